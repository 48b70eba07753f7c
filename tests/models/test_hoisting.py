"""A loop that computes what no turn changes before its first turn."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lora_moe_jax.models.hoisting import hoisted_loop

UNROLLED = 4


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))
FACTORS = jnp.array([1.0, 0.5, 2.0])
table = jax.jit(lambda tokens: FACTORS * jnp.sin(tokens.astype(jnp.float32)))


def turn(tokens):
    """Of a carry of two arrays; the sine of the tokens is in a function of its own."""

    def one(first, place, carry):
        i, (x, y) = first + place, carry
        x = x + doubled(table(tokens)) + jnp.zeros(3) + i
        y = lax.cond(i > 1, jnp.cos, lambda y: y, y) * jnp.cumsum(tokens)
        return (x, y), jnp.flip(x)

    return one


def looped(tokens, carry, count=2 * UNROLLED):
    return hoisted_loop(count, [turn(tokens)], carry, written_out=UNROLLED)


def written_out(tokens, carry, count):
    results = []
    for i in range(count):
        carry, result = turn(tokens)(jnp.int32(0), jnp.int32(i), carry)
        results.append(result)
    return carry, jnp.stack(results)


TOKENS, CARRY = jnp.arange(3), (jnp.ones(3), jnp.full(3, 0.5))


@pytest.mark.parametrize("count", [1, UNROLLED, 2 * UNROLLED + 1])
@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function])
def test_computes_what_the_turns_written_out_do(wrap, count):
    found = wrap(functools.partial(looped, count=count))(TOKENS, CARRY)
    wanted = written_out(TOKENS, CARRY, count)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 3 * UNROLLED + 1])
@pytest.mark.parametrize("period", [2, 3, UNROLLED + 1])
def test_turns_of_several_kinds(period, count):
    turns = [
        lambda first, place, x, k=k: (x + k * jnp.sin(x), first + place) for k in range(period)
    ]
    found, numbers = jax.jit(lambda x: hoisted_loop(count, turns, x, written_out=UNROLLED))(
        jnp.ones(3)
    )
    wanted = jnp.ones(3)
    for number in range(count):
        wanted, _ = turns[number % period](0, 0, wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_array_equal(numbers, np.arange(count))


def test_what_no_turn_changes_is_before_the_loop():
    jaxpr = jax.make_jaxpr(looped)(TOKENS, CARRY).jaxpr
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "while"]
    outside = {eqn.primitive.name for eqn in jaxpr.eqns}
    turns = [eqn for eqn in loop.params["body_jaxpr"].jaxpr.eqns if eqn.primitive.name == "jit"]
    functions = {id(eqn.params["jaxpr"].jaxpr) for eqn in turns}
    assert len(turns) == UNROLLED and len(functions) == 1  # which is lowered once
    inside = {eqn.primitive.name for eqn in turns[0].params["jaxpr"].jaxpr.eqns}
    assert {"sin", "cumsum", "convert_element_type"} <= outside
    assert {"cond", "add", "rev"} <= inside and not {"sin", "cumsum"} & inside
    # A constant is made where it is used, not read from memory.
    assert "broadcast_in_dim" in inside


def test_a_loop_within_a_loop():
    def outer(tokens):
        def one(first, place, x):
            (x, _), _ = hoisted_loop(2, [turn(tokens + first + place)], (x, x), written_out=2)
            return x, None

        return hoisted_loop(2, [one], jnp.ones(3), written_out=1)[0]

    wanted = jnp.ones(3)
    for i in range(2):
        carry = wanted, wanted
        for j in range(2):
            carry, _ = turn(TOKENS + i)(jnp.int32(0), jnp.int32(j), carry)
        wanted = carry[0]
    np.testing.assert_allclose(jax.jit(outer)(TOKENS), wanted, rtol=1e-6)
