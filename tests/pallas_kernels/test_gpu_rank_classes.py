"""Rank classes in the Hopper kernels: in the interpreter, the bits of a bank of one class."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Lora, moe_mlp
from pallas_kernels.grouped_lora_matmul.gate import Gate

if not hasattr(plgpu, "force_gpu_interpret_mode"):
    pytest.skip("the Mosaic GPU interpreter needs jax >= 0.11", allow_module_level=True)

from pallas_kernels.grouped_lora_matmul import mosaic_gpu
from tests.pallas_kernels.class_cases import RankClass, cut, firsts_of, padded, ranks_of
from tests.pallas_kernels.gpu_interpreter import ProductCase, ShrinkCase
from tests.pallas_kernels.product_cases import Term
from tests.pallas_kernels.test_gpu_interpreter import assert_close
from tests.pallas_kernels.test_gpu_tracing import layer
from tests.pallas_kernels.tpu_interpreter import groups_of_rows

CLASSES = (RankClass(2, 16), RankClass(1, 64), RankClass(2, 24))
FIRSTS, SLOTS = firsts_of(CLASSES), len(ranks_of(CLASSES))
SIZES = np.array([9, 0, 4, 6], np.int32)  # a row past the last group
MIXED = np.array([0, 0, 2, -1, 2, 2, 4, 1, 1, 3, 4, 3, 3, 2, 2, 2, 2, 2, 2, 1], np.int32)
PRODUCTS = {
    "two parts": ProductCase(20, 64, 192, (Term(0, 128, 64), Term(128, 64, 64, shared=True))),
    "gated": ProductCase(
        20, 64, 128, (Term(0, 64, 64), Term(64, 64, 64)), gate=Gate(), biased=True
    ),
    "backward": ProductCase(20, 128, 64, (Term(0, 64, 64), Term(0, 64, 64)), contract=1),
}
SHRINKS = {
    "parts apart": ShrinkCase(20, 192, (64, 64), shared=(False, True)),
    "blocks of rows": ShrinkCase(20, 192, (64, 64), shared=(False, True), as_of=300),
    "pieces of runs": ShrinkCase(20, 192, (64, 64), as_of=10_000),
}
# Where each compiles.
SOME = ("gated", "blocks of rows")


def some(cases):
    return [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in cases]


def of_classes(arrays, split):
    """Arrays of each part, class by class."""
    by_part = [split(array, CLASSES) for array in arrays]
    return tuple(its for of_class in zip(*by_part, strict=True) for its in of_class)


def split_slots(scaling, classes):
    firsts = firsts_of(classes)
    return np.split(scaling, firsts[1:])


def with_nan(factors, parts):
    """The factors with NaN in all of the second class."""
    its = slice(parts, 2 * parts)
    return *factors[:parts], *(np.full_like(f, np.nan) for f in factors[its]), *factors[its.stop :]


@pytest.mark.interpreter
@pytest.mark.parametrize("name", some(PRODUCTS))
def test_product(name):
    """Tiles of one slot, and of several; NaN in a class reaches its own rows alone."""
    one = dataclasses.replace(PRODUCTS[name], slots=SLOTS)
    *fixed, u, factors = one.arguments(SIZES, MIXED)
    whole = tuple(padded(factor, CLASSES) for factor in factors)
    expected = one.run(*fixed, u, whole)
    assert_close(expected, one.expect(*fixed, u, whole))
    several = dataclasses.replace(one, firsts=FIRSTS)
    factors = of_classes(factors, cut)
    found = several.run(*fixed, u, factors)
    assert found.tobytes() == expected.tobytes()
    hit = (MIXED == 2) & (np.arange(20) < 19)
    for low in u:
        low[hit] = np.nan
    found = several.run(*fixed, u, with_nan(factors, len(one.terms)))
    assert np.isnan(found[hit].astype(np.float32)).all()
    assert found[~hit].tobytes() == expected[~hit].tobytes()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", some(SHRINKS))
def test_shrink(name):
    """All columns that a product may read: what a class has fewer ranks is zero."""
    one = dataclasses.replace(SHRINKS[name], slots=SLOTS)
    *fixed, factors, scalings = one.arguments(SIZES, MIXED)
    adapted = (groups_of_rows(SIZES, 20) >= 0) & (MIXED >= 0)
    whole = tuple(padded(factor, CLASSES) for factor in factors)
    expected = one.run(*fixed, whole, scalings)
    for its, other in zip(expected, one.expect(*fixed, whole, scalings), strict=True):
        assert_close(its[adapted], other[adapted])
    several = dataclasses.replace(one, firsts=FIRSTS)
    factors, scalings = of_classes(factors, cut), of_classes(scalings, split_slots)
    found = several.run(*fixed, factors, scalings)
    for its, other in zip(found, expected, strict=True):
        assert its[adapted].tobytes() == other[adapted].tobytes()
    broken = with_nan(factors, 2), with_nan(scalings, 2)
    kept = adapted & (MIXED != 2)
    for its, other in zip(several.run(*fixed, *broken), expected, strict=True):
        assert its[kept].tobytes() == other[kept].tobytes()


def test_classes_of_a_part_are_in_one_kernel(monkeypatch):
    """Parts of too many ranks together are not; parts of columns of their own are."""
    calls = []

    def kernel(x, tables, factors, scalings, firsts, starts, schedule):
        assert firsts == (0, 2) and len(factors) == len(scalings) == 2 * len(starts)
        calls.append((starts, [f.shape[2] for f in factors]))
        return factors

    monkeypatch.setattr(mosaic_gpu, "shrink_kernel", kernel)
    # Start, width, rank.
    shapes = [(0, 64, 128), (0, 64, 64), (64, 128, 16), (0, 64, 24), (192, 64, 8)]

    def factors(slots, largest):
        ranks = (min(rank, largest) for *_, rank in shapes)
        widths = (width for _, width, _ in shapes)
        return [jnp.zeros((slots, 1, *sizes)) for sizes in zip(ranks, widths, strict=True)]

    terms = (*factors(2, 16), *factors(3, 128))
    starts = 2 * tuple(start for start, *_ in shapes)
    firsts = (0,) * 5 + (2,) * 5
    x, tables = jnp.zeros((300, 256)), mosaic_gpu.tables(None, jnp.zeros(300, jnp.int32), 1)
    u = mosaic_gpu.shrink(x, tables, terms, starts, (None,) * 10, firsts)
    assert [its.shape for its in u] == [factor.shape for factor in terms]
    assert calls == [
        ((64, 192), [16, 8, 16, 8]),
        ((0,), [16, 128]),
        ((0, 0), [16, 16, 64, 24]),
    ]


@pytest.mark.parametrize(
    "tokens, shared",
    [
        (3, True),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(300, True, marks=pytest.mark.slow),
        pytest.param(300, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_layer_are_traced(tokens, shared):
    function, (*routed, _, _, _) = layer("qwen3-30b-a3b", tokens)
    _, twice, hidden = routed[4].shape
    groups = routed[4].shape[0]

    def classes(n_in, n_out, a_groups, b_groups):
        def array(*sizes, dtype=jnp.bfloat16):
            return jax.ShapeDtypeStruct(sizes, dtype)

        return tuple(
            Lora(
                array(slots, a_groups, rank, n_in),
                array(slots, b_groups, rank, n_out),
                array(slots, groups, dtype=jnp.float32),
            )
            for slots, rank in CLASSES
        )

    outer = 1 if shared else groups
    into = classes(hidden, twice // 2, outer, groups)
    lora = (into, into, classes(twice // 2, hidden, groups, outer))

    def total(x, lora, *rest):
        return jnp.sum(moe_mlp(x, *rest, *lora, implementation="mosaic_gpu"))

    found = jax.eval_shape(jax.grad(total, argnums=(0, 1)), routed[0], lora, *routed[1:])
    assert jax.tree.structure(found) == jax.tree.structure((routed[0], lora))
    assert [v.shape for v in jax.tree.leaves(found)] == [
        v.shape for v in jax.tree.leaves((routed[0], lora))
    ]
