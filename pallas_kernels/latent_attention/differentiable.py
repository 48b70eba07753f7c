"""Absorbed forward, so that a cache of latents is all that is read; by heads back.

A gradient takes seven products of pairs of tokens, whose cost is that of the columns. Of
DeepSeek-V3's heads they have 192 and 128 columns, of its latents 576 and 512. The result is what
the forward pass made: both forms have the same one but for rounding.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_lora_matmul.api import grouped_lora_matmul, lora_matmul
from pallas_kernels.grouped_lora_matmul.lora import Lora, Slots
from pallas_kernels.kept import kept
from pallas_kernels.paged_attention import differentiable as attention
from pallas_kernels.paged_attention.api import paged_latent_attention


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def latent_attention(
    scale: float, q_nope, q_rope, latent_pages, rope_pages, view, kv_b, token_slots
):
    """See `api.latent_attention`."""
    q = _by_head(q_nope, kv_b.k_up, token_slots, kv_b.key_lora)
    attended = paged_latent_attention(q, q_rope, latent_pages, rope_pages, view, scale=scale)
    return _by_head(attended, kv_b.v_up, token_slots, kv_b.value_lora)


def _by_head(x, w, token_slots, lora: Slots | None):
    """x [T, H, in] times w [H, out, in] of its head: [T, H, out]."""
    tokens, heads, width = x.shape
    rows = jnp.swapaxes(x, 0, 1).reshape(heads * tokens, width)
    y = grouped_lora_matmul(rows, w, None, jnp.tile(token_slots, heads), (lora,))
    return jnp.swapaxes(y.reshape(heads, tokens, -1), 0, 1)


def _forward(scale, *arguments):
    # Differentiated outside of jit, NumPy arguments arrive as they are.
    arguments = jax.tree.map(jnp.asarray, arguments)
    out = kept(latent_attention(scale, *arguments))
    return out, (*arguments, out)


def _backward(scale, saved, dout):
    saved, dout = jax.tree.map(jnp.asarray, (saved, dout))
    q_nope, q_rope, latent_pages, rope_pages, view, kv_b, token_slots, out = saved
    nope = q_nope.shape[-1]
    latent, rope = (attention.read_pages(pages, view) for pages in (latent_pages, rope_pages))
    expand = functools.partial(_keys_and_values, kv_b, token_slots)
    (k_nope, v), pull = jax.vjp(expand, latent, kv_b.key_lora, kv_b.value_lora)
    k_rope = jnp.broadcast_to(rope[:, None], q_rope.shape)
    q, k = (jnp.concatenate(its, axis=-1) for its in ((q_nope, q_rope), (k_nope, k_rope)))
    gradients = attention.platform_gradients()
    dq, dk, dv = gradients(q, k, v, out, dout, view, scale, None, None)
    dq = dq.astype(q.dtype)
    dlatent, *dlora = pull((dk[..., :nope].astype(k.dtype), dv.astype(v.dtype)))
    drope = dk[..., nope:].astype(jnp.promote_types(jnp.float32, dk.dtype)).sum(axis=1)
    return (
        dq[..., :nope],
        dq[..., nope:],
        attention.as_pages(dlatent, latent_pages, view),
        attention.as_pages(drope, rope_pages, view),
        None,
        kv_b._replace(k_up=None, v_up=None, key_lora=dlora[0], value_lora=dlora[1]),
        None,
    )


latent_attention.defvjp(_forward, _backward)


def _keys_and_values(kv_b, token_slots, latent, key_lora, value_lora):
    """k [T, H, N] and v [T, H, V] of latents [T, C]: a dense layer, with A inside for both."""
    keys, values = jnp.swapaxes(jnp.asarray(kv_b.k_up), 1, 2), jnp.asarray(kv_b.v_up)
    heads = keys.shape[0]
    w = [its.reshape(-1, its.shape[-1]) for its in (keys, values)]
    lora = tuple(map(_dense, (_turned(key_lora), value_lora)))
    parts = tuple(its.shape[0] for its in w)
    y = lora_matmul(latent, jnp.concatenate(w), token_slots, lora, parts=parts)
    k, v = jnp.split(y, [parts[0]], axis=1)
    return k.reshape(len(k), heads, -1), v.reshape(len(v), heads, -1)


def _turned(slots: Slots | None) -> Slots | None:
    """Adapters of keys with A inside, as those of values have it."""
    return _of_pairs(lambda pair: Lora(pair.b, pair.a, pair.scaling), slots)


def _dense(slots: Slots | None) -> Slots | None:
    """Adapters whose B are by head, with the heads' columns side by side."""

    def dense(pair: Lora) -> Lora:
        slots, heads, rank, width = pair.b.shape
        b = jnp.swapaxes(pair.b, 1, 2).reshape(slots, 1, rank, heads * width)
        return pair._replace(b=b)

    return _of_pairs(dense, slots)


def _of_pairs(function, slots: Slots | None) -> Slots | None:
    if slots is None or isinstance(slots, Lora):
        return slots and function(slots)
    return tuple(map(function, slots))
