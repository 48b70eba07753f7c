"""The TPU attention kernel in Pallas's interpreter, which looks for races, and compiled for TPUs.

The interpreter's dots choose their code by their number of rows, as any dot on a CPU, so the tests
of bits give all windows one height. On a TPU the rows of the MXU do not know of each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import PageView, paged_attention, paged_latent_attention
from pallas_kernels.grouped_lora_matmul.tpu_schedule import Device
from pallas_kernels.paged_attention import api, mosaic_tpu, reference, tpu_bytes, tpu_sizes
from pallas_kernels.paged_attention.tpu_attention import head_from_words
from pallas_kernels.paged_attention.tpu_sizes import BLOCK
from tests.pallas_kernels.tpu_attention_compile import CALLS
from tests.pallas_kernels.tpu_compile import TOPOLOGIES, reports_of
from tests.pallas_kernels.tpu_interpreter import interpreter

LENGTHS = (530, 270, 9)  # cached positions of each request: three, two and one blocks
SCALE = 0.1
# A decode row past two blocks, a short one, a chunk that begins in one block and ends in another,
# padding.
BATCH = [(0, 529), (2, 8), *[(1, position) for position in range(250, 263)], (-1, 0), (-1, 0)]


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads of the queries and of the cache (0: latents), widths of both caches; with sinks?"""

    heads: int
    kv_heads: int
    widths: tuple[int, int]
    page: int = 16
    window: int | None = None
    dtype: str = "bfloat16"
    sinks: bool = False

    @functools.cached_property
    def data(self):
        """Queries and caches of every request and position."""
        rng = np.random.default_rng(0)
        head = (self.kv_heads,) if self.kv_heads else ()
        width = self.widths[0] if self.kv_heads else sum(self.widths)
        shapes = (self.heads, width), *((*head, width) for width in self.widths)
        shape = len(LENGTHS), max(LENGTHS)
        return [rng.standard_normal((*shape, *of)).astype(jnp.dtype(self.dtype)) for of in shapes]

    def arguments(self, tokens, seed=0):
        """q, both caches and the view; whatever nobody may read is NaN."""
        rng = np.random.default_rng(seed)
        columns = -(-max(LENGTHS) // self.page)
        # Unused entries of the tables mean nothing: no page at all, if read.
        tables = rng.integers(-(2**31), 2**31 - 1, (len(LENGTHS), columns)).astype(np.int32)
        free = list(rng.permutation(3 * columns))
        for request, length in enumerate(LENGTHS):
            for column in range(-(-length // self.page)):
                tables[request, column] = free.pop()
        request, position = np.array(tokens, np.int32).T
        q, *caches = self.data
        q = q[request, position]
        q[request < 0] = np.nan
        pages = [np.full((3 * columns, self.page, *c.shape[2:]), np.nan, q.dtype) for c in caches]
        for number in range(len(LENGTHS)):
            seen = self.seen(tokens, number)
            for cache, values in zip(pages, caches, strict=True):
                cache[tables[number, seen // self.page], seen % self.page] = values[number, seen]
        return q, *pages, PageView(request, position, tables)

    def seen(self, tokens, number):
        """The positions that a request's tokens see."""
        spans = [
            range(0 if self.window is None else max(0, position - self.window + 1), position + 1)
            for request, position in tokens
            if request == number
        ]
        return np.array(sorted(set().union(*spans)), int)

    def call(self, q, first, second, view, implementation="mosaic_tpu"):
        options = dict(scale=SCALE, implementation=implementation)
        if self.kv_heads:
            options |= dict(sliding_window=self.window, sinks=self.sinks_of_heads)
            return paged_attention(q, first, second, view, **options)
        return paged_latent_attention(*self.split(q), first, second, view, **options)

    @property
    def sinks_of_heads(self):
        if not self.sinks:
            return None
        return 4 * np.random.default_rng(1).standard_normal(self.heads).astype(np.float32)

    def split(self, q):
        return q[..., : self.widths[0]], q[..., self.widths[0] :]

    @functools.cached_property
    def kernel(self):
        return jax.jit(self.call)

    def run(self, tokens, seed=0):
        with interpreter():
            return np.asarray(self.kernel(*self.arguments(tokens, seed)))

    def expect(self, tokens):
        q, first, second, view = self.arguments(tokens)
        if self.kv_heads:
            options = dict(scale=SCALE, sliding_window=self.window, sinks=self.sinks_of_heads)
            return reference.paged_attention(q, first, second, view, **options)
        return reference.paged_latent_attention(*self.split(q), first, second, view, scale=SCALE)


CASES = {
    "grouped": Case(4, 2, (64, 64), page=64),
    "a window, a group of three": Case(6, 2, (32, 128), page=8, window=20),
    "sinks, a group of three": Case(6, 2, (64, 64), page=64, sinks=True),
    "latents": Case(4, 0, (128, 64), page=32),
}
SLOW_CASES = {
    "one head of the cache": Case(4, 1, (64, 64), page=128),
    "wide heads, large pages": Case(4, 4, (256, 128), page=BLOCK),
    "pages of two blocks": Case(2, 2, (64, 64), page=2 * BLOCK),
    "a window over blocks": Case(8, 2, (64, 64), window=300),
    "pages of 16": Case(16, 2, (64, 64)),
    "float32": Case(4, 2, (64, 64), dtype="float32"),
    "float32 latents": Case(8, 0, (32, 16), dtype="float32"),
    "latents of DeepSeek-V3": Case(128, 0, (512, 64)),
}


@contextlib.contextmanager
def small_windows(cores=1):
    """Windows of one token each, tiles of four: a lone token's rows are as many as any window's."""
    with (
        mock.patch.object(tpu_sizes, "WINDOW_ROWS", tpu_sizes.SUBLANES),
        mock.patch.object(mosaic_tpu, "current_device", lambda: Device(cores=cores)),
    ):
        yield


def check(case: Case, tokens):
    found, expected = case.run(tokens), case.expect(tokens)
    assert found.dtype == jnp.dtype(case.dtype)
    # Weights and results are rounded to the cache's dtype.
    tolerance = 2**-6 if case.dtype == "bfloat16" else 1e-5
    error = np.abs(found.astype(np.float64) - expected).max()
    assert error <= tolerance * max(1, np.abs(expected).max())
    assert not found[np.array(tokens)[:, 0] < 0].any()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
    check(CASES[name], BATCH)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", SLOW_CASES)
def test_more_cases_equal_the_definition(name):
    check(SLOW_CASES[name], BATCH)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["grouped", pytest.param("latents", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_batch(name):
    """A chunk at once, by two cores, split elsewhere, in another order and other pages; alone."""
    case = dataclasses.replace(CASES[name])  # compiles its own
    batch = [*BATCH[:2], *BATCH[5:11], *BATCH[-2:]]
    with small_windows():
        together = case.run(batch)
        order = [*range(4, len(batch)), *range(4)]
        shuffled = case.run([batch[i] for i in order], seed=1)
        assert np.array_equal(shuffled, together[order])
        for token in 0, 7:  # in the last of three blocks, and in the second of two
            assert np.array_equal(case.run([batch[token]])[0], together[token])
    with small_windows(cores=2):
        assert np.array_equal(dataclasses.replace(case).run(batch), together)


@pytest.mark.slow
@pytest.mark.interpreter
def test_a_window_begins_where_it_begins_for_every_chunk():
    """Blocks that a chunk's first token needs and its last does not are left out when alone."""
    case = Case(2, 2, (64, 64), page=64, window=262)
    chunk = [(0, position) for position in range(515, 520)]
    with small_windows():
        together = case.run(chunk)
        alone = case.run(chunk[-1:])
    assert np.array_equal(alone[0], together[-1])


@pytest.mark.interpreter
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_request_stays_alone(poison):
    case = CASES["grouped"]
    q, *caches, view = case.arguments(BATCH)
    others = view.request != 1
    owned = view.page_tables[1, : -(-LENGTHS[1] // case.page)]
    for pages in caches:
        pages[owned] = poison
    q = np.where(others[:, None, None], q, np.nan).astype(q.dtype)
    with interpreter():
        found = np.asarray(case.kernel(q, *caches, view))
    assert np.array_equal(found[others], case.run(BATCH)[others])
    assert np.isnan(found[~others].astype(np.float32)).all()


@pytest.mark.parametrize("heads", [2, 4, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heads_are_taken_from_words(dtype, heads):
    """What TPUs run in place of an index: the interpreter above has no views of words."""
    values = np.random.default_rng(0).standard_normal((BLOCK, heads, 128)).astype(jnp.dtype(dtype))

    def kernel(cache, found):
        for head in range(heads):
            found[head] = head_from_words(cache, head)

    shape = jax.ShapeDtypeStruct((heads, BLOCK, 128), jnp.float32)
    found = jax.jit(pl.pallas_call(kernel, out_shape=shape, interpret=True))(values)
    assert np.array_equal(found, values.swapaxes(0, 1).astype(np.float32))


@pytest.mark.parametrize(
    "changed, said",
    [
        (dict(dtype="float16"), "all bfloat16 or all float32"),
        (dict(widths=(192, 128)), "multiples of it"),
        (dict(page=24), "positions"),
        (dict(kv_heads=6, heads=12), "1, 2, 4, 8"),
        (dict(kv_heads=64, heads=64, widths=(512, 512)), "VMEM"),
        (dict(columns=10_000), "SMEM"),
        (dict(tokens=0), "one token"),
    ],
)
def test_refusals_name_the_shapes(changed, said):
    sizes = dict(dtype="bfloat16", heads=8, kv_heads=2, widths=(64, 64), page=16, columns=9)
    sizes |= dict(tokens=3) | changed
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(sizes["dtype"]))
    cache = (9, sizes["page"], sizes["kv_heads"])
    q = array((sizes["tokens"], sizes["heads"], sizes["widths"][0]))
    k, v = (array((*cache, width)) for width in sizes["widths"])
    of_tokens = jax.ShapeDtypeStruct((sizes["tokens"],), jnp.int32)
    tables = jax.ShapeDtypeStruct((64, sizes["columns"]), jnp.int32)
    view = PageView(of_tokens, of_tokens, tables)
    attend = functools.partial(paged_attention, scale=1.0, implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match=f"{said}.*{sizes['heads']}"):
        jax.eval_shape(attend, q, k, v, view)


def test_a_tpu_takes_it_where_it_serves_widths_heads_and_pages(monkeypatch):
    """Whatever the numbers of tokens and requests are: or a model's steps would differ in bits."""

    def call(width, columns):
        array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        q, cache = array((3, 8, width)), array((9, 16, 2, width))
        view = PageView(*map(numbers, ((3,), (3,), (64, columns))))

        def attend(q, cache, *view):
            return paged_attention(q, cache, cache, PageView(*view), scale=1.0)

        return str(jax.make_jaxpr(attend)(q, cache, *view))

    numbers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    assert "pallas_call" not in call(64, 9)
    monkeypatch.setattr(api, "platform_implementation", lambda: "mosaic_tpu")
    assert "pallas_call" in call(64, 9)
    assert "pallas_call" not in call(192, 9)
    with pytest.raises(NotImplementedError, match="SMEM; fewer tokens, fewer requests"):
        call(64, 10_000)


@pytest.mark.parametrize("shape", tpu_bytes.SHAPES, ids=lambda shape: shape.name)
def test_bytes_moved(shape):
    """Caches are read once in decoding, but for lanes that 64 columns leave empty."""
    view = tpu_bytes.decode()
    moved = tpu_bytes.attention_bytes(shape.sizes(view), view)
    lanes = sum(-(-width // 128) * 128 for width in shape.widths) / sum(shape.widths)
    pages = 1 + (16 / shape.window if shape.window else 0.01)
    assert 1 <= moved.ratio <= lanes * pages
    prefill = tpu_bytes.prefill()
    chunk = tpu_bytes.attention_bytes(shape.sizes(prefill), prefill)
    tiles = -(-512 // shape.sizes(prefill).height)
    assert chunk.caches <= tiles * lanes * chunk.least


def test_bytes_by_hand():
    """Three tokens of one request and one of another, pages of 8, a group of three."""
    shape = tpu_bytes.AttentionShape("", 6, 2, (64, 128))
    view = PageView(
        np.array([0, 0, 0, 1, -1], np.int32),
        np.array([7, 8, 9, 300, 0], np.int32),
        np.zeros((2, 40), np.int32),
    )
    moved = tpu_bytes.attention_bytes(shape.sizes(view, page=8), view)
    assert moved.caches == (2 + 38) * 8 * 2 * 256 * 2
    assert moved.rows == 5 * 2 * 8 * 256 * 2
    assert moved.tables == 4 * (5 * 4 + 80)
    assert moved.least == 2 * ((10 + 301) * 2 * 192 + 5 * 6 * 192)


def compile_all(tokens, **options):
    """Compiles calls of `tpu_attention_compile` for TPUs: one kernel each, no copy of a cache."""
    module = "tests.pallas_kernels.tpu_attention_compile"
    reports = reports_of(module, tokens=tokens, **options)
    assert len(reports) == len(options["generations"]) * len(options["names"])
    for report in reports:
        assert report["kernels"] == 1, report
        # Tiles, and queries and results where they are filled up to lanes and rows.
        assert report["temporary_bytes"] < 100_000 * max(tokens, 64), report


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (aot extra)"
)


@needs_libtpu
def test_decoding_compiles_for_every_generation():
    """In one process, whose start takes as long as some of the compiling."""
    names = ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss"]
    compile_all(64, generations=list(TOPOLOGIES), names=names)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64, 512])
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_all_calls_compile(generation, tokens):
    compile_all(tokens, generations=[generation], names=list(CALLS))
