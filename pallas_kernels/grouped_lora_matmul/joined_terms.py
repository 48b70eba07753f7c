"""Several terms in one product, for backends whose u are plain arrays."""

from __future__ import annotations

import itertools

import jax.numpy as jnp


def joined_terms(product, lefts, spans, dtype):
    """`outer` of each (u, rank) of `lefts`, as `dtype`.

    Args:
      product: (left, start, width) -> [slots, groups, R, width], called once for each of the spans.
    """
    found = [None] * len(lefts)
    for span in dict.fromkeys(spans):
        same = [i for i, its in enumerate(spans) if its == span]
        some = [lefts[i] for i in same]
        left = jnp.concatenate([u[:, :rank] for u, rank in some], axis=1)
        ends = list(itertools.accumulate(rank for _, rank in some))
        for i, its in zip(same, jnp.split(product(left, *span), ends[:-1], axis=2), strict=True):
            found[i] = its.astype(dtype)
    return tuple(found)
