"""Random calls of the TPU backend's functions, with poison wherever the interface allows it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul.tpu_schedule import ProductSchedule
from tests.pallas_kernels import tpu_interpreter
from tests.pallas_kernels.product_cases import ProductSizes
from tests.pallas_kernels.tpu_interpreter import groups_of_rows, jitted


@dataclasses.dataclass(frozen=True)
class ProductCase(ProductSizes):
    """A product of any sizes."""

    dtype: str = "float32"
    schedule: ProductSchedule | None = None

    @property
    def static(self):
        return super().static | dict(firsts=(0,) * len(self.terms))

    def arguments(self, group_sizes, row_slots, seed=0):
        """x, w, group_sizes, row_slots, u, factors. Rows past the last group, and u of rows
        without an adapter, are NaN."""
        rng = np.random.default_rng(seed)
        dtype = jnp.dtype(self.dtype)

        def normal(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(dtype)

        group = groups_of_rows(group_sizes, self.rows)
        row_slots = np.asarray(row_slots, np.int32)
        x = normal(self.rows, self.k)
        x[group < 0] = np.nan
        w = normal(*self.w_shape, scale=self.k**-0.5)
        u = [normal(self.rows, term.rank) for term in self.terms]
        for low in u:
            low[(row_slots < 0) | (group < 0)] = np.nan
        factors = [normal(*term.factor_shape(self.slots, self.groups)) for term in self.terms]
        sizes = np.asarray(group_sizes, np.int32)
        return x, w, sizes, row_slots, tuple(u), tuple(factors)

    def run(self, *arguments, races=True, of_layer=lambda bias: bias):
        product = jitted("product", self.schedule, self.groups, **self.static)
        return product(*arguments, races=races, bias=of_layer(self.bias(self.dtype)))

    def expect(self, *arguments):
        return tpu_interpreter.product(*arguments, **self.static, bias=self.bias(self.dtype))


@st.composite
def batches(draw, rows: int, groups: int, slots: int):
    """Group sizes and slots of rows: ragged, empty and full groups; slots in any order."""
    used = draw(st.sampled_from([rows, rows, 0, rows // 2, rows - 1]))
    cuts = draw(st.lists(st.integers(0, used), min_size=groups, max_size=groups))
    ends = np.sort(cuts)
    if draw(st.booleans()):
        ends[-1] = used
    any_slots = st.lists(st.integers(-1, slots - 1), min_size=rows, max_size=rows)
    row_slots = np.array(
        draw(st.one_of(any_slots, any_slots.map(sorted), st.just([-1] * rows))), np.int32
    )
    return np.diff(ends, prepend=0).astype(np.int32), row_slots


def assert_close(found, expected, dtype):
    """Within float32 rounding of sums, or bfloat16's of inputs and results."""
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance
    )
