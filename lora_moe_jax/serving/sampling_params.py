"""How a request wants its tokens chosen, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lora_moe_jax.errors import RequestError

MAX_LOGPROBS = 20  # as in vLLM and OpenAI's interface
STOP_STRINGS, STOP_LENGTH = 32, 256  # at most: all are looked for after each token


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request.

    Attributes:
      max_tokens: most tokens to generate.
      temperature: 0 is greedy; otherwise logits are divided by it first.
      top_k: keep the k most likely tokens, and those that are as likely as the last of them, of
        which bfloat16 has many; 0 keeps all, and so does -1, which is what others write.
      top_p: keep the fewest most likely tokens whose probability adds up to this; after top_k.
      min_p: drop tokens less likely than this share of the most likely one; after top_p.
      seed: makes the request's samples repeatable whatever runs beside it; None draws one. Seeds
        with the same lowest 32 bits are the same.
      stop: strings that end the text; the text is cut before them. At most 32, of 256 characters.
      stop_token_ids: token ids that end it, kept in token_ids.
      ignore_eos: go on past the model's own end-of-text tokens.
      logprobs: None returns none (False says so too); an integer k from 0 to 20 returns each
        token's logprob under the model (before temperature and filters) and the k most likely
        tokens with theirs. True is 0: the token's own alone.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | bool | None = None

    def __post_init__(self):
        for key, value in vars(self).items():
            object.__setattr__(self, key, _plain(value))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for key in ("stop", "stop_token_ids"):
            self._require(key, "a list", isinstance(getattr(self, key), list | tuple))
            object.__setattr__(self, key, tuple(map(_plain, getattr(self, key))))
        if isinstance(self.logprobs, bool):
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        counted = self.logprobs is None or _is_int(self.logprobs, 0, MAX_LOGPROBS)
        self._require("logprobs", f"None, or an integer from 0 to {MAX_LOGPROBS}", counted)
        self._require("ignore_eos", "True or False", isinstance(self.ignore_eos, bool))
        self._require("max_tokens", "an integer from 1 to 2**31 - 1", _is_int(self.max_tokens, 1))
        warm = _is_number(self.temperature, 0, 1e30)
        self._require("temperature", "a number from 0 to 1e30", warm)
        counted = _is_int(self.top_k, -1)
        self._require("top_k", "an integer up to 2**31 - 1; 0 or -1 for all", counted)
        in_range = _is_number(self.top_p, 0, 1) and self.top_p > 0
        self._require("top_p", "a number above 0, at most 1", in_range)
        self._require("min_p", "a number from 0 to 1", _is_number(self.min_p, 0, 1))
        seeded = self.seed is None or _is_int(self.seed, -(2**63), 2**63 - 1)
        self._require("seed", "None, or an integer of 64 bits", seeded)
        texts = all(isinstance(text, str) and 0 < len(text) <= STOP_LENGTH for text in self.stop)
        said = f"at most {STOP_STRINGS} strings of 1 to {STOP_LENGTH} characters"
        self._require("stop", said, texts and len(self.stop) <= STOP_STRINGS)
        ids = all(_is_int(token, 0) for token in self.stop_token_ids)
        self._require("stop_token_ids", "token ids", ids)

    @property
    def filters(self) -> bool:
        """Whether tokens are filtered by top-k, top-p or min-p."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def _require(self, key: str, expected: str, holds: bool) -> None:
        if not holds:
            raise RequestError(
                "a sampling setting is out of range",
                key=key,
                expected=expected,
                found=repr(getattr(self, key)),
            )


def _plain(value):
    """NumPy's numbers and arrays as Python's."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _is_int(value, low, high=2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value, low, high) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and low <= value <= high
