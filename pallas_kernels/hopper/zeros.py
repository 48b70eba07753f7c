"""Zeros in some rows of shared memory."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper import ptx

WARPS = 4
LANES = 32 * WARPS
STORED = 16  # bytes that a lane stores at once

# $0: a lane's first row, $1: the first row that is kept, $2: how many are, $3: where it stores.
STORE = """{
.reg .pred others; .reg .b32 row, zero;
add.s32 row, $0, ROWS_ON;
setp.lt.u32 others, row, ROWS;
sub.s32 row, row, $1;
setp.ge.and.u32 others, row, $2, others;
mov.b32 zero, 0;
@others st.shared.v4.b32 [$3 + BYTES_ON], {zero, zero, zero, zero};
}"""


def keep_rows(count, rows, *, interpreted: bool) -> None:
    """Makes all of a reference's rows zeros but the first `count`; see `zeros_outside`."""
    if interpreted:  # PTX is unknown there
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        rows[...] = jnp.where(row < count, rows[...], jnp.zeros_like(rows[...]))
    else:
        zeros_outside(rows, 0, count)


def zeros_outside(rows, first, stop) -> None:
    """Makes all rows zeros but [first, stop); by one warpgroup, whose loads nothing waits for.

    Args:
      rows: [rows, width] of two bytes each, 16 to 128 bytes wide, one after the other in memory:
        swizzled as wide as they are, which moves words within a row alone.
    """
    count, width = rows.shape
    lanes_of_row = 2 * width // STORED

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType((plgpu.SwizzleTransform(2 * width),)), ptx.NUMBER, ptx.NUMBER)
    )
    def store(context, rows, first, stop):
        del context
        address, first, stop = map(ptx.value, (rows, first, stop))
        lane = ptx.thread(WARPS)
        row = arith.divui(lane, ptx.number(lanes_of_row))
        place = utils.inline_ptx(
            f"mad.lo.s32 $0, $1, {STORED}, $2;", lane, address, result_types=ptx.int32()
        )
        for number in range(-(-count * lanes_of_row // LANES)):
            sizes = dict(
                ROWS_ON=number * LANES // lanes_of_row, BYTES_ON=number * LANES * STORED, ROWS=count
            )
            code = STORE
            for name, size in sizes.items():
                code = code.replace(name, str(size))
            kept = row, first, arith.subi(stop, first), place
            utils.inline_ptx(code, *kept, has_side_effects=True)

    store(rows, first, stop)
