"""What the operation in plain JAX costs, by counting: it follows rows and widths, not slots or
rank x width."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest

from pallas_kernels import grouped_lora_matmul
from tests.pallas_kernels.cases import Part, Shape, make_case

ROWS, GROUPS, K, RANK, WIDTH = 53, 3, 97, 11, 89


def abstract_case(slots, rows=ROWS):
    shape = Shape(rows, GROUPS, K, (Part(WIDTH),), slots=slots, rank=RANK)
    case = make_case(shape, [rows, 0, 0], np.zeros(rows))
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), case)


def forward(case):
    return grouped_lora_matmul(*case, implementation="xla")


def backward(case, dy):
    def inner(x, lora):
        return grouped_lora_matmul(x, *case[1:4], lora, implementation="xla")

    return jax.vjp(inner, case.x, case.lora)[1](dy)


def dy_of(case):
    return jax.ShapeDtypeStruct((case.x.shape[0], WIDTH), case.x.dtype)


@functools.cache
def temporary_bytes(slots):
    analysis = jax.jit(forward).lower(abstract_case(slots)).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def test_temporary_memory_does_not_grow_with_slots():
    assert temporary_bytes(2) == temporary_bytes(200)


def inner_jaxprs(value):
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from inner_jaxprs(item)
    elif hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr


def results(jaxpr):
    """(primitive, shape) of everything that is computed, in loops and branches too."""
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            yield equation.primitive.name, getattr(value.aval, "shape", ())
        for parameter in equation.params.values():
            for inner in inner_jaxprs(parameter):
                yield from results(inner)


@pytest.fixture(scope="module")
def computed():
    """Results of the forward and of the backward product with 101 slots."""
    case = abstract_case(101)
    return {
        "forward": list(results(jax.make_jaxpr(forward)(case).jaxpr)),
        "backward": list(results(jax.make_jaxpr(backward)(case, dy_of(case)).jaxpr)),
    }


def test_nothing_of_rows_times_slots(computed):
    """Every result with a slots axis is a view of the bank or a gradient of its shape."""
    for direction in computed.values():
        for primitive, shape in direction:
            assert not ({ROWS, ROWS + 32, 64} & set(shape) and {101, 303} & set(shape)), primitive


def test_nothing_of_rows_times_rank_times_width(computed):
    tile = 16  # LANES
    for primitive, shape in computed["forward"]:
        if shape[:1] == (ROWS,):
            assert math.prod(shape) <= ROWS * max(RANK * tile, K, WIDTH), primitive
    for direction in computed.values():
        for primitive, shape in direction:
            assert math.prod(shape) < ROWS * RANK * min(K, WIDTH) or 303 in shape or 101 in shape, (
                primitive,
                shape,
            )


def test_the_base_gradient_is_never_computed(computed):
    """Nothing of the weight's size except the weight, which is an argument and no result."""
    weight = math.prod((GROUPS, WIDTH, K))
    for primitive, shape in computed["backward"]:
        assert math.prod(shape) < weight or 303 in shape or 101 in shape, (primitive, shape)


def test_base_only_work_does_not_read_the_bank():
    """The low-rank product is a branch that a batch without adapters does not take."""
    jaxpr = jax.make_jaxpr(forward)(abstract_case(101)).jaxpr
    outside = [
        equation
        for equation in flat(jaxpr)
        if equation.primitive.name != "cond"
        and any(getattr(v.aval, "ndim", 0) >= 3 and 303 in v.aval.shape for v in equation.invars)
    ]
    assert not outside


def flat(jaxpr):
    """Equations outside of branches."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "cond":
            for parameter in equation.params.values():
                for inner in inner_jaxprs(parameter):
                    yield from flat(inner)
