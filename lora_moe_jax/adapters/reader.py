"""Reads an adapter folder in any of the layouts that PEFT and other tools write.

Order of work: config, header, names, shapes, and only then data, one tensor at a time. Nothing is
returned unless everything is right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lora_moe_jax.adapters.adapter import Adapter
from lora_moe_jax.adapters.assemble import Assembler
from lora_moe_jax.adapters.config import CONFIG_FILE, read_config
from lora_moe_jax.adapters.coverage import check_coverage
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.adapters.sites import Site, Table, TensorName, take_apart
from lora_moe_jax.adapters.targets import Targets
from lora_moe_jax.checkpoint.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from lora_moe_jax.errors import AdapterError

TENSOR_FILE = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_FOREIGN = {
    "lora_magnitude_vector": "DoRA's magnitudes; DoRA cannot be served exactly",
    ".bias": "a trained bias; only the factors of LoRA can be served",
    "modules_to_save": "a replaced module; only the factors of LoRA can be served",
    "token_adapter": "replaced embedding rows; only the factors of LoRA can be served",
    "lora_diag": "KaSA's diagonal; KaSA cannot be served exactly",
    "lora_E": "AdaLoRA's singular values; AdaLoRA cannot be served exactly",
    "hada_": "LoHa's factors; only LoRA can be served",
    "lokr_": "LoKr's factors; only LoRA can be served",
}


_WHOLE = ("lm_head.weight", "embed_tokens.weight")


def read_adapter(
    folder: str | os.PathLike,
    projections: Mapping[str, Projection],
    *,
    max_rank: int | None = None,
) -> Adapter:
    """Reads and checks the adapter in `folder`.

    Args:
      folder: holds `adapter_config.json` and `adapter_model.safetensors`.
      projections: what the base model offers, by `Projection.name`.
      max_rank: the largest rank that is accepted; None accepts all.

    Returns:
      The adapter, its factors in the file's dtype.

    Raises:
      AdapterError: for anything that cannot be served exactly; nothing is ignored or guessed.
    """
    return read_with_file(folder, projections, max_rank)[0]


def read_with_file(
    folder: str | os.PathLike, projections: Mapping[str, Projection], max_rank: int | None
) -> tuple[Adapter, SafetensorsFile]:
    """`read_adapter`, and the file it read, for whoever wants to report on it."""
    folder = Path(folder)
    _check_folder(folder)
    config = read_config(folder)
    targets = Targets(config, folder / CONFIG_FILE)
    file = SafetensorsFile(folder / TENSOR_FILE, AdapterError)
    table = Table(projections)
    sites = find_sites(file, table, targets)
    check_coverage(sites, table, targets, file.path)
    assembler = Assembler(file, table, targets, max_rank)
    pairs = assembler.pairs(sites)
    copies = {its.name: file.read(t) for t in file.tensors if (its := table.of_base_copy(t))}
    file.check_unchanged()
    ordered = {name: pairs[name] for name in projections if name in pairs}
    adapter = Adapter(ordered, _layout(sites, table, file), config, base_copies=copies)
    return adapter, file


def _check_folder(folder: Path) -> None:
    if not os.path.isdir(folder):
        raise AdapterError(
            "the adapter folder does not exist",
            file=folder,
            expected=f"a folder with {CONFIG_FILE} and {TENSOR_FILE}",
            found="a file" if os.path.exists(folder) else "nothing",
        )
    names = _names(folder)
    if CONFIG_FILE not in names:
        inside = sorted(n for n in names if os.path.isfile(folder / n / CONFIG_FILE))
        hint = None
        if len(inside) == 1:
            hint = f"PEFT saves an adapter with a name into a sub-folder; use {folder / inside[0]}"
        raise AdapterError(
            "the folder is not an adapter", file=folder, expected=CONFIG_FILE,
            found=_listing(names), hint=hint,
        )  # fmt: skip
    if TENSOR_FILE not in names:
        pickles = sorted(n for n in names if n.endswith(_PICKLES))
        hint = None
        if pickles:
            hint = (
                f"{pickles[0]} is a pickle, which can run code and is never read; convert it where "
                "you trust it: safetensors.torch.save_file(torch.load(path, weights_only=True), "
                f"{TENSOR_FILE!r})"
            )
        raise AdapterError(
            "the adapter has no safetensors file", file=folder, expected=TENSOR_FILE,
            found=_listing(names), hint=hint,
        )  # fmt: skip


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise AdapterError("the folder cannot be read", file=folder, found=error) from error


def _listing(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "an empty folder"


def find_sites(file: SafetensorsFile, table: Table, targets: Targets) -> list[Site]:
    """Sorts the file's tensors by target. Refuses names that mean nothing, or the same thing."""
    sites: dict[str, Site] = {}
    adapters = {}
    for tensor in file.tensors:
        name = take_apart(tensor)
        place = table.locate(name) if name is not None else None
        if place is None:
            _check_base_copy(tensor, file, table)
            continue
        adapters[name.adapter] = tensor
        target, expert = place
        site = sites.setdefault(target, Site(target))
        side = site.a if name.side == "A" else site.b
        if expert in side:
            raise _twice(side[expert].tensor, tensor, file)
        side[expert] = name
        _check_dtype(name, file)
    if len(adapters) > 1:
        raise AdapterError(
            "the file holds more than one adapter", file=file.path,
            key=next(reversed(adapters.values())), expected="one adapter name in all tensors",
            found=", ".join(str(a) for a in adapters),
        )  # fmt: skip
    if not sites:
        raise AdapterError(
            "the file holds no LoRA tensors", file=file.path,
            expected="tensors named ….lora_A.weight and ….lora_B.weight",
            found=f"{len(file.tensors)} tensors",
        )  # fmt: skip
    _name_packed(sites, table, targets, file)
    _check_slots(sites, table, file)
    _check_once(sites, file)
    order = {name: number for number, name in enumerate(table.projections)}
    return sorted(sites.values(), key=lambda site: order[site.parts[0]])


def _check_base_copy(tensor: str, file: SafetensorsFile, table: Table) -> None:
    """Refuses all but a copy of the base's own embedding or head, which PEFT adds."""
    projection = table.of_base_copy(tensor)
    if projection is None:
        kind = next((text for part, text in _FOREIGN.items() if part in tensor), None)
        raise AdapterError(
            "a tensor is not known, or not for this base model", file=file.path, key=tensor,
            expected="lora_A and lora_B of projections such as "
            + ", ".join(list(table.projections)[:3]),
            found=kind or _why_unknown(tensor, table),
            hint="merge the adapter into its base model, or train one without it" if kind else
            "check that the adapter was trained on this base model, and that the engine was built "
            "with slots for it (target_modules)",
        )  # fmt: skip
    # Both weights are [vocabulary, hidden]; an embedding's input is the vocabulary.
    shape = projection.out_features, projection.in_features
    shape = shape[::-1] if projection.kind == "embedding" else shape
    if file.tensors[tensor].shape != shape:
        raise AdapterError(
            "the adapter was trained with another vocabulary size", file=file.path, key=tensor,
            expected=list(shape), found=list(file.tensors[tensor].shape),
        )  # fmt: skip


def _why_unknown(tensor: str, table: Table) -> str:
    name = take_apart(tensor)
    if name is None and tensor.endswith(_WHOLE):
        return "a whole embedding or head, as after a change of the vocabulary"
    if name is None:
        return "not the name of a LoRA factor"
    parts = name.module.split(".")
    if "layers" in parts[:-1] and (number := parts[parts.index("layers") + 1]).isdecimal():
        layers = {p.split(".")[2] for p in table.projections if p.startswith("model.layers.")}
        if number not in layers:
            return f"layer {number[:20]}, and the base model has {len(layers)} layers"
    return f"{name.module}, which the base model does not have, or has no slots for"


def _check_dtype(name: TensorName, file: SafetensorsFile) -> None:
    dtype = file.tensors[name.tensor].dtype
    if dtype not in FLOAT_DTYPES:
        raise AdapterError(
            "a tensor has a dtype that cannot be served", file=file.path, key=name.tensor,
            expected="one of " + ", ".join(FLOAT_DTYPES), found=dtype,
            hint="save the adapter in float32 or bfloat16",
        )  # fmt: skip


def _name_packed(
    sites: dict[str, Site], table: Table, targets: Targets, file: SafetensorsFile
) -> None:
    """Replaces `….experts` and `….experts.base_layer` by the parameters that PEFT wrapped.

    With both parameters targeted the inner wrapper is gate_up_proj, the first in the module, and
    the outer one down_proj. A single wrapper is whichever the config targets.
    """
    for block in sorted(table.blocks):
        outer, inner = sites.pop(block, None), sites.pop(f"{block}.base_layer", None)
        if outer is None and inner is None:
            continue
        if outer is None:
            raise AdapterError(
                "packed gate_up_proj factors stand inside down_proj factors that are missing",
                file=file.path, key=next(iter(inner.names())).tensor,
                expected=f"tensors of {block} besides those of {block}.base_layer",
                found="none",
            )  # fmt: skip
        named = [leaf for leaf in ("gate_up_proj", "down_proj")
                 if targets.parameter(f"{block}.{leaf}")]  # fmt: skip
        if inner is not None:
            named = ["gate_up_proj", "down_proj"]
        elif len(named) != 1:
            raise AdapterError(
                "packed expert factors could be those of gate_up_proj or of down_proj",
                file=file.path, key=next(iter(outer.names())).tensor,
                expected="target_parameters that name one of the two, or tensors for both",
                found=f"target_parameters {list(targets.config.target_parameters)}",
            )  # fmt: skip
        for leaf, site in zip(reversed(named), (outer, inner), strict=False):
            target = f"{block}.{leaf}"
            if target in sites:
                first = next(iter(sites[target].names()))
                raise _twice(first.tensor, next(iter(site.names())).tensor, file)
            sites[target] = Site(target, True, site.a, site.b)


def _check_slots(sites: dict[str, Site], table: Table, file: SafetensorsFile) -> None:
    """Factors of several projections need slots of all of them."""
    for site in sites.values():
        missing = [part for part in site.parts if part not in table.projections]
        if missing:
            raise AdapterError(
                "a factor of several projections, and some of them have no slots",
                file=file.path, key=next(iter(site.names())).tensor,
                expected="slots of " + ", ".join(site.parts),
                found="none of " + ", ".join(missing),
                hint="build the engine with target_modules that include them",
            )  # fmt: skip


def _check_once(sites: dict[str, Site], file: SafetensorsFile) -> None:
    owner: dict[str, Site] = {}
    for site in sites.values():
        for side in (site.a, site.b):
            if None in side and len(side) > 1:
                other = next(name for expert, name in side.items() if expert is not None)
                raise _twice(side[None].tensor, other.tensor, file)
        for part in site.parts:
            if part in owner:
                names = (next(iter(s.names())).tensor for s in (owner[part], site))
                raise _twice(*names, file)
            owner[part] = site


def _twice(first: str, second: str, file: SafetensorsFile) -> AdapterError:
    return AdapterError(
        "two tensors stand for the same factor", file=file.path, key=second,
        expected="each factor once", found=f"it is also given by {first}",
    )  # fmt: skip


def _layout(sites: list[Site], table: Table, file: SafetensorsFile) -> str:
    found = set()
    for site in sites:
        if table.projections[site.parts[0]].kind != "expert":
            continue
        stacked = [side[None].tensor for side in (site.a, site.b) if None in side]
        if site.packed:
            found.add("packed")
        elif len(stacked) == 1:
            found.add("mixed")
        elif stacked:
            shared = any(file.tensors[name].shape[0] == 1 for name in stacked)
            found.add("shared_outer" if shared else "stacked")
        else:
            found.add("per_expert")
    if len(found) > 1:
        return "mixed"
    return found.pop() if found else "module"
