"""Kernels for GPUs: a program has some rows, and adds their features in an order of its own.

That order follows from the number of features, and from nothing else: one program runs for any
number of rows. Triton's blocks are powers of two; what lies past a row's end is masked.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layered import LAYER_OPERANDS, is_layered, layer_operands, number_of

WIDEST = 8192  # features that a program has at once
BLOCK = 2048  # values of a program, where rows are short: several share it


def row_sum(x):
    return _call("row_sum", _row_sum_kernel, [_column_of(x, x.dtype)], [x])[0]


def row_dot(x, y):
    return _call("row_dot", _row_dot_kernel, [_column_of(x, _wide(x, y))], [x, y])[0]


def scaled_and_dot(x, y, scale):
    results = [y, _column_of(x, _wide(x, y))]
    return tuple(_call("scaled_and_dot", _scaled_and_dot_kernel, results, [x, y, scale]))


def rms_norm(x, weight, eps):
    kernel = functools.partial(_rms_norm_kernel, eps)
    return _call("rms_norm", kernel, [x], [x], weight)[0]


def norm_gradient(x, weight, dy, eps, more=None):
    kernel = functools.partial(_norm_gradient_kernel, eps)
    rows = [x, dy] if more is None else [x, dy, more]
    return _call("norm_gradient", kernel, [x], rows, weight)[0]


def add_norm(x, more, weight, eps):
    kernel = functools.partial(_add_norm_kernel, eps)
    return tuple(_call("add_norm", kernel, [x, x], [x, more], weight))


def log_sum_exp(x):
    """A program has a chunk of a row, as of few rows one program each would be all; then a join."""
    rows, chunks = x.shape[0], _Tile(*x.shape).chunks
    part = jax.ShapeDtypeStruct((rows, chunks), x.dtype)
    parts = _call("sum_exp", _sum_exp_kernel, [part] * 2, [x], chunks=chunks)
    return _call("log_sum_exp", _log_sum_exp_kernel, [_column_of(x, x.dtype)], parts)[0][:, 0]


def _row_sum_kernel(tile, x, out):
    def add(i, total):
        return total + tile.load(x, i, 0)

    tile.store_column(out, tile.loop(add, tile.full(0)).sum(axis=1, keepdims=True))


def _row_dot_kernel(tile, x, y, out):
    def add(i, total):
        return total + tile.load(x, i, 0).astype(out.dtype) * tile.load(y, i, 0).astype(out.dtype)

    total = tile.loop(add, tile.full(0, out.dtype))
    tile.store_column(out, total.sum(axis=1, keepdims=True))


def _scaled_and_dot_kernel(tile, x, y, scale, scaled, out):
    factor = tile.load_column(scale).astype(out.dtype)

    def add(i, total):
        part = tile.load(x, i, 0).astype(out.dtype)
        tile.store(scaled, i, (part * factor).astype(scaled.dtype))
        return total + part * tile.load(y, i, 0).astype(out.dtype)

    total = tile.loop(add, tile.full(0, out.dtype))
    tile.store_column(out, total.sum(axis=1, keepdims=True))


def _rms_norm_kernel(eps, tile, x, weight, out):
    def load(i):
        return tile.load(x, i, 0)

    _normalise(eps, tile, load, weight, out)


def _add_norm_kernel(eps, tile, x, more, weight, total, out):
    def load(i):
        parts = (tile.load(its, i, 0).astype(jnp.float32) for its in (x, more))
        return sum(parts).astype(x.dtype)

    def store(i, _):
        tile.store(total, i, load(i))

    _normalise(eps, tile, load, weight, out)
    tile.loop(store, None)


def _normalise(eps, tile, load, weight, out):
    def add_square(i, total):
        part = load(i).astype(jnp.float32)
        return total + part * part

    total = tile.loop(add_square, tile.full(0)).sum(axis=1, keepdims=True)
    scale = lax.rsqrt(total / tile.features + eps)

    def normalise(i, _):
        part = (load(i).astype(jnp.float32) * scale).astype(out.dtype)
        tile.store(out, i, part * tile.load_features(weight, i))

    tile.loop(normalise, None)


def _norm_gradient_kernel(eps, tile, x, dy, *rest):
    *more, weight, out = rest

    def load(i):
        dnormed = tile.load(dy, i, 0) * tile.load_features(weight, i)
        return tile.load(x, i, 0).astype(jnp.float32), dnormed.astype(jnp.float32)

    def add(i, totals):
        part, dnormed = load(i)
        squares, along = totals
        return squares + part * part, along + dnormed * part

    totals = tile.loop(add, (tile.full(0), tile.full(0)))
    squares, along = (total.sum(axis=1, keepdims=True) / tile.features for total in totals)
    inverse = lax.rsqrt(squares + eps)

    def store(i, _):
        part, dnormed = load(i)
        dx = (inverse * (dnormed - part * (inverse * inverse * along))).astype(out.dtype)
        for its in more:
            dx = (dx.astype(jnp.float32) + tile.load(its, i, 0).astype(jnp.float32)).astype(
                dx.dtype
            )
        tile.store(out, i, dx)

    tile.loop(store, None)


def _sum_exp_kernel(tile, x, maxima, totals):
    """The maximum of a chunk, and the sum of exp(x - maximum)."""
    chunk = pl.program_id(1)
    part = tile.load(x, chunk, -jnp.inf)
    # Finite, so that features of -inf alone, or one of inf, do not make exp(-inf + inf).
    bounds = jnp.finfo(jnp.float32)
    maximum = jnp.clip(part.max(axis=1, keepdims=True), bounds.min, bounds.max)
    tile.store_column(maxima, maximum, chunk)
    tile.store_column(totals, jnp.exp(part - maximum).sum(axis=1, keepdims=True), chunk)


def _log_sum_exp_kernel(tile, maxima, totals, out):
    """Joins the chunks, in an order that follows from how many there are."""
    part = tile.load(maxima, 0, -jnp.inf)
    maximum = part.max(axis=1, keepdims=True)
    total = (tile.load(totals, 0, 0) * jnp.exp(part - maximum)).sum(axis=1, keepdims=True)
    tile.store_column(out, maximum + jnp.log(total))


class _Tile:
    """The rows of one program, of which it sees `width` features at once."""

    def __init__(self, rows: int, features: int, program: jax.Array | int = 0):
        self.rows, self.features, self.program = rows, features, program
        self.width = min(pl.next_power_of_2(features), WIDEST)
        self.height = max(1, BLOCK // self.width)

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.features, self.width)

    def loop(self, body, state):
        if self.chunks == 1:
            return body(0, state)
        return lax.fori_loop(0, self.chunks, body, state)

    def full(self, value, dtype=jnp.float32):
        return jnp.full((self.height, self.width), value, dtype)

    def load(self, ref, chunk, other):
        return plgpu.load(ref.at[:, self._columns(chunk)], mask=self._mask(chunk), other=other)

    def load_column(self, ref):
        return plgpu.load(ref, mask=self._real_rows(), other=0)

    def load_features(self, weight, chunk):
        columns = chunk * self.width + lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
        return plgpu.load(weight.at(columns), mask=self._inside(chunk), other=0)

    def store(self, ref, chunk, values):
        plgpu.store(ref.at[:, self._columns(chunk)], values, mask=self._mask(chunk))

    def store_column(self, ref, values, column=0):
        plgpu.store(ref.at[:, pl.ds(column, 1)], values, mask=self._real_rows())

    def _columns(self, chunk):
        return pl.ds(chunk * self.width, self.width)

    def _inside(self, chunk):
        column = lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
        return chunk * self.width + column < self.features

    def _real_rows(self):
        row = lax.broadcasted_iota(jnp.int32, (self.height, 1), 0)
        return self.program * self.height + row < self.rows

    def _mask(self, chunk):
        return self._inside(chunk) & self._real_rows()


class _Weight(NamedTuple):
    """A weight [features]: an array, or a layer's part of one."""

    array: jax.Array
    layer: tuple[jax.Array, ...]

    def at(self, columns):
        return self.array.at[*self.layer, columns]


def _wide(x, y):
    return jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, y.dtype))


def _column_of(x, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], 1), dtype)


def _call(name: str, kernel, results, rows, *weights, chunks: int = 1):
    """Runs a kernel on arrays [rows, features], of which the first has as many as a row has.

    Args:
      results: arrays of the shapes and dtypes of what it gives.
      weights: [features] each; may be `Layered`.
      chunks: programs for the same rows.
    """
    shape = rows[0].shape
    tile, arrays = _Tile(*shape), []
    for weight in weights:
        arrays += [weight.stack, *layer_operands(weight)] if is_layered(weight) else [weight]

    def body(*refs):
        inputs, outputs = refs[: len(rows) + len(arrays)], refs[len(rows) + len(arrays) :]
        rest, found = iter(inputs[len(rows) :]), []
        for weight in weights:
            count = LAYER_OPERANDS * is_layered(weight)
            stack, layer = next(rest), [next(rest) for _ in range(count)]
            found.append(_Weight(stack, (number_of(layer),) if layer else ()))
        kernel(_Tile(*shape, pl.program_id(0)), *inputs[: len(rows)], *found, *outputs)

    wide = tile.chunks * tile.width

    def blocks(its):
        columns = wide if its.shape == shape else its.shape[1]
        return pl.BlockSpec((tile.height, columns), lambda i, _: (i, 0))

    call = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(its.shape, its.dtype) for its in results],
        grid=(pl.cdiv(tile.rows, tile.height), chunks),
        in_specs=[
            *map(blocks, rows),
            *[pl.BlockSpec(its.shape, lambda i, _, its=its: (0,) * its.ndim) for its in arrays],
        ],
        out_specs=[*map(blocks, results)],
        compiler_params=plgpu.CompilerParams(num_warps=4 if tile.width <= BLOCK else 8),
        interpret=jax.default_backend() == "cpu",
        name=name,
    )
    return call(*rows, *arrays)
