"""The Hopper kernel of heads: in Pallas's interpreter, which also looks for races."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import implementation, rotate_and_cache
from pallas_kernels.head_rotation import api, xla
from tests.pallas_kernels.cases import in_layers
from tests.pallas_kernels.test_head_rotation import (
    EPS,
    PAGE,
    TOKENS,
    arguments,
    without_norms,
)

if not hasattr(plgpu, "force_gpu_interpret_mode"):
    pytest.skip("the Mosaic GPU interpreter needs jax >= 0.11", allow_module_level=True)

from pallas_kernels.head_rotation import mosaic_gpu, triton
from tests.pallas_kernels.gpu_interpreter import interpret

pytestmark = pytest.mark.interpreter
WIDTH = 128


def case(heads, kv_heads):
    """Weights are in a layer of several, of which the others are NaN, as are padding's heads."""
    of_tokens, q_weight, k_weight, *rest = arguments(heads, kv_heads, WIDTH, "bfloat16")
    padding = np.asarray([request < 0 for request, _ in TOKENS])
    of_tokens = jnp.where(padding[:, None, None], jnp.nan, of_tokens)
    return of_tokens, *in_layers((q_weight, k_weight)), *rest


def run(*call):
    """In two programs, so that one has several tokens after each other."""
    with mock.patch.object(mosaic_gpu, "MOST_PROGRAMS", 2):
        function = functools.partial(mosaic_gpu.rotate_and_cache, eps=EPS, interpreted=True)
        return interpret(jax.jit(function), *call)


def cached_places(view):
    """Of each page and position, whether a token is cached there."""
    found = np.zeros((6, PAGE), bool)
    for request, position in TOKENS:
        if request >= 0 and position // PAGE < view.page_tables.shape[1]:
            found[view.page_tables[request, position // PAGE], position % PAGE] = True
    return found


# All in whole tiles of 8 rows, keys and values within one; every row; few in none.
@pytest.mark.parametrize(
    "sizes, normed", [((32, 4), True), ((56, 4), True), ((3, 1), True), ((32, 4), False)]
)
def test_equal_plain_operations(sizes, normed):
    call = case(*sizes) if normed else without_norms(*case(*sizes))
    *arrays, k_pages, v_pages, view = call
    q, *pages = run(*call)
    plain = jax.jit(functools.partial(xla.rotate_and_cache, eps=EPS))
    wanted_q, *wanted = (np.float32(its) for its in plain(*call))
    np.testing.assert_allclose(np.float32(q), wanted_q, rtol=2**-7, atol=2**-6)
    np.testing.assert_allclose(np.float32(pages[0]), wanted[0], rtol=2**-7, atol=2**-6)
    # Values, and whatever else the pages hold, stay what they are.
    np.testing.assert_array_equal(np.float32(pages[1]), wanted[1])
    others = ~cached_places(view)
    for its, before in zip(pages, (k_pages, v_pages), strict=True):
        assert its[others].tobytes() == np.asarray(before)[others].tobytes()


@pytest.mark.parametrize("normed", [True, False])
def test_bits_of_a_token_are_its_own(normed):
    call = case(6, 1) if normed else without_norms(*case(6, 1))
    heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view = call
    together = run(*call)
    q, pages = [], (k_pages, v_pages)
    for token in range(len(TOKENS)):
        one = slice(token, token + 1)
        alone = view._replace(request=view.request[one], positions=view.positions[one])
        its, *pages = run(heads[one], q_weight, k_weight, cos[one], sin[one], *pages, alone)
        q.append(its)
    for found, wanted in zip((np.concatenate(q), *pages), together, strict=True):
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    "sizes, dtype, what",
    [
        ((8, 2, 64), "bfloat16", r"width 128.*bfloat16\[6, 12, 64\]"),
        ((57, 4, 128), "bfloat16", r"at most 64.*bfloat16\[6, 65, 128\]"),
        ((8, 2, 128), "float32", r"must be bfloat16.*float32\[6, 8, 2, 128\]"),
    ],
)
def test_others_are_served_what_they_have_been(sizes, dtype, what):
    call = arguments(*sizes, dtype)
    with pytest.raises(NotImplementedError, match=what):
        rotate_and_cache(*call, eps=EPS, implementation="mosaic_gpu")
    assert chosen(call) is triton


def test_hopper_is_served_by_this_kernel():
    assert chosen(arguments(32, 4, 128, "bfloat16")) is mosaic_gpu


def chosen(call):
    """The module that serves a call on Hopper."""
    heads, *_, k_pages, v_pages, _ = call
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(implementation, "platform_implementation", lambda: "mosaic_gpu"),
    ):
        return api._backend(None, heads, k_pages, v_pages)
