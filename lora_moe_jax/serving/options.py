"""The engine's sizes, checked and completed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from lora_moe_jax.adapters.disk_copy import check_folder
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import ConfigError
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import abstract_model, projections
from lora_moe_jax.serving.queue_limit import check_limit
from lora_moe_jax.serving.sampling_params import MAX_LOGPROBS
from pallas_kernels.implementation import platform_implementation

DTYPES = ("bfloat16", "float32")
UPDATE_POLICIES = ("finish", "switch")
DEFAULT_MAX_LENGTH = 1024
BUCKET_UNIT = 8  # tokens
MANY_RANKS = 1024  # that slots of tiny models may have, too
# Of steps with prompts, where nobody says. A step reads all weights, whatever it has: with few
# tokens an accelerator waits for these most of the time. On a CPU padding costs what tokens do.
PREFILL_TOKENS = {"cpu": (128,), "gpu": (256, 2048), "tpu": (512,)}


@dataclass(frozen=True)
class EngineOptions:
    """Sizes that every compiled step is built from. See `Engine.from_pretrained`."""

    dtype: str
    max_adapters: int
    rank_classes: tuple[tuple[int, int], ...]  # (rank, slots), the smallest rank first
    max_requests: int
    max_length: int
    page_size: int
    token_buckets: tuple[int, ...]
    prefill_chunk: int
    cache_tokens: int
    prefix_cache: bool = True
    # One by default: the loop is one more whole model to compile, a host that works ahead of the
    # device gains little by it, and tokens come in groups.
    decode_steps: int = 1
    max_logprobs: int = MAX_LOGPROBS
    max_waiting: int | None = None
    update_policy: str = "finish"
    adapter_disk: str | os.PathLike | None = None

    @property
    def max_rank(self) -> int:
        """The largest rank that fits into any slot."""
        return self.rank_classes[-1][0]

    @property
    def pages_per_request(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_length // self.page_size)

    @property
    def pages(self) -> int:
        """Pages of the cache."""
        return -(-self.cache_tokens // self.page_size)

    @classmethod
    def resolve(
        cls,
        config: ModelConfig,
        *,
        dtype: str,
        max_length: int | None,
        token_buckets: Sequence[int] | None,
        prefill_chunk: int | None,
        cache_tokens: int | None = None,
        prefix_cache: bool = True,
        max_logprobs: int = MAX_LOGPROBS,
        max_waiting: int | None = None,
        update_policy: str = "finish",
        adapter_disk: str | os.PathLike | None = None,
        max_rank: int | Mapping[int, int],
        **sizes: int,
    ) -> EngineOptions:
        """Checks what the caller gave and fills in the rest.

        Raises:
          ConfigError: a value out of range.
        """
        if dtype not in DTYPES:
            raise ConfigError("unknown dtype", key="dtype", expected=f"{DTYPES}", found=repr(dtype))
        for key, value in sizes.items():
            _check_size(key, value, minimum=0 if key == "max_adapters" else 1)
        classes = rank_classes(max_rank, sizes["max_adapters"])
        # No product can have more ranks: a larger one is a mistake, and much memory.
        _check_size("max_rank", classes[-1][0], maximum=max(config.hidden_size, MANY_RANKS))
        if max_length is None:
            max_length = min(DEFAULT_MAX_LENGTH, config.max_position)
        _check_size("max_length", max_length, maximum=config.max_position)
        if token_buckets is None:
            token_buckets = default_buckets(sizes["max_requests"], max_length)
        if not isinstance(token_buckets, list | tuple) or not token_buckets:
            raise ConfigError(
                "an engine option is out of range",
                key="token_buckets",
                expected="a list of at least one size",
                found=repr(token_buckets),
            )
        for size in token_buckets:
            _check_size("token_buckets", size)
        # A token of every request that runs has room.
        _check_size("token_buckets", max(token_buckets), minimum=sizes["max_requests"])
        buckets = tuple(sorted({_bucket(size, dtype) for size in token_buckets}))
        if prefill_chunk is None:
            prefill_chunk = buckets[-1]
        _check_size("prefill_chunk", prefill_chunk)
        of_request = -(-max_length // sizes["page_size"]) * sizes["page_size"]
        if cache_tokens is None:
            cache_tokens = sizes["max_requests"] * of_request
        _check_size("cache_tokens", cache_tokens, minimum=of_request)
        if not isinstance(prefix_cache, bool):
            raise ConfigError(
                "an engine option is out of range",
                key="prefix_cache",
                expected="True or False",
                found=repr(prefix_cache),
            )
        _check_size("max_logprobs", max_logprobs, minimum=0, maximum=MAX_LOGPROBS)
        if max_waiting is not None:
            check_limit(max_waiting)
        if not isinstance(update_policy, str) or update_policy not in UPDATE_POLICIES:
            raise ConfigError(
                "this is not a way to update adapters",
                key="update_policy",
                expected=f"one of {UPDATE_POLICIES}",
                found=repr(update_policy)[:200],
            )
        if adapter_disk is not None:
            check_folder(adapter_disk)
        return cls(
            dtype=dtype,
            max_length=max_length,
            token_buckets=buckets,
            prefill_chunk=prefill_chunk,
            prefix_cache=prefix_cache,
            cache_tokens=cache_tokens,
            max_logprobs=min(max_logprobs, config.vocab_size),
            max_waiting=max_waiting,
            update_policy=update_policy,
            adapter_disk=adapter_disk,
            rank_classes=classes,
            **sizes,
        )


def default_buckets(max_requests: int, max_length: int) -> tuple[int, ...]:
    """Of steps that generate, and of those with prompts: no larger than all requests together."""
    generation = max(BUCKET_UNIT, max_requests)
    most = max(generation, max_requests * max_length)
    prompts = PREFILL_TOKENS.get(jax.default_backend(), PREFILL_TOKENS["cpu"])
    return generation, *(min(most, max(generation, size)) for size in prompts)


def _bucket(size: int, dtype: str) -> int:
    """The tokens of a step that is to have room for so many.

    XLA gives the rows of a multiple of 8 the same bits, and those of fewer others. To Hopper
    kernels the number means nothing, and fewer are faster.
    """
    if size < BUCKET_UNIT and dtype == "bfloat16" and platform_implementation() == "mosaic_gpu":
        return size
    return -(-size // BUCKET_UNIT) * BUCKET_UNIT


def rank_classes(
    max_rank: int | Mapping[int, int], max_adapters: int
) -> tuple[tuple[int, int], ...]:
    """How many slots (of `max_adapters`) hold which rank: (rank, slots), the smallest rank first.

    Raises:
      ConfigError: something is out of range, or there are more or fewer slots.
    """
    if not isinstance(max_rank, Mapping):
        _check_size("max_rank", max_rank)
        return ((max_rank, max_adapters),)
    for rank, slots in max_rank.items():
        _check_size("max_rank", rank)
        _check_size("max_rank", slots)
    if sum(max_rank.values()) != max_adapters or not max_rank:
        raise ConfigError(
            "the slots of all ranks together are not as many as there are to be",
            key="max_rank",
            expected=f"max_adapters, {max_adapters} slots",
            found=f"{dict(max_rank)}, {sum(max_rank.values())} slots",
        )
    return tuple(sorted(max_rank.items()))


def slot_config(
    config: ModelConfig,
    options: EngineOptions,
    target_modules: Sequence[str] | None,
    shared_outer: bool,
) -> SlotConfig | None:
    """The adapter slots to build; None when there are to be none."""
    if options.max_adapters == 0:
        return None
    slots = SlotConfig(
        options.max_adapters, options.rank_classes, options.dtype, shared_outer=shared_outer
    )
    if target_modules is None:
        return slots
    if not isinstance(target_modules, list | tuple | set | frozenset) or not target_modules:
        raise ConfigError(
            "an engine option is out of range",
            key="target_modules",
            expected="a list of module names",
            found=repr(target_modules),
            hint="max_adapters=0 builds an engine without adapters",
        )
    every = projections(abstract_model(config, dtype=options.dtype, adapters=slots))
    for target in target_modules:
        if not any(_matches(name, target) for name in every):
            raise ConfigError(
                "the model has no module of this name",
                key="target_modules",
                expected=f"names among {sorted({name.rsplit('.', 1)[-1] for name in every})}",
                found=repr(target),
            )
    targets = {name for name in every if any(_matches(name, target) for target in target_modules)}
    return replace(slots, targets=frozenset(targets))


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_size(key: str, value, minimum: int = 1, maximum: int | None = None) -> None:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or value < minimum or (maximum is not None and value > maximum):
        expected = f"an integer of at least {minimum}"
        if maximum is not None:
            expected += f" and at most {maximum}"
        raise ConfigError(
            "an engine option is out of range", key=key, expected=expected, found=repr(value)
        )
