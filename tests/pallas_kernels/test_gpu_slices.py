"""Slices of features: each feature is stored once, and none of them has two terms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul.gpu_slices import Slices, columns_of_terms


def stored(slices: Slices) -> list[tuple[int, int]]:
    """The first feature of each slice, and how many it stores."""
    firsts = [int(slices.first_feature(np.int32(i))) for i in range(sum(slices.counts))]
    return [(first, int(slices.width_of(np.int32(first)))) for first in firsts]


@settings(deadline=None)
@given(
    columns=st.lists(st.integers(1, 30).map(lambda units: 16 * units), min_size=1, max_size=4),
    features=st.sampled_from([16, 32, 48, 64]),
)
def test_every_feature_is_in_one_slice(columns, features):
    slices = Slices.of(tuple(columns), features)
    found = [feature for first, width in stored(slices) for feature in range(first, first + width)]
    assert found == list(range(sum(columns)))
    assert {width for _, width in stored(slices)} <= {*slices.widths}


@pytest.mark.parametrize("features, apart", [(64, False), (32, False), (48, True)])
def test_slices_end_where_terms_do(features, apart):
    columns = columns_of_terms(5120, (0, 4608), (4096, 512))
    assert columns == (4096, 512, 512)
    slices = Slices.of(columns, features)
    assert slices.apart == apart
    ends = {first + width for first, width in stored(slices)}
    assert {4096, 4608, 5120} <= ends
