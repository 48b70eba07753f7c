"""The compiled, fixed-shape functions of the engine, all built at start-up.

`step` runs the model over a flat batch of T tokens (one function for each T of the shape buckets)
and samples a token for each row that is to have one; `decode` takes several such steps in a loop on
the device. Both take one array from the host, see `StepLayout`, and keep each row's last token on
the device, so that the next step can be begun before this one's tokens are read. `score` turns the
hidden states of a step into logprobs of given tokens. Parameters cross the boundary as flat lists
of arrays. With a mesh, each function runs under `shard_map`.

Nothing in `step` may depend on the device's own values for which code runs: a GPU's host waits for
each such decision (measured, JAX 0.11.2: a conditional or a loop of unknown length holds the call
until the device is there). So top-k, top-p and min-p, which sort the vocabulary, are no conditional
in `step` but a function of their own, `filter`, that is run after it where a row has them. So is
`top`, which finds each row's most likely tokens in the logits of a step or of `score`. A batch
with such a wish is not for `decode`.

All that a step reads and writes lies in one place for good: what the host sends is copied to where
it lay before (`stage`), results go where an earlier step's were, and of those that are read after
the next step has begun there is a copy (`copy`). For a GPU replays a step as one CUDA graph, and
its host rewrites every node of which an operand has moved (measured: 12 ms for a whole step).
"""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_moe_jax.adapters.bank import Bank, SlotEntry
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.layers.adapter_slots import AdapterSlots, LoraParam
from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.logprobs import token_logprobs, top_logprobs
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.parallel.mesh import axis_size
from lora_moe_jax.parallel.sharding import partition_spec, sharding_rules
from lora_moe_jax.serving.compile_guard import LateCompileError
from lora_moe_jax.serving.sampler import SamplingRows, sample
from lora_moe_jax.serving.step_batch import StepBatch
from lora_moe_jax.serving.step_layout import FED_BACK, RowInputs, StepInputs, StepLayout
from pallas_kernels import PageView

Pages = list[tuple[jax.Array, jax.Array]]
TopK = tuple[jax.Array, jax.Array]  # int32 ids [rows, K] and their logprobs, most likely first


HOLES = 4  # for arrays of a kind: those of two steps, and those being freed


class CacheLostError(RuntimeError):
    """A step failed on the device and took the cache with it: the engine cannot go on."""


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
        self._seen: list = []  # of the bank, when the leaves were listed
        self._leaves: list[jax.Array] = []

    def bank_leaves(self) -> list[jax.Array]:
        """The bank's arrays in the order that `merge` takes them, listed anew when one is new."""
        arrays = self.bank.arrays
        now = list(arrays.values())
        if len(now) != len(self._seen) or not all(map(operator.is_, now, self._seen)):
            names = self._names
            self._leaves = [getattr(arrays[names[p[:-1]]], p[-1]) for p in self._bank_paths]
            self._seen = now
        return self._leaves

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


class Results(NamedTuple):
    """What a step gives, on the device.

    Attributes:
      hidden: [T, H] of the batch; None of several steps.
      chosen: int32 [steps, 2, B], each row's token and the bits of its logprob.
      top: of each row, where any wants them.
    """

    hidden: jax.Array | None
    chosen: jax.Array
    top: TopK | None


class Steps:
    """Compiles `step`, `decode`, `filter`, `score` and `top` and calls them.

    Args:
      token_buckets: sizes T of the flat batch.
      requests: rows B of the page tables and of what is sampled.
      top_logprobs: K, how many of the most likely tokens `top` gives; with 0 there is none.
      decode_steps: how many steps `decode` takes; with 1 there is none.

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
        top_logprobs: int,
        progress: Callable[[int, int], None],
        decode_steps: int = 1,
    ):
        self.arrays, self.config, self.pages = arrays, config, pages
        self.layout = StepLayout(requests, pages_per_request)
        self.last_tokens = self._zeros((requests,), jnp.int32)
        self._logits = self._zeros((requests, config.vocab_size), jnp.float32)
        self._chosen = {n: self._zeros((n, 2, requests), jnp.int32) for n in {1, decode_steps}}
        self._hidden, self._packed = {}, {}
        for size in token_buckets:
            self._hidden[size] = self._zeros((size, config.hidden_size), arrays.base[0].dtype)
            self._packed[size] = self._zeros((self.layout.size(size),), jnp.int32)
        self.waited = 0.0
        self._lost = False
        self._compiled: dict[str, Any] = {}
        self._lowering = threading.Lock()
        # What the compiler works on for longest comes first.
        jobs = {f"step[{size}]": self._step_job(size) for size in reversed(token_buckets)}
        if decode_steps > 1:
            size = token_buckets[0]
            jobs[f"decode[{size}] × {decode_steps}"] = self._decode_job(size, decode_steps)
        for size, hidden in self._hidden.items():
            flat = jax.ShapeDtypeStruct((size,), jnp.int32)
            jobs[f"score[{size}]"] = _Job(score_rows, (hidden, flat, flat), ())
        rows = jax.ShapeDtypeStruct((self.layout.row_size,), jnp.int32)
        function = functools.partial(filter_rows, self.layout)
        jobs["filter"] = _Job(function, (self._logits, self.last_tokens, rows), (3,))
        if top_logprobs:
            function = functools.partial(top_rows, top_logprobs)
            for size in sorted({requests, *token_buckets}):
                logits = jax.ShapeDtypeStruct((size, config.vocab_size), jnp.float32)
                jobs[f"top[{size}]"] = _Job(function, (logits,), ())
        self._stage = {size: self._compile_copy(its, True) for size, its in self._packed.items()}
        self._copy = {n: self._compile_copy(its, False) for n, its in self._chosen.items()}
        self._fences = self._leave_holes()
        with ThreadPoolExecutor() as threads:
            futures = {name: threads.submit(self._compile, job) for name, job in jobs.items()}
            for done, (name, future) in enumerate(futures.items()):
                self._compiled[name] = future.result()
                progress(done + 1, len(futures))
        self.names = tuple(jobs)

    def run(self, batch: StepBatch) -> Results:
        """Begins the step, or the `decode_steps`, of a batch; updates the cache.

        The hidden states it gives are only there until the next step begins.
        """
        size, steps = batch.size, batch.steps
        packed = self._packed[size] = self._stage[size](batch.packed, self._packed[size])
        kept, chosen = (self.pages, self.last_tokens), self._chosen[steps]
        if steps > 1:
            name = f"decode[{size}] × {steps}"
            self.pages, self.last_tokens, chosen = self._call(name, *kept, chosen, packed)
        else:
            results = self._hidden[size], self._logits, chosen
            self.pages, self.last_tokens, results = self._call(
                f"step[{size}]", *kept, results, packed
            )
            self._hidden[size], self._logits, chosen = results
        self._chosen[steps] = chosen
        if steps == 1 and batch.filters:
            rows = batch.packed[-self.layout.row_size :]
            self.last_tokens, chosen = self._call("filter", self._logits, self.last_tokens, rows)
        else:
            chosen = self._copy[steps](chosen)
        chosen.copy_to_host_async()
        top = self._top(self._logits) if batch.top else None
        return Results(self._hidden[size] if steps == 1 else None, chosen, top)

    def score(
        self, hidden: jax.Array, slots: np.ndarray, targets: np.ndarray, top: bool
    ) -> tuple[jax.Array, jax.Array, TopK | None]:
        """Begins to score the given next token of every row: (logprobs, logits, most likely)."""
        logprobs, logits = self._call(f"score[{hidden.shape[0]}]", hidden, slots, targets)
        logprobs.copy_to_host_async()
        return logprobs, logits, self._top(logits) if top else None

    def _top(self, logits: jax.Array) -> TopK:
        top = self._call(f"top[{logits.shape[0]}]", logits)
        for array in top:
            array.copy_to_host_async()
        return top

    def fetch(self, array: jax.Array) -> np.ndarray:
        """Waits for a result."""
        start = time.perf_counter()
        array = np.asarray(array)
        self.waited += time.perf_counter() - start
        return array

    def check(self) -> None:
        """After a failure: finds out whether the cache is still there. If not, later steps fail."""
        places = self._packed, self._hidden, self._logits, self._chosen
        kept = jax.tree.leaves((self.pages, self.last_tokens, places))
        self._lost = any(array.is_deleted() for array in kept)
        if not self._lost:
            try:
                jax.block_until_ready(kept)
            except jax.errors.JaxRuntimeError:
                self._lost = True

    def _call(self, name: str, *inputs):
        if name not in self._compiled:
            raise LateCompileError(f"there is no step {name}; the engine has {self.names}")
        if self._lost:
            raise CacheLostError(
                "an earlier step failed on the device and its cache is lost; build a new engine"
            )
        return self._compiled[name](self.arrays.base, self.arrays.bank_leaves(), *inputs)

    def _step_job(self, size: int) -> _Job:
        function = functools.partial(step, self.layout)
        results = self._hidden[size], self._logits, self._chosen[1]
        inputs = self.pages, self.last_tokens, results, self._packed[size]
        return _Job(function, inputs, (2, 3, 4))

    def _decode_job(self, size: int, steps: int) -> _Job:
        function = functools.partial(decode, steps, self.layout)
        inputs = self.pages, self.last_tokens, self._chosen[steps], self._packed[size]
        return _Job(function, inputs, (2, 3, 4))

    def _compile(self, job: _Job):
        bound = functools.partial(job.function, self.arrays)
        bound.__name__ = _name(job.function)  # what compile logs call it
        arguments = (self.arrays.base, self.arrays.bank_leaves(), *job.inputs)
        if self.arrays.mesh is not None:
            bound, arguments = self._on_mesh(bound, arguments, job.inputs[0] is self.pages)
        # A step does not read what lies where it writes: dropped as unused, it is not donated.
        jitted = jax.jit(bound, donate_argnums=job.donated, keep_unused=True)
        # Tracing and lowering are Python, which threads would only slow down; compiling is not.
        with self._lowering:
            lowered = jitted.lower(*arguments)
        return lowered.compile()

    def _compile_copy(self, array: jax.Array, in_place: bool):
        """Copies an array like this one; with `in_place` a second one says where to."""

        def copy(new, *_):
            return jnp.copy(new)

        shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._replicated())
        arguments = (shape, shape) if in_place else (shape,)
        jitted = jax.jit(copy, donate_argnums=(1,) if in_place else (), keep_unused=True)
        return jitted.lower(*arguments).compile()

    def _on_mesh(self, bound, arguments, with_pages: bool):
        """Splits weights, bank and pages as the mesh asks; everything else is replicated."""
        mesh, replicated = self.arrays.mesh, PartitionSpec()
        base, bank = self.arrays.specs()
        if with_pages:
            pages = page_specs(self.config, mesh, len(self.pages))
            others = [pages, *[replicated] * len(arguments[3:])]
            out = (pages, *[replicated] * len(arguments[3:]))
        else:
            others, out = [replicated] * len(arguments[2:]), replicated
        mapped = jax.shard_map(
            bound, mesh=mesh, in_specs=(base, bank, *others), out_specs=out, check_vma=False
        )

        def place(leaf):
            if isinstance(leaf, jax.Array):
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated())

        return mapped, jax.tree.map(place, arguments)

    def _leave_holes(self) -> list[jax.Array]:
        """Arrays with room between them for the small ones that come and go with every step.

        These would be cut from where a step's working memory was, and so move it.
        """
        kinds = (*self._packed.values(), *self._chosen.values())
        arrays = [self._zeros(its.shape, its.dtype) for its in kinds for _ in range(2 * HOLES)]
        return jax.block_until_ready(arrays)[1::2]

    def _zeros(self, shape: tuple[int, ...], dtype) -> jax.Array:
        return jnp.zeros(shape, dtype, device=self._replicated())

    def _replicated(self) -> NamedSharding | None:
        mesh = self.arrays.mesh
        return None if mesh is None else NamedSharding(mesh, PartitionSpec())


class _Job(NamedTuple):
    """A function to compile, the shapes of what it takes after the weights, and what it may eat."""

    function: Callable
    inputs: tuple
    donated: tuple[int, ...]


def _name(function: Callable) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return function.__name__


def step(layout: StepLayout, arrays: ModelArrays, base, bank, pages, last_tokens, results, packed):
    """One step: (pages, last_tokens, (hidden, logits, chosen)), see `Results`.

    The results take the memory of earlier ones, which are given for that alone.
    """
    del results
    inputs = layout.unpack(packed)
    model = arrays.merge(base, bank)
    pages, hidden, logits = _forward(model, pages, last_tokens, inputs)
    last_tokens, chosen = _choose(logits, inputs.rows, last_tokens, filters=False)
    return pages, last_tokens, (hidden, logits, chosen[None])


def decode(
    steps: int,
    layout: StepLayout,
    arrays: ModelArrays,
    base,
    bank,
    pages,
    last_tokens,
    chosen,
    packed,
):
    """Several steps of a batch of one token for each row: (pages, last_tokens, chosen)."""
    inputs = layout.unpack(packed)
    model = arrays.merge(base, bank)
    real = inputs.request >= 0

    def body(i, carry):
        pages, last_tokens, chosen = carry
        now = inputs._replace(
            tokens=jnp.where(real & (i > 0), FED_BACK, inputs.tokens),
            positions=inputs.positions + jnp.where(real, i, 0),
            rows=inputs.rows._replace(step=inputs.rows.step + i),
        )
        pages, _, logits = _forward(model, pages, last_tokens, now)
        last_tokens, one = _choose(logits, now.rows, last_tokens, filters=None)
        return pages, last_tokens, chosen.at[i].set(one)

    pages, last_tokens, chosen = lax.fori_loop(0, steps, body, (pages, last_tokens, chosen))
    return pages, last_tokens, chosen


def filter_rows(layout: StepLayout, arrays: ModelArrays, base, bank, logits, last_tokens, part):
    """Chooses once more, with filters, from the logits of a step: (last_tokens, chosen)."""
    last_tokens, chosen = _choose(logits, layout.row_values(part), last_tokens, filters=True)
    return last_tokens, chosen[None]


def _forward(model: Decoder, pages: Pages, last_tokens, inputs: StepInputs):
    """The pages with the batch's tokens written, hidden [T, H], and the rows' logits [B, V]."""
    request, rows = inputs.request, inputs.rows
    fed_back = last_tokens.at[request].get(mode="clip")
    tokens = jnp.where(inputs.tokens == FED_BACK, fed_back, inputs.tokens)
    token_slots = jnp.where(request >= 0, rows.slots.at[request].get(mode="clip"), -1)
    # As a slice of the host's array, which lies somewhere else at every step, the tables would be
    # an operand that moves, of every layer's attention (see above).
    tables = jnp.maximum(rows.page_tables, 0)
    view = PageView(request, inputs.positions, tables)
    caches = [LayerCache(first, second, view) for first, second in pages]
    hidden, caches = model(tokens, token_slots, caches)
    # What is sampled and what is scored must begin from the same bits: nothing crosses this line.
    hidden = lax.optimization_barrier(hidden)
    slots = jnp.where(rows.sample_at >= 0, rows.slots, -1)
    logits = model.logits(hidden.at[rows.sample_at].get(mode="clip"), slots)
    return [(cache.first, cache.second) for cache in caches], hidden, logits


def _choose(logits, rows: RowInputs, last_tokens, filters: bool | None):
    """The rows' last tokens [B], and the tokens and the bits of their logprobs [2, B]."""
    samples = rows.sample_at >= 0
    settings = SamplingRows(
        # Rows of requests that are gone, or not so far, keep theirs: they must cost nothing.
        temperature=jnp.where(samples, rows.temperature, 0),
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        seed=rows.seed,
        step=rows.step,
    )
    sampled = sample(logits, settings, filters)
    logprobs = token_logprobs(logits, sampled)
    last_tokens = jnp.where(samples, sampled, last_tokens)
    return last_tokens, jnp.stack([sampled, logprobs.view(jnp.int32)])


def top_rows(count: int, arrays: ModelArrays, base, bank, logits) -> TopK:
    """The most likely tokens of each row of what was sampled from or scored."""
    return top_logprobs(logits, count)


def score_rows(arrays: ModelArrays, base, bank, hidden, token_slots, targets):
    """Logprobs [T] of each row's target, and the logits [T, V]."""
    logits = arrays.merge(base, bank).logits(hidden, token_slots)
    return token_logprobs(logits, targets), logits


def page_specs(config: ModelConfig, mesh: Mesh | None, layers: int):
    """Key and value pages are split by head; latent pages are whole on every device."""
    if config.mla is None and axis_size(mesh, "tensor") > 1:
        spec = PartitionSpec(None, None, "tensor")
    else:
        spec = PartitionSpec()
    return [(spec, spec)] * layers


def page_shapes(
    model: Decoder, config: ModelConfig, mesh: Mesh | None, *, pages: int, page_size: int, dtype
) -> list[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Shapes and shardings of the cache pages of every layer; the model may be abstract."""
    specs = page_specs(config, mesh, config.num_layers)
    result = []
    for layer, layer_specs in zip(model.layers, specs, strict=True):
        shapes = layer.self_attn.cache_shapes(config, axis_size(mesh, "tensor"))
        result.append(
            tuple(
                jax.ShapeDtypeStruct(
                    (pages, page_size, *shape),
                    dtype,
                    sharding=None if mesh is None else NamedSharding(mesh, spec),
                )
                for shape, spec in zip(shapes, layer_specs, strict=True)
            )
        )
    return result


def allocate_pages(
    model: Decoder, config: ModelConfig, mesh: Mesh | None, *, pages: int, page_size: int, dtype
) -> Pages:
    """Zeroed cache pages of every layer."""
    shapes = page_shapes(model, config, mesh, pages=pages, page_size=page_size, dtype=dtype)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
