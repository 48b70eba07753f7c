"""Whether what a `LoraConfig` names is there: a typing error must not train something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_moe_jax.adapters.config import AdapterConfig
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.adapters.sites import aliases
from lora_moe_jax.adapters.targets import Targets
from lora_moe_jax.errors import AdapterError

_LIST = "names go into a list: one string is a pattern of whole names"
_ALL = '"all-linear" stands for all linear layers and experts'
_PATTERN = "a pattern is one of a name's end; an expert's is ….experts.3.up_proj"


def check_named(
    config: AdapterConfig, projections: Mapping[str, Projection], slots: Mapping[str, Projection]
) -> None:
    """Checks every name and pattern of a configuration by itself.

    Args:
      projections: the base model's, by name.
      slots: those of them that the engine has slots for.

    Raises:
      AdapterError: one means no projection of the model, or a target none that has slots.
    """
    for rule in _rules(config.target_modules) or [()]:
        if not _names_any(rule, projections):
            raise _unknown("target_modules", rule, projections, f"{_ALL}; {_LIST}")
        if not _names_any(rule, slots):
            raise _without_slots(rule, slots)
    for rule in _rules(config.exclude_modules):
        if not _names_any(rule, projections):
            raise _unknown("exclude_modules", rule, projections, _LIST)
    for key, patterns in (
        ("rank_pattern", config.rank_pattern),
        ("alpha_pattern", config.alpha_pattern),
    ):
        for pattern in patterns:
            if not _gives_any(pattern, projections):
                raise _unknown(key, pattern, projections, _PATTERN)


def _rules(value: tuple[str, ...] | str) -> list[tuple[str, ...] | str]:
    return [value] if isinstance(value, str) else [(name,) for name in value]


def _names_any(rule: tuple[str, ...] | str, projections: Mapping[str, Projection]) -> bool:
    targets = Targets(AdapterConfig(target_modules=rule), None)
    if targets.all_linear:
        return any(its.kind in ("linear", "expert") for its in projections.values())
    return any(targets.module(name) for names in _names(projections) for name in names)


def _gives_any(pattern: str, projections: Mapping[str, Projection]) -> bool:
    targets = Targets(AdapterConfig(r=1, rank_pattern={pattern: 2}), None)
    return any(targets.rank(first) == 2 for first, *_ in _names(projections))


def _names(projections: Mapping[str, Projection]) -> Iterator[list[str]]:
    """Every group's names; the first groups of all come first, as most rules mean one of them."""
    for group in range(max((its.groups for its in projections.values()), default=0)):
        yield from (aliases(its, group) for its in projections.values() if group < its.groups)


def _unknown(
    key: str, found: object, projections: Mapping[str, Projection], hint: str
) -> AdapterError:
    return AdapterError(
        "the model has no module of this name",
        key=key,
        expected=f"names among {_last_names(projections)}",
        found=_shown(found),
        hint=hint,
    )


def _without_slots(rule: tuple[str, ...] | str, slots: Mapping[str, Projection]) -> AdapterError:
    return AdapterError(
        "the engine has no slots for what the adapter targets",
        key="target_modules",
        expected=f"names among {_last_names(slots)}",
        found=_shown(rule),
        hint="build the engine with target_modules that include it",
    )


def _last_names(projections: Mapping[str, Projection]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in projections})


def _shown(rule: object) -> str:
    """A rule, or the one name in it."""
    return repr(rule[0] if isinstance(rule, tuple) and rule else rule)[:200]
