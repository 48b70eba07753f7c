"""Where the base weights of a model's layers are: each in an array of its own, or in stacks.

Layers that follow each other and are alike can have those of a kind in one array, of which each
layer's parameter is a `Layered` part. The decoder makes a loop of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from lora_moe_jax.layers.adapter_slots import LoraParam
from lora_moe_jax.models.decoder import Decoder
from pallas_kernels.implementation import platform_implementation
from pallas_kernels.layered import Layered

Path = tuple[str | int, ...]
Axes = tuple[str | None, ...]

LANES = 128  # of a TPU
# Where kernels read a layer's part of a stack in place.
STACKED = {"mosaic_gpu": ("bfloat16",), "mosaic_tpu": ("bfloat16", "float32"), "xla": ()}


def stacks_layers(dtype: str) -> bool:
    """Whether a model's layers lie in stacks."""
    return dtype in STACKED[platform_implementation()]


def place(shape: tuple[int, ...], sharding: Sharding | None) -> Format | Sharding | None:
    """Where weights of a shape go: on a TPU such that the last axis is innermost.

    Where that axis is no whole lanes on a device, XLA's own layout is another, to save padding, and
    every step would copy the weights into this one, which kernels read.
    """
    columns = (shape if sharding is None else sharding.shard_shape(shape))[-1]
    if platform_implementation() != "mosaic_tpu" or len(shape) == 1 or columns % LANES == 0:
        return sharding
    one_device = jnp.zeros(()).sharding
    return Format(Layout(tuple(range(len(shape)))), sharding or one_device)


def layer_runs(model: Decoder) -> list[range]:
    """The layers, in runs of such that have parameters of the same names and shapes."""

    def form(number: int):
        state = nnx.to_flat_state(nnx.state(model.layers[number]))
        return [(path, v.shape, v.dtype) for path, v in state]

    numbers = range(len(model.layers))
    runs = (list(run) for _, run in itertools.groupby(numbers, form))
    return [range(run[0], run[-1] + 1) for run in runs]


def filled(
    model: Decoder,
    make: Callable[[Path, nnx.Variable, int], jax.Array],
    sharding_of: Callable[[Axes], Sharding | None],
    *,
    stacked: bool,
    progress: Callable[[int, int], None],
) -> Decoder:
    """An abstract model with arrays.

    Args:
      make: the array of a parameter, from its path, its variable and its number.
      sharding_of: how an array with such axes lies on the devices.
      stacked: whether layers that are alike lie in one array of each kind.
      progress: called with the parameters done and their number.
    """
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    places = dict(_places(model, flat)) if stacked else {}
    stacks: dict[Path, jax.Array] = {}
    for number, (path, variable) in enumerate(flat.items()):
        array = make(path, variable, number)
        if path in places:
            first, index, count = places[path]
            if first not in stacks:
                shape = count, *array.shape
                where = place(shape, sharding_of((None, *variable.get_metadata("axes"))))
                stacks[first] = _zeros(shape, array.dtype, where)
            stacks[first] = _put(stacks[first], array, index)
        else:
            flat[path] = variable.replace(array)
        progress(number + 1, len(flat))
    for path, (first, index, _) in places.items():
        flat[path] = flat[path].replace(Layered(stacks[first], index))
    return nnx.merge(graph, nnx.from_flat_state(flat.items()))


def _places(model: Decoder, flat: dict[Path, nnx.Variable]) -> Iterator:
    """(path, (path of the stack's first, index in the stack, layers of it)) of what is in stacks.

    Adapter slots are not: the bank has stacks of its own.
    """
    run_of = {number: run for run in layer_runs(model) for number in run if len(run) > 1}
    for path, variable in flat.items():
        if path[0] == "layers" and path[1] in run_of and not isinstance(variable, LoraParam):
            run = run_of[path[1]]
            yield path, (("layers", run.start, *path[2:]), path[1] - run.start, len(run))


def _zeros(shape: tuple[int, ...], dtype, where: Format | Sharding | None) -> jax.Array:
    if isinstance(where, Format):
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=where)()
    return jnp.zeros(shape, dtype, device=where)


def _put(stack: jax.Array, array: jax.Array, index: int) -> jax.Array:
    """The stack, where it is, with an array in it."""
    where = place(stack.shape, stack.sharding)
    return _writer(where if isinstance(where, Format) else None)(stack, array, index)


@functools.cache
def _writer(where: Format | None) -> Callable:
    def write(stack, array, index):
        return stack.at[index].set(array)

    return jax.jit(write, donate_argnums=0, out_shardings=where)
