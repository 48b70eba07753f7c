"""What an adapter's config targets, and each target's rank and scaling: PEFT's matching rules."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from lora_moe_jax.adapters.config import AdapterConfig
from lora_moe_jax.adapters.patterns import Matcher


class Targets:
    """Answers, for module and parameter names without `base_model.model.`, what PEFT would.

    `file` is named in the `AdapterError` of a regular expression that cannot be used.
    """

    def __init__(self, config: AdapterConfig, file: str | os.PathLike):
        self.config, self._matcher = config, Matcher(file)
        compile_ = self._matcher.compile
        target = config.target_modules
        self.all_linear = isinstance(target, str) and target.lower() == "all-linear"
        self._targets = () if self.all_linear else self._name_rule("target_modules", target)
        self._excludes = self._name_rule("exclude_modules", config.exclude_modules)
        self._parameters = frozenset(config.target_parameters)
        # The first number of the name is the layer: a lazy prefix, not an expert's number.
        self._layer_forms = [
            compile_(pattern, r"(?:^|.*?\.){}\.(?P<index>\d+)\.", "layers_pattern")
            for pattern in config.layers_pattern
        ] or [compile_(r".*?\.[^.]*\.(?P<index>\d+)\.", "{}", "layers_pattern")]
        self._ranks = self._value_rules("rank_pattern", config.rank_pattern)
        self._alphas = self._value_rules("alpha_pattern", config.alpha_pattern)

    def excludes(self, module: str) -> bool:
        return self._fits(self._excludes, module)

    def module(self, name: str) -> bool:
        """Whether `target_modules` names this module ("all-linear" names none by itself)."""
        if self.excludes(name) or not self._fits(self._targets, name):
            return False
        wanted = self.config.layers_to_transform
        # As in PEFT, a module that is named in full is targeted whatever its layer.
        return not wanted or name in self.config.target_modules or self._layer(name) in wanted

    def parameter(self, name: str) -> bool:
        """Whether `target_parameters` names this parameter, e.g. `….experts.gate_up_proj`."""
        return _ends_with(name, self._parameters)

    def rank(self, name: str) -> int:
        return self._first(self._ranks, name, self.config.r)

    def scaling(self, name: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rsLoRA, in float64."""
        rank, alpha = self.rank(name), self._first(self._alphas, name, self.config.lora_alpha)
        return alpha / math.sqrt(rank) if self.config.use_rslora else alpha / rank

    def _name_rule(self, key: str, value: tuple[str, ...] | str):
        if isinstance(value, str):
            return self._matcher.compile(value, "{}", key) if value else frozenset()
        return frozenset(value)

    def _fits(self, rule, name: str) -> bool:
        if isinstance(rule, frozenset | tuple):
            return _ends_with(name, rule)
        return self._matcher.match(rule, name, full=True) is not None

    def _value_rules(self, key: str, patterns: dict) -> list[tuple]:
        form = r"(.*\.)?({})$"
        return [(self._matcher.compile(p, form, key), v) for p, v in patterns.items()]

    def _first(self, rules: list[tuple], name: str, default):
        for pattern, value in rules:
            if self._matcher.match(pattern, name):
                return value
        return default

    def _layer(self, name: str) -> int | None:
        for form in self._layer_forms:
            if found := self._matcher.match(form, name):
                return int(found["index"])
        return None


def _ends_with(name: str, endings: Iterable[str]) -> bool:
    """Whether `name`, or what follows one of its dots, is in the set `endings`."""
    while name not in endings:
        _, dot, name = name.partition(".")
        if not dot:
            return False
    return True
