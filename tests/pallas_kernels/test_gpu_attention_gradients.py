"""The Hopper kernels of attention's gradient: in Pallas's interpreter, or on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PageView, implementation
from pallas_kernels.paged_attention import backward, differentiable, gpu_gradient_units
from pallas_kernels.paged_attention.gpu_gradient_units import GradientSizes
from pallas_kernels.paged_attention.gpu_gradients import (
    V_WIDTHS,
    WIDTHS,
    attention_gradients,
)
from tests.pallas_kernels.gpu_interpreter import interpreter

pytestmark = pytest.mark.interpreter
INTERPRETED = jax.default_backend() != "gpu"
SCALE = 0.12
TOKENS = 220
LENGTHS = (70, 130, 5)  # of three requests
PADDING = 7


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads of queries and of keys, their widths and the values', the window, and the sinks.

    `loading`: a consumer loads as well, as it does where registers do not move.
    """

    heads: int
    kv_heads: int
    width: int = 64
    v_width: int = 64
    window: int | None = None
    has_sinks: bool = False
    loading: bool = False

    @property
    def sinks(self):
        """[heads], from far below a row's scores to above them all."""
        return np.linspace(-3, 4, self.heads, dtype=np.float32) if self.has_sinks else None

    @functools.cached_property
    def data(self):
        """q, k, v, out and dout of every request and position, as float64."""
        rng = np.random.default_rng(0)
        shapes = (
            (self.heads, self.width),
            (self.kv_heads, self.width),
            (self.kv_heads, self.v_width),
        )
        tokens = len(LENGTHS), max(LENGTHS)
        q, k, v, dout = (
            rng.standard_normal((*tokens, *shape)).astype(jnp.bfloat16).astype(np.float64)
            for shape in (*shapes, (self.heads, self.v_width))
        )
        out = [self.dense(*(x[i] for x in (q, k, v, dout)))[0] for i in range(len(LENGTHS))]
        return q, k, v, np.stack(out), dout

    def dense(self, q, k, v, dout):
        """The result, dq, dk and dv of one sequence."""
        group = self.heads // self.kv_heads
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        apart = np.arange(len(q))[:, None] - np.arange(len(q))
        seen = (apart >= 0) & (apart < (self.window or len(q)))
        scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) * SCALE, -np.inf)
        highest = scores.max(-1, keepdims=True)
        weights = np.exp(scores - highest)
        sink = 0 if self.sinks is None else np.exp(self.sinks[:, None, None] - highest)
        weights /= weights.sum(-1, keepdims=True) + sink
        out = np.einsum("hqk,khd->qhd", weights, v)
        delta = np.einsum("qhd,qhd->hq", out, dout)
        dscores = weights * (np.einsum("qhd,khd->hqk", dout, v) - delta[..., None]) * SCALE
        by_key = np.einsum("hqk,qhd->khd", dscores, q), np.einsum("hqk,qhd->khd", weights, dout)
        by_key = (x.reshape(len(k), self.kv_heads, group, -1).sum(2) for x in by_key)
        return out, np.einsum("hqk,khd->qhd", dscores, k), *by_key

    @functools.cache  # noqa: B019
    def run(self, requests: tuple[int, ...], others=np.nan):
        """Gradients of each of the requests, which lie in this order, padding (-1) among them.

        `others` is what everything else holds.
        """
        request, positions = np.full(TOKENS, -1, np.int32), np.zeros(TOKENS, np.int32)
        spans, place = {}, 0
        for r in requests:
            length = LENGTHS[r] if r >= 0 else PADDING
            if r >= 0:
                spans[r] = slice(place, place + length)
                request[spans[r]], positions[spans[r]] = r, np.arange(length)
            place += length
        arrays = [np.full((TOKENS, *x.shape[2:]), others, jnp.bfloat16) for x in self.data]
        for array, x in zip(arrays, self.data, strict=True):
            for r, span in spans.items():
                array[span] = x[r, : LENGTHS[r]]
        view = PageView(request, positions, np.zeros((len(LENGTHS), 1), np.int32))
        registers_move = mock.patch.object(implementation, "REGISTERS_MOVE", not self.loading)
        with interpreted_kernels(), registers_move:
            found = jax.tree.map(np.asarray, self.kernel(*arrays, view))
        assert all(x.dtype == jnp.bfloat16 for x in found)
        assert not any(x[request < 0].view(np.uint16).any() for x in found)
        return {r: [x[span] for x in found] for r, span in spans.items()}

    @functools.cached_property
    def kernel(self):
        @jax.jit
        def run(*arrays):
            return attention_gradients(
                *arrays, SCALE, self.window, self.sinks, interpreted=INTERPRETED
            )

        return run


@contextlib.contextmanager
def interpreted_kernels():
    """Two programs in the interpreter; off a CPU nothing changes."""
    if not INTERPRETED:
        yield
        return
    with mock.patch.object(gpu_gradient_units, "PROGRAMS", 2), interpreter():
        yield


CASES = {
    "a group of four": Case(4, 1),
    "two heads, wide keys, a window": Case(2, 2, width=128, window=37),
    "sinks and a window": Case(2, 1, window=50, has_sinks=True),
}
SLOW_CASES = {
    "a group of three, wide values": Case(3, 1, v_width=128, window=100),
    "groups of four": Case(8, 2, width=128, v_width=128),
    "groups of four with sinks": Case(8, 2, has_sinks=True),
    "keys and values of latents": Case(3, 3, width=192, v_width=128),
}
# A unit of one step, and more units than one for a program; rings of two stages, and of four.
LOADING = {
    name: dataclasses.replace(case, loading=True) for name, case in (CASES | SLOW_CASES).items()
}
TOGETHER = 0, -1, 1, 2


def check(case: Case):
    q, k, v, _, dout = case.data
    for r, found in case.run(TOGETHER).items():
        length = LENGTHS[r]
        _, *expected = case.dense(*(x[r, :length] for x in (q, k, v, dout)))
        for its, right in zip(found, expected, strict=True):
            error = np.abs(its.astype(np.float64) - right).max()
            # Weights, their gradients and results are rounded to bfloat16.
            assert error <= 2**-6 * np.abs(right).max(), (r, error, np.abs(right).max())


@pytest.mark.parametrize("name", ["a group of four", "sinks and a window"])
def test_equal_those_of_dense_attention(name):
    check(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two heads, wide keys, a window", *SLOW_CASES])
def test_larger_cases_equal_those_of_dense_attention(name):
    check((CASES | SLOW_CASES)[name])


@pytest.mark.parametrize(
    "name",
    [
        "a group of four",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in LOADING
            if name != "a group of four"
        ),
    ],
)
def test_bits_do_not_depend_on_who_loads(name):
    case = (CASES | SLOW_CASES)[name]
    for r, found in LOADING[name].run(TOGETHER).items():
        for its, right in zip(found, case.run(TOGETHER)[r], strict=True):
            assert np.array_equal(its.view(np.uint16), right.view(np.uint16))


@pytest.mark.parametrize(
    "name, requests, others",
    [
        ("a group of four", (2, 1, 0), np.nan),
        ("two heads, wide keys, a window", (1,), 1.0),
        ("sinks and a window", (1, 2), np.nan),
    ],
)
def test_bits_are_those_of_the_sequence_alone(name, requests, others):
    case = CASES[name]
    together = case.run(TOGETHER)
    for r, found in case.run(requests, others).items():
        for its, right in zip(found, together[r], strict=True):
            assert np.array_equal(its.view(np.uint16), right.view(np.uint16))


def test_rings_have_room_for_what_consumers_load_ahead():
    for width, v_width in itertools.product(WIDTHS, V_WIDTHS):
        sizes = GradientSizes(128, 4, 2, width, v_width, None, False, 1.0, False)
        assert sizes.query_stages >= 3 and sizes.key_stages >= 2


def test_tiles_with_the_most_work_come_first():
    number = jnp.array([0, 1, -1, 0, 1, 2])
    blocks = jnp.array([3, 3, 0, 5, 5, 5])
    table = gpu_gradient_units.tile_table(number, blocks, work=blocks - 2 * number)
    words = np.asarray(table.words).reshape(-1, gpu_gradient_units.WORDS)[: int(table.count[0])]
    expected = [(384, 0, 5), (0, 0, 3), (512, 1, 5), (128, 1, 3), (640, 2, 5)]
    assert list(map(tuple, words.tolist())) == expected


def sequence(dtype, width=64):
    rng = np.random.default_rng(1)
    arrays = [jnp.asarray(rng.standard_normal((9, n, width)), dtype) for n in (2, 1, 1, 2, 2)]
    view = PageView(jnp.zeros(9, jnp.int32), jnp.arange(9), jnp.zeros((1, 1), jnp.int32))
    return *arrays, view


@pytest.mark.parametrize(
    "dtype, width", [("float32", 64), ("bfloat16", 96)], ids=["float32", "a width"]
)
def test_others_are_plain_jax(dtype, width):
    arguments = *sequence(dtype, width), SCALE, 5, np.zeros(2, np.float32)
    with mock.patch.object(backward, "attention_gradients", return_value="plain") as plain:
        assert attention_gradients(*arguments) == "plain"
    plain.assert_called_once_with(*arguments)


def test_a_backend_may_have_gradients_of_its_own():
    q, k, v, _, dout, view = sequence("float32")

    def gradients(q, k, v, out, dout, view, scale, window, sinks):
        assert sinks is None
        return scale * out * dout, window * k, 2 * v

    own = SimpleNamespace(paged_attention=lambda q, *others: 3 * q, attention_gradients=gradients)
    attend = functools.partial(differentiable.paged_attention, own, SCALE, 5)
    found = jax.vjp(lambda *arrays: attend(*arrays, view, None), q, k[None], v[None])[1](dout)
    for its, right in zip(found, (SCALE * 3 * q * dout, 5 * k[None], 2 * v[None]), strict=True):
        np.testing.assert_allclose(its, right, rtol=1e-6)
