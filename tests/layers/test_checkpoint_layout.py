"""Parameters made from checkpoint tensors, and split back."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax.layers.checkpoint_layout import Concatenated, ZerosElsewhere


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_concatenated_gives_each_device_its_rows(devices):
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal((height, 5)) for height in (12, 6, 4)]
    layout = Concatenated((12, 6, 4), (True, True, False), devices)
    whole = layout.load(*tensors)
    assert whole.shape == (sum(layout.local_heights) * devices, 5)
    for device, rows in enumerate(np.split(whole, devices)):
        mine = [np.split(tensor, devices)[device] for tensor in tensors[:2]]
        np.testing.assert_array_equal(rows, np.concatenate([*mine, tensors[2]]))
    for stored, tensor in zip(layout.store(whole), tensors, strict=True):
        np.testing.assert_array_equal(stored, tensor)


@pytest.mark.parametrize("devices", [1, 2])
def test_zeros_stand_for_what_a_checkpoint_has_not(devices):
    whole = Concatenated((8, 6, 4), (True, True, False), devices)
    layout = ZerosElsewhere(whole, (False, True, True))
    tensors = [np.arange(1, height + 1) for height in (6, 4)]
    parameter = layout.load(*tensors)
    nothing, *rest = whole.store(parameter)
    assert np.array_equal(nothing, np.zeros(8))
    for found in (rest, layout.store(parameter)):
        for its, tensor in zip(found, tensors, strict=True):
            assert np.array_equal(its, tensor)
