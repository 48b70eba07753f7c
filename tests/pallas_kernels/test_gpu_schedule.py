"""Schedules of the Hopper kernels fit in shared memory and cover their tiles, for any shapes."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_lora_matmul import (
    gpu_experts,
    gpu_outer,
    gpu_product,
    gpu_product_layout,
    gpu_shrink,
    gpu_shrink_layout,
    gpu_spread,
    mosaic_gpu,
)
from pallas_kernels.grouped_lora_matmul import gpu_schedule as gs
from pallas_kernels.grouped_lora_matmul import gpu_shrink_schedule as ss
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.gpu_product_inner import Inner, Unmade
from pallas_kernels.grouped_lora_matmul.gpu_rows import Tables, Tiles
from pallas_kernels.grouped_lora_matmul.mosaic_gpu import MAX_RANK
from pallas_kernels.hopper.machine import SHARED_MEMORY
from pallas_kernels.hopper.store import whole_lines
from pallas_kernels.shapes import DECODE_TOKENS, EXPERT_SHAPES, PREFILL_TOKENS

LIMIT = 227 * 1024  # bytes of shared memory that one program of an H200 may have
HALF_LIMIT = 113 * 1024  # the same if two share a multiprocessor, which keeps 1 KB for each
ALIGNMENT = 1024  # of every array in it
MULTIPROCESSORS = 132
IN_TILES = Tables(None, None, None, Tiles(None, None))  # kinds of tables alone are looked at
TOKENS = (1, 2, 8, DECODE_TOKENS, 256, 1024, PREFILL_TOKENS, 32768)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def bytes_of(memory) -> int:
    """What one scratch array takes; barriers are 8 bytes each."""
    if hasattr(memory, "num_barriers"):
        return 8 * math.prod(np.atleast_1d(memory.num_barriers))
    size = math.prod(memory.shape) * jnp.dtype(memory.dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_memory(its) -> bool:
    return hasattr(its, "num_barriers") or hasattr(its, "dtype")


def shared_memory(scratch) -> int:
    return sum(map(bytes_of, jax.tree.leaves(scratch, is_leaf=is_memory)))


def product_layout(
    schedule,
    rows,
    groups,
    k,
    width,
    parts,
    ranks,
    contract=2,
    out_dtype=jnp.bfloat16,
    makes_u=False,
    ring_rows=0,
    biased=False,
):
    """Sizes of the product kernel; `ranks` has one entry for each low-rank term."""
    gate = Gate() if parts == 2 else None
    terms = None
    starts = tuple(width * term for term in range(len(ranks))) if parts == 2 else (0,) * len(ranks)
    if ranks:
        terms = gpu_product.Terms(
            tuple(gpu_shrink.Columns(array(rows, 64), 0, rank) for rank in ranks),
            tuple(array(8, groups, rank, width) for rank in ranks),
        )
    if makes_u:
        scaling = array(8, 1, dtype=jnp.float32)
        unmade = tuple(Unmade(array(8, groups, rank, k), scaling) for rank in ranks)
        terms = gpu_product.Terms((), terms.factors, unmade)
    n, firsts = parts * width, (0,) * len(ranks)
    w = array(groups, n, k) if contract == 2 else array(groups, k, n)
    x = array(rows, k)
    bias = array(groups, n) if biased else None
    lora, out_dtype = (terms, starts, firsts), jnp.dtype(out_dtype)
    return gpu_product_layout.ProductLayout(
        x, w, *lora, schedule, contract, gate, IN_TILES, False, out_dtype, ring_rows, bias
    )


def product_memory(*sizes, **options) -> int:
    """Bytes of that kernel."""
    return shared_memory(product_layout(*sizes, **options).scratch())


def check_product(
    rows, groups, width, parts, out_bytes=2, contract=2, equal=False, biased=False
) -> gs.ProductSchedule:
    sizes, named = (rows, groups, width, parts, out_bytes, contract), dict(equal=equal)
    schedule = gs.product_schedule(*sizes, **named, biased=biased)
    assert schedule == gs.product_schedule(*sizes, **named, biased=biased)
    # A bias costs stages at most: it is no reason for other tiles.
    plain = gs.product_schedule(*sizes, **named)
    assert plain == dataclasses.replace(schedule, stages=plain.stages, buffers=plain.buffers)
    check_heights(schedule.heights)
    # More variants of the whole K loop and the compiler spills registers.
    assert len(schedule.heights) <= 3
    # What a low variant lacks is made of its own accumulators.
    chunks = gpu_product_layout.chunks(schedule.heights, min(gs.CHUNK, schedule.heights[-1]))
    pieces = [piece for chunk in chunks for piece in chunk]
    assert all(piece.width <= schedule.heights[0] for piece in pieces)
    ends = [0, *(piece.start + piece.width for piece in pieces)]
    assert [piece.start for piece in pieces] == ends[:-1] and ends[-1] == schedule.heights[-1]
    assert set(schedule.heights) <= set(ends)
    if equal and groups == 1 and rows > gs.TALLEST:
        assert gs.LOWEST <= schedule.heights[-1] <= gs.TALLEST
    else:
        # Products of one layer share their tiles.
        assert gs.tile_height(rows, groups) == schedule.heights[-1]
    assert schedule.buffers >= 1
    if schedule.width < 64:
        # Part of one block (of gate, and of up), of rows that are stored one by one.
        assert schedule.features in ((16, 32) if parts == 1 else (32, 48)) and contract == 2
        assert schedule.heights[-1] <= gs.CHUNK and (parts == 2 or groups == 1)
    else:
        assert schedule.features % 64 == 0
    assert 1 <= schedule.programs <= MULTIPROCESSORS
    assert schedule.together == gs.tiles_together(rows / groups, schedule.heights[-1]) >= 1
    # A stage is released while the next one is read.
    assert schedule.stages >= 2
    return schedule


def check_heights(heights):
    assert list(heights) == sorted(set(heights)) and heights[0] > 0
    # Rows are the N side of the tensor core instruction, and its K side when u is.
    assert all(height % 8 == 0 and height <= 256 for height in heights)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_named_shapes(name, tokens):
    shape = EXPERT_SHAPES[name]
    rows, groups = tokens * shape.top_k, shape.experts
    hidden, wide = shape.hidden, shape.intermediate
    for rank in (16, 64, MAX_RANK):
        for k, width, parts, ranks, contract in (
            (hidden, wide, 2, (rank, rank), 2),
            (hidden, 2 * wide, 1, (rank, rank), 2),
            (wide, hidden, 1, (rank,), 2),
            (2 * wide, hidden, 1, (rank, rank), 1),
            (hidden, wide, 1, (rank,), 1),
            (hidden, wide, 2, (), 2),
        ):
            for biased in (False, True):
                schedule = check_product(rows, groups, width, parts, biased=biased)
                assert schedule.stages >= (4 if schedule.depth == 1 else 3)
                sizes = schedule, rows, groups, k, width, parts, ranks, contract
                assert product_memory(*sizes, biased=biased) <= LIMIT, (schedule, ranks)
        for ranks in (rank,), (rank, rank):
            check_shrink(rows, ranks, hidden)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_products_that_make_u(name, rank, biased):
    shape = EXPERT_SHAPES[name]
    hidden, wide = shape.hidden, shape.intermediate
    for rows, groups, k, width, ranks in (
        (shape.top_k, shape.experts, hidden, wide, (rank, rank)),
        (shape.top_k, shape.experts, wide, hidden, (rank,)),
        (1, 1, hidden, 5120, (rank,)),
        (1, 1, hidden, 128, (rank,)),
    ):
        parts, used = len(ranks), ss.rank_tile(rank) * len(ranks)
        if used > 64:
            continue
        named = dict(biased=biased)
        schedule = gs.product_schedule(rows, groups, width, parts, made_ranks=used, **named)
        sizes = schedule, rows, groups, k, width, parts, ranks
        layout = product_layout(*sizes, makes_u=True, **named)
        assert layout.inner.fits(schedule.features) and schedule.stages >= 3
        assert shared_memory(layout.scratch()) <= LIMIT
        # All ranks are among the last 64 rows; where stages of W begin, stages of B do.
        assert 0 <= layout.first_rank and layout.first_rank + used <= 64
        assert layout.b_per_stage * 64 == schedule.depth * layout.block_rows
        assert layout.b_per_stage >= layout.terms_of_stage * layout.feature_blocks


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [0, 8, 16, 32])
@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_experts_in_one_kernel_share_a_ring(name, rank, biased):
    shape = EXPERT_SHAPES[name]
    hidden, wide, rows = shape.hidden, shape.intermediate, shape.top_k
    made = ss.rank_tile(rank) if rank else 0
    *schedules, ring_rows = gs.experts_schedules(rows, wide, hidden, 2 * made, made, biased)
    sizes = (hidden, wide, 2), (wide, hidden, 1)
    layouts = [
        product_layout(
            schedule,
            rows,
            shape.experts,
            k,
            width,
            parts,
            (rank,) * parts if rank else (),
            makes_u=rank > 0,
            ring_rows=ring_rows,
            biased=biased and parts == 2,
        )
        for schedule, (k, width, parts) in zip(schedules, sizes, strict=True)
    ]
    assert shared_memory(gpu_experts._scratch(layouts)) <= LIMIT
    into, out = schedules
    assert (into.depth, into.stages) == (out.depth, out.stages) and into.stages >= 3
    for layout in layouts:
        assert layout.block_rows == ring_rows and layout.first_a_row + 64 <= ring_rows
        used = layout.inner.used if rank else 0
        assert 0 <= layout.first_rank and layout.first_rank + used <= 64
    ends = [layout.w_rows - layout.schedule.width + 64 for layout in layouts]
    assert max(ends) <= ring_rows


def test_experts_in_one_kernel_leave_no_column_of_h_unmade():
    """Stages of down have all columns of h's whole lines, and what nobody wrote may be NaN."""
    served = []
    for width in range(8, 400, 8):
        of_rows = gs.experts_schedules(3, width, 256, 32, 16)
        of_tiles = gs.experts_schedules_of_tiles(600, 60, width, 256)
        for found in filter(None, (of_rows, of_tiles)):
            features = found[0].features
            assert -(-width // features) * features >= whole_lines(width, 64)
        served.append((width, of_rows is not None, of_tiles is not None))
    assert {(64, False, False), (128, True, False), (384, True, True)} <= set(served)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [0, 16, 32, 64])
@pytest.mark.parametrize("tokens", [3, 8, 64, 128, 256])
@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_experts_of_tiles_share_a_ring(name, tokens, rank, biased):
    shape = EXPERT_SHAPES[name]
    hidden, wide, groups = shape.hidden, shape.intermediate, shape.experts
    rows, shrink = tokens * shape.top_k, None
    if rank:
        schedule, down = ss.shrink_of_tiles(ss.rank_tile(rank)), array(8, groups, rank, wide)
        sizes = (down,), (array(8, 1, dtype=jnp.float32),), (0,), (0,), schedule, False
        shrink = gpu_shrink_layout.ShrinkLayout(array(rows, wide), *sizes)
        assert shrink.blocks == 1 and shrink.schedule.heights == (ss.BLOCK_OF_ROWS,)
    found = gs.experts_schedules_of_tiles(
        rows, groups, wide, hidden, biased, shrink and shrink.schedule
    )
    if found is None:
        assert rows > gs.MOST_OF_GROUP * groups or rows * (wide // 64) < 2 * MULTIPROCESSORS
        return
    assert rows <= gs.MOST_OF_GROUP * groups
    *schedules, ring_rows = found
    sizes = (hidden, wide, 2), (wide, hidden, 1)
    into, out = (
        product_layout(
            schedule,
            rows,
            groups,
            k,
            width,
            parts,
            (rank,) * parts if rank else (),
            ring_rows=ring_rows,
            biased=biased and parts == 2,
        )
        for schedule, (k, width, parts) in zip(schedules, sizes, strict=True)
    )
    assert shared_memory(gpu_experts._scratch((into, out), shrink)) <= LIMIT
    assert into.schedule.stages == out.schedule.stages >= gs.STAGES
    assert into.block_rows == out.block_rows == into.w_rows == out.w_rows == ring_rows
    for name in ("x_stage", "w_stage"):
        # The same in both: what they overlay, and how stages follow each other.
        left, right = (str(layout.scratch()[name]) for layout in (into, out))
        assert left == right


@pytest.mark.parametrize(
    "width, made_ranks, features",
    [(5120, 0, 64), (5120, 48, 64), (2048, 0, 32), (2048, 32, 32), (2048, 48, 16), (128, 16, 16)],
)
def test_few_features_are_spread_over_many_programs(width, made_ranks, features):
    schedule = gs.product_schedule(1, 1, width, made_ranks=made_ranks)
    assert schedule.features == features and schedule.programs == width // features
    assert gs.product_schedule(1, 1, width, contract=1).width == 64


def test_many_features_leave_room_for_ranks_in_one_block():
    heads = dict(columns=(4096, 512, 512))
    schedule = gs.product_schedule(1, 1, 5120, made_ranks=16, equal=True, **heads)
    assert (schedule.features, schedule.programs) == (48, 86 + 11 + 11)
    # W has as many stages as without adapters.
    assert schedule.stages == gs.product_schedule(1, 1, 5120, equal=True).stages
    # Not where some tiles would begin after others, nor where columns are narrower.
    assert gs.product_schedule(1, 1, 5120, made_ranks=32, **heads).features == 64
    assert gs.product_schedule(1, 1, 6400, made_ranks=16).features == 64
    assert gs.product_schedule(1, 1, 4128, made_ranks=16, columns=(4096, 32)).features == 64


def test_ranks_that_leave_no_room_for_few_features():
    assert gs.product_schedule(1, 1, 128, made_ranks=64).width == 64


def test_products_that_cannot_make_u():
    def fits(starts, widths, ranks, gated, features=64):
        scaling = array(8, 1, dtype=jnp.float32)
        unmade = tuple(Unmade(array(8, 4, rank, 512), scaling) for rank in ranks)
        return Inner(unmade, starts, widths, gated).fits(features)

    assert fits((0, 512), (512, 64), (16, 64), False)
    assert not fits((0, 64), (64, 512), (16, 64), False, features=128)  # a tile of two terms
    assert not fits((0,), (512,), (72,), False)  # more ranks than a block has
    assert fits((0, 512), (512, 512), (32, 16), True)
    assert not fits((0, 512), (512, 512), (40, 16), True)


@pytest.mark.parametrize("width, most", [(32, 8), (64, 8), (128, 8), (256, 4), (2048, 0)])
def test_a_router_makes_u_for_each_of_few_rows(width, most):
    """One tile for each program, all of them at once; of more rows one tile has them all."""
    assert [rows for rows in range(1, 200) if gs.is_read_again(rows, width)] == [
        *range(1, most + 1)
    ]
    for rows in range(2, most + 1):
        alone = gs.product_schedule(rows, 1, width, 1, 4, made_ranks=16, equal=True, alone=True)
        assert (alone.rows_of_tile, alone.heights) == (1, (8,))
        assert alone.programs == rows * width // alone.features <= gs.PROGRAMS // 2
        assert alone.features + 16 <= 64 and alone.stages >= 3
        together = gs.product_schedule(rows, 1, width, 1, 4, equal=True)
        assert together.rows_of_tile == together.heights[-1] >= rows


@pytest.mark.parametrize("rows", [2, 8, 32, 64, 96])
@pytest.mark.parametrize(
    "k, width, ranks", [(2048, 5120, (16, 16, 16)), (4096, 2048, (16,)), (2048, 128, (16,))]
)
def test_shrinks_beside_products_of_few_rows(rows, k, width, ranks):
    x = array(rows, k)
    factors = tuple(array(8, 1, rank, k) for rank in ranks)
    scalings = tuple(array(8, 1, dtype=jnp.float32) for _ in ranks)
    of_product = functools.partial(gs.product_schedule, rows, 1, width, equal=True)
    schedule = of_product(beside=gs.BYTES_BESIDE)
    known = x, factors, scalings, (0,) * len(ranks), schedule
    beside = mosaic_gpu._made_in_product(*known, 1, ahead=False)
    programs = beside.schedule.programs
    # Who has tiles has no units, and the other way around; all are there at once.
    assert programs + schedule.programs == MULTIPROCESSORS
    assert beside.units <= rows * len(ranks) and beside.schedule.block <= ss.BLOCK_OF_ROWS
    # What a product leaves to it costs the product no stage but for the smallest.
    alone = of_product()
    assert schedule == dataclasses.replace(alone, stages=schedule.stages)
    assert schedule.stages >= min(3, alone.stages)
    unmade = tuple(map(Unmade, factors, scalings))
    widths = [width] if len(ranks) == 1 else [4096, 512, 512]
    b = tuple(array(8, 1, *its) for its in zip(ranks, widths, strict=True))
    starts = (0, 4096, 4608)[: len(ranks)]
    layout = gpu_product_layout.ProductLayout(
        x,
        array(1, width, k),
        gpu_product.Terms((), b, unmade, beside),
        starts,
        (0,) * len(ranks),
        schedule,
        2,
        None,
        dataclasses.replace(IN_TILES, equal=True),
        False,
        jnp.dtype(jnp.bfloat16),
    )
    scratch = layout.scratch()
    own = scratch.pop("shrink")
    assert sum(map(bytes_of, [*scratch.values(), *own.values()])) <= LIMIT
    # The shrink's stages are no larger than the product's, in which they are.
    stage = schedule.stages * schedule.depth
    of_x, of_a = (bytes_of(views[0]) for views in beside.stage_views())
    assert of_x <= stage * schedule.heights[-1] * 128
    assert of_a <= stage * max(64, schedule.features) * 128


def test_shrinks_that_have_no_programs_to_be_made_by():
    factor, scaling = array(8, 128, 16, 2048), array(8, 128, dtype=jnp.float32)
    for rows, groups, width in (512, 128, 768), (32, 1, 16384):
        schedule = gs.product_schedule(rows, groups, width, equal=groups == 1)
        known = array(rows, 2048), (factor,), (scaling,), (0,), schedule
        assert mosaic_gpu._made_in_product(*known, 1, ahead=False) is None


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [4, 32, 64])
@pytest.mark.parametrize("shape", EXPERT_SHAPES.values(), ids=lambda shape: shape.name)
@pytest.mark.parametrize("which", ["gate_up", "down"])
def test_shrinks_before_the_tiles_of_their_programs(shape, which, tokens, rank):
    rows, product = tokens * shape.top_k, getattr(shape, which)
    if rows > ss.BLOCKS_OF_ROWS:
        return
    parts = len(product.parts)
    width, ranks = product.n // parts, (rank,) * parts
    x, groups = array(rows, product.k), product.groups
    sizes = rows, groups, width, parts
    schedule = gs.product_schedule(*sizes, beside=gs.BYTES_BESIDE)
    factors = tuple(array(8, groups, rank, product.k) for _ in ranks)
    scalings = tuple(array(8, groups, dtype=jnp.float32) for _ in ranks)
    known = x, factors, scalings, (0,) * parts, schedule
    ahead = mosaic_gpu._made_in_product(*known, parts, ahead=True)
    stage = schedule.stages * schedule.depth
    if ahead is None:  # x of two of its stages has no room
        assert stage * schedule.heights[-1] < 2 * ss.SHRINK_STEPS * ss.BLOCK_OF_ROWS
        return
    # One program on each multiprocessor, and few words to read at first.
    assert ahead.schedule.programs <= MULTIPROCESSORS
    assert -(-ahead.units // ahead.schedule.programs) * ahead.schedule.block <= 8
    unmade = tuple(map(Unmade, factors, scalings))
    b = tuple(array(8, groups, rank, width) for _ in ranks)
    starts = tuple(width * part for part in range(parts))
    layout = gpu_product_layout.ProductLayout(
        x,
        array(groups, product.n, product.k),
        gpu_product.Terms((), b, unmade, ahead),
        starts,
        (0,) * parts,
        schedule,
        2,
        Gate() if parts == 2 else None,
        IN_TILES,
        False,
        jnp.dtype(jnp.bfloat16),
    )
    scratch = layout.scratch()
    own = scratch.pop("shrink")
    assert sum(map(bytes_of, [*scratch.values(), *own.values()])) <= LIMIT
    # The shrink's stages are no larger than the product's, in which they are.
    of_x, of_a = (bytes_of(views[0]) for views in ahead.stage_views())
    assert of_x <= stage * schedule.heights[-1] * 128
    assert of_a <= stage * parts * schedule.features * 128


def check_shrink(rows, ranks, width):
    tile = ss.rank_tile(max(ranks))
    packs = mosaic_gpu._packs(range(len(ranks)), ranks, tile)
    assert [term for pack in packs for term in pack] == list(range(len(ranks)))
    for pack in packs:
        for alone in {False, len(pack) > 1}:
            check_pack(rows, tuple(ranks[term] for term in pack), tile, width, alone)


def check_pack(rows, ranks, tile, width, alone):
    of_unit = width * (len(ranks) if alone else 1)
    for groups in 1, 128:
        check_pieces(rows, ranks, width, (tile, of_unit, alone, ss.piece_rows(rows, groups)))


def check_pieces(rows, ranks, width, sizes):
    *_, alone, piece = sizes
    schedule = ss.shrink_schedule(rows, ranks, *sizes)
    assert schedule == ss.shrink_schedule(rows, ranks, *sizes)
    check_heights(schedule.heights)
    assert schedule.heights[-1] >= (schedule.block or piece)
    # At once, all of them.
    together = -(-schedule.programs // MULTIPROCESSORS)
    assert 1 <= together <= 2
    # Loads of one stage overlap the products of another.
    assert schedule.stages >= 2
    layout = gpu_shrink_layout.ShrinkLayout(
        array(rows, width),
        [array(8, 1, rank, width) for rank in ranks],
        [array(8, 1, dtype=jnp.float32) for _ in ranks],
        (0,),
        tuple(part * width * alone for part in range(len(ranks))),
        schedule,
        False,
    )
    assert shared_memory(layout.scratch()) <= (LIMIT if together == 1 else HALF_LIMIT), schedule


ROWS = st.one_of(st.integers(1, 300), st.integers(1, 300_000))


@settings(max_examples=300, deadline=None)
@given(
    rows=ROWS,
    groups=st.one_of(st.just(1), st.integers(1, 512)),
    width=st.integers(1, 300).map(lambda blocks: 64 * blocks),
    parts=st.sampled_from([1, 2]),
    ranks=st.lists(st.integers(1, MAX_RANK // 8).map(lambda n: 8 * n), max_size=3),
    contract=st.sampled_from([1, 2]),
    wide=st.booleans(),
    equal=st.booleans(),
)
def test_any_product(rows, groups, width, parts, ranks, contract, wide, equal):
    ranks = tuple(ranks[:2] if parts == 2 else ranks)
    out_dtype = jnp.dtype(jnp.float32 if wide and parts == 1 else jnp.bfloat16)
    contract = 2 if parts == 2 else contract
    schedule = check_product(rows, groups, width, parts, out_dtype.itemsize, contract, equal)
    memory = product_memory(schedule, rows, groups, 512, width, parts, ranks, contract, out_dtype)
    assert memory <= LIMIT, schedule


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, ranks=st.lists(st.integers(1, MAX_RANK), min_size=1, max_size=3))
@example(rows=4096, ranks=[MAX_RANK] * 3)
def test_any_shrink(rows, ranks):
    check_shrink(rows, tuple(-(-rank // 8) * 8 for rank in ranks), 512)


@pytest.mark.parametrize("rank", range(1, MAX_RANK + 1))
def test_rank_tile(rank):
    """A swizzle of the tensor cores that holds the rank, or the widest, and no wider than that."""
    tile = ss.rank_tile(rank)
    assert tile in (16, 32, 64)
    assert tile >= min(rank, 64) and (tile == 16 or tile // 2 < rank)


@pytest.mark.parametrize(
    "buckets, ranks, width, blocks",
    [
        (128, (16, 16), 2048, 2),
        (1024, (16, 16), 2048, 4),
        (1024, (16,), 768, 3),  # 384 features are half of it
        (1024, (16,), 256, 2),
        (264, (64, 64), 2048, 4),
        (1, (16,), 8192, 2),
    ],
)
def test_features_of_outer_products(buckets, ranks, width, blocks):
    """Units of many features, unless programs would have few of them, or much of none."""
    columns = tuple((64 * term, rank) for term, rank in enumerate(ranks))
    spans = ((0, width),) * len(ranks)
    assert gpu_outer.blocks_of_consumer(buckets, columns, spans) == blocks


def test_few_equal_tiles_leave_no_program_without_work():
    for rows in (1, 3, 17):
        schedule = gs.product_schedule(rows, 128, 64)
        assert schedule.programs <= rows


def test_the_widest_rows_that_can_be_spread():
    """While one row is stored the next is loaded."""
    assert SHARED_MEMORY // (2 * gpu_spread.MAX_WIDTH) >= 2
    wide = gpu_spread.MAX_WIDTH
    mosaic_gpu.check(array(8, wide), array(1, 64, wide), (None,), (64,))
    with pytest.raises(NotImplementedError, match=f"K goes up to {wide}"):
        mosaic_gpu.check(array(8, wide + 64), array(1, 64, wide + 64), (None,), (64,))


@pytest.mark.parametrize("width, height, turns", [(2048, 128, 2), (5120, 128, 5), (128, 64, 1)])
def test_height_of_dense_layers(width, height, turns):
    """o, qkv and router of Qwen3-30B-A3B, 4096 rows: programs end their last turns together."""
    schedule = gs.product_schedule(4096, 1, width, equal=True)
    assert schedule.heights == (height,)
    tiles = -(-4096 // height) * -(-width // schedule.features)
    assert -(-tiles // schedule.programs) == turns and tiles > 0.9 * turns * schedule.programs


@pytest.mark.parametrize("rows", [8, 300, 4096, 16384, 32768, 100_000])
@pytest.mark.parametrize("groups", [1, 8, 128])
def test_tiles_fit_the_registers_that_consumers_begin_with(monkeypatch, rows, groups):
    """Where they cannot have others' (JAX 0.12), a tile's sums are of at most 136 rows."""
    monkeypatch.setattr(gs, "TALLEST", 136)
    for width, parts in ((768, 2), (2048, 1)):
        schedule = gs.product_schedule(rows, groups, width, parts, equal=groups == 1)
        heights = schedule.heights
        assert list(heights) == sorted(set(heights)) and heights[-1] <= 136
        assert all(height > 0 and height % 8 == 0 for height in heights)
        assert schedule.stages >= 3
