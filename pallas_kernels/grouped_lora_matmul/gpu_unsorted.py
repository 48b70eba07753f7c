"""Very few rows that stay in order: each is a run and a tile of its own, laid out by a program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_lora_matmul.gpu_rows import place_of
from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.rows import layout_of_row


def lay_out(x, groups: int, group, token_slots, valid):
    """The x of all rows, their places, and the words that programs count up, zeros.

    Args: see `gpu_dispatch.dispatch_few`; K a multiple of `rows.THREADS`.

    Returns:
      [M, K], int32 [M], int32 [M].
    """
    rows, choices = group.size, group.shape[1]
    kernel = kept_kernel(
        functools.partial(_body, groups, choices),
        out_type=[
            jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype),
            *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2,
        ],
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name=f"lora_rows_k{x.shape[1]}",
    )
    routing = group.reshape(-1), token_slots, *(() if valid is None else (valid,))
    return kernel(*(its.astype(jnp.int32) for its in routing), x)


def _body(groups: int, choices: int, group, token_slots, *refs):
    *valid, x, y, place, arrivals = refs
    row = lax.axis_index("row")
    token = lax.div(row, jnp.int32(choices))
    wait_for_kernels_before(group.shape[0])
    values = plgpu.load(x.at[token], layout=layout_of_row(x.shape[1], x.dtype))
    number, slot = group[row], token_slots[token]
    works = number >= 0
    for its in valid:
        works &= its[token] != 0
    number = jnp.where(works, jnp.minimum(number, groups), groups)
    place[row] = place_of(number, slot, groups)
    arrivals[row] = 0
    y.at[row][...] = values
