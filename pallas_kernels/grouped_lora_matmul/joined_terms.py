"""Several terms in one product, for backends whose u are plain arrays."""

from __future__ import annotations

import itertools

import jax.numpy as jnp


def joined_terms(product, lefts, dtype):
    """`outer` of each (u, rank) of `lefts`, as `dtype`, from one product(left) of them all."""
    left = jnp.concatenate([u[:, :rank] for u, rank in lefts], axis=1)
    ends = list(itertools.accumulate(rank for _, rank in lefts))
    return tuple(part.astype(dtype) for part in jnp.split(product(left), ends[:-1], axis=2))
