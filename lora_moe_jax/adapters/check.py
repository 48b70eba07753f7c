"""Checks of an adapter in memory, which a trainer made: what the reader checks of a folder."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.checkpoint.safetensors_file import FLOAT_DTYPES
from lora_moe_jax.errors import AdapterError


def check_adapter(adapter: Adapter, projections: Mapping[str, Projection]) -> None:
    """Raises AdapterError unless every pair fits its projection and is finite."""
    for name, pair in adapter.pairs.items():
        check_factors(name, pair, projections)
        _check_values(name, pair)


def check_factors(name: str, pair: LoraPair, projections: Mapping[str, Projection]) -> None:
    """Raises AdapterError unless shapes and dtypes fit; looks at no value."""
    projection = projections.get(name)
    if projection is None:
        raise _wrong(name, "projection is not one of the base model", "a projection of it", name)
    widths = {"a": projection.in_features, "b": projection.out_features}
    for side, width in widths.items():
        factor = getattr(pair, side)
        fits = factor.ndim == 3 and factor.shape[0] in (1, projection.groups)
        if not fits or factor.shape[1:] != (pair.rank, width) or pair.rank == 0:
            expected = f"[{projection.groups} or 1, rank, {width}]"
            raise _wrong(name, f"factor {side} has a wrong shape", expected, list(factor.shape))
        if factor.dtype not in FLOAT_DTYPES.values():
            expected = ", ".join(FLOAT_DTYPES)
            raise _wrong(name, f"factor {side} has a wrong dtype", expected, factor.dtype)
    _check_by_group(name, pair, "scaling")


def _check_by_group(name: str, pair: LoraPair, field: str) -> None:
    groups, shape = max(len(pair.a), len(pair.b)), getattr(pair, field).shape
    if shape not in ((1,), (groups,)):
        raise _wrong(name, f"{field} has a wrong shape", f"[{groups}] or [1]", list(shape))


def _check_values(name: str, pair: LoraPair) -> None:
    _check_by_group(name, pair, "ranks")
    for side in ("a", "b"):
        if not np.isfinite(getattr(pair, side)).all():
            raise _wrong(name, f"factor {side} is not finite", "finite values", "NaN or infinity")
    if not np.isfinite(pair.scaling).all():
        raise _wrong(name, "scaling is not finite", "finite values", pair.scaling.tolist()[:8])
    if pair.ranks.min() < 0 or pair.ranks.max() > pair.rank:
        raise _wrong(name, "ranks are wrong", f"0 to {pair.rank}", pair.ranks.tolist()[:8])


def _wrong(name: str, what: str, expected: object, found: object) -> AdapterError:
    return AdapterError(f"the adapter's {what}", key=name, expected=expected, found=found)
