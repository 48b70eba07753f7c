"""The TPU kernel of paged attention: one pass over a request's cache, in order of position.

A tile is some consecutive tokens of one request, which read the cache once together; rows of a
product are (token, query head of one head of the cache). Grouped heads and latents differ only in
which caches are keys and which one is values.

    for each tile of tokens:
        for each block of 256 positions: its pages arrive from HBM, several blocks ahead;
            for each head of the cache, for each window of a tile's tokens:
                S = Q · Kᵀ                 [rows, 256 positions]
                P = exp2(S - maximum)      rounded to the cache's dtype
                O = O · correction + P · V

Every row's numbers are its own: blocks come in order of position from the first, and one that lies
wholly past a row's position (or before its window) changes no bit of it, so that it may be left
out. So bits do not depend on the tile, the chunk or the batch. Only pages that hold a position some
token sees are read. Values of positions that no token sees are set to zero, as they may be
anything, and 0 x NaN is NaN.

A position's heads share 32-bit words in VMEM (two heads of bfloat16 a word): a head's keys are a
strided load of words and a shift.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_lora_matmul.tpu_common import HBM, dot, loop, nbytes
from pallas_kernels.grouped_lora_matmul.tpu_schedule import LANES, Device
from pallas_kernels.paged_attention.tiles import TILE_WORDS, token_tiles
from pallas_kernels.paged_attention.tpu_sizes import BLOCK, Sizes


def attention_kernel(sizes: Sizes, queries, caches, view, device: Device, sinks=None):
    """Attends.

    Args:
      queries: one [T, H, columns] for each of the caches that hold keys.
      caches: [P, page, heads of the cache, columns] each; without the heads' axis if there is one.
      sinks: [H], or None. Sums begin with them: scores without values.

    Returns:
      [T, H, columns of the values] in the queries' dtype.
    """
    s = sizes
    padding = s.rows_of_token - s.group

    def by_cache_head(q):
        q = q.reshape(s.tokens, s.kv_heads, s.group, q.shape[2])
        return jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))

    queries = [by_cache_head(q) for q in queries]
    sinks = [] if sinks is None else [_over_lanes(s, sinks)]
    dtype = queries[0].dtype
    of_token = (s.kv_heads, s.rows_of_token)
    state = (s.kv_heads, s.height * s.rows_of_token)
    scratch = dict(
        q_stages=[pltpu.VMEM((2, s.height, *of_token, q.shape[3]), dtype) for q in queries],
        q_arrived=pltpu.SemaphoreType.DMA((2,)),
        rings=[pltpu.VMEM((s.stages, *s.block_shape(i)), caches[i].dtype) for i in range(2)],
        arrived=pltpu.SemaphoreType.DMA((s.stages, 2)),
        maximum=pltpu.VMEM((*state, LANES), jnp.float32),
        total=pltpu.VMEM((*state, LANES), jnp.float32),
        sums=pltpu.VMEM((*state, s.value_width), jnp.float32),
        y_stage=pltpu.VMEM((s.height, *of_token, s.value_width), dtype),
        stored=pltpu.SemaphoreType.DMA(()),
    )
    positions = s.table_columns * s.page  # as many as there may be: a guess at the longest
    width = sum(q.shape[3] for q in queries) + s.value_width
    kernel = pl.pallas_call(
        functools.partial(_body, s, len(queries), len(caches)),
        out_shape=jax.ShapeDtypeStruct((s.tokens, *of_token, s.value_width), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(device.cores,),
            in_specs=[
                *[pl.BlockSpec(memory_space=HBM)] * (len(queries) + len(caches)),
                *[pl.BlockSpec(memory_space=pltpu.VMEM)] * len(sinks),
            ],
            out_specs=pl.BlockSpec(memory_space=HBM),
            scratch_shapes=[scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=device.limit,
            shape_invariant_numerics=True,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * s.tokens * s.heads * width * positions,
            bytes_accessed=nbytes(queries) + positions * s.requests * s.position_bytes,
            transcendentals=s.tokens * s.heads * positions,
        ),
        name=s.name(),
    )
    tables = *token_tiles(view, s.height), view.page_tables.reshape(-1)
    y = kernel(*tables, *queries, *caches, *sinks)
    return y[:, :, : s.group].reshape(s.tokens, s.heads, s.value_width)


def _over_lanes(sizes: Sizes, sinks):
    """float32 [heads of the cache, rows of a token, 128], scaled for powers of two."""
    s = sizes
    sinks = sinks.astype(jnp.float32).reshape(s.kv_heads, s.group, 1) * math.log2(math.e)
    sinks = jnp.pad(sinks, ((0, 0), (0, s.rows_of_token - s.group), (0, 0)))
    return jnp.broadcast_to(sinks, (s.kv_heads, s.rows_of_token, LANES))


def _body(sizes: Sizes, query_count, cache_count, count, words, page_tables, *refs):
    *refs, y, scratch = refs
    queries, refs = refs[:query_count], refs[query_count:]
    arrays = queries, refs[:cache_count], refs[cache_count:]
    kernel = _Kernel(sizes, count[0], words, page_tables, *arrays, y, **scratch)
    kernel.run(pl.program_id(0), pl.num_programs(0))


class _Tile(NamedTuple):
    """Tokens of one request; they see blocks [first_block, end_block)."""

    token: jax.Array
    tokens: jax.Array
    request: jax.Array
    position: jax.Array
    first: jax.Array  # the first position that its first token sees
    first_block: jax.Array
    end_block: jax.Array

    @property
    def last(self):
        """The position of the last token."""
        return self.position + self.tokens - 1


class _Kernel:
    """One program, which takes every so many tiles, over the kernel's references."""

    def __init__(
        self,
        sizes,
        count,
        words,
        page_tables,
        queries,
        caches,
        sinks,
        y,
        *,
        q_stages,
        q_arrived,
        rings,
        arrived,
        maximum,
        total,
        sums,
        y_stage,
        stored,
    ):
        self.sizes, self.count = sizes, count
        self.tile_words, self.page_tables = words, page_tables
        self.queries, self.caches, self.sinks, self.y = queries, caches, sinks, y
        self.q_stages, self.q_arrived = q_stages, q_arrived
        self.rings, self.arrived = rings, arrived
        self.maximum, self.total, self.sums = maximum, total, sums
        self.y_stage, self.stored = y_stage, stored

    def run(self, program, programs):
        s = self.sizes
        mine = lax.div(self.count - program + (programs - 1), programs)
        pl.when(mine > 0)(lambda: self.copy_queries(self.tile_at(program), 0, "start"))
        ahead = self.with_block(programs, program, self.tile_at(program).first_block)
        fetch = functools.partial(self.fetch, programs)
        ahead = lax.fori_loop(0, s.stages, fetch, ahead)

        def work(i, state):
            tile = self.tile_at(program + i * programs)
            following = self.tile_at(program + (i + 1) * programs)
            pl.when(i + 1 < mine)(lambda: self.copy_queries(following, (i + 1) % 2, "start"))
            self.copy_queries(tile, i % 2, "wait")
            self.clear(tile)

            def attend(block, state):
                step, ahead = state
                stage = lax.rem(step, jnp.int32(s.stages))
                self.wait_block(tile, block, stage)
                self.attend(tile, block, stage, i % 2)
                return step + 1, self.fetch(programs, stage, ahead)

            state = lax.fori_loop(tile.first_block, tile.end_block, attend, state)
            pl.when(i > 0)(
                lambda: self.copy_result(self.tile_at(program + (i - 1) * programs), "wait")
            )
            self.finish(tile)
            self.copy_result(tile, "start")
            return state

        lax.fori_loop(0, mine, work, (jnp.int32(0), ahead))
        last = self.tile_at(program + (mine - 1) * programs)
        pl.when(mine > 0)(lambda: self.copy_result(last, "wait"))

    # What there is to do.

    def tile_at(self, index) -> _Tile:
        s = self.sizes
        # Also asked for past the last tile, and before the first: any tile will do.
        index = jnp.clip(index, 0, s.tokens - 1)
        token, tokens, request, position = (
            self.tile_words[index * TILE_WORDS + word] for word in range(TILE_WORDS)
        )
        first = jnp.int32(0) if s.window is None else jnp.maximum(position - s.window + 1, 0)
        end = lax.div(position + tokens + (BLOCK - 1), jnp.int32(BLOCK))
        return _Tile(
            token=token,
            tokens=tokens,
            request=request,
            position=position,
            first=first,
            first_block=lax.div(first, jnp.int32(BLOCK)),
            end_block=jnp.where(request >= 0, end, 0),
        )

    def with_block(self, programs, index, block):
        """The tile and block if the tile has it, else the first block of those that follow."""

        def has_none(state):
            index, block = state
            return (index < self.count) & (block >= self.tile_at(index).end_block)

        def following(state):
            index = state[0] + programs
            return index, self.tile_at(index).first_block

        return lax.while_loop(has_none, following, (index, block))

    # Copies.

    def fetch(self, programs, stage, ahead):
        """Starts the copies of the next block that nobody has fetched; returns the one after."""
        index, block = ahead
        start = functools.partial(self.start_block, self.tile_at(index), block, stage)
        pl.when(index < self.count)(start)
        return self.with_block(programs, index, block + 1)

    def start_block(self, tile: _Tile, block, stage):
        def page(number):
            self.copy_page(tile, block, stage, number, "start")

        self.by_page(tile, block, page)

    def wait_block(self, tile: _Tile, block, stage):
        def all_pages():
            for i, ring in enumerate(self.rings):
                whole = ring.at[stage]
                pltpu.make_async_copy(whole, whole, self.arrived.at[stage, i]).wait()

        def page(number):
            self.copy_page(tile, block, stage, number, "wait")

        self.by_page(tile, block, page, all_pages)

    def by_page(self, tile: _Tile, block, body, all_pages=None):
        """Calls body(number) for those pages of a block that hold a position some token sees.

        Or `all_pages` where that is all of them: without a branch their scalar work overlaps.
        """
        copy, start = self.sizes.copy, block * BLOCK
        first = lax.div(jnp.maximum(tile.first - start, 0), jnp.int32(copy))
        seen = jnp.minimum(tile.last + 1 - start, BLOCK)
        stop = lax.div(seen + (copy - 1), jnp.int32(copy))
        whole = stop - first == BLOCK // copy

        def unrolled():
            for number in range(BLOCK // copy):
                body(number)

        pl.when(whole)(all_pages or unrolled)
        pl.when(~whole)(lambda: _loop_between(first, stop, body))

    def copy_page(self, tile: _Tile, block, stage, number, act):
        s = self.sizes
        position = block * BLOCK + number * s.copy
        column = jnp.minimum(lax.div(position, jnp.int32(s.page)), s.table_columns - 1)
        # In range whatever the table holds: copies are not checked, which would take most of the
        # time between blocks.
        page = self.page_tables[tile.request * s.table_columns + column]
        page = jnp.clip(page, 0, self.caches[0].shape[0] - 1)
        rows = pl.ds(number * s.copy, s.copy)
        for i, (cache, ring) in enumerate(zip(self.caches, self.rings, strict=True)):
            source = cache.at[page]
            if s.copy < s.page:
                inside = lax.rem(position, jnp.int32(s.page))
                source = source.at[pl.ds(pl.multiple_of(inside, s.copy), s.copy)]
            for line, columns in enumerate(s.lines(i)):
                target = ring.at[stage, line, rows]
                part = source.at[..., columns] if ring.shape[1] > 1 else source
                getattr(pltpu.make_async_copy(part, target, self.arrived.at[stage, i]), act)()

    def copy_queries(self, tile: _Tile, buffer, act):
        def token(i):
            for q, stage in zip(self.queries, self.q_stages, strict=True):
                source, target = q.at[tile.token + i], stage.at[buffer, i]
                getattr(pltpu.make_async_copy(source, target, self.q_arrived.at[buffer]), act)()

        loop(tile.tokens, token)

    def copy_result(self, tile: _Tile, act):
        def token(i):
            copy = pltpu.make_async_copy(self.y_stage.at[i], self.y.at[tile.token + i], self.stored)
            getattr(copy, act)()

        loop(tile.tokens, token)

    # The work on a tile.

    def by_window(self, tile: _Tile, body):
        """Calls body(each), where each(work) calls work(first token, tokens) for all windows.

        A lone token has a window of its own size: in decoding all are.
        """
        size = self.sizes.window_tokens
        pl.when(tile.tokens == 1)(lambda: body(lambda work: work(0, 1)))

        @pl.when(tile.tokens > 1)
        def _several():
            count = lax.div(tile.tokens + (size - 1), jnp.int32(size))
            body(lambda work: loop(count, lambda i: work(i * size, size)))

    def rows(self, token, tokens):
        """The rows of a window."""
        unit = self.sizes.rows_of_token
        return pl.ds(pl.multiple_of(token * unit, unit), tokens * unit)

    def clear(self, tile: _Tile):
        def window(token, tokens):
            rows = self.rows(token, tokens)
            for head in range(self.sizes.kv_heads):
                maximum, total = self.beginning(head, tokens)
                for ref, value in ((self.maximum, maximum), (self.total, total), (self.sums, 0.0)):
                    ref[head, rows, :] = jnp.full((rows.size, ref.shape[2]), value, jnp.float32)

        self.by_window(tile, lambda each: each(window))

    def beginning(self, head, tokens):
        """The maximum and the total of a head's rows before they see a position."""
        if not self.sinks:
            return -jnp.inf, 0.0
        (sinks,) = self.sinks
        return jnp.concatenate([sinks[head]] * tokens), 1.0

    def attend(self, tile: _Tile, block, stage, buffer):
        s = self.sizes
        start = block * BLOCK
        seen = tile.first - start, tile.last + 1 - start

        def heads(each):
            for head in range(s.kv_heads):
                keys = [self.head_of(i, stage, head) for i in range(s.key_caches)]
                values = self.head_of(s.value_cache, stage, head, seen)
                each(functools.partial(self.add_block, tile, start, buffer, head, keys, values))

        self.by_window(tile, heads)

    def head_of(self, cache, stage, head, seen=None):
        """One head's [BLOCK, width] of a block; zeros outside of the positions in `seen`."""
        ring = self.rings[cache]
        if self.sizes.kv_heads == 1 and seen is None:
            return ring[stage, 0]
        columns = []
        for line in range(ring.shape[1]):
            found = self.line_of(ring.at[stage, line], head)
            if seen is not None:
                row = lax.broadcasted_iota(jnp.int32, found.shape, 0)
                found = jnp.where((row >= seen[0]) & (row < seen[1]), found, 0.0)
            columns.append(found.astype(ring.dtype))
        return jnp.concatenate(columns, axis=1)

    def line_of(self, ref, head):
        """Of a block's [BLOCK, heads, columns], or [BLOCK, columns], a head in float32."""
        if self.sizes.kv_heads == 1:
            return ref[...].astype(jnp.float32)
        if self.sizes.interpreted:
            return ref[:, head].astype(jnp.float32)
        return head_from_words(ref, head)

    def add_block(self, tile: _Tile, start, buffer, head, keys, values, token, tokens):
        """One block of positions, from `start` on, into the running sums of a window."""
        s = self.sizes
        sees = tile.position + token + (tokens - 1) >= start
        if s.window is not None:
            sees &= tile.position + token - s.window < start + (BLOCK - 1)

        def add():
            rows = self.rows(token, tokens)
            scores = sum(
                dot(self.query(i, buffer, head, token, tokens), its, 1, 1)
                for i, its in enumerate(keys)
            )
            scores = self.masked(tile, start, token, scores * (s.scale * math.log2(math.e)))
            old = self.maximum[head, rows, :]
            new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
            self.maximum[head, rows, :] = new
            # Before a row's first visible block the maximum is -inf; keep the arithmetic finite.
            base = jnp.where(new == -jnp.inf, 0.0, new)
            correction = jnp.exp2(old - base)
            weights = jnp.exp2(scores - _across(base, BLOCK))
            total = weights.sum(axis=1, keepdims=True)
            self.total[head, rows, :] = self.total[head, rows, :] * correction + total
            added = dot(weights.astype(values.dtype), values, 1, 0)
            sums = self.sums[head, rows, :]
            self.sums[head, rows, :] = sums * _across(correction, s.value_width) + added

        # A lone token sees every block it is given.
        add() if tokens == 1 else pl.when(sees)(add)

    def query(self, cache, buffer, head, token, tokens):
        """The rows of a window: [rows, width]."""
        ref = self.q_stages[cache]
        found = ref[buffer, pl.ds(token, tokens), head]
        # Rows of a token are whole registers of float32, not always of bfloat16.
        flat = found.astype(jnp.float32).reshape(tokens * found.shape[1], found.shape[2])
        return flat.astype(ref.dtype)

    def masked(self, tile: _Tile, start, token, scores):
        """-inf where a row may not look."""
        row = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        last = tile.position + token - start + lax.div(row, jnp.int32(self.sizes.rows_of_token))
        visible = column <= last
        if self.sizes.window is not None:
            visible &= column > last - self.sizes.window
        return jnp.where(visible, scores, -jnp.inf)

    def finish(self, tile: _Tile):
        """The weighted means, to where they are copied from; zeros for padding tokens."""
        s = self.sizes

        def window(token, tokens):
            rows = self.rows(token, tokens)
            for head in range(s.kv_heads):
                total = _across(self.total[head, rows, :], s.value_width)
                mean = jnp.where(total == 0, 0.0, self.sums[head, rows, :] / total)
                mean = mean.reshape(tokens, s.rows_of_token, s.value_width)
                self.y_stage[pl.ds(token, tokens), head] = mean.astype(self.y_stage.dtype)

        self.by_window(tile, lambda each: each(window))


def head_from_words(ref, head: int):
    """One head of [BLOCK, heads, columns] in VMEM, as float32: a strided load of the words.

    The interpreters that look for races do not have such views.
    """
    heads, columns = ref.shape[1:]
    packed = 4 // ref.dtype.itemsize
    if packed == 2:
        ref = ref.bitcast(jnp.uint32)
    stride = heads // packed
    rows = pl.ds(head // packed, BLOCK, stride=stride) if stride > 1 else slice(None)
    words = ref.reshape(BLOCK * stride, columns)[rows, :]
    if packed == 1:
        return words
    # The upper half of a float32 is a bfloat16.
    words = (words << (16 - 16 * (head % packed))) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(words, jnp.float32)


def _across(lanes, width: int):
    """Columns that are all alike: [rows, 128] to [rows, width]."""
    if width <= LANES:
        return lanes[:, :width]
    return jnp.concatenate([lanes] * (width // LANES), axis=1)


def _loop_between(first, stop, body):
    """Calls body(i) for first <= i < stop."""

    def step(i, carry):
        body(i)
        return carry

    lax.fori_loop(first, stop, step, 0)
