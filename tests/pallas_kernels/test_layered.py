"""Layers' parts of arrays: in every function the bits and gradients of arrays of their own.

Other layers' are NaN. That kernels read parts where they are is in `test_gpu_interpreter` and
`test_tpu_kernels`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Lora, add_norm, grouped_lora_matmul, moe_mlp, rms_norm, rotate_and_cache
from pallas_kernels.layered import Layered, as_stack, layer_of, merged, without_layers
from tests.pallas_kernels.cases import in_layers
from tests.pallas_kernels.test_head_rotation import EPS, arguments


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def assert_same(found, wanted):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_what_a_part_is():
    stack = normal(3, 4, 5)
    part = Layered(jnp.asarray(stack), 2)
    assert (part.shape, part.ndim, part.dtype) == ((4, 5), 2, np.float32)
    for its in (part[...], without_layers({"a": part})["a"], jnp.zeros((4, 5)) + part):
        np.testing.assert_array_equal(its, stack[2])
    np.testing.assert_array_equal(part[1], stack[2, 1])
    np.testing.assert_array_equal(part.reshape(2, 10), stack[2].reshape(2, 10))
    np.testing.assert_array_equal(part.astype("bfloat16"), stack[2].astype(jnp.bfloat16))
    assert part.astype("float32") is part
    rows, count = merged(part)
    np.testing.assert_array_equal(rows[2 * count : 3 * count], stack[2])
    assert merged(stack) == (stack, 0)
    np.testing.assert_array_equal(as_stack(part), stack)
    np.testing.assert_array_equal(as_stack(stack), stack[None])
    assert layer_of(stack, part).tolist() == [2] and layer_of(stack) is None
    with pytest.raises(ValueError, match=r"one layer, got those of \[1, 2\]"):
        layer_of(part, stack, Layered(part.stack, 1))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("features", [24, 2560, 20000])
def test_norms(implementation, features):
    x, more, weight = normal(5, features), normal(5, features, seed=1), normal(features, seed=2)

    def both(weight, x, more):
        def run(x, more):
            total, normed = add_norm(x, more, weight, 1e-6, implementation=implementation)
            return total, normed, rms_norm(x, weight, 1e-6, implementation=implementation)

        found, pullback = jax.vjp(run, x, more)
        return found, pullback(found)

    part = in_layers(weight)
    assert_same(jax.jit(both)(part, x, more), jax.jit(both)(weight, x, more))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.slow)])
def test_rotation(implementation):
    heads, *weights = arguments(2, 1, 16, "bfloat16")
    weights, rest = weights[:2], weights[2:]

    @jax.jit
    def run(weights, heads, *rest):
        rotate = functools.partial(rotate_and_cache, eps=EPS, implementation=implementation)
        found, pullback = jax.vjp(lambda heads: rotate(heads, *weights, *rest), heads)
        return found, pullback(found)

    wanted = run(weights, heads, *rest)
    of_layer, k_weight = in_layers([np.asarray(weight) for weight in weights])
    assert_same(run([of_layer, k_weight], heads, *rest), wanted)
    assert_same(run([of_layer, weights[1]], heads, *rest), wanted)
    # bfloat16, which float32 holds: a copy that is rounded to the type of the heads.
    wide = [Layered(its.stack.astype(np.float32), its.layer) for its in (of_layer, k_weight)]
    assert_same(run(wide, heads, *rest), wanted)


def lora(groups, k, n, seed):
    shapes = (3, groups, 4, k), (3, groups, 4, n), (3, groups)
    return Lora(*(normal(*shape, seed=seed + i) for i, shape in enumerate(shapes)))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_products(implementation):
    x, w, entry = normal(9, 24), normal(2, 40, 24, seed=1), lora(2, 24, 40, 2)
    sizes, slots = jnp.array([4, 5]), jnp.array([0, 1, 2, -1, 0, 0, 1, 2, 2])
    bias = normal(2, 40, seed=5)

    @jax.jit
    def run(w, entry, bias, x):
        named = dict(bias=bias, implementation=implementation)

        def product(x):
            return grouped_lora_matmul(x, w, sizes, slots, (entry,), **named)

        y, pullback = jax.vjp(product, x)
        return y, pullback(y)

    assert_same(run(*in_layers((w, entry, bias)), x), run(w, entry, bias, x))


def test_a_layer_of_experts():
    x, gate_up, down = normal(6, 16), normal(4, 16, 16, seed=1), normal(4, 16, 8, seed=2)
    adapters = lora(4, 16, 8, 3), lora(4, 16, 8, 6), lora(4, 8, 16, 9)
    experts, weights = jnp.arange(12).reshape(6, 2) % 4, normal(6, 2, seed=12)
    slots, bias = jnp.array([0, 1, 2, -1, 0, 1]), normal(4, 16, seed=13)

    @jax.jit
    def run(gate_up, bias, down, adapters, x):
        arrays = x, experts, weights, slots, gate_up, down, *adapters
        return moe_mlp(*arrays, gate_up_bias=bias)

    parts = in_layers((gate_up, bias, down, adapters))
    assert_same(run(*parts, x), run(gate_up, bias, down, adapters, x))
