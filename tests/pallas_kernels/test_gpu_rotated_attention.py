"""Few tokens' heads and attention in one kernel: in the interpreter, with races, or on a GPU."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import PageView
from pallas_kernels.head_rotation import xla as plain_rotation
from pallas_kernels.paged_attention import reference
from tests.pallas_kernels.cases import in_layers

if not hasattr(plgpu, "force_gpu_interpret_mode"):
    pytest.skip("the Mosaic GPU interpreter needs jax >= 0.11", allow_module_level=True)

from pallas_kernels.paged_attention import gpu_join
from pallas_kernels.rotated_attention import mosaic_gpu
from tests.pallas_kernels.gpu_interpreter import interpret

pytestmark = pytest.mark.interpreter
INTERPRETED = jax.default_backend() != "gpu"
WIDTH, EPS, SCALE = 128, 1e-6, 0.1
COLUMNS = 12  # pages of a request
OTHERS = (70, 71, 72, 300), (63, 64, 40), (0, 1, 2, 3, 4, 5, 6, 300)


def case(*positions, heads=4, kv_heads=1, page=64, normed=True, requests=(1,)):
    """Tokens of two requests, by default of the second; what is not in their caches is NaN."""
    rng, tokens = np.random.default_rng(positions[0]), len(positions)
    requests = np.int32(requests * tokens)[:tokens]

    def normal(*shape):
        return rng.standard_normal(shape).astype(jnp.bfloat16)

    angles = np.float32(positions)[:, None] * rng.standard_normal(WIDTH // 2).astype(np.float32)
    pages = [np.full((2 * COLUMNS, page, kv_heads, WIDTH), np.nan, jnp.bfloat16) for _ in range(2)]
    tables = rng.permutation(2 * COLUMNS).astype(np.int32).reshape(2, COLUMNS)
    for request in set(requests.tolist()):
        first = min(its for its, of in zip(positions, requests, strict=True) if of == request)
        seen = np.arange(min(first, COLUMNS * page))
        for its in pages:
            its[tables[request, seen // page], seen % page] = normal(len(seen), kv_heads, WIDTH)
    weights = in_layers((1 + normal(WIDTH) / 8, 1 + normal(WIDTH) / 8)) if normed else (None, None)
    view = PageView(requests, np.int32(positions), tables)
    return (
        normal(tokens, heads + 2 * kv_heads, WIDTH),
        *weights,
        np.cos(angles),
        np.sin(angles),
        *pages,
        view,
    )


def run(call, programs=2, **options):
    """In so many programs, which have several splits one after the other if these are more."""
    static = dict(eps=EPS, scale=SCALE, interpreted=INTERPRETED)
    kernel = jax.jit(functools.partial(mosaic_gpu.rotated_attention, **static))
    if not INTERPRETED:
        return kernel(*call)
    with (
        mock.patch.object(mosaic_gpu, "PROGRAMS", programs),
        mock.patch.object(gpu_join, "AHEAD", 2),
    ):
        return interpret(kernel, *call, **options)


def check(call, **options):
    """Values of the result and of the new places in the pages; all others stay what they are."""
    *_, k_pages, v_pages, view = call
    found, *pages = run(call, **options)
    q, *wanted = jax.jit(functools.partial(plain_rotation.rotate_and_cache, eps=EPS))(*call)
    expected = reference.paged_attention(q, *wanted, view, scale=SCALE)
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=2**-6, atol=2**-6)
    pages_of_tokens, inside = np.divmod(view.positions, k_pages.shape[1])
    place = view.page_tables[view.request, pages_of_tokens], inside
    for its, before, want in zip(pages, (k_pages, v_pages), wanted, strict=True):
        its, other = np.float32(its), np.array(before, np.float32)
        np.testing.assert_allclose(its[place], np.float32(want)[place], rtol=2**-6, atol=2**-6)
        its[place] = other[place] = 0
        np.testing.assert_array_equal(its, other)
    return found


# Its first position, the last and the first of a block, of a split, and splits in turns.
@pytest.mark.parametrize(
    "position", [0, 700, *(pytest.param(its, marks=pytest.mark.slow) for its in (63, 64, 255, 300))]
)
def test_equals_plain_operations(position):
    assert np.float32(check(case(position))).any()


@pytest.mark.parametrize(
    "position, sizes, options",
    [
        (140, dict(heads=6, kv_heads=2, page=16), dict(programs=4)),  # groups of three
        (70, dict(heads=12, kv_heads=1), {}),  # of more than 8
        pytest.param(70, dict(heads=2, kv_heads=2, page=128), {}, marks=pytest.mark.slow),
        pytest.param(300, dict(normed=False), {}, marks=pytest.mark.slow),
        pytest.param(130, dict(requests=(0,)), {}, marks=pytest.mark.slow),
    ],
)
def test_sizes(position, sizes, options):
    check(case(position, **sizes), **options)


def test_tokens_of_two_requests():
    check(case(300, 70, requests=(1, 0), heads=6, kv_heads=2), programs=8)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU it does or does not")
@pytest.mark.parametrize(
    "positions, requests", [((300,), (1,)), pytest.param((70, 300), (1, 0), marks=pytest.mark.slow)]
)
def test_it_begins_early(positions, requests):
    check(case(*positions, requests=requests), begins_early=True)


# All in a block, in two, in two splits; the first of all.
@pytest.mark.parametrize(
    "positions", [(254, 255, 256), *(pytest.param(its, marks=pytest.mark.slow) for its in OTHERS)]
)
def test_tokens_of_one_request(positions):
    """Each program stores the new keys that it sees: for the interpreter, races."""
    call = case(*positions, requests=(1,) * (len(positions) - 1) + (0,))
    check(call, detect_races=False)


@st.composite
def chunks(draw):
    """Tokens of chunks of two requests, in any order: positions, requests, and a page's size."""
    page = draw(st.sampled_from([16, 64]))
    tokens = [
        (draw(st.shared(st.integers(0, 11 * page), key=f"{page}, {request}")) + i, request)
        for request in (0, 1)
        for i in range(draw(st.integers(1, 4)))
    ]
    return *zip(*draw(st.permutations(tokens)), strict=True), page


@settings(deadline=None, max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(chunks())
def test_chunks_in_any_order(chunks):
    positions, requests, page = chunks
    check(case(*positions, requests=requests, page=page), detect_races=False)


def test_padding_gets_zeros_and_is_not_cached():
    *arrays, k_pages, v_pages, view = case(70)
    padding = view._replace(request=np.int32([-1]))
    found, *pages = run((*arrays, k_pages, v_pages, padding))
    assert not np.float32(found).any()
    for its, before in zip(pages, (k_pages, v_pages), strict=True):
        assert np.asarray(its).tobytes() == before.tobytes()


def test_padding_beside_a_token():
    *arrays, view = case(5, 70, requests=(0, 1))
    found, *pages = run((*arrays, view._replace(request=np.int32([-1, 1]))))
    expected, *all_pages = run((*arrays, view))
    assert not np.float32(found[0]).any()
    assert np.asarray(found[1]).tobytes() == np.asarray(expected[1]).tobytes()
    for its, others in zip(pages, all_pages, strict=True):
        its, others = (np.asarray(pages)[view.page_tables[1]] for pages in (its, others))
        assert its.tobytes() == others.tobytes()


def test_positions_past_the_table_are_not_cached():
    """As `rotate_and_cache` has it; what they attend to is nobody's."""
    *arrays, k_pages, v_pages, view = case(COLUMNS * 64 + 5)
    _, *pages = run((*arrays, k_pages, v_pages, view))
    for its, before in zip(pages, (k_pages, v_pages), strict=True):
        assert np.asarray(its).tobytes() == before.tobytes()


@pytest.mark.parametrize(
    "change, what",
    [
        (dict(heads=17), r"at most 16 query heads.*\[1, 19, 128\]"),
        (dict(page=24), "pages must have"),
    ],
)
def test_what_it_cannot_serve(change, what):
    heads, *_, k_pages, v_pages, view = case(5, **change)
    with pytest.raises(NotImplementedError, match=what):
        mosaic_gpu.check(heads, k_pages, v_pages, view)


def test_it_serves_few_tokens():
    heads, *_, k_pages, v_pages, view = case(*range(9))
    mosaic_gpu.check(heads[:8], k_pages, v_pages, view)
    with pytest.raises(NotImplementedError, match="at most 8 tokens"):
        mosaic_gpu.check(heads, k_pages, v_pages, view)


# Of 132 programs.
@pytest.mark.parametrize("tokens, longest", [(8, 33 * 256), (1, 264 * 256)])
def test_it_serves_sequences_of_which_a_program_has_few_splits(tokens, longest):
    heads, *_, k_pages, v_pages, view = case(*range(tokens), heads=8, kv_heads=4)

    def check_with(columns):
        tables = np.zeros((2, columns), np.int32)
        mosaic_gpu.check(heads, k_pages, v_pages, view._replace(page_tables=tables))

    check_with(longest // 64)
    with pytest.raises(NotImplementedError, match=f"{tokens} tokens of at most {longest + 64} "):
        check_with(longest // 64 + 1)
