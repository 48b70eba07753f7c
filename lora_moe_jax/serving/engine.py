"""The engine: one base model, a bank of adapters, and requests that mix them."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from lora_moe_jax.adapters import Adapter, LoraPair, check_name, read_adapter
from lora_moe_jax.adapters.bank import Bank
from lora_moe_jax.adapters.check import check_adapter
from lora_moe_jax.adapters.pool import AdapterInfo, AdapterPool
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import AdapterError, RequestError
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import load_model
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.parallel.mesh import automatic
from lora_moe_jax.serving import validate
from lora_moe_jax.serving.compile_cache import use_compile_cache
from lora_moe_jax.serving.compile_guard import compile_count, no_compile
from lora_moe_jax.serving.options import EngineOptions, slot_config
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.progress import progress_bar
from lora_moe_jax.serving.request import (
    Completion,
    Delta,
    GenerateRequest,
    Request,
    Score,
    ScoreRequest,
)
from lora_moe_jax.serving.runner import Runner
from lora_moe_jax.serving.sampling_params import SamplingParams
from lora_moe_jax.serving.scheduler import Scheduler
from lora_moe_jax.serving.steps import ModelArrays, Steps, allocate_pages
from lora_moe_jax.serving.text import TextCodec

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was built, and what it holds.

    `compilations` counts the whole process; after warm-up it stays as it is. `adapters` are the
    names; resident ones and bytes on the host include old versions that requests are ending with.

    `prompt_tokens` were computed, `prefix_hit_tokens` found in the cache in their place: of both
    together, the latter's share is the hit rate. `cached_pages` may be found by later requests;
    those of them that no running request has are among the `free_pages`, as they make room.

    `steps` were begun; `host_ms_per_step` is how long the host works for one, on average, while it
    does not wait for the device.

    `preemptions` counts how often a request made room for an older one; its tokens are computed, or
    found, once more.
    """

    compilations: int
    steps: int
    host_ms_per_step: float
    prompt_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    adapters: int
    resident_adapters: int
    free_adapter_slots: int
    adapter_loads: int
    adapter_evictions: int
    adapter_host_bytes: int
    preemptions: int
    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    total_pages: int
    bank_bytes: int
    cache_bytes: int


class Engine:
    """Scores and generates with any mix of adapters over one base model.

    Build it with `from_pretrained`. Not thread-safe: use it from one thread.
    """

    def __init__(
        self,
        arrays: ModelArrays,
        config: ModelConfig,
        codec: TextCodec | None,
        steps: Steps,
        options: EngineOptions,
    ):
        self.config = config
        self.options = options
        self.codec = codec
        self.bank = arrays.bank
        self._adapters = AdapterPool(
            options.max_adapters, functools.partial(_write_slot, arrays.bank)
        )
        scheduler = Scheduler(
            PagePool(options.pages, options.page_size),
            self._adapters,
            rows=options.max_requests,
            pages_per_request=options.pages_per_request,
            token_buckets=options.token_buckets,
            prefill_chunk=options.prefill_chunk,
            prefix_cache=options.prefix_cache,
            decode_steps=options.decode_steps,
        )
        self._runner = Runner(steps, scheduler, codec, config.eos_token_ids)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        *,
        dtype: str = "bfloat16",
        max_adapters: int = 8,
        max_rank: int = 32,
        target_modules: Sequence[str] | None = None,
        shared_outer: bool = False,
        mesh: Mesh | None = None,
        max_requests: int = 8,
        max_length: int | None = None,
        page_size: int = 16,
        token_buckets: Sequence[int] | None = None,
        prefill_chunk: int | None = None,
        cache_tokens: int | None = None,
        prefix_cache: bool = True,
        decode_steps: int = 1,
        progress: bool = False,
    ) -> Engine:
        """Loads a Hugging Face folder, compiles every step, and is ready to serve.

        Args:
          folder: config.json, safetensors, and tokenizer.json if text is wanted.
          dtype: of weights, activations and cache: "bfloat16" or "float32".
          max_adapters: adapter slots on the device; any number of adapters may be loaded.
          max_rank: the largest rank that fits into a slot.
          target_modules: module names (`q_proj`, `experts.gate_proj`, …) that adapters may
            target; all of them by default. Others get no slots and cost nothing.
          shared_outer: keep one outer factor for all experts of a layer; only adapters that
            share theirs can then be loaded.
          mesh: devices to split over, with axes named "tensor" and "expert".
          max_requests: requests that run at the same time.
          max_length: most tokens of one request, prompt and output together. Default: 1024, or
            what the model was made for if that is less.
          page_size: tokens of a cache page.
          token_buckets: sizes of the flat batch that steps are compiled for. Default: one for
            generation and one for prompts.
          prefill_chunk: most tokens of one prompt in one step. Default: the largest bucket.
          cache_tokens: positions that the cache holds for all requests together. Default: enough
            for every running request to be as long as any. With less, more requests can run than
            there would be memory for at the worst; then the last one makes room and is computed
            again.
          prefix_cache: keep what was computed, while its memory is not needed, for requests that
            begin with the same tokens under the same version of an adapter. No bit depends on it.
          decode_steps: how many tokens of each request the device generates without the host while
            nobody waits, no prompt is left and no request reaches its max_tokens. Tokens then come
            in groups of this many, and a new request may wait for two of them. No bit depends on
            it.
          progress: show progress bars on stderr.

        Raises:
          ConfigError: the model or the mesh is not supported, or an option is out of range.
          CheckpointError: the weights are damaged or do not belong to the configuration.
        """
        use_compile_cache()
        config, mesh = read_config(folder), automatic(mesh)
        options = EngineOptions.resolve(
            config,
            dtype=dtype,
            max_adapters=max_adapters,
            max_rank=max_rank,
            max_requests=max_requests,
            max_length=max_length,
            page_size=page_size,
            token_buckets=token_buckets,
            prefill_chunk=prefill_chunk,
            cache_tokens=cache_tokens,
            prefix_cache=prefix_cache,
            decode_steps=decode_steps,
        )
        checkpoint = Checkpoint.open(folder, config)
        codec = TextCodec.from_folder(folder)
        slots: SlotConfig = slot_config(config, options, target_modules, shared_outer)
        with progress_bar("loading weights", shown=progress) as bar:
            model = load_model(
                checkpoint, config, dtype=dtype, adapters=slots, mesh=mesh, progress=bar.update
            )
        return cls.from_model(model, codec, options, mesh=mesh, progress=progress)

    @classmethod
    def from_model(
        cls,
        model: Decoder,
        codec: TextCodec | None,
        options: EngineOptions,
        *,
        mesh: Mesh | None = None,
        progress: bool = False,
    ) -> Engine:
        """The same for a model on the device whose slots are those of the options."""
        arrays = ModelArrays(model, model.config, mesh)
        pages = allocate_pages(
            model,
            model.config,
            mesh,
            pages=options.pages,
            page_size=options.page_size,
            dtype=options.dtype,
        )
        with progress_bar("compiling steps", shown=progress) as bar:
            steps = Steps(
                arrays,
                model.config,
                pages,
                token_buckets=options.token_buckets,
                requests=options.max_requests,
                pages_per_request=options.pages_per_request,
                progress=bar.update,
                decode_steps=options.decode_steps,
            )
        return cls(arrays, model.config, codec, steps, options)

    # Adapters

    def load_adapter(self, name: str, source: str | os.PathLike | Adapter) -> AdapterInfo:
        """Loads an adapter folder (or one in memory, which is copied) under a name.

        It is kept in host memory, and goes to the device at once if a slot is free, otherwise with
        the first request that uses it. Under a name that is taken it is a new version: requests
        that have begun end with the version they began with, later ones use the new one.

        Raises:
          AdapterError: it cannot be served exactly. Nothing has changed then.
        """
        check_name(name)
        adapter = self._read_adapter(source)
        self.bank.check(adapter)
        info = self._adapters.add(name, adapter).info
        self._runner.scheduler.drop_unloaded()
        return info

    def _read_adapter(self, source: str | os.PathLike | Adapter) -> Adapter:
        if self.options.max_adapters == 0:
            raise AdapterError(
                "the engine has no adapter slots",
                key="max_adapters",
                expected="at least 1",
                found="0",
                hint="build the engine with a larger max_adapters",
            )
        if isinstance(source, Adapter):
            check_adapter(source, self.bank.projections)
            return _copied(source)
        if not isinstance(source, str | os.PathLike):
            raise AdapterError(
                "an adapter comes from a folder or from an Adapter",
                key="source",
                expected="a path or an Adapter",
                found=type(source).__name__,
            )
        return read_adapter(source, self.bank.projections, max_rank=self.options.max_rank)

    def unload_adapter(self, name: str, when_busy: Literal["refuse", "finish"] = "refuse") -> None:
        """Forgets an adapter and frees what it has.

        Args:
          when_busy: what to do if unfinished requests use it: "refuse", or "finish": its name is
            forgotten at once, its slot and host memory are freed with the last of them.

        Raises:
          AdapterError: it is not loaded, or requests are using it.
        """
        self._adapters.remove(name, when_busy)
        self._runner.scheduler.drop_unloaded()

    def pin_adapter(self, name: str) -> AdapterInfo:
        """Puts an adapter into a slot and keeps it there, under this name, until it is unpinned.

        A new version inherits the pin. One slot always stays for adapters that are not pinned.

        Raises:
          AdapterError: it is not loaded, no slot can be had now, or too many are pinned.
        """
        self._runner.scheduler.look_again()
        return self._adapters.pin(name)

    def unpin_adapter(self, name: str) -> AdapterInfo:
        """Lets others take the adapter's slot again. Raises AdapterError if it is not loaded."""
        self._runner.scheduler.look_again()
        return self._adapters.unpin(name)

    def adapters(self) -> list[AdapterInfo]:
        """The loaded adapters as they are now, each at its newest version."""
        return list(self._adapters)

    # Requests

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapters: Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Generates for every prompt, all in one batch as far as they fit.

        Args:
          prompts: strings or lists of token ids.
          params: one for all, or one for each.
          adapters: the adapter of each prompt, None for the base model.

        Raises:
          RequestError: a request that cannot be served; none has been started then.
        """
        completions = {}
        for delta in self.stream(prompts, params, adapters):
            if delta.completion is not None:
                completions[delta.index] = delta.completion
        return [completions[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapters: Sequence[str | None] | None = None,
    ) -> Iterator[Delta]:
        """`generate`, one token at a time as they come. Closing the iterator ends the requests.

        Raises:
          RequestError: at once, before the iterator is returned.
        """
        prompts = validate.sequence_of_prompts(prompts)
        params = SamplingParams() if params is None else params
        settings = validate.one_each("params", params, len(prompts))
        requests = []
        for index, (prompt, chosen) in enumerate(zip(prompts, settings, strict=True)):
            tokens = self._token_ids(prompt, f"prompts[{index}]")
            validate.params(chosen, f"params[{index}]", has_text=self.codec is not None)
            request = GenerateRequest(
                index=index,
                tokens=tokens,
                prompt_length=len(tokens),
                adapter=None,
                params=chosen,
                seed=secrets.randbits(32) if chosen.seed is None else chosen.seed,
            )
            self._check_length(request, f"prompts[{index}]", chosen.max_tokens)
            requests.append(request)
        self._choose_adapters(requests, adapters)
        return self._runner.run(requests)

    def score(
        self,
        token_ids: Sequence[Prompt],
        adapters: Sequence[str | None] | None = None,
        return_logits: bool = False,
    ) -> list[Score]:
        """Logprobs of given sequences, equal bit for bit to those of generating them.

        Raises:
          RequestError: a sequence that cannot be scored; none has been started then.
        """
        requests = []
        for index, prompt in enumerate(validate.sequence_of_prompts(token_ids)):
            tokens = self._token_ids(prompt, f"token_ids[{index}]")
            request = ScoreRequest(
                index=index,
                tokens=tokens,
                prompt_length=len(tokens),
                adapter=None,
                return_logits=return_logits,
            )
            self._check_length(request, f"token_ids[{index}]", 0)
            requests.append(request)
        self._choose_adapters(requests, adapters)
        for _ in self._runner.run(requests):
            raise AssertionError("scoring yields no tokens")
        return [_score(request) for request in requests]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, by the checkpoint's chat template, to use as a prompt."""
        return self._text_codec("messages").chat(messages)

    def stats(self) -> EngineStats:
        """Counters and sizes."""
        scheduler, pool = self._runner.scheduler, self._adapters
        return EngineStats(
            compilations=compile_count(),
            **self._runner.counts,
            host_ms_per_step=self._runner.host_ms_per_step,
            **scheduler.counts,
            adapters=len(self.adapters()),
            resident_adapters=pool.resident,
            free_adapter_slots=pool.free,
            adapter_loads=pool.loads,
            adapter_evictions=pool.evictions,
            adapter_host_bytes=pool.host_bytes,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_pages=scheduler.pool.free,
            cached_pages=len(scheduler.pool.prefixes),
            total_pages=scheduler.pool.total,
            bank_bytes=self.bank.nbytes,
            cache_bytes=sum(array.nbytes for array in jax.tree.leaves(self._runner.steps.pages)),
        )

    def _token_ids(self, prompt: Prompt, key: str) -> list[int]:
        if isinstance(prompt, str):
            prompt = self._text_codec(key).encode(prompt)
        return validate.token_ids(prompt, key, self.config.vocab_size)

    def _text_codec(self, key: str) -> TextCodec:
        if self.codec is None:
            raise RequestError(
                "the model folder has no tokenizer.json", key=key, hint="pass token ids"
            )
        return self.codec

    def _check_length(self, request: Request, key: str, max_tokens: int) -> None:
        total = request.prompt_length + max_tokens
        if total > self.options.max_length:
            raise RequestError(
                "the request is longer than the cache",
                key=key,
                expected=f"at most {self.options.max_length} tokens, prompt and output together",
                found=f"{request.prompt_length} prompt tokens and max_tokens {max_tokens}",
                hint="shorten it, or build the engine with a larger max_length",
            )

    def _choose_adapters(self, requests: list, adapters: Sequence[str | None] | None) -> None:
        names = validate.one_each("adapters", adapters, len(requests))
        for index, (request, name) in enumerate(zip(requests, names, strict=True)):
            try:
                request.adapter = None if name is None else self._adapters.get(name)
            except AdapterError as error:
                raise RequestError(
                    "the request names an adapter that is not loaded",
                    key=f"adapters[{index}]",
                    expected=error.expected,
                    found=repr(name),
                    hint="load it with load_adapter",
                ) from error


def _write_slot(bank: Bank, slot: int, adapter: Adapter) -> None:
    with no_compile("writing an adapter to its slot"):
        bank.write(slot, adapter)


def _copied(adapter: Adapter) -> Adapter:
    """The same with arrays of its own: their owner may go on training them."""
    pairs = {
        name: LoraPair(*map(np.array, (pair.a, pair.b, pair.scaling, pair.ranks)))
        for name, pair in adapter.pairs.items()
    }
    return replace(adapter, pairs=pairs)


def _score(request: ScoreRequest) -> Score:
    return Score(
        logprobs=np.concatenate(request.logprobs)[:-1],
        logits=np.concatenate(request.logits) if request.return_logits else None,
        adapter=request.adapter_name,
        adapter_version=request.adapter_version,
    )
