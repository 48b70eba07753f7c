"""From a configuration, and maybe a checkpoint, to a model on the device."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.checkpoint.writer import write_checkpoint
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.adapter_slots import AdapterSlots, LoraParam
from lora_moe_jax.layers.build import Build, SlotConfig
from lora_moe_jax.models import deepseek, gpt_oss, qwen3
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.models.layer_stacks import Axes, filled, place, stacks_layers
from lora_moe_jax.parallel.mesh import axis_size, mesh_axes
from lora_moe_jax.parallel.sharding import named_sharding, sharding_rules

FAMILIES = {
    "qwen3": qwen3.make_layer,
    "qwen3_moe": qwen3.make_layer,
    "deepseek_v2": deepseek.make_layer,
    "deepseek_v3": deepseek.make_layer,
    "gpt_oss": gpt_oss.make_layer,
}


def build_model(
    config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    adapters: SlotConfig | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
) -> Decoder:
    """A model with random weights, all on one device; `load_model` splits over a mesh."""
    rules = tuple(sharding_rules(config, mesh).items())
    devices = axis_size(mesh, "tensor")
    build = Build(nnx.Rngs(seed), dtype, adapters, mesh_axes(mesh), rules, devices)
    return Decoder(config, build, FAMILIES[config.family])


def abstract_model(config: ModelConfig, **options) -> Decoder:
    """`build_model` without any memory: arrays are shapes and dtypes."""
    return nnx.eval_shape(lambda: build_model(config, **options))


def random_model(
    config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    adapters: SlotConfig | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """A model with random weights made on the device, array by array: for benchmarks of its size.

    Adapter slots are zero, norms one, biases zero; other weights have unit gain. Of a mesh that
    splits features it is another model: rows of fused projections lie in another order there.
    """
    model = abstract_model(config, dtype=dtype, adapters=adapters, mesh=mesh)
    sharding_of = _sharding_of(config, mesh)

    def make(path, variable, number):
        return _random(variable, number, sharding_of(variable.get_metadata("axes")))

    return filled(model, make, sharding_of, stacked=stacks_layers(dtype), progress=progress)


def _random(variable, seed: int, sharding: Sharding | None) -> jax.Array:
    shape, dtype = variable.shape, variable.dtype
    if isinstance(variable, LoraParam) or _is_bias(variable):
        return jnp.zeros(shape, dtype, device=sharding)
    if len(shape) == 1:
        return jnp.ones(shape, dtype, device=sharding)
    return _normal(shape, dtype, sharding)(jax.random.key(seed))


def _is_bias(variable) -> bool:
    return variable.get_metadata("tensors")[0].endswith(("bias", ".sinks"))


@functools.cache
def _normal(shape: tuple[int, ...], dtype, sharding: Sharding | None) -> Callable:
    """Makes one matrix at a time: whole arrays of float32 may not fit beside the weights."""

    def matrix(key):
        return (shape[-1] ** -0.5 * jax.random.normal(key, shape[-2:])).astype(dtype)

    def matrices(key):
        keys = jax.random.split(key, math.prod(shape[:-2]))
        return jax.lax.map(matrix, keys).reshape(shape)

    return jax.jit(matrices, out_shardings=sharding)


def projections(model: Decoder) -> dict[str, Projection]:
    """The projections that have adapter slots, by name."""
    return {slots.projection.name: slots.projection for slots in iter_slots(model)}


def iter_slots(model: Decoder) -> list[AdapterSlots]:
    """The adapter slots of every projection that has some."""
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, AdapterSlots)]


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: str,
    adapters: SlotConfig | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """Reads a checkpoint tensor by tensor straight to the device, split as the mesh asks.

    Args:
      progress: called with the parameters done and their number.
    """
    model = abstract_model(config, dtype=dtype, adapters=adapters, mesh=mesh)
    sharding_of = _sharding_of(config, mesh)

    def make(path, variable, number):
        sharding = sharding_of(variable.get_metadata("axes"))
        if isinstance(variable, LoraParam):
            return jnp.zeros(variable.shape, variable.dtype, device=sharding)
        return _read_parameter(checkpoint, variable, sharding)

    return filled(model, make, sharding_of, stacked=stacks_layers(dtype), progress=progress)


def _sharding_of(config: ModelConfig, mesh: Mesh | None) -> Callable[[Axes], Sharding | None]:
    """How an array with such axes lies on the mesh."""
    rules = sharding_rules(config, mesh)
    return lambda axes: None if mesh is None else named_sharding(axes, rules, mesh)


def _read_parameter(checkpoint: Checkpoint, variable, sharding) -> jax.Array:
    dtype = variable.dtype
    tensors = variable.get_metadata("tensors")
    layout = variable.get_metadata("layout")
    value = layout.load(*(checkpoint.read(name, dtype=dtype) for name in tensors))
    # The device gets a copy of its own, and the host's buffer ends before the next one is read.
    where = place(value.shape, sharding)
    array = jax.device_put(np.ascontiguousarray(value), where, may_alias=False)
    return array.block_until_ready()


def save_model(folder: str | os.PathLike, model: Decoder) -> None:
    """Writes a model's base weights and configuration in the layout of the Hugging Face hub.

    Raises:
      CheckpointError: the folder is not empty, or cannot be written.
    """
    write_checkpoint(folder, model.config, checkpoint_tensors(model))


def checkpoint_tensors(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """The base weights under their checkpoint names, one at a time, for `write_checkpoint`.

    Parameters that share one tensor (kv_b's key and value rows) are its rows by head, in order.
    """
    _, state = nnx.split(model)
    base = [v for _, v in nnx.to_flat_state(state) if not isinstance(v, LoraParam)]
    by_tensors: dict[tuple[str, ...], list] = {}
    for variable in base:
        by_tensors.setdefault(variable.get_metadata("tensors"), []).append(variable)
    for names, variables in by_tensors.items():
        stored = [v.get_metadata("layout").store(np.asarray(v[...])) for v in variables]
        if len(stored) == 1:
            yield from zip(names, stored[0], strict=True)
        else:
            rows = np.concatenate([arrays[0] for arrays in stored], axis=1)
            yield names[0], rows.reshape(-1, rows.shape[-1])
