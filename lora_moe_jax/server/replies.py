"""The objects of a response: whole ones and the chunks of a stream, from the engine's deltas."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Sequence

from lora_moe_jax.serving.decoder import Decoder
from lora_moe_jax.serving.request import Delta
from lora_moe_jax.serving.text import TextCodec
from lora_moe_jax.serving.token_bytes import token_bytes


class Usage:
    """Counts tokens; a prompt with several choices counts once."""

    def __init__(self, n: int):
        self._n = n
        self._prompt = 0
        self._generated = 0

    def add(self, delta: Delta) -> None:
        self._generated += delta.token_id is not None
        if delta.completion is not None and delta.index % self._n == 0:
            self._prompt += len(delta.completion.prompt_token_ids)

    def counts(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt + self._generated,
        }


class CompletionReply:
    """Objects of /v1/completions.

    Args:
      model: the name that the client used.
    """

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, codec: TextCodec, model: str):
        self._codec = codec
        self._model = model
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets: dict[int, _Offsets] = {}  # of each choice

    def response(self, choices: Sequence[list[Delta]], usage: Usage) -> dict:
        """The answer, from all the deltas of each choice."""
        made = [self._choice(deltas, streamed=False) for deltas in choices]
        return self._head(self.whole) | {"choices": made, "usage": usage.counts()}

    def opening(self, count: int) -> list[dict]:
        """What a stream of `count` choices begins with."""
        return []

    def chunk(self, delta: Delta) -> dict | None:
        """The part of a stream for a delta; None if it has nothing to show."""
        if not delta.text and delta.logprob is None and delta.completion is None:
            return None
        return self._head(self.part) | {"choices": [self._choice([delta], streamed=True)]}

    def last(self, usage: Usage) -> dict:
        """The part with the counts."""
        return self._head(self.part) | {"choices": [], "usage": usage.counts()}

    def _head(self, kind: str) -> dict:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, deltas: list[Delta], streamed: bool) -> dict:
        index, completion = deltas[-1].index, deltas[-1].completion
        scored = [delta for delta in deltas if delta.logprob is not None]
        return {
            "index": index,
            **self._content("".join(delta.text for delta in deltas), streamed),
            "logprobs": self._logprobs(scored) if scored else None,
            "finish_reason": None if completion is None else str(completion.finish_reason),
        }

    def _content(self, text: str, streamed: bool) -> dict:
        return {"text": text}

    def _logprobs(self, deltas: list[Delta]) -> dict:
        offsets = [
            self._offsets.setdefault(delta.index, _Offsets(self._codec)).next(delta.token_id)
            for delta in deltas
        ]
        likely = [self._likely(delta) for delta in deltas]
        return {
            "tokens": [self._token(delta.token_id) for delta in deltas],
            "token_logprobs": [_number(delta.logprob) for delta in deltas],
            "top_logprobs": likely if any(likely) else None,
            "text_offset": offsets,
        }

    def _likely(self, delta: Delta) -> dict[str, float | None]:
        """Logprobs of the most likely tokens, and of the one that was chosen, by their text.

        Of tokens that look alike, as parts of characters do, the most likely stands for all.
        """
        if not delta.top_logprobs:
            return {}
        likely = {}
        for token, logprob in [*delta.top_logprobs, (delta.token_id, delta.logprob)]:
            likely.setdefault(self._token(token), _number(logprob))
        return likely

    def _token(self, token_id: int) -> str:
        """A token alone; part of a character shows as a replacement character."""
        return self._codec.tokenizer.decode([token_id], skip_special_tokens=False)


class ChatReply(CompletionReply):
    """Objects of /v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, count: int) -> list[dict]:
        first = {"delta": {"role": "assistant", "content": ""}}
        rest = {"logprobs": None, "finish_reason": None}
        return [
            self._head(self.part) | {"choices": [{"index": index, **first, **rest}]}
            for index in range(count)
        ]

    def _content(self, text: str, streamed: bool) -> dict:
        if streamed:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, deltas: list[Delta]) -> dict:
        entries = [
            self._entry(delta.token_id, delta.logprob)
            | {"top_logprobs": [self._entry(*likely) for likely in delta.top_logprobs or []]}
            for delta in deltas
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict:
        found = token_bytes(self._codec.tokenizer, token_id)
        return {
            "token": self._token(token_id),
            "logprob": _number(logprob),
            "bytes": None if found is None else list(found),
        }


class _Offsets:
    """Where each token's text begins in a choice.

    What is held back, as it may become a stop string, has its place as well.
    """

    def __init__(self, codec: TextCodec):
        self._codec = codec
        self._decoder = Decoder(codec.tokenizer)
        self._length = 0
        self._waits = False  # for the rest of a character

    def next(self, token_id: int) -> int:
        text = self._decoder.step(token_id)
        start = self._length
        if self._waits and text.endswith(own := self._codec.decode([token_id])):
            start += len(text) - len(own)  # before it is what the character has become
        self._waits = not text
        self._length += len(text)
        return start


def _number(logprob: float) -> float | None:
    """JSON has no NaN and no infinity: an adapter may be finite, and what it gives not."""
    return logprob if math.isfinite(logprob) else None


def event(data: dict | str) -> str:
    """A server-sent event.

    In ASCII: there are characters that end a line for some clients, and for others not.
    """
    text = data if isinstance(data, str) else json.dumps(data, allow_nan=False)
    return f"data: {text}\n\n"
