"""What an adapter in training looks like: `LoraConfig`, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lora_moe_jax.adapters.bank import Bank
from lora_moe_jax.adapters.config import LARGEST, AdapterConfig
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.adapters.sites import aliases
from lora_moe_jax.adapters.targets import Targets
from lora_moe_jax.errors import AdapterError
from lora_moe_jax.training.named_modules import check_named
from lora_moe_jax.training.pair_shape import PairShape

INITS = ("default", "gaussian")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    """A new adapter, with PEFT's meaning of each field.

    Attributes:
      rank, alpha: where no pattern says otherwise; every expert has this rank.
      target_modules: names or name endings (`q_proj`, `experts.up_proj`), one regular expression of
        whole names, or "all-linear": all linear layers and routed experts, without router,
        embedding and output head.
      exclude_modules: likewise, for what is not targeted after all.
      rank_pattern, alpha_pattern: regular expression of a name's end -> its own rank or alpha. The
        name of an expert's projection is `….experts.3.up_proj`.
      use_rslora: the scaling is alpha / sqrt(rank) instead of alpha / rank.
      init: of A, B being zero: "default" (uniform within 1 / sqrt(in)) or "gaussian" (standard
        deviation 1 / rank). An embedding's A is zero and its B normal.
      seed: of the random numbers, which depend on the projection too, and on nothing else.
    """

    rank: int = 16
    alpha: float = 32
    target_modules: tuple[str, ...] | list[str] | str = ALL_LINEAR
    exclude_modules: tuple[str, ...] | list[str] | str = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    init: Literal["default", "gaussian"] = "default"
    seed: int = 0

    def peft(self) -> AdapterConfig:
        """The same as PEFT's configuration. Raises AdapterError for a value out of range."""
        ranks = {"rank": self.rank} | _of("rank_pattern", self.rank_pattern)
        alphas = {"alpha": self.alpha} | _of("alpha_pattern", self.alpha_pattern)
        for key, value in ranks.items():
            if type(value) is not int or value < 1:
                raise _wrong(key, "an integer of at least 1", value)
        for key, value in alphas.items():
            if type(value) not in (int, float) or not 0 < abs(value) <= LARGEST:
                raise _wrong(key, f"a number of at most {LARGEST:g}, and not 0", value)
        if not isinstance(self.init, str) or self.init not in INITS:
            raise _wrong("init", f"one of {INITS}", self.init)
        if type(self.seed) is not int or self.seed < 0:
            raise _wrong("seed", "an integer of at least 0", self.seed)
        if not isinstance(self.use_rslora, bool | np.bool_):
            raise _wrong("use_rslora", "True or False", self.use_rslora)
        return AdapterConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            use_rslora=bool(self.use_rslora),
            target_modules=_names("target_modules", self.target_modules),
            exclude_modules=_names("exclude_modules", self.exclude_modules),
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
        )


def pair_shapes(
    config: LoraConfig, bank: Bank, projections: Mapping[str, Projection]
) -> dict[str, PairShape]:
    """The pairs of an adapter, by projection name.

    Args:
      projections: the base model's, also those without slots in the bank.

    Raises:
      AdapterError: a field is out of range, a name or pattern means no projection of the model, a
        target has no slots, all targets are excluded, or a rank is above the bank's.
    """
    peft = config.peft()
    targets = Targets(peft, None)
    check_named(peft, projections, bank.projections)
    found = {}
    for name, projection in bank.projections.items():
        wanted = [_wanted(targets, projection, group) for group in range(projection.groups)]
        if any(wanted):
            found[name] = _pair_shape(targets, projection, wanted, bank)
    if not found:
        raise AdapterError(
            "all that the adapter targets is excluded",
            key="exclude_modules",
            expected="fewer names",
            found=repr(config.exclude_modules)[:200],
        )
    return found


def _wanted(targets: Targets, projection: Projection, group: int) -> bool:
    names = aliases(projection, group)
    if targets.all_linear:
        linear = projection.kind in ("linear", "expert")
        return linear and not any(map(targets.excludes, names))
    return any(map(targets.module, names)) and not any(map(targets.excludes, names))


def _pair_shape(
    targets: Targets, projection: Projection, wanted: list[bool], bank: Bank
) -> PairShape:
    names = [aliases(projection, group)[0] for group in range(projection.groups)]
    ranks = [targets.rank(name) if use else 0 for name, use in zip(names, wanted, strict=True)]
    scaling = [
        targets.scaling(name) if rank else 0 for name, rank in zip(names, ranks, strict=True)
    ]
    return PairShape.of(projection.name, ranks, scaling, bank)


def _of(key: str, pattern: Mapping[str, object]) -> dict[str, object]:
    if not isinstance(pattern, Mapping) or not all(isinstance(name, str) for name in pattern):
        raise _wrong(key, "a mapping from regular expressions to numbers", pattern)
    return {f"{key}[{name!r}]": value for name, value in pattern.items()}


def _names(key: str, value: object) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, tuple | list) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise _wrong(key, "names, or one regular expression", value)


def _wrong(key: str, expected: str, found: object) -> AdapterError:
    return AdapterError(
        "a field of LoraConfig is wrong", key=key, expected=expected, found=repr(found)[:200]
    )
