"""A mesh of GPUs is refused where NCCL lacks what XLA calls."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lora_moe_jax import ConfigError
from lora_moe_jax.parallel import nccl


def mesh(platform: str, count: int):
    devices = np.array([SimpleNamespace(platform=platform)] * count)
    return SimpleNamespace(devices=devices, size=count)


class Library:
    def ncclGetVersion(self, place):  # noqa: N802
        place._obj.value = 22809


class NewLibrary(Library):
    def ncclGetPeerDevicePointer(self):  # noqa: N802
        raise AssertionError("nobody calls it here")


@pytest.fixture
def newest(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr(jax, "__version__", "0.12.0")


def test_an_old_one_is_refused(newest, monkeypatch):
    monkeypatch.setattr(nccl, "_loaded", Library)
    with pytest.raises(ConfigError, match="too old") as caught:
        nccl.check_nccl(mesh("gpu", 2))
    assert caught.value.key == "mesh" and caught.value.found == "NCCL 2.28.9"
    assert nccl.WITHOUT_KERNEL in caught.value.hint


def test_nor_where_nobody_calls_what_it_lacks(newest, monkeypatch):
    monkeypatch.setattr(nccl, "_loaded", Library)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x {nccl.WITHOUT_KERNEL}")
    nccl.check_nccl(mesh("gpu", 2))


@pytest.mark.parametrize(
    "library, of",
    [
        (NewLibrary, mesh("gpu", 2)),
        (lambda: None, mesh("gpu", 2)),
        (Library, mesh("gpu", 1)),
        (Library, mesh("cpu", 2)),
    ],
)
def test_others_are_not(newest, monkeypatch, library, of):
    monkeypatch.setattr(nccl, "_loaded", library)
    nccl.check_nccl(of)


def test_nor_with_jax_before(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(nccl, "_loaded", Library)
    nccl.check_nccl(mesh("gpu", 2))


def test_what_is_not_loaded_is_not_loaded_for_it(monkeypatch):
    monkeypatch.setattr(nccl, "LIBRARY", "libno_such_library.so.2")
    assert nccl._loaded() is None
    monkeypatch.setattr(nccl, "LIBRARY", "libc.so.6")
    assert nccl._loaded().getpid() > 0
