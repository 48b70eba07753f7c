"""From what callers pass to requests: checked as a whole before any of them begins."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from lora_moe_jax.adapters.pool import AdapterPool
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import AdapterError, RequestError
from lora_moe_jax.serving import validate
from lora_moe_jax.serving.options import EngineOptions
from lora_moe_jax.serving.request import GenerateRequest, Request, ScoreRequest
from lora_moe_jax.serving.sampling_params import SamplingParams
from lora_moe_jax.serving.text import TextCodec

Prompt = str | Sequence[int]


class UnknownAdapterError(RequestError):
    """A request for an adapter that is not loaded, or not any more."""


class Intake:
    """Makes the requests of an engine. Its errors name the argument and the place in it.

    Attributes:
      codec: None without a tokenizer.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        codec: TextCodec | None,
        adapters: AdapterPool,
    ):
        self._config = config
        self._options = options
        self.codec = codec
        self._adapters = adapters

    def generate(self, prompts, params, adapters, priority) -> list[GenerateRequest]:
        """What `Engine.generate` asks for. Raises RequestError."""
        prompts = validate.sequence_of_prompts(prompts)
        params = SamplingParams() if params is None else params
        settings = validate.one_each("params", params, len(prompts))
        requests = []
        for index, (prompt, chosen) in enumerate(zip(prompts, settings, strict=True)):
            tokens = self._token_ids(prompt, f"prompts[{index}]")
            validate.params(
                chosen,
                f"params[{index}]",
                has_text=self.codec is not None,
                max_logprobs=self._options.max_logprobs,
                vocab_size=self._config.vocab_size,
            )
            request = GenerateRequest(
                index=index,
                tokens=tokens,
                prompt_length=len(tokens),
                adapter=None,
                params=chosen,
                stop_tokens=frozenset(chosen.stop_token_ids).union(
                    () if chosen.ignore_eos else self._config.eos_token_ids
                ),
                seed=_seed(chosen),
            )
            self._check_length(request, f"prompts[{index}]", chosen.max_tokens)
            requests.append(request)
        self._choose(requests, adapters, priority)
        return requests

    def score(
        self, token_ids, adapters, return_logits: bool, top_logprobs: int, priority
    ) -> list[ScoreRequest]:
        """What `Engine.score` asks for. Raises RequestError."""
        validate.alternatives(top_logprobs, "top_logprobs", self._options.max_logprobs)
        requests = []
        for index, prompt in enumerate(validate.sequence_of_prompts(token_ids, "token_ids")):
            tokens = self._token_ids(prompt, f"token_ids[{index}]")
            request = ScoreRequest(
                index=index,
                tokens=tokens,
                prompt_length=len(tokens),
                adapter=None,
                return_logits=return_logits,
                alternatives=int(top_logprobs),
            )
            self._check_length(request, f"token_ids[{index}]", 0)
            requests.append(request)
        self._choose(requests, adapters, priority)
        return requests

    def encoded(self, prompts: Sequence[Prompt], key: str) -> list:
        """Token ids in place of texts, in any thread. Raises RequestError."""
        return [
            self.text_codec(f"{key}[{index}]").encode(prompt) if isinstance(prompt, str) else prompt
            for index, prompt in enumerate(prompts)
        ]

    def text_codec(self, key: str) -> TextCodec:
        """The tokenizer; raises RequestError if there is none."""
        if self.codec is None:
            raise RequestError(
                "the model folder has no tokenizer.json", key=key, hint="pass token ids"
            )
        return self.codec

    def _token_ids(self, prompt: Prompt, key: str) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.text_codec(key).encode(prompt)
        return validate.token_ids(prompt, key, self._config.vocab_size)

    def _check_length(self, request: Request, key: str, max_tokens: int) -> None:
        most, count = self._options.max_length, request.prompt_length
        if count + max_tokens > most:
            larger = ", or build the engine with a larger max_length"
            raise RequestError(
                "the request is too long",
                key=key,
                expected=f"at most {most} tokens, prompt and output together",
                found=f"{count} tokens" + (f" and max_tokens {max_tokens}" if max_tokens else ""),
                hint="shorten it" + (larger if most < self._config.max_position else ""),
            )

    def _choose(self, requests: list, adapters, priority) -> None:
        """Gives the requests their adapters and priorities."""
        names = validate.one_each("adapters", adapters, len(requests))
        priorities = validate.one_each("priority", priority, len(requests))
        for index, (request, name, each) in enumerate(
            zip(requests, names, priorities, strict=True)
        ):
            request.priority = validate.priority(each, f"priority[{index}]")
            try:
                request.adapter = None if name is None else self._adapters.get(name)
            except AdapterError as error:
                raise UnknownAdapterError(
                    "the request names an adapter that is not loaded",
                    key=f"adapters[{index}]",
                    expected=error.expected,
                    found=repr(name),
                    hint="load it with load_adapter",
                ) from error


def _seed(params: SamplingParams) -> int:
    """Of 32 bits, as the sampler's generator takes it."""
    return secrets.randbits(32) if params.seed is None else params.seed % 2**32
