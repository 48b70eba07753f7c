"""Attention of heads whose keys and values are made of cached latents, with adapters on that.

    k_h = c · W_UK,hᵀ + s (c · Aᵀ) · Bᵏ_h      v_h = c · W_UV,hᵀ + s (c · Aᵀ) · Bᵛ_h

with c a position's latent, and beside k_h a rotated key that all heads share. Letters: T tokens of
the batch, H heads, N columns of their queries that are not rotated, E rotated ones, V of values,
C of latents.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_lora_matmul.lora import Lora, Slots, classes_of, slot_counts
from pallas_kernels.latent_attention import differentiable
from pallas_kernels.paged_attention.api import PageView, in_32_bits
from pallas_kernels.paged_attention.check import check_view
from pallas_kernels.routing_plan.api import check_tokens


class KvB(NamedTuple):
    """What makes keys and values of latents (DeepSeek's kv_b), by head.

    Attributes:
      k_up: W_UK of each head, transposed. v_up: W_UV. They are frozen, and may be `Layered`.
      key_lora: a is Bᵏ `[slots, H, R, N]`, b is A `[slots, 1, R, C]`, scaling `[slots, 1]`; None
        without adapters.
      value_lora: a is A, b is Bᵛ `[slots, H, R, V]`.
    """

    k_up: Float[Array, "heads latent nope"]
    v_up: Float[Array, "heads v latent"]
    key_lora: Slots | None
    value_lora: Slots | None


def latent_attention(
    q_nope: Float[Array, "tokens heads nope"],
    q_rope: Float[Array, "tokens heads rope"],
    latent_pages: Float[Array, "pages page_size latent"],
    rope_pages: Float[Array, "pages page_size rope"],
    view: PageView,
    kv_b: KvB,
    token_slots: Int[Array, " tokens"],
    *,
    scale: float,
) -> Float[Array, "tokens heads v"]:
    """Each token's heads attend to positions 0..its own of its request.

    In the absorbed form: queries go to the latents' space, attend to latents, and what comes of it
    is made values. Exactness and isolation are those of `paged_attention`.

    Differentiable with respect to queries, pages and adapters where the batch holds whole
    sequences, positions from 0 on, each of one adapter: training. The gradient is that of the form
    above, in which a head has N + E and V columns to multiply, not C + E and C: on Hopper GPUs by
    the kernels of grouped heads where they serve these widths, else in plain JAX.

    Raises:
      ValueError: shapes that do not belong together.
    """
    _check(q_nope, latent_pages, kv_b, token_slots)
    check_view(view, q_nope.shape[0])
    arrays = q_nope, q_rope, latent_pages, rope_pages, in_32_bits(view), kv_b, token_slots
    return differentiable.latent_attention(float(scale), *arrays)


def _check(q_nope, latent_pages, kv_b: KvB, token_slots) -> None:
    """Raises ValueError unless kv_b and slots belong to queries and latents."""
    tokens, heads, nope = q_nope.shape
    latent = latent_pages.shape[-1]
    expected = (heads, latent, nope), (heads, kv_b.v_up.shape[1], latent)
    for name, array, shape in zip(("k_up", "v_up"), kv_b[:2], expected, strict=True):
        if array.shape != shape:
            raise ValueError(f"kv_b.{name} must be {list(shape)}, got {list(array.shape)}")
    if (kv_b.key_lora is None) != (kv_b.value_lora is None):
        raise ValueError("kv_b.key_lora and value_lora: both have adapters, or neither has")
    for name, lora in dict(key_lora=kv_b.key_lora, value_lora=kv_b.value_lora).items():
        for pair in classes_of(lora):
            _check_pair(name, pair, heads)
    slots = [slot_counts(lora) for lora in (kv_b.key_lora, kv_b.value_lora)]
    if slots[0] != slots[1]:
        raise ValueError(f"kv_b.key_lora and value_lora must have the same slots, got {slots}")
    check_tokens(tokens, token_slots, None)


def _check_pair(name: str, pair: Lora, heads: int) -> None:
    """Raises ValueError unless Bᵏ or Bᵛ is by head, and A and the scaling are of all."""
    by_head, shared = (pair.a, pair.b) if name == "key_lora" else (pair.b, pair.a)
    if by_head.shape[1] != heads or shared.shape[1] != 1 or pair.scaling.shape[1] != 1:
        shapes = ", ".join(f"{part} {its.shape}" for part, its in pair._asdict().items())
        raise ValueError(
            f"kv_b.{name}: B must be of {heads} heads, A and scaling of 1, got {shapes}"
        )
