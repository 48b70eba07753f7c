"""`adapter_config.json`: what PEFT 0.21 writes, checked, with all that cannot be served refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lora_moe_jax.errors import AdapterError
from lora_moe_jax.strict_json import read_json_object

CONFIG_FILE = "adapter_config.json"
LARGEST = 1e30  # of alpha: far beyond, the scaling could not be stored as float32

# Options that change the maths in a way this library does not compute.
_REFUSED = {
    "use_dora": "DoRA rescales every row of the weight",
    "lora_bias": "a bias is added to the LoRA product",
    "modules_to_save": "whole modules of the base model are replaced",
    "trainable_token_indices": "rows of the embedding are replaced",
    "layer_replication": "the base model's layers are renumbered",
    "alora_invocation_tokens": "the adapter is active only after certain tokens",
    "use_qalora": "inputs are pooled before the product",
    "use_bdlora": "the factors are block-diagonal",
    "kasa_config": "a diagonal stands between the factors and the base weight is truncated",
    "arrow_config": "tokens are routed between adapters",
    "velora_config": "the VeLoRA variant is not implemented",
    "monteclora_config": "the factors are sampled",
    "megatron_config": "the layers are Megatron's parallel ones",
    "fan_in_fan_out": "the base weights are stored transposed",
    "ensure_weight_tying": "the adapters of tied layers are tied",
}
# Options that say nothing about the maths of a trained adapter.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode",
    "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
_READ = {
    "alpha_pattern", "bias", "exclude_modules", "layers_pattern", "layers_to_transform",
    "lora_B_layout", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "target_parameters", "use_rslora",
}  # fmt: skip
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA configuration, with the names and meanings of PEFT's `LoraConfig`.

    Attributes:
      r, lora_alpha: rank and alpha where no pattern says otherwise.
      use_rslora: the scaling is alpha / sqrt(rank) instead of alpha / rank.
      target_modules: module names or name endings, or one regular expression, or "all-linear".
      exclude_modules: likewise, for modules that are not targeted after all.
      target_parameters: parameter names or name endings, e.g. "experts.gate_up_proj".
      layers_to_transform: if not empty, the only layers whose modules are targeted.
      layers_pattern: regular expressions of the name before the layer number.
      rank_pattern, alpha_pattern: regular expression of a name's end -> its own rank or alpha.
      peft_version: version of PEFT that wrote the adapter, if it says so.
      lora_B_layout: order of the columns of packed expert lora_B tensors.
      base_model: what the adapter says it was trained on; not checked.
    """

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    target_modules: tuple[str, ...] | str = ()
    exclude_modules: tuple[str, ...] | str = ()
    target_parameters: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    peft_version: str | None = None
    lora_B_layout: str = "rank_major"
    base_model: str | None = None


def read_config(folder: Path) -> AdapterConfig:
    """Reads and checks `folder/adapter_config.json`. Raises `AdapterError`."""
    path = folder / CONFIG_FILE
    return parse_config(read_json_object(path, AdapterError), path)


def parse_config(settings: Mapping[str, object], file: str | os.PathLike) -> AdapterConfig:
    """Checks the object of an `adapter_config.json`. `file` is for the errors (`AdapterError`)."""
    read = _Fields(settings, file)
    _refuse_unsupported(settings, read)
    config = AdapterConfig(
        r=read.given("r", 8, read.check_rank),
        lora_alpha=read.given("lora_alpha", 8, read.check_number),
        use_rslora=read.boolean("use_rslora"),
        target_modules=read.names("target_modules", or_pattern=True),
        exclude_modules=read.names("exclude_modules", or_pattern=True),
        target_parameters=read.names("target_parameters"),
        layers_to_transform=read.layers("layers_to_transform"),
        layers_pattern=read.names("layers_pattern", or_one=True),
        rank_pattern=read.pattern("rank_pattern", read.check_rank),
        alpha_pattern=read.pattern("alpha_pattern", read.check_number),
        peft_version=read.text("peft_version", None),
        lora_B_layout=read.text("lora_B_layout", "rank_major"),
        base_model=read.text("base_model_name_or_path", None),
    )
    if not config.target_modules and not config.target_parameters:
        raise AdapterError(
            "the adapter does not say what it targets",
            file=file,
            key="target_modules",
            expected='module names, a regular expression, "all-linear", or target_parameters',
            found=settings.get("target_modules"),
        )
    if config.layers_to_transform and isinstance(config.target_modules, str):
        raise read.wrong("layers_to_transform", "nothing, because target_modules is a string")
    if config.layers_pattern and not config.layers_to_transform:
        raise read.wrong("layers_pattern", "nothing, because layers_to_transform is not given")
    if config.lora_B_layout not in ("rank_major", "expert_major"):
        raise read.wrong("lora_B_layout", '"rank_major" or "expert_major"')
    return config


def _refuse_unsupported(settings: Mapping[str, object], read: _Fields) -> None:
    peft_type = settings.get("peft_type", "LORA")
    if not isinstance(peft_type, str) or peft_type.upper() != "LORA":
        raise read.wrong("peft_type", '"LORA"')
    for key, value in settings.items():
        if not value:
            continue
        if key in _REFUSED:
            raise AdapterError(
                f"this kind of adapter cannot be served exactly: {_REFUSED[key]}",
                file=read.file,
                key=key,
                expected="null, false or empty",
                found=_shown(value),
                hint="merge the adapter into the base model, or train one without this option",
            )
        if key not in _HARMLESS and key not in _READ:
            raise AdapterError(
                "an option of the adapter is not known, and could change its maths",
                file=read.file,
                key=key,
                expected="the options of PEFT 0.21, or null, false or empty",
                found=_shown(value),
                hint="remove the key if it does not change what the adapter computes",
            )
    if (settings.get("bias") or "none") != "none":
        raise read.wrong("bias", '"none": trained biases of the base model cannot be served')
    init = settings.get("init_lora_weights", True)
    if init is not None and not isinstance(init, bool) and init not in _PLAIN_INITS:
        raise AdapterError(
            "the adapter's initialisation changed the base model",
            file=read.file,
            key="init_lora_weights",
            expected="true, false, or one of " + ", ".join(_PLAIN_INITS),
            found=_shown(init),
            hint="convert it with PEFT: save_pretrained(folder, "
            "path_initial_model_for_weight_conversion=...)",
        )


class _Fields:
    """Typed access to the config; null and missing both mean the default."""

    def __init__(self, settings: Mapping[str, object], file: str | os.PathLike):
        self.settings, self.file = settings, file

    def wrong(self, key: str, expected: str, found: object = None) -> AdapterError:
        return AdapterError(
            "a field of the adapter's config is wrong",
            file=self.file,
            key=key,
            expected=expected,
            found=_shown(self.settings.get(key) if found is None else found),
        )

    def given(self, key: str, default: float, check) -> float:
        value = self.settings.get(key)
        return default if value is None else check(key, value)

    def check_rank(self, key: str, value: object) -> int:
        if type(value) is not int or not 1 <= value < 1 << 20:
            raise self.wrong(key, "an integer of at least 1", value)
        return value

    def check_number(self, key: str, value: object) -> float:
        if type(value) not in (int, float) or not abs(value) <= LARGEST:
            raise self.wrong(key, f"a number of at most {LARGEST:g}", value)
        return value

    def boolean(self, key: str) -> bool:
        value = self.settings.get(key)
        if value is not None and type(value) is not bool:
            raise self.wrong(key, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None) -> str | None:
        value = self.settings.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value or default

    def names(self, key: str, *, or_pattern=False, or_one=False) -> tuple[str, ...] | str:
        value = self.settings.get(key)
        if value is None:
            return ()
        if isinstance(value, str) and (or_pattern or or_one):
            return value if or_pattern else (value,) if value else ()
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            raise self.wrong(key, "a list of strings" + (" or one string" if or_pattern else ""))
        return tuple(value)

    def layers(self, key: str) -> tuple[int, ...]:
        value = self.settings.get(key)
        if value is None:
            return ()
        layers = value if isinstance(value, list) else [value]
        if not all(type(layer) is int and layer >= 0 for layer in layers):
            raise self.wrong(key, "a layer number or a list of them")
        return tuple(layers)

    def pattern(self, key: str, check) -> dict:
        value = self.settings.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object of regular expressions and numbers")
        return {name: check(f"{key}[{name[:120]!r}]", number) for name, number in value.items()}


def _shown(value: object) -> str:
    return repr(value)[:200]
