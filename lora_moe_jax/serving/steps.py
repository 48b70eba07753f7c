"""The compiled, fixed-shape functions of the engine, all built at start-up.

`forward` runs the model over a flat batch of T tokens (one function for each T of the shape
buckets); `sample` and `score` turn its hidden states into tokens and logprobs. Parameters cross
the boundary as flat lists of arrays. With a mesh, each function runs under `shard_map`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_moe_jax.adapters.bank import Bank, SlotEntry
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.adapter_slots import AdapterSlots, LoraParam
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.logprobs import token_logprobs
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.parallel.mesh import axis_size
from lora_moe_jax.parallel.sharding import partition_spec, sharding_rules
from lora_moe_jax.serving.compile_guard import LateCompileError
from lora_moe_jax.serving.sampler import SamplingRows, sample
from pallas_kernels import PageView

Pages = list[tuple[jax.Array, jax.Array]]


class ModelArrays:
    """A model taken apart: its graph, its flat base weights, and its bank."""

    def __init__(self, model: Decoder, config: ModelConfig, mesh: Mesh | None):
        self.mesh = mesh
        self.rules = sharding_rules(config, mesh)
        self.graph, bank, base = nnx.split(model, LoraParam, ...)
        self.base, self._base_tree = jax.tree.flatten(base)
        _, self._bank_tree = jax.tree.flatten(bank)
        self._bank_paths = [path for path, _ in nnx.to_flat_state(bank)]
        self._base_axes = [v.get_metadata("axes") for _, v in nnx.to_flat_state(base)]
        self._bank_axes = [v.get_metadata("axes") for _, v in nnx.to_flat_state(bank)]
        slots = {p: n for p, n in nnx.iter_graph(model) if isinstance(n, AdapterSlots)}
        self.bank = Bank(
            {s.projection.name: SlotEntry(s.projection, s.lora()) for s in slots.values()}
        )
        self._names = {path: s.projection.name for path, s in slots.items()}

    def bank_leaves(self) -> list[jax.Array]:
        """The bank's arrays in the order that `merge` takes them."""
        return [
            getattr(self.bank.arrays[self._names[path[:-1]]], path[-1]) for path in self._bank_paths
        ]

    def merge(self, base: list[jax.Array], bank: list[jax.Array]) -> Decoder:
        """The model again, from (possibly traced, possibly split) arrays."""
        base_state = jax.tree.unflatten(self._base_tree, base)
        return nnx.merge(self.graph, base_state, jax.tree.unflatten(self._bank_tree, bank))

    def specs(self) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """How base and bank arrays are split over the mesh."""
        return tuple(
            [partition_spec(axes, self.rules) for axes in group]
            for group in (self._base_axes, self._bank_axes)
        )


class Steps:
    """Compiles `forward`, `sample` and `score` and calls them.

    Args:
      token_buckets: sizes T of the flat batch.
      requests: rows B of the page tables and of `sample`.

    Attributes:
      waited: seconds that the host has waited for results so far.
    """

    def __init__(
        self,
        arrays: ModelArrays,
        config: ModelConfig,
        pages: Pages,
        *,
        token_buckets: tuple[int, ...],
        requests: int,
        pages_per_request: int,
        progress: Callable[[int, int], None],
    ):
        self.arrays, self.config, self.pages = arrays, config, pages
        self.waited = 0.0
        self._compiled: dict[str, Any] = {}
        jobs = {}
        for size in token_buckets:
            batch = batch_shapes(size, requests, pages_per_request)
            hidden = jax.ShapeDtypeStruct((size, config.hidden_size), arrays.base[0].dtype)
            jobs[f"forward[{size}]"] = (forward, (self.pages, batch), (2,))
            jobs[f"sample[{size}]"] = (sample_rows, (hidden, *sample_shapes(requests)), ())
            jobs[f"score[{size}]"] = (score_rows, (hidden, *score_shapes(size)), ())
        with ThreadPoolExecutor() as threads:
            futures = {
                name: threads.submit(self._compile, function, inputs, donate)
                for name, (function, inputs, donate) in jobs.items()
            }
            for done, (name, future) in enumerate(futures.items()):
                self._compiled[name] = future.result()
                progress(done + 1, len(futures))
        self.names = tuple(jobs)

    def forward(self, batch: Mapping[str, np.ndarray]) -> jax.Array:
        """Runs a batch and updates the cache; returns its hidden states on the device."""
        name = f"forward[{len(batch['tokens'])}]"
        hidden, self.pages = self._call(name, self.pages, dict(batch))
        return hidden

    def sample(self, hidden: jax.Array, *rows) -> tuple[np.ndarray, np.ndarray]:
        """Samples a token for each chosen row: (tokens, logprobs)."""
        tokens, logprobs = self._call(f"sample[{hidden.shape[0]}]", hidden, *rows)
        return self._fetch(tokens), self._fetch(logprobs)

    def score(self, hidden: jax.Array, *rows) -> tuple[np.ndarray, jax.Array]:
        """Scores the given next token of every row: (logprobs, logits on the device)."""
        logprobs, logits = self._call(f"score[{hidden.shape[0]}]", hidden, *rows)
        return self._fetch(logprobs), logits

    def _fetch(self, array: jax.Array) -> np.ndarray:
        start = time.perf_counter()
        array = np.asarray(array)
        self.waited += time.perf_counter() - start
        return array

    def _call(self, name: str, *inputs):
        if name not in self._compiled:
            raise LateCompileError(f"there is no step {name}; the engine has {self.names}")
        return self._compiled[name](self.arrays.base, self.arrays.bank_leaves(), *inputs)

    def _compile(self, function, inputs, donate):
        bound = functools.partial(function, self.arrays)
        bound.__name__ = function.__name__  # what compile logs call it
        arguments = (self.arrays.base, self.arrays.bank_leaves(), *inputs)
        if self.arrays.mesh is not None:
            bound, arguments = self._on_mesh(bound, arguments, function)
        return jax.jit(bound, donate_argnums=donate).lower(*arguments).compile()

    def _on_mesh(self, bound, arguments, function):
        """Splits weights, bank and pages as the mesh asks; everything else is replicated."""
        mesh, replicated = self.arrays.mesh, PartitionSpec()
        pages = page_specs(self.config, mesh, len(self.pages))
        base, bank = self.arrays.specs()
        others = [pages, replicated] if function is forward else [replicated] * len(arguments[2:])
        out = (replicated, pages) if function is forward else replicated
        mapped = jax.shard_map(
            bound, mesh=mesh, in_specs=(base, bank, *others), out_specs=out, check_vma=False
        )

        def place(leaf):
            if isinstance(leaf, jax.Array):
                return leaf
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, replicated)
            )

        return mapped, jax.tree.map(place, arguments)


def forward(arrays: ModelArrays, base, bank, pages: Pages, batch) -> tuple[jax.Array, Pages]:
    """Hidden states [T, H] of a batch, and the pages with its tokens written."""
    model = arrays.merge(base, bank)
    view = PageView(batch["request"], batch["positions"], batch["page_tables"])
    caches = [LayerCache(first, second, view) for first, second in pages]
    hidden, caches = model(batch["tokens"], batch["token_slots"], caches)
    return hidden, [(cache.first, cache.second) for cache in caches]


def sample_rows(arrays: ModelArrays, base, bank, hidden, rows, row_slots, settings: SamplingRows):
    """Tokens [B] sampled from the hidden states of `rows`, and their logprobs."""
    logits = arrays.merge(base, bank).logits(hidden[rows], row_slots)
    tokens = sample(logits, settings)
    return tokens, token_logprobs(logits, tokens)


def score_rows(arrays: ModelArrays, base, bank, hidden, token_slots, targets):
    """Logprobs [T] of each row's target, and the logits [T, V]."""
    logits = arrays.merge(base, bank).logits(hidden, token_slots)
    return token_logprobs(logits, targets), logits


def batch_shapes(tokens: int, requests: int, pages_per_request: int):
    """Shapes of `StepBatch.device_arrays`."""
    flat = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    names = ("tokens", "positions", "token_slots", "request")
    tables = jax.ShapeDtypeStruct((requests, pages_per_request), jnp.int32)
    return dict.fromkeys(names, flat) | {"page_tables": tables}


def sample_shapes(requests: int):
    """Shapes of the row numbers, slots and settings that `sample_rows` takes."""
    ints, floats = (jax.ShapeDtypeStruct((requests,), dtype) for dtype in (jnp.int32, jnp.float32))
    seed = jax.ShapeDtypeStruct((requests,), jnp.uint32)
    settings = SamplingRows(
        temperature=floats, top_k=ints, top_p=floats, min_p=floats, seed=seed, step=ints
    )
    return ints, ints, settings


def score_shapes(tokens: int):
    """Shapes of the slots and targets that `score_rows` takes."""
    return (jax.ShapeDtypeStruct((tokens,), jnp.int32),) * 2


def page_specs(config: ModelConfig, mesh: Mesh | None, layers: int):
    """Key and value pages are split by head; latent pages are whole on every device."""
    if config.mla is None and axis_size(mesh, "tensor") > 1:
        spec = PartitionSpec(None, None, "tensor")
    else:
        spec = PartitionSpec()
    return [(spec, spec)] * layers


def allocate_pages(
    model: Decoder, config: ModelConfig, mesh: Mesh | None, *, pages: int, page_size: int, dtype
) -> Pages:
    """Zeroed cache pages of every layer."""
    specs = page_specs(config, mesh, config.num_layers)
    result = []
    for layer, layer_specs in zip(model.layers, specs, strict=True):
        shapes = layer.self_attn.cache_shapes(config, axis_size(mesh, "tensor"))
        result.append(
            tuple(
                jnp.zeros(
                    (pages, page_size, *shape),
                    dtype,
                    device=None if mesh is None else NamedSharding(mesh, spec),
                )
                for shape, spec in zip(shapes, layer_specs, strict=True)
            )
        )
    return result
