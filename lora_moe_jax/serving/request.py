"""A request on its way through the engine, and what comes out."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lora_moe_jax.adapters.entry import Entry
from lora_moe_jax.errors import RequestError
from lora_moe_jax.serving.prefix_cache import CachedPage
from lora_moe_jax.serving.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended: a stop token or string, its length, or `RequestStream.abort`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


# For each token (id, logprob) of the most likely ones, the most likely first.
TopLogprobs = list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Completion:
    """One finished generation.

    Attributes:
      text: the generated text, cut before a stop string; None without a tokenizer.
      token_ids: the generated tokens, a final stop token included.
      logprobs: each token's logprob under the model, if asked for.
      top_logprobs: for each token the most likely ones in its place and their logprobs, the most
        likely first, as many as asked for; None for none.
      adapter, adapter_version: what made it, from the start; None for the base model.
      adapter_versions: the version that made each token; None for the base model. They are all
        `adapter_version`, unless the engine's `update_policy` is "switch".
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    adapter: str | None
    adapter_version: int | None
    prompt_token_ids: list[int]
    top_logprobs: TopLogprobs | None = None
    adapter_versions: list[int] | None = None


class Delta(NamedTuple):
    """What a stream yields: one token of one request, or none where the request was aborted.

    `text` is what became readable with it (it may be empty while a character is incomplete or a
    stop string may be starting); `completion` is set on the request's last delta. `adapter_version`
    is the version that made the token; None without one, and for the base model.
    """

    index: int
    token_id: int | None
    logprob: float | None
    text: str | None
    completion: Completion | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    adapter_version: int | None = None


@dataclass(frozen=True)
class Score:
    """Logprobs of a given sequence.

    Attributes:
      logprobs: float32 [S - 1], the logprob of each token after the first.
      logits: float32 [S, V] if asked for.
      adapter, adapter_version: what made all of it; None for the base model.
      top_logprobs: for each token after the first, as in `Completion`.
    """

    logprobs: np.ndarray
    logits: np.ndarray | None
    adapter: str | None
    adapter_version: int | None
    top_logprobs: TopLogprobs | None = None


@dataclass(eq=False)
class Request:
    """A request that waits or runs, with one version of an adapter.

    `computed` of its `tokens` are in the cache: in its `pages`, of which the first are `cached` and
    may be others' too. While it waited for a slot, `passed` others with adapters were admitted
    before it. It is `done` when nothing more comes of it, early if it was `aborted`.

    `pending` results, further tokens or the last of a score, are on their way: the steps that give
    them have been begun, and not read. `life` counts how often it was taken out of its row: what a
    step gives is for the life in which the step was begun.

    Where it went on with a newer version, `began` is the one that it began with, and it is `mixed`
    while the cache holds anything of it that an older version computed.
    """

    index: int
    tokens: list[int]
    prompt_length: int
    adapter: Entry | None
    row: int = -1
    pages: list[int] = field(default_factory=list)
    cached: list[CachedPage] = field(default_factory=list)
    computed: int = 0
    passed: int = 0
    pending: int = 0
    life: int = 0
    began: int | None = None
    mixed: bool = False
    done: bool = False
    aborted: bool = False
    priority: int = field(default=0, kw_only=True)

    @property
    def slot(self) -> int | None:
        """The slot its adapter has now that it runs, -1 for the base model."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def adapter_name(self) -> str | None:
        """None for the base model."""
        return None if self.adapter is None else self.adapter.info.name

    @property
    def version(self) -> int | None:
        """The adapter's version that computes it now, None for the base model."""
        return None if self.adapter is None else self.adapter.info.version

    @property
    def adapter_version(self) -> int | None:
        """The version that it began with, whatever was loaded since."""
        return self.version if self.began is None else self.began

    def switch(self, adapter: Entry) -> None:
        """Goes on with a newer version. One that has come to nothing yet begins with that."""
        if self.computed or len(self.tokens) > self.prompt_length:
            self.began = self.adapter_version
        self.mixed = self.computed > 0
        self.adapter = adapter

    @functools.cached_property
    def capacity(self) -> int:
        """Most tokens that it will put into the cache."""
        return self.prompt_length

    @property
    def ready(self) -> int:
        """How many tokens, pending ones too, may be in the cache after the next step."""
        return min(len(self.tokens) + self.pending, self.capacity)

    def restart(self) -> None:
        """It has lost its pages and will be computed again; what came out of it stays.

        Tokens on their way to it are lost and sampled again: the same ones.
        """
        self.row, self.pages, self.cached, self.computed, self.pending = -1, [], [], 0, 0
        self.mixed = False

    @property
    def reusable(self) -> int:
        """How many of its tokens need not be computed if they are in the cache."""
        return 0


@dataclass(eq=False)
class GenerateRequest(Request):
    """A request whose next tokens are sampled, until one of `stop_tokens` is."""

    params: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: frozenset[int] = frozenset()
    seed: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: TopLogprobs = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)

    @property
    def generated(self) -> Sequence[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @functools.cached_property
    def capacity(self) -> int:
        # The last token is never fed back.
        return self.prompt_length + self.params.max_tokens - 1

    @property
    def reusable(self) -> int:
        # The next token is sampled from what the last one gives.
        return len(self.tokens) - 1


@dataclass(eq=False)
class ScoreRequest(Request):
    """A request whose own tokens are scored, so each of them is computed."""

    return_logits: bool = False
    alternatives: int = 0
    logprobs: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    top_logprobs: TopLogprobs = field(default_factory=list)

    @property
    def in_parts(self) -> bool:
        """Whether steps have been begun for some of its tokens, but not for all."""
        return 0 < self.computed < len(self.tokens)

    def restart(self) -> None:
        super().restart()
        self.began = None
        self.logprobs, self.logits, self.top_logprobs = [], [], []


def scores(requests: Sequence[ScoreRequest]) -> list[Score]:
    """What came of requests that are done. Raises RequestError if one was aborted."""
    return [_score(request) for request in requests]


def _score(request: ScoreRequest) -> Score:
    if request.aborted:
        raise RequestError("the request was aborted", key=f"token_ids[{request.index}]")
    return Score(
        logprobs=np.concatenate(request.logprobs)[:-1],
        logits=np.concatenate(request.logits) if request.return_logits else None,
        adapter=request.adapter_name,
        adapter_version=request.adapter_version,
        top_logprobs=request.top_logprobs[:-1] if request.alternatives else None,
    )
