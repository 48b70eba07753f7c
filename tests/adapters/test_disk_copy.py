"""Adapters whose factors are in a file without a name."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lora_moe_jax import AdapterError, ConfigError
from lora_moe_jax.adapters import Adapter, AdapterConfig, LoraPair
from lora_moe_jax.adapters.disk_copy import check_folder, on_disk

CONFIG = AdapterConfig(r=3, target_modules=("x",))


def pair(seed: int, dtype, groups: int = 2, rank: int = 3) -> LoraPair:
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((groups, rank, width)).astype(dtype) for width in (5, 7))
    return LoraPair(a, b, np.ones(groups, np.float32), np.full(groups, rank, np.int32))


def adapter() -> Adapter:
    """Of several types, none of whose arrays ends where another may begin."""
    dtypes = np.float32, np.float16, ml_dtypes.bfloat16
    pairs = {str(i): pair(i, dtype) for i, dtype in enumerate(dtypes)}
    turned = pair(9, np.float32)
    pairs["turned"] = LoraPair(turned.b.swapaxes(1, 2), turned.a, turned.scaling, turned.ranks)
    return Adapter(pairs, "module", CONFIG)


def test_is_the_same_adapter(tmp_path):
    one = adapter()
    found = on_disk(one, tmp_path)
    assert found.on_disk and not one.on_disk
    assert (found.nbytes, found.rank, found.targets) == (one.nbytes, one.rank, one.targets)
    for name, its in one.pairs.items():
        for factor in ("a", "b", "scaling", "ranks"):
            value, expected = getattr(found.pairs[name], factor), getattr(its, factor)
            assert value.dtype == expected.dtype and value.shape == expected.shape
            np.testing.assert_array_equal(
                value.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
            )


def test_nobody_can_find_or_change_it(tmp_path):
    found = on_disk(adapter(), tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="read-only"):
        found.pairs["0"].a[0, 0, 0] = 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no list of maps")
def test_it_is_one_map_and_goes_with_the_adapter(tmp_path):
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    found = on_disk(adapter(), tmp_path)
    factor = found.pairs["0"].a
    assert maps() == 1
    del found
    assert maps() == 1 and np.isfinite(factor).all()
    del factor
    assert maps() == 0


def test_an_adapter_of_nothing(tmp_path):
    assert on_disk(Adapter({}, "module", CONFIG), tmp_path).nbytes == 0


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(AdapterError, match="cannot be written") as caught:
        on_disk(adapter(), tmp_path / "none")
    assert caught.value.file == str(tmp_path / "none")


@pytest.mark.parametrize("folder", ["none", "a file", 3, "a\0b"])
def test_a_folder_is_checked_before(tmp_path, folder):
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match="adapter_disk"):
        check_folder(tmp_path / folder if isinstance(folder, str) else folder)
    assert os.listdir(tmp_path) == ["a file"]
