"""What a request's body asks for. A field that is not known is refused: it may change the answer.

`null` stands for a field that is left out, as in OpenAI's interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request

from lora_moe_jax.errors import RequestError
from lora_moe_jax.server.errors import ApiError, describe
from lora_moe_jax.serving.sampling_params import MAX_LOGPROBS, SamplingParams
from lora_moe_jax.strict_json import parse_json_object

MAX_BODY_BYTES = 8 << 20
MAX_BODY_SECONDS = 60
MAX_CHOICES = 128
ROLES = ("system", "developer", "user", "assistant")

# The engine's own settings, which check themselves.
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
# They change nothing in the answer.
_HARMLESS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
# What is not supported may be sent with the value that says so.
_NEUTRAL = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class _Kind(NamedTuple):
    """What a field may be: in words, and as a check."""

    expected: str
    holds: Callable[[object], bool]


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_ANYTHING = _Kind("anything", lambda value: True)
_INTEGER = _Kind("an integer", _is_int)
_BOOL = _Kind("true or false", lambda value: isinstance(value, bool))
_STRING = _Kind("a string", lambda value: isinstance(value, str))
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_CHOICES = _Kind(
    f"an integer from 1 to {MAX_CHOICES}",
    lambda value: _is_int(value) and 1 <= value <= MAX_CHOICES,
)
_LIKELY = _Kind(
    f"an integer from 0 to {MAX_LOGPROBS}",
    lambda value: _is_int(value) and 0 <= value <= MAX_LOGPROBS,
)
_ROLE = _Kind(f"one of {', '.join(ROLES)}", lambda value: value in ROLES)
_REQUIRED = object()
_NOTHING: Mapping[str, tuple] = {}


@dataclass(frozen=True)
class Asked:
    """A checked request.

    Attributes:
      prompts: of completions; chats have `messages` instead.
      to_the_end: generate as much as fits instead of `params.max_tokens`,
      most_by_default: but no more than this; None: all of it.
      n: choices for each prompt.
      priority: the smaller, the earlier.
      include_usage: end a stream with the count of tokens.
    """

    model: str
    prompts: list[str | list[int]]
    messages: list[dict[str, str]]
    params: SamplingParams
    to_the_end: bool
    most_by_default: int | None
    n: int
    priority: int
    stream: bool
    include_usage: bool


def read_completion(body: dict) -> Asked:
    """Reads the body of /v1/completions.

    Raises:
      ApiError, RequestError: a field is missing, wrong, or not supported.
    """
    fields = _Fields(body)
    prompts = _prompts(fields.take("prompt"))
    count = fields.take("logprobs", _LIKELY, None)
    return _asked(
        fields,
        prompts=prompts,
        max_tokens=fields.take("max_tokens", default=None),
        most_by_default=16,
        logprobs=count,
    )


def read_chat(body: dict) -> Asked:
    """Reads the body of /v1/chat/completions; raises as `read_completion`."""
    fields = _Fields(body)
    messages = [
        _message(message, f"messages[{index}]")
        for index, message in enumerate(fields.take("messages", _LIST))
    ]
    if not messages:
        raise ApiError(400, "messages must not be empty", param="messages")
    newer = fields.take("max_completion_tokens", default=None)
    older = fields.take("max_tokens", default=None)
    if None not in (newer, older) and newer != older:
        message = "max_tokens and max_completion_tokens differ; send one of them"
        raise ApiError(400, message, param="max_tokens")
    top = fields.take("top_logprobs", _LIKELY, 0)
    logprobs = fields.take("logprobs", _BOOL, False)
    if top and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return _asked(
        fields,
        messages=messages,
        max_tokens=older if newer is None else newer,
        logprobs=top if logprobs else None,
    )


def _asked(
    fields: _Fields,
    *,
    prompts=(),
    messages=(),
    max_tokens: int | None,
    most_by_default: int | None = None,
    logprobs: int | None,
) -> Asked:
    """The fields that completions and chats share."""
    settings = {key: fields.take(key, default=None) for key in _SAMPLING}
    settings = {key: value for key, value in settings.items() if value is not None}
    if max_tokens is not None:
        settings["max_tokens"] = max_tokens
    params = SamplingParams(logprobs=logprobs, **settings)
    stream = fields.take("stream", _BOOL, False)
    asked = Asked(
        model=fields.take("model", _STRING),
        prompts=list(prompts),
        messages=list(messages),
        params=params,
        to_the_end=max_tokens is None,
        most_by_default=most_by_default,
        n=fields.take("n", _CHOICES, 1),
        priority=fields.take("priority", _INTEGER, 0),
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )
    fields.refuse_others(_HARMLESS, _NEUTRAL)
    return asked


def _include_usage(fields: _Fields, stream: bool) -> bool:
    options = fields.take("stream_options", _OBJECT, {})
    if options and not stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    inner = _Fields(options, "stream_options.")
    include = inner.take("include_usage", _BOOL, False)
    inner.take("include_obfuscation", _BOOL, False)  # there is nothing to hide
    inner.refuse_others()
    return include


class Load(NamedTuple):
    """An adapter to load; `in_place` where one of this name may be replaced."""

    name: str
    path: str
    in_place: bool


def read_load(body: dict) -> Load:
    """Reads the body of /v1/load_lora_adapter; raises ApiError."""
    fields = _Fields(body)
    name, path = fields.take("lora_name", _STRING), fields.take("lora_path", _STRING)
    load = Load(name, path, fields.take("load_inplace", _BOOL, False))
    fields.refuse_others()
    return load


def read_unload(body: dict) -> str:
    """The adapter's name in the body of /v1/unload_lora_adapter; raises ApiError."""
    fields = _Fields(body)
    name = fields.take("lora_name", _STRING)
    fields.refuse_others(("lora_int_id",))  # vLLM's number for it, besides
    return name


class _Fields:
    """Fields of an object, each taken once; what is left over at the end is refused."""

    def __init__(self, body: dict, prefix: str = ""):
        self._left = {key: value for key, value in body.items() if value is not None}
        self._prefix = prefix

    def take(self, key: str, kind: _Kind = _ANYTHING, default=_REQUIRED):
        """The value of `key`, or `default`; without one the field is required."""
        name = self._prefix + key
        if key not in self._left:
            if default is not _REQUIRED:
                return default
            raise ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
        value = self._left.pop(key)
        if not kind.holds(value):
            raise ApiError(400, f"{name} must be {kind.expected}", param=name, code="invalid_type")
        return value

    def refuse_others(
        self, harmless: Sequence[str] = (), neutral: Mapping[str, tuple] = _NOTHING
    ) -> None:
        for key, value in self._left.items():
            accepted = key in harmless or any(_same(value, v) for v in neutral.get(key, ()))
            if not accepted:
                name = self._prefix + key[:200]
                found = "with this value is not supported" if key in neutral else "is not known"
                code = "unsupported_value" if key in neutral else "unknown_parameter"
                raise ApiError(400, f"{name} {found}", param=name, code=code)


def _prompts(prompt) -> list[str | list[int]]:
    """A string, token ids, or a list of either, as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_int(item) for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) for item in prompt):
            return prompt  # the engine checks the token ids
    message = "prompt must be a string, a list of token ids, or a list of strings or of such lists"
    raise ApiError(400, message, param="prompt", code="invalid_type")


def _message(message, name: str) -> dict[str, str]:
    """A message with text for its content."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{name} must be an object", param=name, code="invalid_type")
    fields = _Fields(message, f"{name}.")
    read = {"role": fields.take("role", _ROLE)}
    content = fields.take("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, f"{name}.content") for part in content)
    if not isinstance(content, str):
        param = f"{name}.content"
        expected = "a string or a list of text parts"
        raise ApiError(400, f"{param} must be {expected}", param=param, code="invalid_type")
    read["content"] = content
    if sender := fields.take("name", _STRING, None):
        read["name"] = sender
    # As in OpenAI's own replies, which come back with what follows.
    fields.refuse_others((), {"tool_calls": ([],), "annotations": ([],)})
    return read


def _text_part(part, name: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str) or len(part) != 2:
        message = f'{name} may have parts of the form {{"type": "text", "text": "..."}} only'
        raise ApiError(400, message, param=name, code="unsupported_value")
    return text


async def read_body(request: Request) -> dict:
    """The JSON object in a request's body.

    Raises:
      ApiError: it is none, too large, or does not come.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {MAX_BODY_SECONDS} s") from error
    try:
        return parse_json_object(bytes(body), "body", RequestError)
    except RequestError as error:
        raise ApiError(400, describe(error), code="invalid_json") from error


def _same(value, accepted) -> bool:
    """Equality that tells False from 0."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
