"""Which words of u the lanes of a consumer make zeros of."""

from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul.gpu_product_in_place import LANES, vectors


@given(st.integers(8, 200).map(lambda units: 64 * units))
def test_vectors_cover_all_words_and_no_others(words):
    parts = vectors(words)
    assert all(vector in (1, 2, 4) for _, vector in parts)
    assert all(begin % vector == 0 for begin, vector in parts)
    ends = [begin + LANES * vector for begin, vector in parts]
    assert parts[0][0] == 0 and ends[-1] == words
    # None begins past the end of the one before, nor at its begin.
    starts = [begin for begin, _ in parts]
    assert all(a < b <= end for a, b, end in zip(starts, starts[1:], ends, strict=False))
