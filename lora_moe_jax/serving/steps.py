"""The compiled, fixed-shape functions of the engine, all built at start-up.

What they do is in `step_functions.py`: one `step` for each size T of the flat batch, `decode` for
several steps in a loop on the device, and `filter`, `top` and `score`. With a mesh, each function
runs under `shard_map`.

What a step reads and writes lies in one place for good, and its results go where an earlier
step's were: a GPU replays CUDA graphs, and its host rewrites every node of which an operand has
moved. Only what the host sends, where it does, and the few numbers that it reads back, come and go.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.parallel.mesh import axis_size
from lora_moe_jax.serving.compile_guard import LateCompileError
from lora_moe_jax.serving.kernel_programs import compile_kernels
from lora_moe_jax.serving.model_arrays import ModelArrays
from lora_moe_jax.serving.step_batch import StepBatch
from lora_moe_jax.serving.step_functions import (
    TopK,
    decode,
    filter_rows,
    pack_scored,
    score_rows,
    step,
    top_rows,
)
from lora_moe_jax.serving.step_layout import StepLayout

Pages = tuple[jax.Array, jax.Array]  # of all layers, one after the other
# XLA's defaults and sums over devices, at each of which a CUDA graph would end otherwise: the host
# would launch them one by one, and devices would wait for each other longer.
GRAPHS_WITH_SUMS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,COLLECTIVES"
}
HOLES = 4  # for arrays of a kind: those of two steps, and those being freed
# At once, at most: logits of all rows of a long step would be more than a gigabyte.
SCORED_ROWS = 256


class CacheLostError(RuntimeError):
    """The device failed and took the cache, or the slots, with it: the engine cannot go on."""


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


class Scores(NamedTuple):
    """Scores of some rows of a step on the device; padding follows those that are the last.

    Attributes:
      logprobs: float32 [n]. logits: float32 [n, V], if they are wanted.
      top: see `Results`.
    """

    logprobs: jax.Array
    logits: jax.Array | None
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
        self._packed: jax.Array | None = None  # what the last step gave for the one that follows
        self._logits = self._zeros((requests, config.vocab_size), jnp.float32)
        self._hidden = {}
        for size in token_buckets:
            self._hidden[size] = self._zeros((size, config.hidden_size), arrays.base[0].dtype)
        self._scored = {size: min(size, SCORED_ROWS) for size in token_buckets}  # at once
        self.waited = 0.0
        self.lost = False
        self._compiled: dict[str, Any] = {}
        # What the compiler works on for longest comes first.
        jobs = {f"step[{size}]": self._step_job(size) for size in reversed(token_buckets)}
        if decode_steps > 1:
            size = next(size for size in token_buckets if size >= requests)
            jobs[f"decode[{size}] × {decode_steps}"] = self._decode_job(size, decode_steps)
        for size, hidden in self._hidden.items():
            packed = jax.ShapeDtypeStruct((1 + 2 * self._scored[size],), jnp.int32)
            jobs[f"score[{size}]"] = _Job(score_rows, (hidden, packed), ())
        rows = jax.ShapeDtypeStruct((self.layout.row_size,), jnp.int32)
        function = functools.partial(filter_rows, self.layout)
        jobs["filter"] = _Job(function, (self._logits, self.last_tokens, rows), (3,))
        if top_logprobs:
            function = functools.partial(top_rows, top_logprobs)
            for size in sorted({requests, *self._scored.values()}):
                logits = jax.ShapeDtypeStruct((size, config.vocab_size), jnp.float32)
                jobs[f"top[{size}]"] = _Job(function, (logits,), ())
        self._fences = self._leave_holes(
            [*(self.layout.size(size) for size in token_buckets), 2 * decode_steps * requests]
        )
        # Kernels have threads of their own: a step's must not wait for other steps to end.
        with ThreadPoolExecutor() as kernels, ThreadPoolExecutor() as threads:
            # Tracing and lowering are Python, which threads would only slow down; compiling is not.
            # Mosaic numbers kernels as they are lowered: where these are not kept, the persistent
            # cache finds them in the same order alone.
            compiled = [self._compile(job, kernels, threads) for job in jobs.values()]
            for done, (name, future) in enumerate(zip(jobs, compiled, strict=True)):
                self._compiled[name] = future.result()
                progress(done + 1, len(jobs))
            kernels.shutdown(cancel_futures=True)
        self.names = tuple(jobs)

    def run(self, batch: StepBatch) -> Results:
        """Begins the step, or the `decode_steps`, of a batch; updates the cache.

        The hidden states it gives are only there until the next step begins.
        """
        size, steps = batch.size, batch.steps
        name = f"step[{size}]" if steps == 1 else f"decode[{size}] × {steps}"
        self._check_name(name)
        kept = self.pages, self.last_tokens
        packed = self._packed if batch.packed is None else batch.packed
        self._packed = None  # a new one may lie where it lay
        if steps > 1:
            self.pages, self.last_tokens, chosen = self._call(name, *kept, packed)
        else:
            results = self._hidden[size], self._logits
            *kept, results, self._packed, chosen = self._call(name, *kept, results, packed)
            self.pages, self.last_tokens = kept
            self._hidden[size], self._logits = results
        if steps == 1 and batch.filters:
            rows = batch.packed[-self.layout.row_size :]
            self.last_tokens, chosen = self._call("filter", self._logits, self.last_tokens, rows)
        chosen.copy_to_host_async()
        top = self._top(self._logits) if batch.top else None
        return Results(self._hidden[size] if steps == 1 else None, chosen, top)

    def score(
        self,
        hidden: jax.Array,
        first: int,
        slots: np.ndarray,
        targets: np.ndarray,
        *,
        top: bool,
        logits: bool,
    ) -> list[Scores]:
        """Begins to score the given next tokens of the rows from the first on, some at once.

        Args:
          top, logits: whether the most likely tokens are wanted, and all logits.
        """
        size, found = hidden.shape[0], []
        count = self._scored[size]
        for begin in range(0, len(targets), count):
            rows = slice(begin, begin + count)
            packed = pack_scored(first + begin, slots[rows], targets[rows], count)
            logprobs, its = self._call(f"score[{size}]", hidden, packed)
            logprobs.copy_to_host_async()
            found.append(Scores(logprobs, its if logits else None, self._top(its) if top else None))
        return found

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
        """After a failure: finds out whether cache and bank are there. If not, later steps fail."""
        own = self.pages, self.last_tokens, self._hidden, self._logits
        kept = jax.tree.leaves((own, self.arrays.bank.stacks))
        self.lost = any(array.is_deleted() for array in kept)
        if not self.lost:
            try:
                jax.block_until_ready(kept)
            except jax.errors.JaxRuntimeError:
                self.lost = True

    def _call(self, name: str, *inputs):
        self._check_name(name)
        if self.lost:
            raise CacheLostError(
                "the device failed, and the cache or the adapter slots are lost; build a new engine"
            )
        return self._compiled[name](self.arrays.base, self.arrays.bank.stacks, *inputs)

    def _check_name(self, name: str) -> None:
        if name not in self._compiled:
            raise LateCompileError(f"there is no step {name}; the engine has {self.names}")

    def _packed_shape(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.layout.size(size),), jnp.int32)

    def _step_job(self, size: int) -> _Job:
        function = functools.partial(step, self.layout)
        results = self._hidden[size], self._logits
        inputs = self.pages, self.last_tokens, results, self._packed_shape(size)
        return _Job(function, inputs, (2, 3, 4, 5))

    def _decode_job(self, size: int, steps: int) -> _Job:
        function = functools.partial(decode, steps, self.layout)
        return _Job(function, (self.pages, self.last_tokens, self._packed_shape(size)), (2, 3))

    def _compile(self, job: _Job, kernels: Executor, threads: Executor) -> Future:
        sums = self.arrays.mesh is not None and jax.default_backend() == "gpu"
        return threads.submit(self._lower(job, kernels).compile, GRAPHS_WITH_SUMS if sums else None)

    def _lower(self, job: _Job, kernels: Executor) -> jax.stages.Lowered:
        """A job ready to be compiled; its kernels are being compiled then."""
        bound = functools.partial(job.function, self.arrays)
        bound.__name__ = _name(job.function)  # what compile logs call it
        arguments = (self.arrays.base, self.arrays.bank.stacks, *job.inputs)
        if self.arrays.mesh is not None:
            bound, arguments = self._on_mesh(bound, arguments, job)
        # `keep_unused` would keep the program for good: JAX's caches have it by itself then.
        jitted = jax.jit(bound, donate_argnums=job.donated)
        lowered = jitted.lower(*arguments)
        compile_kernels(lowered, kernels)
        return lowered

    def _on_mesh(self, bound, arguments, job: _Job):
        """Splits weights, bank and pages as the mesh asks; everything else is replicated."""
        mesh, replicated = self.arrays.mesh, PartitionSpec()
        base, bank = self.arrays.specs()
        if job.inputs[0] is self.pages:
            pages = page_specs(self.config, mesh)
            others = [pages, *[replicated] * len(arguments[3:])]
            out = pages, *[replicated] * len(job.donated)
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

    def _leave_holes(self, sizes: Sequence[int]) -> list[jax.Array]:
        """Arrays with room between them for the small ones that come and go with every step.

        These would be cut from where a step's working memory was, and so move it.
        """
        arrays = [self._zeros((size,), jnp.int32) for size in sizes for _ in range(2 * HOLES)]
        return jax.block_until_ready(arrays)[1::2]

    def _zeros(self, shape: tuple[int, ...], dtype) -> jax.Array:
        return jnp.zeros(shape, dtype, device=self._replicated())

    def _replicated(self) -> NamedSharding | None:
        mesh = self.arrays.mesh
        return None if mesh is None else NamedSharding(mesh, PartitionSpec())


class _Job(NamedTuple):
    """A function to compile, the shapes of what it takes after the weights, and what it may eat.

    One that takes pages gives back what it eats, in that order, and one thing more.
    """

    function: Callable
    inputs: tuple
    donated: tuple[int, ...]


def _name(function: Callable) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return function.__name__


def page_specs(config: ModelConfig, mesh: Mesh | None) -> tuple[PartitionSpec, PartitionSpec]:
    """Key and value pages are split by head; latent pages are whole on every device."""
    if config.mla is None and axis_size(mesh, "tensor") > 1:
        spec = PartitionSpec(None, None, "tensor")
    else:
        spec = PartitionSpec()
    return spec, spec


def page_shapes(
    model: Decoder, config: ModelConfig, mesh: Mesh | None, *, pages: int, page_size: int, dtype
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes and shardings of the cache, with `pages` for each layer; the model may be abstract."""
    (shapes,) = {
        layer.self_attn.cache_shapes(config, axis_size(mesh, "tensor")) for layer in model.layers
    }
    return tuple(
        jax.ShapeDtypeStruct(
            (config.num_layers * pages, page_size, *shape),
            dtype,
            sharding=None if mesh is None else NamedSharding(mesh, spec),
        )
        for shape, spec in zip(shapes, page_specs(config, mesh), strict=True)
    )


def allocate_pages(
    model: Decoder, config: ModelConfig, mesh: Mesh | None, *, pages: int, page_size: int, dtype
) -> Pages:
    """A zeroed cache."""
    shapes = page_shapes(model, config, mesh, pages=pages, page_size=page_size, dtype=dtype)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
