"""The Hopper attention kernel: in Pallas's interpreter, which also looks for races, or on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import PageView, implementation, paged_attention, paged_latent_attention
from pallas_kernels.paged_attention import gpu_attention, gpu_join, gpu_sizes, reference
from pallas_kernels.paged_attention.tiles import RUN_WORDS, TILE_WORDS, split_runs, token_tiles
from tests.pallas_kernels.gpu_interpreter import interpret

pytestmark = pytest.mark.interpreter
INTERPRETED = jax.default_backend() != "gpu"
LENGTHS = (150, 70, 9)  # cached positions of each request: three, two and one blocks
SCALE = 0.1
TOKENS = 60
# A decode row past two blocks, a chunk that begins in one block and ends in another, padding.
BATCH = [(0, 149), (2, 8), *[(1, position) for position in range(60, 70)], (-1, 0), (-1, 0)]


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads of the queries and of the cache (0: latents), widths of keys and values.

    `split` replaces the kernel's own size; `spread` says whether several programs share a sequence,
    `tiles` how many tiles of a unit share its blocks. `sinks`: heads have them. `loading`: who
    multiplies loads as well, as where registers do not move.
    """

    heads: int
    kv_heads: int
    width: int
    v_width: int
    page: int = 16
    window: int | None = None
    split: int = gpu_sizes.SPLIT
    spread: bool = False
    tiles: int = 1
    sinks: bool = False
    loading: bool = False

    @functools.cached_property
    def sinks_of_heads(self):
        """Some that take most of the weight, and some that take none."""
        if not self.sinks:
            return None
        return 4 * np.random.default_rng(1).standard_normal(self.heads).astype(np.float32)

    @functools.cached_property
    def data(self):
        """Queries and caches of every request and position."""
        rng = np.random.default_rng(0)
        head = (self.kv_heads,) if self.kv_heads else ()
        width = self.width + (0 if self.kv_heads else self.v_width)
        shapes = (self.heads, width), (*head, self.width), (*head, self.v_width)
        return [rng.standard_normal((3, max(LENGTHS), *shape)) for shape in shapes]

    def arguments(self, tokens, seed=0):
        """q, both caches and the view; whatever nobody may read is NaN."""
        rng = np.random.default_rng(seed)
        columns = -(-max(LENGTHS) // self.page)
        tables = rng.integers(0, 3 * columns, (3, columns)).astype(np.int32)
        free = list(rng.permutation(3 * columns))
        for request, length in enumerate(LENGTHS):
            for column in range(-(-length // self.page)):
                tables[request, column] = free.pop()
        request, position = np.array(tokens, np.int32).T
        q, *caches = self.data
        q = q[request, position].astype(jnp.bfloat16)
        q[request < 0] = np.nan
        pages = [np.full((3 * columns, self.page, *c.shape[2:]), np.nan, q.dtype) for c in caches]
        for number, length in enumerate(LENGTHS):
            first = self.first_read(tokens, number)
            seen = np.arange(first, length)
            for cache, values in zip(pages, caches, strict=True):
                cache[tables[number, seen // self.page], seen % self.page] = values[number, seen]
        return q, *pages, PageView(request, position, tables)

    def first_read(self, tokens, number):
        """The first position that a request's tokens see."""
        if self.window is None:
            return 0
        positions = [position for request, position in tokens if request == number]
        return max(0, min(positions, default=0) - self.window + 1)

    @functools.cached_property
    def kernel(self):
        if self.kv_heads:

            def run(q, first, second, view):
                static = SCALE, self.window, self.sinks, INTERPRETED
                sizes = gpu_sizes.grouped_sizes(q, first, second, *static)
                sizes = dataclasses.replace(sizes, split=self.split, tiles=self.tiles)
                sinks = jnp.asarray(self.sinks_of_heads) if self.sinks else None
                return gpu_attention.attention_kernel(sizes, q, (first, second), view, sinks)

        else:

            def run(q, first, second, view):
                sizes = gpu_sizes.latent_sizes(
                    q[..., : self.width], first, second, SCALE, INTERPRETED
                )
                sizes = dataclasses.replace(sizes, split=self.split)
                caches = (first[:, :, None], second[:, :, None])
                return gpu_attention.attention_kernel(sizes, q, caches, view)

        return jax.jit(run)

    def run(self, tokens, seed=0):
        with (
            mock.patch.object(gpu_sizes, "WORTH", 1 if self.spread else 99),
            mock.patch.object(implementation, "REGISTERS_MOVE", not self.loading),
        ):
            if not INTERPRETED:
                return np.asarray(self.kernel(*self.arguments(tokens, seed)))
            # A sequence is spread where units leave a quarter of the programs idle.
            units = len(tokens) * max(1, self.kv_heads)
            programs = 2 + units * 4 // 3 if self.spread else 2
            with (
                mock.patch.object(gpu_attention, "PROGRAMS", programs),
                mock.patch.object(gpu_join, "AHEAD", 2),
            ):
                return interpret(self.kernel, *self.arguments(tokens, seed))

    def expect(self, tokens):
        q, first, second, view = self.arguments(tokens)
        if self.kv_heads:
            options = dict(scale=SCALE, sliding_window=self.window, sinks=self.sinks_of_heads)
            return reference.paged_attention(q, first, second, view, **options)
        q_latent, q_rope = q[..., : self.width], q[..., self.width :]
        return reference.paged_latent_attention(q_latent, q_rope, first, second, view, scale=SCALE)


CASES = {
    "grouped": Case(8, 2, 64, 64),
    "a window": Case(4, 1, 64, 128, page=8, window=20),
    "sinks": Case(6, 2, 64, 64, sinks=True),
    "latents shared by two": Case(4, 0, 384, 64, page=32),
    "latents that two load": Case(4, 0, 384, 64, page=32, loading=True),
}
MORE_CASES = {
    "wide keys, a group of three": Case(6, 2, 128, 64, page=64),
    "large pages": Case(4, 4, 64, 64, page=128),
    "latents": Case(4, 0, 64, 64),
}
LARGE_CASES = {
    "latents of DeepSeek-V3": Case(128, 0, 512, 64),
    "latents of DeepSeek-V3 that two load": Case(128, 0, 512, 64, loading=True),
    "a window over blocks": Case(64, 1, 64, 64, window=100),
}


def check(case: Case, tokens):
    result = case.run(tokens)
    found, expected = result.astype(np.float64), case.expect(tokens)
    # Weights and results are rounded to bfloat16.
    assert np.abs(found - expected).max() <= 2**-6 * max(1, np.abs(expected).max())
    assert not found[np.array(tokens)[:, 0] < 0].any()
    return result


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
    check(CASES[name], BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_more_cases_equal_the_definition(name):
    check(MORE_CASES[name], BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_CASES)
def test_large_cases_equal_the_definition(name):
    check(LARGE_CASES[name], BATCH[::3])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("grouped", marks=pytest.mark.slow),
        "a window",
        pytest.param("latents shared by two", marks=pytest.mark.slow),
        pytest.param("latents that two load", marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_the_batch(name):
    """A chunk at once, split at another place, in another order and other pages; and alone."""
    case = CASES[name]
    if case.window is None:
        tokens = BATCH
    else:
        tokens = [token for token in BATCH if token[0] == 1]
    together = case.run(tokens).view(np.uint16)
    order = [*range(5, len(tokens)), *range(5)]
    shuffled = case.run([tokens[i] for i in order], seed=1).view(np.uint16)
    assert np.array_equal(shuffled, together[order])
    alone = case.run([tokens[3]]).view(np.uint16)
    assert np.array_equal(alone[0], together[3])


# Each with a row past two splits, and a tile whose rows see different ones.
SPLIT_CASES = {
    "grouped": (
        Case(3, 1, 64, 64, page=64, split=64),
        [(0, 149), (-1, 0), (1, 63), (1, 64), (1, 65)],
    ),
    "a window": (
        Case(2, 2, 64, 64, page=64, window=70, split=64),
        [(-1, 0), (0, 132), (0, 133), (0, 134)],
    ),
    "sinks": (
        Case(3, 1, 64, 64, page=64, split=64, sinks=True),
        [(0, 149), (-1, 0), (1, 63), (1, 64), (2, 8)],
    ),
    "latents": (
        Case(2, 0, 64, 64, page=64, split=64),
        [(0, 127), (0, 128), (-1, 0)],
    ),
    "latents shared by two": (
        Case(2, 0, 384, 64, page=64, split=128),
        [(0, 127), (0, 128), (-1, 0), (0, 149)],
    ),
    # A program has padding between two units, and first of all.
    "latents that two load": (
        Case(64, 0, 384, 64, page=64, split=128, loading=True),
        [(-1, 0), (0, 127), (-1, 0), (-1, 0), (0, 128), (0, 149), (1, 20)],
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("grouped", marks=pytest.mark.slow),
        pytest.param("a window", marks=pytest.mark.slow),
        pytest.param("sinks", marks=pytest.mark.slow),
        pytest.param("latents", marks=pytest.mark.slow),
        pytest.param("latents that two load", marks=pytest.mark.slow),
        "latents shared by two",
    ],
)
def test_bits_do_not_depend_on_who_has_a_split(name):
    """Programs with whole sequences, or with splits of them; then in another order, and alone."""
    case, tokens = SPLIT_CASES[name]
    spread = dataclasses.replace(case, spread=True)
    with mock.patch.object(gpu_attention, "join_kernel", wraps=gpu_join.join_kernel) as join:
        whole = check(case, tokens)
        assert not join.called
        order = [*range(2, len(tokens)), 0, 1]
        shuffled = spread.run([tokens[i] for i in order], seed=1)
        assert join.called
    assert np.array_equal(shuffled.view(np.uint16), whole[order].view(np.uint16))
    row = max(range(len(tokens)), key=lambda row: tokens[row][1])
    alone = spread.run([tokens[row]] + [(-1, 0)] * (len(tokens) - 1))
    assert np.array_equal(alone[0].view(np.uint16), whole[row].view(np.uint16))


def test_bits_do_not_depend_on_who_loads():
    case, tokens = SPLIT_CASES["latents shared by two"]
    for spread in (False, True):
        its = dataclasses.replace(case, spread=spread)
        loaded = dataclasses.replace(its, loading=True).run(tokens)
        assert np.array_equal(loaded.view(np.uint16), its.run(tokens).view(np.uint16))


@pytest.mark.slow
@pytest.mark.parametrize("loading", [False, True])
def test_bits_do_not_depend_on_pieces(loading):
    case = dataclasses.replace(LARGE_CASES["latents of DeepSeek-V3"], heads=64, loading=loading)
    tokens = [*BATCH[::3], (0, 148)]
    small = case.run(tokens)
    with mock.patch.object(gpu_sizes, "MANY_TOKENS", 1):
        large = check(dataclasses.replace(case), tokens)
    assert np.array_equal(large.view(np.uint16), small.view(np.uint16))


# Units of which one tile has no tokens, or some; a block that one tile of a unit sees.
TILE_CASES = {
    "one split": Case(32, 1, 64, 64),
    "splits": Case(16, 1, 64, 64, page=64, split=64),
    "a window": Case(32, 2, 64, 128, window=20),
    "sinks": Case(32, 1, 64, 64, sinks=True),
}


@pytest.mark.parametrize(
    "name",
    [
        "one split",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("splits", "a window", "sinks")),
    ],
)
def test_bits_do_not_depend_on_tiles_that_share_blocks(name):
    case = TILE_CASES[name]
    tokens = [(0, 149), *[(1, position) for position in range(57, 69)], (-1, 0)]
    together = check(dataclasses.replace(case, tiles=2), tokens)
    assert np.array_equal(together.view(np.uint16), case.run(tokens, seed=1).view(np.uint16))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("one split", "a window", "sinks")),
        "splits",
    ],
)
def test_bits_do_not_depend_on_who_loads_for_two_tiles(name):
    """With padding before, between and behind a program's units, and more blocks than stages."""
    case = dataclasses.replace(TILE_CASES[name], tiles=2)
    chunk = [(1, position) for position in range(59, 66)]
    single = [(0, position) for position in (148, 146, 144, 142)]
    tokens = [*[(-1, 0)] * 9, (0, 149), *[(-1, 0)] * 10, *chunk, *single, (-1, 0)]
    loaded = check(dataclasses.replace(case, loading=True), tokens)
    assert np.array_equal(loaded.view(np.uint16), case.run(tokens).view(np.uint16))


@settings(max_examples=50, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(-1, 2), st.integers(0, 90), st.integers(1, 9)), min_size=1, max_size=6
    ),
    height=st.sampled_from([1, 2, 5, 8]),
)
def test_tiles_cover_every_token_once(runs, height):
    # One number of tokens for all, as XLA compiles for each.
    runs = [*runs, (-1, 0, TOKENS - sum(n for _, _, n in runs))]
    request = np.concatenate([np.full(n, r) for r, _, n in runs]).astype(np.int32)
    spans = [np.zeros(n) if r < 0 else np.arange(p, p + n) for r, p, n in runs]
    positions = np.concatenate(spans).astype(np.int32)
    found = token_tiles(PageView(request, positions, None), height)
    covered = np.zeros(len(request), int)
    words = np.asarray(found.words).reshape(-1, TILE_WORDS)
    for token, count, of, position in words[: int(found.count[0])]:
        tokens = slice(token, token + count)
        covered[tokens] += 1
        assert 1 <= count <= height and (request[tokens] == of).all()
        if of >= 0:
            assert positions[tokens].tolist() == list(range(position, position + count))
    assert (covered == 1).all()
    # As few as there can be, a request's chunk cut from its start.
    joined = (request[1:] == request[:-1]) & (
        (positions[1:] == positions[:-1] + 1) | (request[1:] < 0)
    )
    lengths = np.diff(np.flatnonzero(np.concatenate([[True], ~joined, [True]])))
    assert found.count[0] == sum(-(-lengths // height))


def test_positions_past_a_page_table_have_no_runs():
    """Of 12 splits of 8 positions: what a run of a 13th stored would lie past all sums."""
    view = PageView(np.array([0, 1], np.int32), np.array([95, 96], np.int32), None)
    found = runs_of(view, None, 24)
    runs = np.asarray(found.words).reshape(-1, RUN_WORDS)[: int(found.count[0])]
    assert sorted(map(tuple, runs[:, [2, 4, 5]])) == [
        (request, split, split + 1) for request in (0, 1) for split in range(12)
    ]


@functools.partial(jax.jit, static_argnums=(1, 2))
def runs_of(view, window, size):
    return split_runs(token_tiles(view, 4), 8, window, 12, size)


@settings(max_examples=50, deadline=None)
@given(
    ends=st.lists(st.integers(-1, 90), min_size=1, max_size=6),
    window_and_spare=st.sampled_from([(None, 0), (3, 4), (40, 0)]),  # of which each compiles
)
def test_runs_cover_every_split_once(ends, window_and_spare):
    window, spare = window_and_spare
    ends = np.array([*ends, *[-1] * (6 - len(ends))])
    request, positions = np.where(ends < 0, -1, np.arange(6)), np.maximum(ends, 0)
    view = PageView(request.astype(np.int32), positions.astype(np.int32), None)
    found = runs_of(view, window, 6 + spare)
    assert found.count[0] <= 6 + spare
    runs, rest = np.split(np.asarray(found.words).reshape(-1, RUN_WORDS), found.count)
    assert (rest[:, 4] == rest[:, 5]).all()
    seen: dict[int, list[int]] = {}
    for token, _, of, position, first, end in runs:
        assert of == request[token] and position == positions[token] and first < end
        seen.setdefault(token, []).extend(range(first, end))
    firsts = 0 * ends if window is None else np.maximum(ends - window + 1, 0)
    expected = {
        token: list(range(firsts[token] // 8, end // 8 + 1))
        for token, end in enumerate(ends)
        if end >= 0
    }
    assert seen == expected
    # No shorter runs would do.
    longest = max((end - first for *_, first, end in runs), default=0)
    lengths = np.array([len(splits) for splits in expected.values()])
    if longest > 1:
        assert (-(-lengths // (longest - 1))).sum() > 6 + spare


def test_sequences_are_spread_where_programs_would_idle():
    def spread(tokens, positions, **changed):
        array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        cache = array((9, 64, 4, 128))
        sizes = gpu_sizes.grouped_sizes(array((tokens, 32, 128)), cache, cache, 1.0, None, False)
        return dataclasses.replace(sizes, **changed).spread_over(positions, 132).spread

    assert spread(1, 4096) == 16 and spread(24, 32768) == 128
    assert spread(25, 32768) == 0  # 100 of 132 programs have work
    assert spread(1, 256) == 0  # one split
    assert spread(1, 4096, window=128) == 0 and spread(1, 4096, window=1024) == 6
    assert spread(24, 1 << 20) == 0  # 1.6 GB of sums


def test_tiles_share_blocks_where_there_are_many_tokens():
    def tiles(tokens, width, k_width=128):
        array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        caches = array((9, 64, 4, k_width)), array((9, 64, 4, width))
        sizes = gpu_sizes.grouped_sizes(array((tokens, 32, k_width)), *caches, 1.0, None, False)
        assert sizes.stages >= gpu_sizes.MIN_STAGES
        return sizes.tiles

    assert tiles(512, 128) == 2 and tiles(511, 128) == 1
    assert tiles(512, 256) == 1  # sums of 256 columns are all the registers
    assert tiles(512, 64, k_width=448) == 1  # memory has room for one block beside two tiles


def test_splits_of_latents_that_two_warpgroups_share_are_longer():
    def sizes(width, heads=16):
        array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        pages = array((9, 64, width)), array((9, 64, 64))
        return gpu_sizes.latent_sizes(array((1, heads, width)), *pages, 1.0)

    assert sizes(256).splits(32768) == sizes(256).spread_over(32768, 132).spread == 128
    assert sizes(512).splits(32768) == sizes(512).spread_over(32768, 132).spread == 16
    assert sizes(512).splits(2048) == 1
    # Two units for each token: as many programs share a sequence.
    both = sizes(512, heads=128)
    assert both.splits(32768) * both.parts == sizes(512).splits(32768)
    assert both.splits(4096) == 1


def test_memory_has_room_for_one_round_of_two_partners():
    """So what they load next goes where the piece was that they are through with."""
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for latent, rope in itertools.product((384, 512), (64, 128)):
        pages = array((9, 64, latent)), array((9, 64, rope))
        sizes = gpu_sizes.latent_sizes(array((1, 16, latent)), *pages, 1.0)
        assert sizes.consumers == 2
        if (latent, rope) != (512, 128):  # which has no room at all, and is refused
            assert sizes.stages == 2
        else:
            assert sizes.stages < gpu_sizes.MIN_STAGES


VIEW_OF_THREE = PageView(np.zeros(3, int), np.arange(3), np.zeros((1, 1), int))


@pytest.mark.parametrize(
    "changed, said",
    [
        (dict(dtype="float32"), "bfloat16"),
        (dict(width=96), "multiples of 64"),
        (dict(page=24), "positions"),
        (dict(heads=200, kv_heads=2), "64 query heads"),
        (dict(v_width=576), "at most 512 columns"),
        (dict(v_width=384), "at most 256 columns"),
    ],
)
def test_refusals_name_the_shapes(changed, said):
    sizes = dict(dtype="bfloat16", heads=8, kv_heads=2, width=64, v_width=64, page=16) | changed
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(sizes["dtype"]))
    cache = (9, sizes["page"], sizes["kv_heads"])
    q = array((3, sizes["heads"], sizes["width"]))
    k, v = array((*cache, sizes["width"])), array((*cache, sizes["v_width"]))
    with pytest.raises(NotImplementedError, match=said):
        paged_attention(q, k, v, VIEW_OF_THREE, scale=1.0, implementation="mosaic_gpu")


def test_unknown_implementations_are_refused():
    with pytest.raises(NotImplementedError, match="'triton' is not one of"):
        q, cache = jnp.zeros((3, 2, 8)), jnp.zeros((1, 4, 8))
        options = dict(scale=1.0, implementation="triton")
        paged_latent_attention(q, q, cache, cache, VIEW_OF_THREE, **options)
