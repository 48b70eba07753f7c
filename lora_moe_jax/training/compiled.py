"""The pieces of a model for one size of batch, compiled side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import jax

from lora_moe_jax.adapters.bank import Bank
from lora_moe_jax.serving.kernel_programs import compile_kernels
from lora_moe_jax.training.pack_slots import pack_slots
from lora_moe_jax.training.packing import PackSizes, padding
from lora_moe_jax.training.pieces import Piece


class Program(NamedTuple):
    """Both directions of a piece, see `Role`; without the arguments that are static."""

    forward: Callable
    backward: Callable


def compiled(
    pieces: Sequence[Piece], bank: Bank, sizes: PackSizes, progress: Callable[[int, int], None]
) -> dict[Hashable, Program]:
    """The programs of all pieces, by their key; calls `progress` with how many are done, of all."""
    jobs: dict[Hashable, Program] = {}
    x = None
    batch, slots = padding(sizes), pack_slots(bank, {}, sizes.slots)
    with ThreadPoolExecutor() as kernels, ThreadPoolExecutor() as threads:

        def compile_later(function, *arguments):
            lowered = function.lower(*arguments)
            compile_kernels(lowered, kernels)
            return lowered, threads.submit(lowered.compile)

        for piece in pieces:
            if piece.key in jobs:
                continue
            arrays = piece.arrays(bank, slots)
            lowered, forward = compile_later(piece.functions.forward, arrays, x, batch, sizes)
            x, kept = jax.tree.map(_shape, lowered.out_info)
            _, backward = compile_later(piece.functions.backward, arrays, kept, batch, sizes, x)
            jobs[piece.key] = Program(forward, backward)
        running = [job for both in jobs.values() for job in both]
        for done, job in enumerate(as_completed(running)):
            job.result()  # raises at once what one of them has raised
            progress(done + 1, len(running))
        kernels.shutdown(cancel_futures=True)
    return {key: Program(*(job.result() for job in both)) for key, both in jobs.items()}


def _shape(info) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(info.shape, info.dtype)
