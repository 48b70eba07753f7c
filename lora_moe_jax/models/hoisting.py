"""A loop in which nothing is computed twice: what no turn changes is computed before the first.

XLA leaves most of it in the loop. A decoder's layers all look up the same angles and lay out the
same rows, in many small kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

INLINED = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


class _Value:
    """A variable of the loop's body.

    Attributes:
      outside: its value where no turn changes it.
      constant: whether nothing but numbers goes into it. Such a value is made again in every turn,
        where the compiler puts it into what uses it: outside it might be an array to be read.
    """

    def __init__(self, outside=None, constant: bool = False):
        self.outside, self.constant = outside, constant


class _Step(NamedTuple):
    """An operation that every turn repeats."""

    eqn: JaxprEqn
    inputs: list[_Value]
    outputs: list[_Value]


def hoisted_loop(count: int, turns: Sequence[Callable], carry, *, written_out: int):
    """`lax.scan` of turn(first, place, carry) -> carry, result for first + place from 0 to
    count - 1, the turns one after the other, again and again.

    `first` is the same for several turns, which are written out: who can do with it and the place,
    a constant, needs no kernel for each sum. Not differentiable, as functions' own gradients are
    lost.

    Args:
      written_out: how many turns, at most, but for whole times all kinds of them.
    """
    zero = jnp.int32(0)
    runs = [_hoisted(turn, zero, carry) for turn in turns]
    times = -(-count // written_out)
    unrolled = -(-count // (times * len(runs))) * len(runs)
    looped = count // unrolled * unrolled if unrolled < count else 0

    def some(first, carry, turns: int):
        results = []
        for place in range(turns):
            carry, result = runs[place % len(runs)](first, jnp.int32(place), carry)
            results.append(result)
        return carry, jax.tree.map(lambda *its: jnp.stack(its), *results)

    def body(state):
        first, carry, results = state
        carry, found = some(first, carry, unrolled)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return first + unrolled, carry, jax.tree.map(put, results, found)

    parts = []
    if looped:
        # Not a scan, from whose counter `first` would be computed in every turn.
        _, shapes = jax.eval_shape(functools.partial(some, turns=looped), zero, carry)
        state = zero, carry, jax.tree.map(lambda its: jnp.zeros(its.shape, its.dtype), shapes)
        _, carry, results = lax.while_loop(lambda state: state[0] < looped, body, state)
        parts.append(results)
    if looped < count:
        carry, results = some(jnp.int32(looped), carry, count - looped)
        parts.append(results)
    return carry, jax.tree.map(lambda *its: jnp.concatenate(its), *parts)


def _hoisted(turn: Callable, first: jax.Array, carry) -> Callable:
    """The turn, with what it computes of neither `first`, place nor carry computed here."""
    closed, shape = jax.make_jaxpr(turn, return_shape=True)(first, first, carry)
    inputs = [_Value() for _ in closed.jaxpr.invars]
    steps: list[_Step] = []
    outputs = _flatten(closed, inputs, steps)
    tree = jax.tree.structure(shape)

    @jax.jit  # lowered once for all turns that are written out
    def run(*state):
        values = dict(zip(inputs, jax.tree.leaves(state), strict=True))
        for step in steps:
            found = _evaluate(step.eqn, [_read(values, its) for its in step.inputs])
            values.update(zip(step.outputs, found, strict=True))
        return jax.tree.unflatten(tree, [_read(values, its) for its in outputs])

    return run


def _read(values: dict[_Value, jax.Array], value: _Value):
    return values[value] if value in values else value.outside


def _flatten(closed: ClosedJaxpr, inputs: list[_Value], steps: list[_Step]) -> list[_Value]:
    """Computes what it can of a function, and appends the other operations to the steps."""
    consts = [_Value(const) for const in closed.consts]
    jaxpr = closed.jaxpr
    variables = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def value_of(atom) -> _Value:
        return _Value(atom.val, True) if isinstance(atom, Literal) else variables[atom]

    for eqn in jaxpr.eqns:
        its = [value_of(atom) for atom in eqn.invars]
        called = _called(eqn)
        if called is not None:
            outputs = _flatten(called, its, steps)
        else:
            outputs = _outputs(eqn, its, steps)
        variables.update(zip(eqn.outvars, outputs, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _outputs(eqn: JaxprEqn, inputs: list[_Value], steps: list[_Step]) -> list[_Value]:
    constant = all(its.constant for its in inputs)
    if eqn.effects or any(its.outside is None for its in inputs):
        outputs = [_Value() for _ in eqn.outvars]
    else:
        found = _evaluate(eqn, [its.outside for its in inputs])
        outputs = [_Value(value, constant) for value in found]
        if not constant:
            return outputs
    steps.append(_Step(eqn, inputs, outputs))
    return outputs


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an operation does nothing but call."""
    if eqn.primitive.name not in INLINED:
        return None
    called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    # From JAX 0.11 on one class is both, and has its constants.
    consts = getattr(called, "consts", ())
    return ClosedJaxpr(called, consts) if isinstance(called, Jaxpr) else called


def _evaluate(eqn: JaxprEqn, inputs: list) -> list:
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    found = eqn.primitive.bind(*functions, *inputs, **params)
    return list(found) if eqn.primitive.multiple_results else [found]
