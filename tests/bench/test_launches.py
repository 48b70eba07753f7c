"""What a GPU's profiler saw: which kernels, of which call, and how long each ran alone."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from lora_moe_jax.bench.launches import (
    Launch,
    calls_of,
    launches_in,
    launches_of,
    traced_call,
    without_overlap,
)
from lora_moe_jax.errors import RequestError


def test_a_gpu_s_streams_are_read():
    """Lines that are no streams say the same again."""
    event = SimpleNamespace(start_ns=5.0, duration_ns=2.0, name="norm")
    lines = [SimpleNamespace(name=name, events=[event]) for name in ("Stream #3", "XLA Ops")]
    assert launches_of(SimpleNamespace(lines=lines)) == [Launch(5.0, 7.0, "norm")]


def test_a_kernel_that_waits_for_another_counts_from_its_end():
    launches = [Launch(0, 10, "a"), Launch(4, 12, "b"), Launch(5, 11, "c"), Launch(20, 30, "a")]
    seconds = [("a", 10e-9), ("b", 2e-9), ("c", 0.0), ("a", 10e-9)]
    assert list(without_overlap(launches)) == seconds


def test_calls_are_told_apart_by_the_longest_pauses():
    """A pause is none while a kernel runs that began earlier."""
    first = [Launch(0, 9, "a"), Launch(1, 2, "b"), Launch(8, 10, "c"), Launch(13, 14, "d")]
    second, third = [Launch(20, 21, "a")], [Launch(26, 27, "b"), Launch(28, 29, "c")]
    assert calls_of([*first, *second, *third], 3, 5e-9) == [first, second, third]
    for count, pause in ((3, 6e-9), (8, 0)):
        with pytest.raises(RuntimeError, match=f"not all of {count} calls had kernels"):
            calls_of([*first, *second, *third], count, pause)


def test_a_trace_without_kernels(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(jax.numpy.ones(3) + 1)
    with pytest.raises(RequestError, match="CUPTI"):
        launches_in(tmp_path)


def test_a_call_without_kernels():
    called = []
    with pytest.raises(RequestError, match="no kernel"):
        traced_call(lambda: called.append(1))
    assert called == [1]
