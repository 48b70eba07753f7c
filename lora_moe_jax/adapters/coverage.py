"""Do the tensors of a file and the targets of its config agree? Names only, no data."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from lora_moe_jax.adapters.config import CONFIG_FILE, AdapterConfig
from lora_moe_jax.adapters.sites import PREFIX, Site, Table, TensorName, aliases, parameter
from lora_moe_jax.adapters.targets import Targets
from lora_moe_jax.errors import AdapterError


def check_coverage(sites: Iterable[Site], table: Table, targets: Targets, file: Path) -> None:
    """Raises `AdapterError` if a tensor is not targeted, or a target's tensors are missing."""
    sites = list(sites)
    for site in sites:
        _check_targeted(site, table, targets, file)
        _check_sides(site, file)
    present = {part: site for site in sites for part in site.parts}
    for name in table.projections:
        _check_present(name, present.get(name), table, targets, file)
    if targets.all_linear:
        _check_every_layer(present, table, targets, file)


def _check_targeted(site: Site, table: Table, targets: Targets, file: Path) -> None:
    projections = [table.projections[part] for part in site.parts]
    if any(targets.parameter(parameter(p)) for p in projections):
        return
    for side in (site.a, site.b):
        for expert, tensor in side.items():
            modules = [n for p in projections for n in aliases(p, expert or 0)]
            names = [tensor.module, *modules]
            linear = targets.all_linear and projections[0].kind != "embedding"
            if not site.packed:
                if linear and not any(map(targets.excludes, names)):
                    continue
                if any(targets.module(n) or targets.parameter(f"{n}.weight") for n in names):
                    continue
            config = targets.config
            raise AdapterError(
                "the file holds a tensor that its config does not target",
                file=file,
                key=tensor.tensor,
                expected=f"a target in {CONFIG_FILE}: target_modules "
                f"{_shown(config.target_modules)}, target_parameters "
                f"{_shown(config.target_parameters)}{_but(config)}",
                found=f"{site.target}, which is not targeted",
                hint=f"make it one of target_{'parameters' if site.packed else 'modules'}"
                f"{' that is not left out' if _but(config) else ''}, or remove the tensor",
            )


def _but(config: AdapterConfig) -> str:
    """What leaves some targets out."""
    keys = "exclude_modules", "layers_to_transform"
    return "".join(f", {key} {_shown(its)}" for key in keys if (its := getattr(config, key)))


def _check_sides(site: Site, file: Path) -> None:
    """Each lora_A needs its lora_B; one tensor for all experts may face one per expert."""
    for side, other, missing in ((site.a, site.b, "lora_B"), (site.b, site.a, "lora_A")):
        lonely = set(side) - set(other)
        if (None in side and other) or (None in other and side):
            continue
        for expert in sorted(lonely, key=lambda e: -1 if e is None else e):
            raise AdapterError(
                f"a tensor has no {missing}",
                file=file,
                key=side[expert].tensor,
                expected=_other_name(side[expert]),
                found="no such tensor",
                hint="the file was not written completely; save the adapter again",
            )


def _check_present(
    name: str, site: Site | None, table: Table, targets: Targets, file: Path
) -> None:
    projection = table.projections[name]
    if site is not None and (None in site.a or None in site.b) and not _experts(site):
        return
    if site is None and targets.parameter(parameter(projection)):
        raise _missing(parameter(projection).removesuffix(".weight"), "target_parameters", file)
    if site is None and targets.all_linear and ".self_attn." in name:
        if not targets.excludes(name):
            raise _missing(name, "target_modules", file)
    have = _experts(site) if site is not None else frozenset()
    for expert in range(projection.groups):
        if expert in have:
            continue
        names = aliases(projection, expert)
        if any(map(targets.module, names)) and not any(map(targets.excludes, names)):
            raise _missing(names[0], "target_modules", file)
    if have and (targets.all_linear or targets.parameter(parameter(projection))):
        for expert in sorted(set(range(projection.groups)) - have):
            raise _missing(aliases(projection, expert)[0], "target_modules", file)


def _check_every_layer(
    present: dict[str, Site], table: Table, targets: Targets, file: Path
) -> None:
    """all-linear does not say what it covered; what one layer has, all layers must have."""
    alike = defaultdict(list)
    for name in table.projections:
        alike[re.sub(r"\.\d+\.", ".*.", name)].append(name)
    for names in alike.values():
        # target_parameters say themselves which layers they mean.
        names = [n for n in names if not targets.parameter(parameter(table.projections[n]))]
        have = [name for name in names if name in present]
        if have and len(have) < len(names):
            lacking = next(name for name in names if name not in present)
            raise _missing(lacking, "target_modules (all-linear, as in other layers)", file)


def _experts(site: Site) -> frozenset[int]:
    return frozenset(e for e in (*site.a, *site.b) if e is not None)


def _missing(module: str, key: str, file: Path) -> AdapterError:
    return AdapterError(
        f"{key} of {CONFIG_FILE} targets a projection that the file has no tensors for",
        file=file,
        key=f"{PREFIX}{module}.lora_A.weight",
        expected="lora_A and lora_B of every targeted projection",
        found="no such tensor",
        hint=f"if it was not trained, say so in the config ({_how_to_exclude(module)}, or full "
        "names); otherwise save the adapter again",
    )


def _how_to_exclude(module: str) -> str:
    """Of experts at once: layers whose experts are one parameter are no modules to PEFT."""
    every = ', as ".*\\\\.mlp\\\\.experts\\\\..*" does with all experts'
    return "exclude_modules" + (every if ".mlp.experts." in module else "")


def _other_name(name: TensorName) -> str:
    mine, other = (".lora_A", ".lora_B") if name.side == "A" else (".lora_B", ".lora_A")
    if name.embedding:
        mine, other = (
            mine.replace("lora", "lora_embedding"),
            other.replace("lora", "lora_embedding"),
        )
    return name.tensor.replace(mine, other)


def _shown(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 300 else text[:300] + "…"
