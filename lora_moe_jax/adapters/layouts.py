"""The layouts adapters are written in: tensors and settings, nothing on disk yet.

"peft" is what PEFT 0.21 loads exactly: routed experts packed, and everything whose name PEFT would
take for an expert's (gate, gate_proj, up_proj, down_proj of a MoE model), or what is no linear
module (the router of gpt-oss), in target_parameters.
"per_expert" is what vLLM and SGLang read: one 2D tensor per expert, all experts, all projections.
"shared_outer" is the 3D form whose outer factors are stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lora_moe_jax.adapters import packing
from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.naming import alpha_for, cover, most_common, patterns
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.adapters.sites import LEAVES, PREFIX
from lora_moe_jax.errors import AdapterError

_AS_PARAMETERS = ("gate", "gate_proj", "up_proj", "down_proj", "router")


@dataclass
class Draft:
    """An adapter about to be written.

    Attributes:
      tensors: name -> array, as in the file.
      values: module or parameter name -> (rank, scaling) that the config must give it.
      settings: the targets of the config.
      form: how gate and up are fused, if they are.
    """

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, tuple[int, np.float32]] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    form: str | None = None

    def add(self, module: str, a: np.ndarray, b: np.ndarray, infix: str = "") -> None:
        """a [..., rank, in] and b [..., rank, out] become lora_A and lora_B."""
        suffix = "" if infix else ".weight"
        name = f"{PREFIX}{module}.lora_{infix}"
        self.tensors[f"{name}A{suffix}"] = np.ascontiguousarray(a)
        self.tensors[f"{name}B{suffix}"] = np.ascontiguousarray(b.swapaxes(-1, -2))

    def config(self) -> dict[str, object]:
        """The settings with rank, alpha and their patterns."""
        rank, scaling = most_common(self.values.values())
        alpha = alpha_for(scaling, rank)
        ranks = {name: r for name, (r, _) in self.values.items()}
        alphas = {name: alpha_for(s, r) for name, (r, s) in self.values.items()}
        return self.settings | {
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": patterns(ranks, rank),
            "alpha_pattern": patterns(alphas, alpha),
        }


class _Layout:
    """One adapter, sorted for writing: plain projections, and expert blocks by leaf."""

    def __init__(self, adapter: Adapter, projections: Mapping[str, Projection]):
        self.projections = projections
        pairs = {n: _without_padding(n, p) for n, p in adapter.pairs.items() if p.ranks.any()}
        if not pairs:
            raise AdapterError("the adapter is empty", expected="one pair of factors at least")
        self.plain = {n: p for n, p in pairs.items() if projections[n].kind != "expert"}
        self.blocks: dict[str, dict[str, LoraPair]] = {}
        for name, pair in pairs.items():
            if projections[name].kind == "expert":
                block, _, leaf = name.rpartition(".")
                self.blocks.setdefault(block, {})[leaf] = pair
        self.plain_universe = [n for n, p in projections.items() if p.kind != "expert"]
        self.expert_projections = [p for p in projections.values() if p.kind == "expert"]

    def add_plain(self, draft: Draft, name: str, value_name: str) -> None:
        pair = self.plain[name]
        infix = "embedding_" if self.projections[name].kind == "embedding" else ""
        draft.add(name, pair.a[0], pair.b[0], infix)
        draft.values[value_name] = pair.rank, pair.scaling[0]

    def groups(self, block: str, leaf: str) -> int:
        return self.projections[f"{block}.{leaf}"].groups


def peft(adapter: Adapter, projections: Mapping[str, Projection]) -> Draft:
    """PEFT's own layout. Raises `AdapterError` for experts that one packed scaling cannot serve."""
    layout, draft = _Layout(adapter, projections), Draft()
    taken = _AS_PARAMETERS if layout.expert_projections else ()
    as_parameter = {n for n in layout.plain_universe if n.rpartition(".")[2] in taken}
    for name in layout.plain:
        layout.add_plain(draft, name, f"{name}.weight" if name in as_parameter else name)
    if any("gate_proj" in pairs or "up_proj" in pairs for pairs in layout.blocks.values()):
        shared = all(_same_a(pairs) for pairs in layout.blocks.values())
        draft.form = packing.SHARED if shared else packing.BLOCK_DIAGONAL
    for block, pairs in layout.blocks.items():
        _add_packed(layout, draft, block, pairs)
    parameters = {f"{name}.weight" for name in as_parameter}
    for projection in layout.expert_projections:
        block, _, leaf = projection.name.rpartition(".")
        parameters.add(f"{block}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}")
    modules = set(layout.plain) - as_parameter
    draft.settings = {
        "target_modules": cover(modules, layout.plain_universe),
        "target_parameters": cover(parameters & set(draft.values), parameters, 2) or None,
    }
    return draft


def _same_a(pairs: dict[str, LoraPair]) -> bool:
    """Whether gate and up, if there, can share one lora_A."""
    gate, up = pairs.get("gate_proj"), pairs.get("up_proj")
    if gate is None or up is None:
        return gate is up
    return gate.a.dtype == up.a.dtype and all(
        np.array_equal(x, y)
        for x, y in ((gate.a, up.a), (gate.scaling, up.scaling), (gate.ranks, up.ranks))
    )


def _add_packed(layout: _Layout, draft: Draft, block: str, pairs: dict[str, LoraPair]) -> None:
    fused = {leaf: pairs[leaf] for leaf in ("gate_proj", "up_proj") if leaf in pairs}
    parts = []
    if "down_proj" in pairs:
        pair = pairs["down_proj"]
        parts.append((f"{block}.down_proj", pair.a, pair.b, {"down_proj": pair}))
    if fused:
        a, b = _fuse(layout, draft.form, block, fused)
        if layout.projections[f"{block}.gate_proj"].interleaved:
            b = packing.in_turn(b)
        parts.append((f"{block}.gate_up_proj", a, b, fused))
    # The outer of PEFT's two wrappers is down_proj; a single one is outer, whichever it is.
    for module, (parameter, a, b, sources) in zip((block, f"{block}.base_layer"), parts):  # noqa: B905
        groups = layout.groups(block, next(iter(sources)))
        a, b = (np.broadcast_to(x, (groups, *x.shape[1:])) for x in (a, b))
        lora_a, lora_b = packing.pack(a, b)
        draft.add(module, lora_a, lora_b.T)
        draft.values[parameter] = a.shape[1], _one_scaling(parameter, sources.values())


def _fuse(
    layout: _Layout, form: str | None, block: str, fused: dict[str, LoraPair]
) -> tuple[np.ndarray, np.ndarray]:
    """a [groups, rank, in] and b [groups, rank, gate + up]."""
    first = next(iter(fused.values()))
    if any(p.a.dtype != first.a.dtype or p.b.dtype != first.b.dtype for p in fused.values()):
        raise _cannot(f"{block}.gate_up_proj", "one dtype for gate and up", "two", "per_expert")
    if form == packing.SHARED:
        size = max(len(pair.b) for pair in fused.values())
        wide = [np.broadcast_to(p.b, (size, *p.b.shape[1:])) for p in fused.values()]
        return first.a, np.concatenate(wide, axis=-1)
    projection = layout.projections[f"{block}.gate_proj"]
    groups, width = projection.groups, projection.out_features
    half = max(pair.rank for pair in fused.values())
    a = np.zeros((groups, 2 * half, projection.in_features), first.a.dtype)
    b = np.zeros((groups, 2 * half, 2 * width), first.b.dtype)
    for leaf, pair in fused.items():
        row, column = (0, 0) if leaf == "gate_proj" else (half, width)
        a[:, row : row + pair.rank] = pair.a
        b[:, row : row + pair.rank, column : column + width] = pair.b
    return a, b


def per_expert(adapter: Adapter, projections: Mapping[str, Projection]) -> Draft:
    """One tensor per expert; projections that the adapter lacks in a block are written as zero."""
    layout, draft = _Layout(adapter, projections), Draft()
    for name in layout.plain:
        layout.add_plain(draft, name, name)
    absent = []
    for block, pairs in layout.blocks.items():
        for leaf in LEAVES:
            pair = pairs.get(leaf)
            for expert in range(layout.groups(block, leaf)):
                module = f"{block}.{expert}.{leaf}"
                rank = 0 if pair is None else int(_of_group(pair.ranks, expert))
                if rank == 0:
                    absent.append((module, block, leaf))
                    continue
                a, b = _of_group(pair.a, expert), _of_group(pair.b, expert)
                _check_cut(module, a[rank:], b[rank:])
                draft.add(module, a[:rank], b[:rank])
                draft.values[module] = rank, _of_group(pair.scaling, expert)
    rank, scaling = most_common(draft.values.values())
    for module, block, leaf in absent:
        projection = layout.projections[f"{block}.{leaf}"]
        like = layout.blocks[block].get(leaf) or next(iter(layout.blocks[block].values()))
        a = np.zeros((rank, projection.in_features), like.a.dtype)
        b = np.zeros((rank, projection.out_features), like.b.dtype)
        draft.add(module, a, b)
        draft.values[module] = rank, scaling
    _set_modules(layout, draft, set(draft.values))
    return draft


def shared_outer(adapter: Adapter, projections: Mapping[str, Projection]) -> Draft:
    """3D tensors, the hidden-side factors once. Raises `AdapterError` if those are not shared."""
    layout, draft = _Layout(adapter, projections), Draft()
    for name in layout.plain:
        layout.add_plain(draft, name, name)
    accounted = set(layout.plain)
    for block, pairs in layout.blocks.items():
        for leaf, pair in pairs.items():
            groups = layout.groups(block, leaf)
            outer, inner = (pair.b, pair.a) if leaf == "down_proj" else (pair.a, pair.b)
            if not all(np.array_equal(outer[0], x) for x in outer[1:]):
                raise _cannot(
                    f"{block}.{leaf}",
                    f"one lora_{'B' if leaf == 'down_proj' else 'A'} for all experts",
                    f"{groups} different ones",
                    "per_expert or peft",
                )
            inner = np.broadcast_to(inner, (groups, *inner.shape[1:]))
            a, b = (inner, outer[:1]) if leaf == "down_proj" else (outer[:1], inner)
            module = f"{block}.{LEAVES[leaf]}"
            draft.add(module, a, b)
            draft.values[module] = pair.rank, _one_scaling(module, [pair])
            accounted.update([module, *(f"{block}.{e}.{leaf}" for e in range(groups))])
    _set_modules(layout, draft, accounted)
    return draft


def _set_modules(layout: _Layout, draft: Draft, accounted: set[str]) -> None:
    """Targets by last name, as vLLM and SGLang expect, less the modules that are not there."""
    universe = set(layout.plain_universe) | set(draft.values)
    for projection in layout.expert_projections:
        block, _, leaf = projection.name.rpartition(".")
        universe.add(f"{block}.{LEAVES[leaf]}")
        universe.update(f"{block}.{e}.{leaf}" for e in range(projection.groups))
    leaves = sorted({name.rpartition(".")[2] for name in draft.values})
    unwanted = {n for n in universe if n.rpartition(".")[2] in leaves} - accounted
    draft.settings = {
        "target_modules": leaves,
        "exclude_modules": cover(unwanted, universe) or None,
    }


def _without_padding(name: str, pair: LoraPair) -> LoraPair:
    """The pair cut to its largest rank in use."""
    rank = int(pair.ranks.max())
    _check_cut(name, pair.a[:, rank:], pair.b[:, rank:])
    return replace(pair, a=pair.a[:, :rank], b=pair.b[:, :rank])


def _of_group(array: np.ndarray, group: int) -> np.ndarray:
    return array[0 if len(array) == 1 else group]


def _one_scaling(name: str, pairs: Iterable[LoraPair]) -> np.float32:
    """The scaling that all used groups of all pairs have in common."""
    found = set()
    for pair in pairs:
        ranks, scaling = np.broadcast_arrays(pair.ranks, pair.scaling)
        found.update(scaling[ranks > 0].tolist())
    if len(found) > 1:
        raise _cannot(name, "one scaling", sorted(found)[:4], "per_expert")
    return np.float32(found.pop()) if found else np.float32(1)


def _check_cut(name: str, a: np.ndarray, b: np.ndarray) -> None:
    if np.any(a) and np.any(b):
        raise AdapterError(
            "rows past the rank are not zero",
            key=name,
            expected="zeros past the rank in one factor at least",
            found="values in both",
        )


def _cannot(name: str, expected: str, found: object, other: str) -> AdapterError:
    return AdapterError(
        "this layout cannot hold the adapter exactly",
        key=name,
        expected=expected,
        found=found,
        hint=f"write it with layout {other}",
    )
