"""The engine: one base model, a bank of adapters, and requests that mix them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from jax.sharding import Mesh

from lora_moe_jax.adapters import Adapter, LoraPair, check_name, read_adapter
from lora_moe_jax.adapters.bank import KvBLora
from lora_moe_jax.adapters.check import check_adapter
from lora_moe_jax.adapters.device_params import DeviceParams
from lora_moe_jax.adapters.disk_copy import on_disk
from lora_moe_jax.adapters.entry import AdapterInfo
from lora_moe_jax.adapters.pool import AdapterPool
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.adapters.slot_writer import SlotWriter
from lora_moe_jax.checkpoint.reader import Checkpoint
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import AdapterError, RequestError
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import abstract_model, load_model, projections
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.parallel.mesh import mesh_of
from lora_moe_jax.parallel.own_placement import own_placement
from lora_moe_jax.serving.base_copies import without_copies
from lora_moe_jax.serving.compile_cache import use_compile_cache
from lora_moe_jax.serving.compile_guard import compile_count, no_compile
from lora_moe_jax.serving.intake import Intake, Prompt
from lora_moe_jax.serving.model_arrays import ModelArrays
from lora_moe_jax.serving.options import EngineOptions, slot_config
from lora_moe_jax.serving.pages import PagePool
from lora_moe_jax.serving.progress import progress_bar
from lora_moe_jax.serving.queue_limit import check_count, check_room
from lora_moe_jax.serving.request import Completion, Request, Score, scores
from lora_moe_jax.serving.runner import Runner
from lora_moe_jax.serving.sampling_params import MAX_LOGPROBS, SamplingParams
from lora_moe_jax.serving.scheduler import Scheduler
from lora_moe_jax.serving.sizes import MemorySizes, free_bytes
from lora_moe_jax.serving.sleep import EngineAsleepError, EngineBusyError, free, nbytes, renewed
from lora_moe_jax.serving.stats import EngineStats
from lora_moe_jax.serving.steps import Steps, allocate_pages
from lora_moe_jax.serving.stream import RequestStream
from lora_moe_jax.serving.text import TextCodec
from pallas_kernels import Lora


def _operation(method: Callable) -> Callable:
    """A method of the engine that comes between steps, as a whole."""

    @functools.wraps(method)
    def whole(engine: Engine, *arguments, **named):
        with engine._runner.operation():
            return method(engine, *arguments, **named)

    return whole


class Engine:
    """Scores and generates with any mix of adapters over one base model.

    Build it with `from_pretrained`. Threads may share `generate`, `stream` and `score`, and take
    its steps together; everything else is for one thread, while no other uses the engine.

    Attributes:
      config: what the base model is.
      options: what the engine was built with, nothing left open.
      arrays: the model's arrays, which a `Trainer` computes with too.
      bank: those of the adapter slots.
      folder: the base model's, as `from_pretrained` was given it; else None.
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
        self.arrays = arrays
        self.bank = arrays.bank
        self.folder: str | None = None
        self._writer = SlotWriter(arrays.bank)
        self._adapters = AdapterPool(
            arrays.bank.ranks,
            self._write_slot,
            self._writer.read,
            switch=options.update_policy == "switch",
        )
        self._intake = Intake(config, options, codec, self._adapters)
        self._asleep = 0
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
        self._runner = Runner(steps, scheduler, codec)

    @classmethod
    @own_placement()
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        *,
        adapters: Mapping[str, str | os.PathLike] | None = None,
        dtype: str = "bfloat16",
        max_adapters: int = 8,
        max_rank: int | Mapping[int, int] = 32,
        target_modules: Sequence[str] | None = None,
        shared_outer: bool = False,
        mesh: Mesh | Mapping[str, int] | None = None,
        max_requests: int = 8,
        max_length: int | None = None,
        page_size: int = 16,
        token_buckets: Sequence[int] | None = None,
        prefill_chunk: int | None = None,
        cache_tokens: int | None = None,
        prefix_cache: bool = True,
        decode_steps: int = 1,
        max_logprobs: int = MAX_LOGPROBS,
        max_waiting: int | None = None,
        update_policy: Literal["finish", "switch"] = "finish",
        adapter_disk: str | os.PathLike | None = None,
        progress: bool = False,
    ) -> Engine:
        """Loads a Hugging Face folder, compiles every step, and is ready to serve.

        Args:
          folder: config.json, safetensors, and tokenizer.json if text is wanted.
          adapters: folders by name, as for `load_adapter`; what is wrong with one is said before
            weights are loaded.
          dtype: of weights, activations and cache: "bfloat16" or "float32".
          max_adapters: adapter slots on the device; any number of adapters may be loaded.
          max_rank: the largest rank that fits into a slot. Or, so that not every slot takes the
            memory of the largest, how many slots hold which rank: `{16: 6, 64: 2}` for 8 in all.
          target_modules: module names (`q_proj`, `experts.gate_proj`, …) that adapters may
            target; all of them by default. Others get no slots and cost nothing.
          shared_outer: keep one outer factor for all experts of a layer; only adapters that
            share theirs can then be loaded.
          mesh: devices to split over, with axes named "tensor" and "expert"; or how many of the
            first devices there are along each, such as `{"tensor": 2}`.
          max_requests: requests that run at the same time.
          max_length: most tokens of one request, prompt and output together. Default: 1024, or
            what the model was made for if that is less.
          page_size: tokens of a cache page.
          token_buckets: sizes of the flat batch that steps are compiled for; the largest has room
            for a token of every request. A small one makes few requests faster, a large one long
            prompts. Default: one for generation by `max_requests`, and for prompts one of 128
            tokens on a CPU, of 256 and of 2048 on a GPU, of 512 on a TPU.
          prefill_chunk: most tokens of one prompt in one step. Default: the largest bucket.
          cache_tokens: positions that the cache holds for all requests together. Default: enough
            for every running request to be as long as any. With less, more requests can run than
            there would be memory for at the worst; then the last one makes room and is computed
            again.
          prefix_cache: keep what was computed, while its memory is not needed, for requests that
            begin with the same tokens under the same version of an adapter. No bit depends on it.
          decode_steps: how many tokens of each request the device generates without the host while
            nobody waits, no prompt is left, no request reaches its max_tokens, and none wants the
            most likely tokens or filters them. Tokens then come in groups of this many, and a new
            request may wait for two of them. No bit depends on it.
          max_logprobs: the most that `SamplingParams.logprobs` and `score`'s `top_logprobs` may
            ask for.
          max_waiting: most requests that may wait for one of the `max_requests` places; those that
            come then are refused with QueueFullError. Default: any number.
          update_policy: what becomes of unfinished requests when their adapter is replaced, by
            `load_adapter` or `update_adapter`. "finish": they end with the version that they began
            with, which keeps its slot while they run, so the new one needs another. "switch": the
            new version is written over the old one, in its slot if it has one, and they go on with
            it from their next step on, with what is in the cache; those that wait are computed by
            the new version alone, and a score starts over, so that it is always of one version.
            `Completion.adapter_versions` and `Delta.adapter_version` say what made each token.
          adapter_disk: a folder on a disk for the host copies of adapters, where there are more
            than memory has room for. They are files without names there, which nobody can change
            and which are gone with the engine. Default: they are in memory, as versions are always
            that came from the device and have given up their slot.
          progress: show sizes and progress bars on stderr.

        Raises:
          ConfigError: the model or the mesh is not supported, an option is out of range, or the
            sizes do not fit into the memory of a device that says what it has.
          CheckpointError: the weights are damaged or do not belong to the configuration.
          AdapterError: see `load_adapter`.
        """
        use_compile_cache()
        config, mesh = read_config(folder), mesh_of(mesh)
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
            max_logprobs=max_logprobs,
            max_waiting=max_waiting,
            update_policy=update_policy,
            adapter_disk=adapter_disk,
        )
        checkpoint = Checkpoint.open(folder, config)
        codec = TextCodec.from_folder(folder)
        slots: SlotConfig = slot_config(config, options, target_modules, shared_outer)
        planned = abstract_model(config, dtype=dtype, adapters=slots, mesh=mesh)
        sizes = MemorySizes.of(planned, options, mesh)
        if progress:
            sizes.show()
        sizes.check(free_bytes(mesh))
        read = _read_adapters(adapters or {}, projections(planned), options)
        with progress_bar("loading weights", shown=progress) as bar:
            model = load_model(
                checkpoint, config, dtype=dtype, adapters=slots, mesh=mesh, progress=bar.update
            )
        engine = cls.from_model(model, codec, options, mesh=mesh, progress=progress)
        engine.folder = os.fspath(folder)
        for name, adapter in read.items():
            engine._add_adapter(name, engine._fitted(adapter))
        return engine

    @classmethod
    @own_placement()
    def from_model(
        cls,
        model: Decoder,
        codec: TextCodec | None,
        options: EngineOptions,
        *,
        mesh: Mesh | None = None,
        progress: bool = False,
    ) -> Engine:
        """The same for a model on the device whose slots are those of the options, and empty.

        The engine makes its own slots in their memory: the model's are gone then.
        """
        MemorySizes.of(model, options, mesh).check(free_bytes(mesh), ["cache"])
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
                top_logprobs=options.max_logprobs,
                progress=bar.update,
                decode_steps=options.decode_steps,
            )
        return cls(arrays, model.config, codec, steps, options)

    @property
    def codec(self) -> TextCodec | None:
        """The model's tokenizer and chat template, if its folder has them."""
        return self._intake.codec

    # Adapters

    def load_adapter(self, name: str, source: str | os.PathLike | Adapter) -> AdapterInfo:
        """Loads an adapter folder (or one in memory, which is copied) under a name.

        It is kept in host memory, or on disk (`adapter_disk` of `from_pretrained`), and goes to the
        device at once if a slot is free, otherwise with the first request that uses it; while
        requests run, in parts between their steps. Under a
        name that is taken it is a new version, which later requests use; those that have begun end
        with the version that they began with, or go on with the new one: see `update_policy`.

        Raises:
          AdapterError: it cannot be served exactly, one of this name is in training, there is no
            room on disk, or its rank is too large for the slot of the version before, whose pin or
            whose requests that go on need another, and none can be had. Nothing has changed then.
        """
        self._check_new_version(name)
        return self._add_adapter(name, self._host_copy(source))

    @_operation
    def _add_adapter(self, name: str, adapter: Adapter) -> AdapterInfo:
        self._check_new_version(name)
        try:
            info = self._adapters.add(name, adapter).info
        finally:  # also where the device failed as the version was written: it has a copy
            self._runner.scheduler.switch_versions()
        self._write_if_idle()
        return info

    def _host_copy(self, source: str | os.PathLike | Adapter) -> Adapter:
        """An adapter as the pool keeps it, which fits the bank. Any thread may make one."""
        return _kept(self._read_adapter(source), self.options)

    @_operation
    def update_adapter(
        self,
        name: str,
        params: Adapter | Mapping[str, LoraPair | Lora | KvBLora] | DeviceParams,
        *,
        trainer: object | None = None,
    ) -> AdapterInfo:
        """Makes parameters on the device the newest version, as `load_adapter` would, bit for bit.

        They go into a slot by one function on the device, compiled for the first parameters of
        these shapes, and are not kept. The host gets a copy only if the version has to give up its
        slot. Requests that have begun end with the version that they began with, which keeps its
        slot while they run; so updates beside running requests need one slot more. Unless the
        engine's `update_policy` is "switch": then they go on with the new one, in the same slot.

        Args:
          params: by `Projection.name` a `LoraPair` of arrays at the adapter's own rank (its `ranks`
            are not looked at), or the arrays of one slot of `bank.arrays`, without the axis of
            slots. Projections that are not there become zero. Or all of this as `DeviceParams`,
            which are not checked again.
          trainer: whose adapter it is from now on: others can neither replace nor unload it, until
            `end_training` or until this object is gone. None: nobody's.

        Raises:
          AdapterError: they do not fit the bank, are not finite, no slot can be had, or an adapter
            of this name is in training elsewhere. Nothing has changed then.
          Exception: what the device says if writing fails. Then no adapter has this name any more,
            and requests that had gone on with this version are aborted.
        """
        self._check_new_version(name, trainer)
        checked = params
        if not isinstance(params, DeviceParams):
            checked = DeviceParams.of(params, self.bank)
        if not checked.finite:
            self._writer.check_finite(checked)
        try:
            info = self._adapters.update(name, checked, trainer).info
        except BaseException:
            self._runner.abort_lost()
            raise
        self._runner.scheduler.switch_versions()
        return info

    def end_training(self, name: str) -> None:
        """Makes an adapter that has a trainer one as any other."""
        self._adapters.end_training(name)

    @_operation
    def adapter_slots(self, names: Sequence[str]) -> list[int]:
        """Puts adapters into slots, where they stay until the engine is asked for anything else.

        Raises:
          AdapterError: one is not loaded, or finds no slot beside the others.
          EngineAsleepError: the bank is asleep.
        """
        self._check_bank()
        return self._adapters.place_all(names)

    def _check_new_version(self, name: str, trainer: object | None = None) -> None:
        check_name(name)
        self._check_bank()
        self._adapters.check_trainer(name, trainer)

    def _write_slot(self, slot: int, adapter: Adapter | DeviceParams) -> Iterator[None]:
        parts = self._writer.write(slot, adapter)
        if isinstance(adapter, DeviceParams):  # compiles for the first of its shapes
            yield from parts
            return
        written = False
        while not written:
            with no_compile("writing an adapter to its slot"):
                written = next(parts, parts) is parts
            yield

    def _write_if_idle(self) -> None:
        """Slots that wait to be written are, unless requests run: then it is done between steps."""
        if not self._runner.scheduler.running:
            self._adapters.write_all()

    def _check_bank(self) -> None:
        _check_slots(self.options)
        if self._asleep == 2:
            raise EngineAsleepError(
                "the bank is asleep", key="sleep", hint="call wake before changing adapters"
            )

    def _read_adapter(self, source: str | os.PathLike | Adapter) -> Adapter:
        """An adapter of its own in host memory, which fits the bank."""
        if isinstance(source, Adapter):
            check_adapter(source, self.bank.projections)
            adapter = source.copied()
        elif isinstance(source, str | os.PathLike):
            rank = self.options.max_rank
            adapter = read_adapter(source, self.bank.projections, max_rank=rank)
        else:
            raise AdapterError(
                "an adapter comes from a folder or from an Adapter",
                key="source",
                expected="a path or an Adapter",
                found=type(source).__name__,
            )
        return self._fitted(adapter)

    def _fitted(self, adapter: Adapter) -> Adapter:
        """As a slot has room for it, without the base weights that came with it."""
        if adapter.base_copies:
            adapter = without_copies(adapter, self.arrays.on_base())
        return self.bank.fitted(adapter)

    @_operation
    def unload_adapter(self, name: str, when_busy: Literal["refuse", "finish"] = "refuse") -> None:
        """Forgets an adapter and frees what it has.

        Args:
          when_busy: what to do if unfinished requests use it: "refuse", or "finish": its name is
            forgotten at once, its slot and host memory are freed with the last of them.

        Raises:
          AdapterError: it is not loaded, in training, or requests are using its newest version.
        """
        self._adapters.remove(name, when_busy)
        self._runner.scheduler.drop_unloaded()

    @_operation
    def pin_adapter(self, name: str) -> AdapterInfo:
        """Puts an adapter into a slot and keeps it there, under this name, until it is unpinned.

        A new version inherits the pin. One slot always stays for adapters that are not pinned.

        Raises:
          AdapterError: it is not loaded, no slot can be had now, or too many are pinned.
        """
        self._adapters.get(name)
        self._check_bank()
        self._runner.scheduler.look_again()
        info = self._adapters.pin(name)
        self._write_if_idle()
        return info

    @_operation
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
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Generates for every prompt, all in one batch as far as they fit.

        Args:
          prompts: strings or lists of token ids.
          params: one for all, or one for each.
          adapters: the adapter of each prompt, None for the base model.
          priority: one for all, or one for each. Of requests that wait those with a smaller one are
            admitted earlier, of equal ones those that came earlier; where the cache is full one
            with the largest makes room. The larger wait for as long as smaller ones keep coming.

        Raises:
          RequestError: a request that cannot be served, or (QueueFullError) not now; none has been
            started then.
        """
        with self.stream(prompts, params, adapters, priority) as deltas:
            ends = [delta for delta in deltas if delta.completion is not None]
        return [end.completion for end in sorted(ends, key=lambda end: end.index)]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapters: Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> RequestStream:
        """`generate`, one token at a time as they come. Closing the iterator ends the requests, and
        its `abort` one of them.

        Raises:
          RequestError: at once, before the iterator is returned.
        """
        return self._open(self._intake.generate(prompts, params, adapters, priority))

    def score(
        self,
        token_ids: Sequence[Prompt],
        adapters: Sequence[str | None] | None = None,
        return_logits: bool = False,
        top_logprobs: int = 0,
        priority: int | Sequence[int] = 0,
    ) -> list[Score]:
        """Logprobs of given sequences, equal bit for bit to those of generating them.

        Args:
          return_logits: float32 `[S, V]` of every sequence as well, on the host.
          top_logprobs: how many of the most likely tokens to return in the place of each token.

        Raises:
          RequestError: a sequence that cannot be scored, or (QueueFullError) not now; none has been
            started then.
        """
        arguments = token_ids, adapters, return_logits, top_logprobs, priority
        with self._open_scores(*arguments) as stream:  # an interrupt ends it
            for _ in stream:
                raise AssertionError("scoring yields no tokens")
        return scores(stream.requests)

    def _open_scores(self, *arguments) -> RequestStream:
        """The stream, without deltas, whose requests are scored when it ends."""
        return self._open(self._intake.score(*arguments))

    def _open(self, requests: Sequence[Request]) -> RequestStream:
        if self._asleep:
            raise EngineAsleepError(
                "the engine is asleep", key="sleep", hint="call wake before the first request"
            )
        with self._runner.operation():
            if self.options.max_waiting is not None:
                room = self.options.max_requests + self.options.max_waiting
                check_count(len(requests), room)
                check_room(self._runner.scheduler.unfinished, len(requests), room)
            return RequestStream(self._runner, requests)

    # Memory

    @_operation
    def sleep(self, level: Literal[1, 2] = 1, abort: bool = False) -> None:
        """Gives memory on the device to others until `wake`; until then no request is taken.

        What was cached is forgotten. Nothing is compiled, now or later. To sleep twice changes
        nothing but the level, if it is a deeper one.

        Args:
          level: 1 frees the pages of the cache, 2 also the bank: adapters go to the host, and come
            back when they are used; until `wake` none can be loaded, updated or pinned.
          abort: abort unfinished requests, as `RequestStream.abort` does.

        Raises:
          EngineBusyError: there are unfinished requests, and `abort` is False.
          RequestError: there is no such level.
        """
        if level not in (1, 2):
            raise RequestError(
                "there is no such level of sleep", key="level", expected="1 or 2", found=repr(level)
            )
        scheduler = self._runner.scheduler
        self._runner.drain()  # nothing may be writing what is freed here
        if abort:
            for request in [*scheduler.running, *scheduler.waiting]:
                self._runner.abort(request)
        if scheduler.unfinished:
            raise EngineBusyError(
                "the engine cannot sleep while requests are unfinished",
                key="sleep",
                expected="no request",
                found=f"{scheduler.unfinished} unfinished request(s)",
                hint="finish or close their streams first, or pass abort=True",
            )
        if not self._asleep:
            scheduler.pool.give_back(scheduler.pool.prefixes.clear())
            free(self._runner.steps.pages)
        if level == 2 and self._asleep < 2:
            self._adapters.clear_slots()
            free(self.bank.stacks)
        self._asleep = max(self._asleep, level)

    @_operation
    def wake(self) -> None:
        """Takes the memory back that `sleep` gave away; harmless when awake."""
        if self._asleep == 2:
            self.bank.stacks = renewed(self.bank.stacks)
            self._adapters.place_pinned()
            self._adapters.write_all()
        if self._asleep:
            self._runner.steps.pages = renewed(self._runner.steps.pages)
            self._runner.scheduler.look_again()
        self._asleep = 0

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, by the checkpoint's chat template, to use as a prompt."""
        return self._intake.text_codec("messages").chat(messages)

    @_operation
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
            adapter_disk_bytes=pool.disk_bytes,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_pages=scheduler.pool.free,
            cached_pages=len(scheduler.pool.prefixes),
            total_pages=scheduler.pool.total,
            bank_bytes=nbytes(self.bank.stacks),
            cache_bytes=nbytes(self._runner.steps.pages),
        )


def _read_adapters(
    folders: Mapping[str, str | os.PathLike],
    base: Mapping[str, Projection],
    options: EngineOptions,
) -> dict[str, Adapter]:
    """Those of an engine that is not there yet."""
    if not isinstance(folders, Mapping):
        raise AdapterError(
            "adapters have no names",
            key="adapters",
            expected="folders by name, as {'poet': FOLDER}",
            found=type(folders).__name__,
        )
    read = {}
    for name, folder in folders.items():
        check_name(name)
        _check_slots(options)
        read[name] = _kept(read_adapter(folder, base, max_rank=options.max_rank), options)
    return read


def _check_slots(options: EngineOptions) -> None:
    if options.max_adapters == 0:
        raise AdapterError(
            "the engine has no adapter slots",
            key="max_adapters",
            expected="at least 1",
            found="0",
            hint="build the engine with a larger max_adapters",
        )


def _kept(adapter: Adapter, options: EngineOptions) -> Adapter:
    """In host memory, or on disk."""
    return on_disk(adapter, options.adapter_disk) if options.adapter_disk else adapter
