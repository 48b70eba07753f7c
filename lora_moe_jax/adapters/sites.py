"""Which tensor of a file belongs to which projection: names only, no data.

Three spellings of routed experts are understood besides the names of the projections themselves:
`experts.3.gate_proj` (one tensor per expert), `experts.gate_proj` (3D, all experts), and PEFT's
packed `experts` and `experts.base_layer`. w1, w3 and w2 stand for gate, up and down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lora_moe_jax.adapters.projection import Projection

PREFIX = "base_model.model."
LEAVES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LEAF_OF = {name: leaf for leaf, w in LEAVES.items() for name in (leaf, w)} | {
    "gate_up_proj": "gate_up_proj"
}
_TENSOR = re.compile(r"(.+?)\.lora_([AB])(?:\.([^.]+))?\.weight")
_EMBEDDING = re.compile(r"(.+?)\.lora_embedding_([AB])(?:\.(?!weight$)([^.]+))?(?:\.weight)?")
_EXPERT = re.compile(r"(.+\.experts)\.(?:(\d{1,6})\.)?(\w+)")
_BASE_COPY = re.compile(r"(.+)\.base_layer\.weight")


@dataclass(frozen=True)
class TensorName:
    """One LoRA tensor's name, taken apart. `module` is the name that PEFT's patterns see."""

    tensor: str
    module: str
    side: Literal["A", "B"]
    adapter: str | None
    embedding: bool


@dataclass
class Site:
    """The tensors of one target: a projection, or a fused `gate_up_proj`.

    Attributes:
      target: name of a projection, or `<parent>.gate_up_proj`.
      packed: PEFT's 2D packing of all experts, one tensor a side.
      a, b: the tensor names by expert number; by None if one tensor holds all.
    """

    target: str
    packed: bool = False
    a: dict[int | None, TensorName] = field(default_factory=dict)
    b: dict[int | None, TensorName] = field(default_factory=dict)

    def names(self) -> Iterable[TensorName]:
        yield from self.a.values()
        yield from self.b.values()

    @property
    def parts(self) -> tuple[str, ...]:
        """The projections that the target covers."""
        parent, _, leaf = self.target.rpartition(".")
        if leaf != "gate_up_proj":
            return (self.target,)
        return (f"{parent}.gate_proj", f"{parent}.up_proj")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a site's target. `groups` is 1 if it has no experts."""

    in_features: int
    out_features: int
    groups: int


class Table:
    """The base model's projections, and the places in them that tensor names can mean."""

    def __init__(self, projections: Mapping[str, Projection]):
        self.projections = projections
        self.blocks = frozenset(
            name.rpartition(".")[0] for name, p in projections.items() if p.kind == "expert"
        )

    def locate(self, tensor: TensorName) -> tuple[str, int | None] | None:
        """The target and expert number that a tensor is for, or None if it is for none.

        The target of a packed tensor is the block, `….experts` or `….experts.base_layer`.
        """
        name = canonical(tensor.module)
        kind = self.projections[name].kind if name in self.projections else None
        if tensor.embedding != (kind == "embedding"):
            return None
        if kind not in (None, "expert"):
            return name, None
        if name.removesuffix(".base_layer") in self.blocks:
            return name, None
        if found := _EXPERT.fullmatch(name):
            block, number, leaf = found.groups()
            if block in self.blocks and leaf in _LEAF_OF:
                target = f"{block}.{_LEAF_OF[leaf]}"
                expert = None if number is None else int(number)
                known = self._has(target) and number in (None, str(expert))
                return (target, expert) if known else None
        return (name, None) if self._has(name) and name not in self.projections else None

    def sizes(self, site: Site) -> Sizes:
        parts = [self.projections[part] for part in site.parts]
        return Sizes(parts[0].in_features, sum(p.out_features for p in parts), parts[0].groups)

    def of_base_copy(self, tensor: str) -> Projection | None:
        """The embedding or head of which `tensor` is PEFT's copy of the weight; None of none."""
        found = _BASE_COPY.fullmatch(tensor)
        projection = self.projections.get(canonical(found[1].removeprefix(PREFIX)) if found else "")
        return projection if projection and projection.kind in ("embedding", "head") else None

    def _has(self, target: str) -> bool:
        return all(part in self.projections for part in Site(target).parts)


def take_apart(tensor: str) -> TensorName | None:
    """The parts of a LoRA tensor's name, or None if it is not one."""
    for pattern, embedding in ((_TENSOR, False), (_EMBEDDING, True)):
        if found := pattern.fullmatch(tensor):
            module, side, adapter = found.groups()
            return TensorName(tensor, module.removeprefix(PREFIX), side, adapter, embedding)
    return None


def canonical(module: str) -> str:
    """A module name in the naming of this library's projections."""
    if module.rpartition(".")[2] == "unembed_tokens":  # Tinker's name
        return "lm_head"
    module = module.replace(".attn.", ".self_attn.")  # Tinker's, of gpt-oss
    return module.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's name


def aliases(projection: Projection, expert: int) -> list[str]:
    """The module names by which a config may target one group of a projection."""
    if projection.kind == "head":
        return [projection.name, "model.unembed_tokens"]
    if projection.kind != "expert":
        return [projection.name]
    block, _, leaf = projection.name.rpartition(".")
    leaves = (leaf, LEAVES[leaf]) if leaf in LEAVES else (leaf,)
    return [f"{block}.{expert}.{name}" for name in leaves] + [f"{block}.{n}" for n in leaves]


def parameter(projection: Projection) -> str:
    """The name by which `target_parameters` targets a projection (transformers v5 names)."""
    if projection.kind != "expert":
        return f"{projection.name}.weight"
    block, _, leaf = projection.name.rpartition(".")
    return f"{block}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"
