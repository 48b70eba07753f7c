"""Kernels are lowered once: in a process, from a file, and never for another kernel."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax.bench.lowering import default_target
from pallas_kernels import lora_matmul

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need jax >= 0.11", allow_module_level=True)

from pallas_kernels.hopper import kept_kernel

WIDE = 128


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int
    heights: tuple[int, ...] = (8,)


class Layout:
    def __init__(self, **sizes):
        self.__dict__ |= sizes


def adding(number, other=0):
    def body(ref):
        return ref + number + other

    return body


class TestSpelled:
    def test_whatever_differs(self):
        """Of static values that a kernel could see."""
        values = [
            None, True, 1, 1.0, "1", (1,), [1], (1, 1), ((1,), 1), range(2), slice, Sizes, Layout,
            np.dtype("int32"), np.int32, jnp.bfloat16, np.int32(1), {"a": 1}, {"a": 2}, {"b": 1},
            Sizes(1), Sizes(2), Sizes(1, (16,)), Layout(rows=1), Layout(rows=2), Layout(k=1),
            jax.ShapeDtypeStruct((2,), "int32"), jax.ShapeDtypeStruct((2,), "float32"),
            jax.ShapeDtypeStruct((2, 1), "int32"), jax.tree.structure((1, [2])), adding,
            functools.partial(adding, 1), functools.partial(adding, 2),
            functools.partial(adding, number=1), adding(1), adding(2), adding(1, 2),
            Layout(rows=1).__init__, Layout(rows=2).__init__, lambda: 1, lambda: 2,
            lambda number=1: number, lambda number=2: number,
        ]  # fmt: skip
        words = list(map(kept_kernel.spelled, values))
        pairs = itertools.combinations(range(len(values)), 2)
        assert not [(values[i], values[k]) for i, k in pairs if words[i] == words[k]]

    def test_the_same_again(self):
        for make in (lambda: Sizes(1, (8, 16)), lambda: Layout(rows=1, k=2), lambda: adding(1)):
            assert kept_kernel.spelled(make()) == kept_kernel.spelled(make())
        assert kept_kernel.spelled(Layout(k=2, rows=1)) == kept_kernel.spelled(Layout(rows=1, k=2))

    @pytest.mark.parametrize("value", [np.ones(2), object(), Layout(), Layout(w=np.ones(2))])
    def test_what_nothing_can_be_kept_by(self, value):
        with pytest.raises(TypeError, match="cannot be kept by"):
            kept_kernel.spelled(value)

    def test_arrays(self):
        def traced(x):
            for its in (x, adding(x), (x,)):
                with pytest.raises(TypeError, match="cannot be kept by"):
                    kept_kernel.spelled(its)
            return x

        jax.jit(traced)(jnp.ones(2))


def lowered_text(widths, monkeypatch, mesh=None) -> str:
    """A program of products of these widths, one after the other, lowered for an H200, or for each
    device of a mesh."""

    def products(x, *weights):
        for w in weights:
            x = lora_matmul(x, w, implementation="mosaic_gpu")
        return x

    if mesh is not None:
        products = jax.shard_map(
            products, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )
    widths = WIDE, *widths
    shapes = (16, WIDE), *((n, k) for k, n in itertools.pairwise(widths))
    monkeypatch.setattr(kept_kernel, "is_kept", lambda: True)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with default_target().context():
        return jax.jit(products).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def modules(text: str) -> set[str]:
    """The different kernels of a lowered program: their modules, as XLA gets them."""
    found = re.findall(r'module = ("(?:[^"\\]|\\.)*")', text)
    assert found
    return set(found)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """That of the persistent cache; nothing is in memory."""
    monkeypatch.setattr(kept_kernel, "_lowered", {})
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / kept_kernel.FOLDER
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_enable_x64", False)


def forget(monkeypatch):
    """As another process that must not lower anything."""
    monkeypatch.setattr(kept_kernel, "_lowered", {})
    monkeypatch.setattr(kept_kernel, "_lower", mock.Mock(side_effect=AssertionError("lowered")))


class TestLowering:
    def test_once_in_a_process(self, folder, monkeypatch):
        lower = mock.Mock(wraps=kept_kernel._lower)
        monkeypatch.setattr(kept_kernel, "_lower", lower)
        text = lowered_text((WIDE, WIDE, WIDE), monkeypatch)
        assert lower.call_count == 1 and len(modules(text)) == 1
        lowered_text((WIDE, 2 * WIDE), monkeypatch)
        assert lower.call_count == 2 and len(list(folder.iterdir())) == 2

    def test_another_process(self, folder, monkeypatch):
        made = lowered_text((WIDE, 2 * WIDE), monkeypatch)
        forget(monkeypatch)
        read = lowered_text((WIDE, 2 * WIDE), monkeypatch)
        # XLA finds by the module what it has compiled.
        assert len(modules(made)) == 2 and modules(made) == modules(read)

    def test_on_a_mesh(self, folder, monkeypatch):
        alone = lowered_text((WIDE,), monkeypatch)
        forget(monkeypatch)
        mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
        assert modules(lowered_text((WIDE,), monkeypatch, mesh)) == modules(alone)

    def test_without_a_folder(self, folder, monkeypatch):
        jax.config.update("jax_compilation_cache_dir", None)
        lowered_text((WIDE,), monkeypatch)
        assert not folder.exists() and len(kept_kernel._lowered) == 1

    @pytest.mark.parametrize("change", ["source", "jax", "setting", "x64"])
    def test_another_version(self, folder, monkeypatch, change):
        lowered_text((WIDE,), monkeypatch)
        if change == "source":
            monkeypatch.setattr(kept_kernel, "_source", lambda: "another")
        elif change == "jax":
            monkeypatch.setattr(jax, "__version__", "0.11.99")
        elif change == "x64":
            jax.config.update("jax_enable_x64", True)
        else:
            its, name = kept_kernel.implementation, "REGISTERS_MOVE"
            monkeypatch.setattr(its, name, not getattr(its, name))
        forget(monkeypatch)
        with pytest.raises(AssertionError, match="lowered"):
            lowered_text((WIDE,), monkeypatch)

    @pytest.mark.parametrize("damage", [lambda its: b"", lambda its: its[:-1] + b"?"])
    def test_a_damaged_file(self, folder, monkeypatch, damage):
        lowered_text((WIDE,), monkeypatch)
        (path,) = folder.iterdir()
        path.write_bytes(damage(path.read_bytes()))
        monkeypatch.setattr(kept_kernel, "_lowered", {})
        with pytest.warns(UserWarning, match="damaged"):
            made = lowered_text((WIDE,), monkeypatch)
        assert [*folder.iterdir()] == [path]
        forget(monkeypatch)
        assert modules(lowered_text((WIDE,), monkeypatch)) == modules(made)

    def test_a_folder_that_cannot_be_written(self, folder, monkeypatch):
        folder.write_text("a file")
        with pytest.warns(UserWarning, match="lowered kernel cannot be"):
            lowered_text((WIDE,), monkeypatch)
        assert folder.read_text() == "a file"


@pytest.mark.parametrize("platform, kept", [("cpu", False), ("gpu", True)])
def test_where_kernels_are_kept(platform, kept):
    with mock.patch.object(jax, "default_backend", lambda: platform):
        assert kept_kernel.is_kept() == kept
        with kept_kernel.nothing_kept():
            assert not kept_kernel.is_kept()
        assert kept_kernel.is_kept() == kept


def test_a_kernel_that_is_to_be_shown_is_not_kept(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert kept_kernel.is_kept()
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    assert not kept_kernel.is_kept()
