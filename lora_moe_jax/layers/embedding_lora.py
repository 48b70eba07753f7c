"""An embedding's low-rank product, u = A[slot, :, token] and y + s · u · B[slot], with gradients.

Many tokens may read one column of A, and all tokens of an adapter its B. Their gradients are summed
in float32 in the order of tokens, so that they depend on the adapter's own tokens alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import Lora, Slots, lora_matmul
from pallas_kernels.apart import apart
from pallas_kernels.grouped_lora_matmul.lora import has_slot, terms_of_part


def columns(lora: Slots, slots: jax.Array, row: jax.Array) -> jax.Array:
    """a `[S, 1, R, V]` of each token's slot and row: `[T, R]` with the largest R of the classes.

    Zero past the rank of the token's class, and for tokens without an adapter.
    """
    classes = list(_classes(lora, slots))
    most, u = max(pair.a.shape[2] for pair, _ in classes), 0
    for pair, own in classes:
        its = _columns(pair.a, own, row)
        its = jnp.pad(its, ((0, 0), (0, most - its.shape[1])))
        u = jnp.where((own >= 0)[:, None], its, u)
    return u


def scalings(lora: Slots, slots: jax.Array) -> jax.Array:
    """float32 `[T, 1]`, the scaling of each token's slot; 0 for tokens without an adapter."""
    of_token = 0.0
    for pair, own in _classes(lora, slots):
        of_token = jnp.where(own >= 0, pair.scaling[jnp.maximum(own, 0), 0], of_token)
    return of_token[:, None]


def plus_rows(y: jax.Array, u: jax.Array, lora: Slots, slots: jax.Array) -> jax.Array:
    """y + u `[T, R]` · b `[S, 1, R, H]` of each token's slot, added in rank order in float32."""
    for pair, own in _classes(lora, slots):
        its = _plus_rows(y, u[:, : pair.b.shape[2]], pair.b, own)
        y = jnp.where((own >= 0)[:, None], its, y)
    return y


def _classes(lora: Slots, slots: jax.Array):
    """(pair, each token's slot in the class, -1 for others) of each class."""
    for _, first, pair in terms_of_part(0, lora):
        yield pair, jnp.where(has_slot(slots, first, pair.a.shape[0]), slots - first, -1)


@jax.custom_vjp
def _columns(a, slots, row):
    """Of slot 0 where there is none."""
    return a[jnp.maximum(slots, 0), 0, :, row]


def _columns_forward(a, slots, row):
    return _columns(a, slots, row), (a, slots, row)


def _columns_backward(saved, du):
    a, slots, row = saved
    count, _, rank, vocab = a.shape
    place = jnp.arange(slots.shape[0])
    past = count * vocab + place  # no two tokens write to one place at a time
    key = jnp.where(slots >= 0, slots * vocab + row, past)
    order = jnp.argsort(key, stable=True)
    begins = key[order] != jnp.roll(key[order], 1)
    turn = place - lax.cummax(jnp.where(begins, place, 0))
    turn = jnp.zeros_like(turn).at[order].set(turn, unique_indices=True)

    def add(i, total):
        index = jnp.where(turn == i, key, past)
        return total.at[index].add(du.astype(jnp.float32), mode="drop", unique_indices=True)

    total = jnp.zeros((count * vocab, rank), jnp.float32)
    total = lax.fori_loop(0, jnp.max(turn) + 1, add, total)
    return total.reshape(count, 1, vocab, rank).swapaxes(2, 3).astype(a.dtype), None, None


_columns.defvjp(_columns_forward, _columns_backward)


@jax.custom_vjp
def _plus_rows(y, u, b, slots):
    slot = jnp.maximum(slots, 0)
    for rank in range(b.shape[2]):
        y = y + apart(u[:, rank, None] * b[slot, 0, rank].astype(jnp.float32))
    return y


def _plus_rows_forward(y, u, b, slots):
    return _plus_rows(y, u, b, slots), (u, b, slots)


def _plus_rows_backward(saved, dy):
    """The gradient of `lora_matmul` with A = 1 and no base."""
    u, b, slots = saved
    count, _, rank, width = b.shape
    eye = jnp.broadcast_to(jnp.eye(rank, dtype=b.dtype), (count, 1, rank, rank))
    scaling = jnp.ones((count, 1), jnp.float32)

    def product(u, b):
        w = jnp.zeros((width, rank), b.dtype)
        return lora_matmul(u, w, slots, (Lora(eye, b, scaling),))

    _, pullback = jax.vjp(product, u, b)
    return dy, *pullback(dy), None


_plus_rows.defvjp(_plus_rows_forward, _plus_rows_backward)
