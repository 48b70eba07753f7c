"""Packed experts, fused gate and up, and the ranks that padding hides: pure functions on arrays."""

from __future__ import annotations

import numpy as np

from lora_moe_jax.adapters.adapter import LoraPair

# In the metadata of files that this library writes: how gate and up were fused into one pair.
FORM_KEY = "gate_up_proj"
SHARED, BLOCK_DIAGONAL = "shared", "block_diagonal"


def unpack(
    lora_a: np.ndarray, lora_b: np.ndarray, groups: int, *, expert_major: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """PEFT's packed [groups*rank, in] and [out, rank*groups] -> a [groups, rank, in], b [groups,
    rank, out]. Rows of A are expert-major, columns of B rank-major unless `expert_major`."""
    a = lora_a.reshape(groups, -1, lora_a.shape[1])
    if expert_major:
        b = lora_b.reshape(len(lora_b), groups, -1).transpose(1, 2, 0)
    else:
        b = lora_b.reshape(len(lora_b), -1, groups).transpose(2, 1, 0)
    return a, np.ascontiguousarray(b)


def pack(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `unpack`, rank-major."""
    lora_b = b.transpose(2, 1, 0).reshape(b.shape[2], -1)
    return np.ascontiguousarray(a.reshape(-1, a.shape[2])), np.ascontiguousarray(lora_b)


def apart(b: np.ndarray) -> np.ndarray:
    """Gate's columns and then up's, of such that take turns (gpt-oss)."""
    return np.concatenate([b[..., 0::2], b[..., 1::2]], axis=-1)


def in_turn(b: np.ndarray) -> np.ndarray:
    """The inverse of `apart`."""
    return np.stack(np.split(b, 2, axis=-1), axis=-1).reshape(b.shape)


def split_gate_up(
    pair: LoraPair, width: int, form: str | None
) -> tuple[LoraPair | None, LoraPair | None] | None:
    """Splits a fused pair, whose outputs are [gate; up] of `width` each.

    A block-diagonal B (what writers make of two separate pairs) gives two pairs of half the rank;
    any other gives two pairs with the same A. `form` is the file's word on which it is; without
    one, B counts as block-diagonal if its corners are exactly zero and its blocks are not.
    If one half of a declared block-diagonal pair is all zero it is None: it stood for nothing.
    Returns None if the pair contradicts `form`.
    """
    half = pair.rank // 2
    corners = (pair.b[:, :half, width:], pair.b[:, half:, :width])
    blocks = (pair.b[:, :half, :width], pair.b[:, half:, width:])
    diagonal = pair.rank % 2 == 0 and not any(corner.any() for corner in corners)
    if form == BLOCK_DIAGONAL and not diagonal:
        return None
    if form == BLOCK_DIAGONAL or (form is None and diagonal and all(x.any() for x in blocks)):
        ranks = np.minimum(pair.ranks, half)
        halves = [
            LoraPair(np.ascontiguousarray(a), np.ascontiguousarray(b), pair.scaling, ranks)
            for a, b in zip((pair.a[:, :half], pair.a[:, half:]), blocks, strict=True)
        ]
        used = [bool(part.a.any() or part.b.any()) for part in halves]
        if form is None or not any(used):
            used = [True, True]
        return tuple(part if keep else None for part, keep in zip(halves, used, strict=True))
    parts = (pair.b[:, :, :width], pair.b[:, :, width:])
    return tuple(LoraPair(pair.a, np.ascontiguousarray(b), pair.scaling, pair.ranks) for b in parts)


def trim(pair: LoraPair) -> LoraPair:
    """Gives each group the rank past which its rows are zero in both factors.

    Packed and padded layouts store experts of different ranks at the largest; this recovers them.
    A pair that is zero altogether is returned as it is.
    """
    ranks = np.zeros(len(pair.ranks), np.int32)
    for row in reversed(range(pair.rank)):
        used = pair.a[:, row].any(axis=-1) | pair.b[:, row].any(axis=-1)
        ranks[(ranks == 0) & used] = row + 1
        if ranks.all():
            break
    rank = int(ranks.max())
    if rank == 0:
        return pair
    a, b = pair.a, pair.b
    if rank < pair.rank:
        a, b = np.ascontiguousarray(a[:, :rank]), np.ascontiguousarray(b[:, :rank])
    return LoraPair(a, b, np.where(ranks > 0, pair.scaling, np.float32(0)), ranks)
