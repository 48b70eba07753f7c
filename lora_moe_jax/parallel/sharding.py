"""From logical axis names of parameters to mesh axes: one table, checked against the model.

    vocab, heads, kv_heads, mlp   ->  tensor      (features that column-parallel products make)
    expert                        ->  expert
    everything else               ->  replicated

`kv_heads` stays replicated when there are fewer key/value heads than tensor devices: every device
then computes all of them and keeps the one that its query heads read. `vocab` stays replicated
when the mesh does not divide it.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import ConfigError
from lora_moe_jax.parallel.mesh import axis_size


def sharding_rules(config: ModelConfig, mesh: Mesh | None) -> Mapping[str, str | None]:
    """Mesh axis of every logical axis that is split for this model on this mesh.

    Raises:
      ConfigError: the mesh does not divide something that has to be split.
    """
    tensor, expert = axis_size(mesh, "tensor"), axis_size(mesh, "expert")
    _must_divide("num_attention_heads", config.num_heads, "tensor", tensor)
    if not all(map(config.is_sparse, range(config.num_layers))):
        _must_divide("intermediate_size", config.intermediate_size, "tensor", tensor)
    if config.moe:
        _must_divide("expert width", config.moe.expert_size, "tensor", tensor)
        _must_divide("shared expert width", config.moe.shared_size, "tensor", tensor)
        _must_divide("number of experts", config.moe.num_experts, "expert", expert)
    if config.mla is None and config.num_kv_heads % tensor and tensor % config.num_kv_heads:
        _must_divide("num_key_value_heads", config.num_kv_heads, "tensor", tensor)
    rules = {"heads": "tensor", "mlp": "tensor", "expert": "expert"}
    rules["kv_heads"] = "tensor" if config.num_kv_heads % tensor == 0 else None
    rules["vocab"] = "tensor" if config.vocab_size % tensor == 0 else None
    return {
        name: axis if axis is not None and axis_size(mesh, axis) > 1 else None
        for name, axis in rules.items()
    }


def partition_spec(axes: tuple[str | None, ...], rules: Mapping[str, str | None]) -> PartitionSpec:
    """The partition of an array whose dimensions have these logical names.

    Without trailing Nones, as compiled functions report it: to `jit` the two forms are different.
    """
    split = [rules.get(axis) if axis else None for axis in axes]
    while split and split[-1] is None:
        split.pop()
    return PartitionSpec(*split)


def named_sharding(axes, rules, mesh: Mesh) -> NamedSharding:
    """`partition_spec` bound to a mesh."""
    return NamedSharding(mesh, partition_spec(axes, rules))


def _must_divide(what: str, size: int, axis: str, devices: int) -> None:
    if size % devices:
        raise ConfigError(
            f"the mesh does not divide the model's {what}",
            key=f"mesh axis {axis!r}",
            expected=f"a divisor of {size}",
            found=str(devices),
            hint="use another mesh shape",
        )
