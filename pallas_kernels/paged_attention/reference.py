"""The definition of paged attention in NumPy, one token and head at a time."""

from __future__ import annotations

import numpy as np


def gather_positions(pages, view, token):
    """The cached values of positions 0..p of the token's request: [p + 1, *features]."""
    pages = np.asarray(pages, np.float64)
    position, request = int(view.positions[token]), int(view.request[token])
    flat = pages.reshape(-1, *pages.shape[2:])
    page_size = pages.shape[1]
    where = [
        int(view.page_tables[request, p // page_size]) * page_size + p % page_size
        for p in range(position + 1)
    ]
    return flat[where]


def paged_attention(q, k_pages, v_pages, view, *, scale, sliding_window=None, sinks=None):
    """Same as the public function, in float64."""
    q = np.asarray(q, np.float64)
    group = q.shape[1] // k_pages.shape[2]
    out = np.zeros((*q.shape[:2], v_pages.shape[-1]))
    for token in range(q.shape[0]):
        if view.request[token] < 0:
            continue
        k, v = (gather_positions(pages, view, token) for pages in (k_pages, v_pages))
        first = max(0, len(k) - sliding_window) if sliding_window else 0
        for head in range(q.shape[1]):
            scores = k[first:, head // group] @ q[token, head] * scale
            others = [] if sinks is None else [sinks[head]]
            weights = _softmax(np.append(scores, others))[: len(scores)]
            out[token, head] = weights @ v[first:, head // group]
    return out


def paged_latent_attention(q_latent, q_rope, latent_pages, rope_pages, view, *, scale):
    """Same as the public function, in float64."""
    q_latent, q_rope = np.asarray(q_latent, np.float64), np.asarray(q_rope, np.float64)
    out = np.zeros(q_latent.shape)
    for token in range(q_latent.shape[0]):
        if view.request[token] < 0:
            continue
        latent, rope = (
            gather_positions(pages, view, token) for pages in (latent_pages, rope_pages)
        )
        for head in range(q_latent.shape[1]):
            scores = (latent @ q_latent[token, head] + rope @ q_rope[token, head]) * scale
            out[token, head] = _softmax(scores) @ latent
    return out


def _softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
