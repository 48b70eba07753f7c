"""Errors in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from starlette.responses import JSONResponse

from lora_moe_jax.errors import LoraMoeError
from lora_moe_jax.serving.intake import UnknownAdapterError
from lora_moe_jax.serving.queue_limit import QueueFullError
from lora_moe_jax.serving.sleep import EngineAsleepError
from lora_moe_jax.serving.workers import EngineClosedError


class ApiError(Exception):
    """What a client is answered.

    Args:
      status: of HTTP.
      message: for people.
      param: the field of the request that is to blame.
      code: for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def refused(error: LoraMoeError, field: str | None = None) -> ApiError:
    """What a client is told of the library's refusal. Hints are for who runs the server.

    Args:
      field: of the request, that is to blame. Default: what the error calls it.
    """
    key = error.key
    if not error.file:  # of a file's a key is what it is
        key = field or _field_of(error.key)
    message = describe(error, key)
    if isinstance(error, QueueFullError):
        return ApiError(
            429,
            message,
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": "1"},
        )
    if isinstance(error, EngineClosedError):
        return ApiError(503, message, kind="server_error", code="shutting_down")
    if isinstance(error, EngineAsleepError):
        return ApiError(503, message, kind="server_error", code="asleep")
    if isinstance(error, UnknownAdapterError):
        return ApiError(404, message, param=field or key, code="model_not_found")
    return ApiError(400, message, param=field or key)


def _field_of(key: str | None) -> str | None:
    """The engine's arguments are lists with an entry for each request; a client sent fields."""
    key = re.sub(r"^params\[\d+\]\.", "", key or "")
    key = re.sub(r"^prompts\[\d+\]", "prompt", key)
    return re.sub(r"^adapters\[\d+\]", "model", key) or None


def too_long(prompt: int, asked: int, longest: int, field: str) -> ApiError:
    """What a client is told of a prompt of so many tokens, with others that were asked for."""
    message = (
        f"the request is longer than the model's context of {longest} tokens, prompt and output "
        f"together: its prompt has {prompt} tokens"
    )
    if asked:
        message += f", and {asked} more are asked for"
    return ApiError(400, message, param=field, code="context_length_exceeded")


def failed() -> ApiError:
    """What a client is told when the server is to blame; the log says more."""
    return ApiError(500, "the server failed; its log says why", kind="server_error")


def describe(error: LoraMoeError, key: str | None = None) -> str:
    """Message, file, key (another one, if it is given), expected and found in one line.

    Of a file the name alone: where it is, is for who runs the server.
    """
    where = [Path(error.file).name] if error.file else []
    if key := key or error.key:
        where.append(key)
    parts = [f"{error.message} ({', '.join(where)})" if where else error.message]
    for label, value in (("expected", error.expected), ("found", error.found)):
        if value is not None:
            parts.append(f"{label} {str(value)[:200]}")  # it may be as long as the body
    return "; ".join(parts)
