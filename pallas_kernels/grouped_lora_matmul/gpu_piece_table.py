"""The pieces of the runs of few sorted rows, listed by one kernel.

Each program looks at all rows for how many pieces begin before its own. In plain JAX it took three
kernels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ROWS = 32  # of a program


def piece_table(place, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `gpu_rows.Pieces` are, from the place of each row.

    Pieces end where a row's number is a multiple of `most`, too.
    """
    rows = place.shape[0]
    call = pl.pallas_call(
        functools.partial(_kernel, rows, most),
        out_shape=[jax.ShapeDtypeStruct((number,), jnp.int32) for number in (1, rows, 1)],
        grid=(pl.cdiv(rows, ROWS),),
        compiler_params=plgpu.CompilerParams(num_warps=8),
        interpret=jax.default_backend() == "cpu",
        name="lora_pieces",
    )
    return tuple(call(place))


def _kernel(rows: int, most: int, place, count, piece_row, bare):
    def begins(row):
        """Whether a piece begins with a row, and whether it has an adapter."""
        exists = row < rows
        own = plgpu.load(place.at[row], mask=exists, other=0)
        before = plgpu.load(place.at[row - 1], mask=exists & (row > 0), other=-1)
        adapted = (own & 0xFFFF) > 0
        is_first = (own != before) | (lax.rem(row, jnp.int32(most)) == 0)
        return exists & adapted & is_first, adapted

    first = pl.program_id(0) * ROWS
    every, own = lax.iota(jnp.int32, pl.next_power_of_2(rows)), first + lax.iota(jnp.int32, ROWS)
    (all_begin, adapted), (own_begin, _) = begins(every), begins(own)
    total = jnp.sum(all_begin, dtype=jnp.int32)
    before = jnp.sum(all_begin & (every < first), dtype=jnp.int32)
    earlier = own_begin[None] & (own[None] < own[:, None])
    number = before + jnp.sum(earlier, axis=1, dtype=jnp.int32)
    # The interpreter writes what is masked too, as it was: it must not be another's.
    number = jnp.where(own_begin, number, rows)
    plgpu.store(piece_row.at[number], own, mask=own_begin)
    rest = (own >= total) & (own < rows)
    plgpu.store(piece_row.at[jnp.where(rest, own, rows)], jnp.zeros_like(own), mask=rest)

    @pl.when(pl.program_id(0) == 0)
    def _count():
        count[0] = total
        bare[0] = rows - jnp.sum(adapted, dtype=jnp.int32)
