"""The paged cache, as attention modules take and return it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import PageView


class LayerCache(NamedTuple):
    """Two page arrays and the batch's view of them.

    Attributes:
      first: keys `[pages, page_size, kv_heads, head_dim]`, or MLA's normed latent
        `[pages, page_size, kv_lora_rank]`.
      second: values, or MLA's rotated rope key `[pages, page_size, rope_dim]`.
      view: which positions of which request the batch's tokens are.
    """

    first: jax.Array
    second: jax.Array
    view: PageView

    def of_layer(self, number: int | jax.Array, layers: int) -> LayerCache:
        """One layer's, of a cache that holds those of so many one after the other."""
        pages = self.first.shape[0] // layers
        tables = self.view.page_tables + number * pages
        return self._replace(view=self.view._replace(page_tables=tables))


def single_sequence_cache(shapes, length: int, dtype="bfloat16", page_size: int = 16) -> LayerCache:
    """A cache for one sequence from position 0, for using attention modules on their own.

    Args:
      shapes: the two per-token shapes that the module's `cache_shapes` gives.
      length: number of tokens.
    """
    pages = -(-length // page_size)
    first, second = (jnp.zeros((pages, page_size, *shape), dtype) for shape in shapes)
    view = PageView(
        request=jnp.zeros(length, jnp.int32),
        positions=jnp.arange(length, dtype=jnp.int32),
        page_tables=jnp.arange(pages, dtype=jnp.int32)[None],
    )
    return LayerCache(first, second, view)
