"""Random inputs of `grouped_lora_matmul`: a few static shapes, any group sizes, slots and ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import Lora, grouped_lora_matmul
from pallas_kernels.layered import Layered


@dataclass(frozen=True)
class Part:
    """One part of the output; groups of a factor are 1 when it is shared by all groups."""

    width: int
    shared_a: bool = False
    shared_b: bool = False
    shared_scaling: bool = False
    adapted: bool = True


@dataclass(frozen=True)
class Shape:
    """Static sizes: one compilation for each."""

    rows: int
    groups: int
    k: int
    parts: tuple[Part, ...]
    slots: int = 4
    rank: int = 4
    dtype: str = "float32"

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(part.width for part in self.parts)

    def served_by(self, implementation: str) -> Shape:
        """The shape itself, or the nearest one that the kernels serve."""
        if implementation != "mosaic_gpu":
            return self
        unit = 64 if len(self.parts) > 1 else 32
        parts = tuple(replace(part, width=_whole(part.width, unit)) for part in self.parts)
        return replace(self, k=_whole(self.k, 64), parts=parts, dtype="bfloat16")

    @property
    def tolerance(self) -> float:
        """Of values near 1, against float64."""
        return 1e-5 if self.dtype == "float32" else 2**-6


def _whole(width: int, unit: int) -> int:
    return width + -width % unit


class Case(NamedTuple):
    """The arrays of one call, in NumPy."""

    x: np.ndarray
    w: np.ndarray
    group_sizes: np.ndarray
    row_slots: np.ndarray
    lora: tuple[Lora | None, ...]


def make_case(shape: Shape, group_sizes, row_slots, seed: int = 0, ranks=None) -> Case:
    """Random non-zero values; slot i's factors are zero at and past `ranks[i]`."""
    rng = np.random.default_rng(seed)
    ranks = np.full(shape.slots, shape.rank) if ranks is None else np.asarray(ranks)
    keep = (np.arange(shape.rank) < ranks[:, None])[:, None, :, None]

    def normal(*size, scale=1.0):
        return (scale * rng.standard_normal(size)).astype(jnp.dtype(shape.dtype))

    def pair(part: Part) -> Lora | None:
        if not part.adapted:
            return None
        a_groups, b_groups, s_groups = (
            1 if shared else shape.groups
            for shared in (part.shared_a, part.shared_b, part.shared_scaling)
        )
        a = normal(shape.slots, a_groups, shape.rank, shape.k, scale=shape.k**-0.5)
        b = normal(shape.slots, b_groups, shape.rank, part.width)
        scaling = rng.uniform(0.5, 2, (shape.slots, s_groups)).astype(np.float32)
        return Lora(
            np.where(keep, a, 0).astype(a.dtype), np.where(keep, b, 0).astype(b.dtype), scaling
        )

    return Case(
        x=normal(shape.rows, shape.k),
        w=normal(shape.groups, sum(shape.widths), shape.k, scale=shape.k**-0.5),
        group_sizes=np.asarray(group_sizes, np.int32),
        row_slots=np.asarray(row_slots, np.int32),
        lora=tuple(pair(part) for part in shape.parts),
    )


def make_bias(case: Case, seed: int = 1) -> np.ndarray:
    """One for a case's product; NaN for groups without rows."""
    groups, width, _ = case.w.shape
    bias = np.random.default_rng(seed).standard_normal((groups, width))
    bias[case.group_sizes == 0] = np.nan
    return bias.astype(case.x.dtype)


@st.composite
def cases(draw, shape: Shape) -> Case:
    """Ragged, empty and full groups, rows past the last group, any slots and ranks."""
    cuts = draw(st.lists(st.integers(0, shape.rows), min_size=shape.groups, max_size=shape.groups))
    used = draw(st.sampled_from([0, 1, shape.rows // 2, shape.rows, shape.rows]))
    ends = np.minimum(np.sort(cuts), used)
    if draw(st.booleans()):
        ends[-1] = used
    row_slots = draw(
        st.one_of(
            st.integers(-1, shape.slots - 1).map(lambda slot: [slot] * shape.rows),
            st.lists(st.integers(-1, shape.slots - 1), min_size=shape.rows, max_size=shape.rows),
        )
    )
    ranks = draw(st.lists(st.integers(0, shape.rank), min_size=shape.slots, max_size=shape.slots))
    seed = draw(st.integers(0, 2**16))
    return make_case(shape, np.diff(ends, prepend=0), row_slots, seed, ranks)


@functools.cache
def jitted(widths: tuple[int, ...] | None, implementation: str, out_dtype=None):
    """The compiled operation, taking the arrays of a `Case`."""
    static = dict(parts=widths, implementation=implementation, out_dtype=out_dtype)
    return jax.jit(functools.partial(grouped_lora_matmul, **static))


@functools.cache
def jitted_with_gradients(widths: tuple[int, ...] | None, implementation: str, out_dtype=None):
    """(case, dy, bias or None) to (y, dx, dlora)."""

    def run(case: Case, dy, bias=None):
        def forward(x, lora):
            return grouped_lora_matmul(
                x,
                case.w,
                case.group_sizes,
                case.row_slots,
                lora,
                parts=widths,
                bias=bias,
                implementation=implementation,
                out_dtype=out_dtype,
            )

        y, pullback = jax.vjp(forward, case.x, case.lora)
        return y, *pullback(dy)

    return jax.jit(run)


def rounding_of_u(case: Case, widths) -> np.ndarray:
    """float64 [M, N]: how far rounding u to bfloat16 can move the results."""
    found = np.zeros((len(case.x), sum(widths)))
    ends = np.cumsum(widths)
    group_of_row = np.repeat(np.arange(len(case.group_sizes)), case.group_sizes)
    for row, group in enumerate(group_of_row):
        slot = case.row_slots[row]
        for pair, end, width in zip(case.lora, ends, widths, strict=True):
            if pair is not None and slot >= 0:
                a, b, scaling = (
                    f[slot, group if f.shape[1] > 1 else 0].astype(np.float64) for f in pair
                )
                u = scaling * (a @ case.x[row].astype(np.float64))
                found[row, end - width : end] = 2**-8 * (np.abs(u) @ np.abs(b))
    return found


def in_layers(arrays, layer=1, layers=3):
    """The arrays as those of one layer, where the others' are NaN."""

    def of(array):
        stack = np.full((layers, *array.shape), np.nan, array.dtype)
        stack[layer] = array
        return Layered(stack, np.int32(layer))

    return jax.tree.map(of, arrays)


def assert_same(found, expected):
    """Arrays of the same dtypes and numbers; NumPy knows no NaN of bfloat16."""
    for its, other in zip(found, expected, strict=True):
        assert its.dtype == other.dtype
        np.testing.assert_array_equal(*(values.astype(np.float64) for values in (its, other)))
