"""Compiles the TPU attention kernel ahead of time, without a TPU: a line of JSON for each call.

    python -m tests.pallas_kernels.tpu_attention_compile '{"generations": ["v6e"], "tokens": 64}'

The argument holds those of `main`. Runs in a process of its own, as `tpu_compile.py`.
"""

from __future__ import annotations

import json
import os
import sys

from tests.pallas_kernels.tpu_compile import SETTINGS, compiled

PAGES, REQUESTS, COLUMNS = 4096, 64, 256


def call(tokens, heads, kv_heads, widths, window=None, page=16, dtype="bfloat16", sinks=False):
    """A function and its argument shapes; `kv_heads` is 0 for latents."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import PageView, paged_attention, paged_latent_attention

    def array(*sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def numbers(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    def grouped(q, k, v, sinks, *view):
        more = dict(sliding_window=window, sinks=sinks)
        return paged_attention(q, k, v, PageView(*view), **more, **options)

    def latent(q, q_rope, latents, rope, *view):
        return paged_latent_attention(q, q_rope, latents, rope, PageView(*view), **options)

    options = dict(scale=0.1, implementation="mosaic_tpu")
    view = numbers(tokens), numbers(tokens), numbers(REQUESTS, COLUMNS)
    if kv_heads:
        caches = [array(PAGES, page, kv_heads, width) for width in widths]
        sinks = array(heads) if sinks else None
        return grouped, (array(tokens, heads, widths[0]), *caches, sinks, *view)
    caches = [array(PAGES, page, width) for width in widths]
    return latent, (*(array(tokens, heads, width) for width in widths), *caches, *view)


CALLS = {
    "qwen3-30b-a3b": dict(heads=32, kv_heads=4, widths=(128, 128)),
    "deepseek-v3": dict(heads=128, kv_heads=0, widths=(512, 64)),
    "gpt-oss": dict(heads=64, kv_heads=8, widths=(64, 64), window=128, sinks=True),
    "deepseek-v2-lite, pages of 64": dict(heads=16, kv_heads=0, widths=(512, 64), page=64),
    "wide keys, a group of three": dict(heads=6, kv_heads=2, widths=(256, 128), page=512),
    "pages of 8, narrow heads": dict(heads=8, kv_heads=2, widths=(16, 16), page=8),
    "float32": dict(heads=32, kv_heads=4, widths=(128, 128), dtype="float32"),
    "float32 latents": dict(heads=16, kv_heads=0, widths=(512, 64), dtype="float32"),
    "sixteen heads of the cache": dict(heads=16, kv_heads=16, widths=(128, 128)),
}


def main(generations: list[str], tokens: int, names: list[str] | None = None):
    """Compiles the calls of these names, or all; prints one report for each."""
    for generation in generations:
        for name in names or CALLS:
            report = compiled(generation, *call(tokens, **CALLS[name]))
            print(json.dumps({"generation": generation, "call": name} | report), flush=True)


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(**json.loads(sys.argv[1]))
