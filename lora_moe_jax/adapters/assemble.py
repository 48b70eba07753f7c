"""From tensors to factor pairs: shapes and ranks checked, packing undone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lora_moe_jax.adapters import packing
from lora_moe_jax.adapters.adapter import LoraPair
from lora_moe_jax.adapters.config import CONFIG_FILE
from lora_moe_jax.adapters.finite import read_finite
from lora_moe_jax.adapters.sites import Site, Sizes, Table, TensorName
from lora_moe_jax.adapters.targets import Targets
from lora_moe_jax.checkpoint.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from lora_moe_jax.errors import AdapterError

_FIRST_NATURAL = (0, 19, 1)  # PEFT versions before it wrote packed experts with A and B exchanged
_FIRST_SWAPPED = (0, 19, 0)  # but where weights are [in, out], only from this one on


class Assembler:
    """Builds the pairs of an adapter whose tensor names have been checked."""

    def __init__(self, file: SafetensorsFile, table: Table, targets: Targets, max_rank: int | None):
        self.file, self.table, self.targets, self.max_rank = file, table, targets, max_rank

    def pairs(self, sites: Iterable[Site]) -> dict[str, LoraPair]:
        """All pairs by projection name. Every shape is checked before any data is read."""
        sites = list(sites)
        swapped = self._swapped([site for site in sites if site.packed])
        for site in sites:
            if not site.packed:
                self._check_shapes(site)
        pairs = {}
        for site in sites:
            pair = self._packed_pair(site, swapped) if site.packed else self._pair(site)
            pairs.update(self._finished(site, pair))
        return pairs

    # ---- shapes -------------------------------------------------------------------------------
    def _check_shapes(self, site: Site) -> None:
        sizes = self.table.sizes(site)
        for side, width in ((site.a, sizes.in_features), (site.b, sizes.out_features)):
            for expert, name in side.items():
                stacked = expert is None and self._is_expert(site.parts[0])
                self._check_shape(name, width, sizes.groups, expert, stacked)
        for expert, a in site.a.items():
            # One tensor for all experts has every expert's tensor as its other side.
            for b in [site.b[expert]] if expert in site.b else site.b.values():
                if self._rank(a) != self._rank(b):
                    raise self._error(
                        "the two factors have different ranks", b,
                        f"rank {self._rank(a)}, as {a.tensor}", f"rank {self._rank(b)}",
                    )  # fmt: skip

    def _check_shape(
        self, name: TensorName, width: int, groups: int, expert: int | None, stacked: bool
    ) -> None:
        shape = self.file.tensors[name.tensor].shape
        rank = self.targets.rank(self._pattern_name(name))
        if expert is not None and expert >= groups:
            raise self._error(
                "the base model has fewer experts", name, f"experts 0 to {groups - 1}",
                f"expert {expert}", hint=self._other_base(),
            )  # fmt: skip
        expected = (rank, width) if name.side == "A" else (width, rank)
        expected = (f"{groups} or 1", *expected) if stacked else expected
        text = f"[{', '.join(map(str, expected))}]"
        if len(shape) != len(expected) or (stacked and shape[0] not in (1, groups)):
            raise self._error(
                "a tensor's shape is wrong", name, text, list(shape), hint=self._other_base()
            )
        if shape[-1 if name.side == "A" else -2] != width:
            raise self._error(
                "a tensor's width is not the base model's", name, text, list(shape),
                hint=self._other_base(),
            )  # fmt: skip
        if self._rank(name) != rank:
            raise self._error(
                f"a tensor's rank is not the one in {CONFIG_FILE}", name, text, list(shape),
                hint="check r and rank_pattern",
            )  # fmt: skip

    def _swapped(self, sites: list[Site]) -> bool:
        """Whether packed experts have A and B exchanged, which the widths of one of them tell."""
        seen: dict[bool, TensorName] = {}
        ambiguous = None
        for site in sites:
            sizes = self.table.sizes(site)
            fits = [s for s in (False, True) if self._fits_packed(site, sizes, s)]
            if not fits:
                self._refuse_packed(site, sizes)
            if len(fits) == 1:
                seen[fits[0]] = site.a[None]
            else:
                ambiguous = site
        if len(seen) == 2:
            raise self._error(
                "packed experts are stored in two orientations", seen[True],
                f"the orientation of {seen[False].tensor}", "A and B exchanged",
            )  # fmt: skip
        if seen or ambiguous is None:
            return True in seen
        return self._swapped_by_version(ambiguous)

    def _swapped_by_version(self, site: Site) -> bool:
        name = site.a[None]
        version = self.targets.config.peft_version or ""
        found = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?!\.dev)", version)
        if found is None:
            raise self._error(
                "packed experts as wide as they are high: nothing tells A from B", name,
                f"peft_version in {CONFIG_FILE}", version or "none",
                hint='add "peft_version" with the version that saved the adapter',
            )  # fmt: skip
        number = tuple(map(int, found.groups()))
        if self.table.projections[site.parts[0]].interleaved and number < _FIRST_SWAPPED:
            return False
        return number < _FIRST_NATURAL

    def _fits_packed(self, site: Site, sizes: Sizes, swapped: bool) -> bool:
        a, b = self._shape(site.a[None]), self._shape(site.b[None])
        widths = (sizes.in_features, sizes.out_features)
        rows = sizes.groups * self.targets.rank(self._packed_name(site))
        width_a, width_b = widths[::-1] if swapped else widths
        return a == (rows, width_a) and b == (width_b, rows)

    def _refuse_packed(self, site: Site, sizes: Sizes) -> None:
        rank = self.targets.rank(self._packed_name(site))
        rows = sizes.groups * rank
        a, b = site.a[None], site.b[None]
        widths = (sizes.in_features, sizes.out_features)
        width_fits = len(self._shape(a)) == 2 and self._shape(a)[1] in widths
        wrong_a = not width_fits or self._shape(a)[0] != rows
        name = a if wrong_a else b
        expected = [rows, widths[0]] if wrong_a else [widths[1], rows]
        raise self._error(
            "a packed tensor's shape is wrong", name,
            f"{expected}: {sizes.groups} experts of rank {rank}", list(self._shape(name)),
            hint="check r and rank_pattern, and that this is the base model it was trained on",
        )  # fmt: skip

    # ---- data ---------------------------------------------------------------------------------
    def _packed_pair(self, site: Site, swapped: bool) -> LoraPair:
        groups = self.table.sizes(site).groups
        expert_major = self.targets.config.lora_B_layout == "expert_major"
        name = self._packed_name(site)
        rank = self.targets.rank(name)
        a = read_finite(self.file, site.a[None].tensor, lambda at: at[0] // rank)
        b = read_finite(
            self.file,
            site.b[None].tensor,
            lambda at: at[1] // rank if expert_major else at[1] % groups,
        )
        a, b = packing.unpack(a, b, groups, expert_major=expert_major)
        a, b = (b, a) if swapped else (a, b)
        ranks = np.full(groups, rank, np.int32)
        return LoraPair(a, b, np.full(groups, self.targets.scaling(name), np.float32), ranks)

    def _pair(self, site: Site) -> LoraPair:
        sizes = self.table.sizes(site)
        names = site.a if None not in site.a else site.b  # by expert, if one side is
        ranks, scaling = self._ranks_and_scaling(names, sizes.groups)
        a = self._factor(site.a, sizes.groups, int(ranks.max()), sizes.in_features)
        b = self._factor(site.b, sizes.groups, int(ranks.max()), sizes.out_features)
        groups = max(len(a), len(b))
        return LoraPair(a, b, scaling[:groups], ranks[:groups])

    def _ranks_and_scaling(
        self, names: dict[int | None, TensorName], groups: int
    ) -> tuple[np.ndarray, np.ndarray]:
        ranks, scaling = np.zeros(groups, np.int32), np.zeros(groups, np.float32)
        for expert, name in names.items():
            where = slice(None) if expert is None else expert
            ranks[where] = self._rank(name)
            scaling[where] = self.targets.scaling(self._pattern_name(name))
        return ranks, scaling

    def _factor(
        self, side: dict[int | None, TensorName], groups: int, rank: int, width: int
    ) -> np.ndarray:
        """[groups or 1, rank, width], from one tensor or from one per expert."""
        if None in side:
            tensor = read_finite(self.file, side[None].tensor)
            tensor = tensor if tensor.ndim == 3 else tensor[None]
            is_b = side[None].side == "B"
            return np.ascontiguousarray(tensor.swapaxes(1, 2)) if is_b else tensor
        dtypes = {self.file.tensors[name.tensor].dtype: name for name in side.values()}
        if len(dtypes) > 1:
            raise self._error(
                "the experts of one projection have different dtypes",
                next(reversed(dtypes.values())), "one dtype", ", ".join(dtypes),
            )  # fmt: skip
        factor = np.zeros((groups, rank, width), FLOAT_DTYPES[next(iter(dtypes))])
        for expert, name in side.items():
            tensor = read_finite(self.file, name.tensor)
            tensor = tensor if name.side == "A" else tensor.T
            factor[expert, : len(tensor)] = tensor
        return factor

    def _finished(self, site: Site, pair: LoraPair) -> dict[str, LoraPair]:
        """The pair, or the two of a fused gate_up_proj, trimmed and checked against max_rank."""
        pairs = (pair,)
        if len(site.parts) == 2:
            projection = self.table.projections[site.parts[0]]
            width = projection.out_features
            if projection.interleaved:
                pair = replace(pair, b=packing.apart(pair.b))
            form = self.file.metadata.get(packing.FORM_KEY)
            pairs = packing.split_gate_up(pair, width, form)
            if pairs is None:
                raise self._error(
                    "gate_up_proj is not block-diagonal, as the file's metadata says it is",
                    site.b[None], f"metadata {packing.FORM_KEY} to fit the data", form,
                )  # fmt: skip
        found = {}
        for part, half in zip(site.parts, pairs, strict=True):
            if half is None:
                continue
            if self._is_expert(part):
                half = packing.trim(half)
            if self.max_rank is not None and half.rank > self.max_rank:
                raise self._error(
                    "the adapter's rank is too large", next(iter(site.names())),
                    f"at most {self.max_rank}", half.rank,
                    hint="raise max_rank, or load an adapter of smaller rank",
                )  # fmt: skip
            found[part] = half
        return found

    def _is_expert(self, part: str) -> bool:
        return self.table.projections[part].kind == "expert"

    # ---- names --------------------------------------------------------------------------------
    def _pattern_name(self, name: TensorName) -> str:
        """What rank_pattern and alpha_pattern see: the module, or the parameter if only that is
        targeted."""
        parameter = f"{name.module}.weight"
        if self.targets.parameter(parameter) and not self.targets.module(name.module):
            return parameter
        return name.module

    def _packed_name(self, site: Site) -> str:
        block = site.a[None].module.removesuffix(".base_layer")
        return f"{block}.{site.target.rpartition('.')[2]}"

    def _shape(self, name: TensorName) -> tuple[int, ...]:
        return self.file.tensors[name.tensor].shape

    def _rank(self, name: TensorName) -> int:
        return self._shape(name)[-2 if name.side == "A" else -1]

    def _other_base(self) -> str:
        base = self.targets.config.base_model
        return "it was probably trained on another base model" + (f": {base[:200]}" if base else "")

    def _error(
        self, message: str, name: TensorName, expected: object, found: object, hint=None
    ) -> AdapterError:
        return AdapterError(
            message, file=self.file.path, key=name.tensor, expected=expected, found=found, hint=hint
        )
