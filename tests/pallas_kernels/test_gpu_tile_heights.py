"""Heights of tiles of large groups: what they are, and that they are good ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul.gpu_tile_heights import likely_heights

FIXED, EACH = 612, 5  # cycles


def time_of(sizes, heights) -> int:
    """Of all groups' tiles, one after the other."""
    total = 0
    for size in filter(None, sizes):
        tiles = -(-size // heights[-1])
        shorter, longer = divmod(size, tiles)
        for tile in range(tiles):
            rows = shorter + (tile < longer)
            total += FIXED + EACH * next(height for height in heights if height >= rows)
    return total


@given(mean=st.floats(81, 5000), tallest=st.integers(14, 18).map(lambda units: 8 * units))
def test_heights_are_three_that_products_have(mean, tallest):
    heights = likely_heights(mean, tallest, FIXED, EACH)
    assert len(heights) == 3 and list(heights) == sorted(set(heights))
    assert heights[0] > 0 and heights[-1] <= tallest and all(its % 8 == 0 for its in heights)


@pytest.mark.parametrize("tallest", [136, 144])
@pytest.mark.parametrize("groups, rows", [(128, 32768), (128, 16384), (32, 4096), (64, 12288)])
def test_random_groups_take_the_least_time(groups, rows, tallest):
    """No others that are equally far from each other do better, by more than chance."""
    rng = np.random.default_rng(groups + rows)
    cases = [rng.multinomial(rows, np.ones(groups) / groups) for _ in range(20)]

    def time(heights):
        return sum(time_of(sizes, heights) for sizes in cases)

    chosen = time(likely_heights(rows / groups, tallest, FIXED, EACH))
    others = [(tallest - 2 * step, tallest - step, tallest) for step in range(8, 64, 8)]
    assert all(chosen <= 1.005 * time(its) for its in others)


def test_groups_that_just_need_two_tiles_have_a_height_for_them():
    """128 rows on average: a quarter of the groups are larger than 136, and their halves 72."""
    low, *high = likely_heights(128.0, 136, FIXED, EACH)
    assert 68 < low <= 80 and high == [128, 136]


def test_a_lower_height_is_near_the_tallest_where_nothing_needs_it():
    assert likely_heights(4096.0, 136, FIXED, EACH) == (120, 128, 136)
