"""The routes: OpenAI's completions, chats and models, adapters as in vLLM, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_moe_jax.errors import AdapterBusyError, AdapterError, LoraMoeError, RequestError
from lora_moe_jax.server.adapter_root import folder_inside
from lora_moe_jax.server.errors import ApiError, describe, failed, refused, too_long
from lora_moe_jax.server.metrics import CONTENT_TYPE, exposition
from lora_moe_jax.server.names import ModelNames
from lora_moe_jax.server.protocol import (
    Asked,
    read_body,
    read_chat,
    read_completion,
    read_load,
    read_unload,
)
from lora_moe_jax.server.replies import ChatReply, CompletionReply, Usage, event
from lora_moe_jax.serving.async_engine import AsyncEngine, DeltaStream
from lora_moe_jax.serving.sampling_params import SamplingParams

CLIENT_GONE = 499  # nginx's number, for the log: nobody receives it
T = TypeVar("T")
_log = logging.getLogger(__name__)


def create_app(
    engine: AsyncEngine,
    names: ModelNames,
    *,
    adapter_root: Path | None = None,
    api_key: str | None = None,
) -> Starlette:
    """The server as an ASGI application. The engine needs a tokenizer; closing it is the caller's.

    Args:
      names: what the models are called.
      adapter_root: the one folder that adapters may be loaded from; None forbids loading.
      api_key: what clients must send to /v1; None lets everyone in.
    """
    responses: Counter[int] = Counter()
    service = _Service(engine, names, adapter_root, responses)
    routes = [
        Route("/v1/models", service.models),
        Route("/v1/models/{model:path}", service.model),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/load_lora_adapter", service.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", service.unload, methods=["POST"]),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
    ]
    handlers = {
        ApiError: lambda request, error: error.response(),
        LoraMoeError: lambda request, error: refused(error).response(),
        HTTPException: _http_error,
        ClientDisconnect: lambda request, error: Response(status_code=CLIENT_GONE),
    }
    middleware = [Middleware(_Gate, responses=responses, api_key=api_key)]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


class _Service:
    """The handlers of the routes."""

    def __init__(
        self,
        engine: AsyncEngine,
        names: ModelNames,
        adapter_root: Path | None,
        responses: Counter[int],
    ):
        self._engine = engine
        self._names = names
        self._adapter_root = adapter_root
        self._responses = responses
        self._names_to_be: list[str] = []  # of adapters that are being loaded

    # Models and adapters

    async def models(self, request: Request) -> Response:
        entries = self._names.entries(await self._engine.adapters())
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return JSONResponse(self._names.entry(await self._adapter(name)))

    async def load(self, request: Request) -> Response:
        root = self._root()
        name, path, in_place = read_load(await read_body(request))
        with self._loading(name):
            others = self._names_to_be.count(name) > 1
            if not in_place and (others or await self._is_loaded(name)):
                message = f"the adapter {name[:200]!r} is loaded already, or being loaded"
                hint = "load_inplace replaces one that is loaded"
                raise ApiError(400, f"{message}; {hint}", param="lora_name")
            try:
                self._names.check(name)
                folder = await asyncio.to_thread(folder_inside, root, path)
                await self._engine.load_adapter(name, folder)
            except AdapterError as error:
                # What is wrong is in a file, or is the name.
                raise refused(error, "lora_path" if error.file else "lora_name") from error
        return JSONResponse(self._names.entry(name))

    @contextlib.contextmanager
    def _loading(self, name: str) -> Iterator[None]:
        """Whoever else comes with this name meanwhile finds it there."""
        self._names_to_be.append(name)
        try:
            yield
        finally:
            self._names_to_be.remove(name)

    async def unload(self, request: Request) -> Response:
        self._root()
        name = read_unload(await read_body(request))
        if not await self._is_loaded(name):
            message = f"the adapter {name[:200]!r} is not loaded"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        try:
            await self._engine.unload_adapter(name)
        except AdapterBusyError as error:
            raise ApiError(409, describe(error, "lora_name"), param="lora_name") from error
        except AdapterError as error:
            raise refused(error, "lora_name") from error
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    def _root(self) -> Path:
        if self._adapter_root is None:
            message = "this server loads no adapters; it was started without --adapter-root"
            raise ApiError(403, message, code="forbidden")
        return self._adapter_root

    async def _is_loaded(self, name: str) -> bool:
        return name in {info.name for info in await self._engine.adapters()}

    async def _adapter(self, model: str) -> str | None:
        return self._names.adapter(model, await self._engine.adapters())

    # Generation

    async def completions(self, request: Request) -> Response:
        asked = read_completion(await read_body(request))
        adapter = await self._adapter(asked.model)
        self._check_count(asked, len(asked.prompts))
        prompts = await self._engine.encoded(asked.prompts, "prompts")
        reply = CompletionReply(self._engine.codec, asked.model)
        return await self._generate(request, asked, adapter, prompts, reply)

    async def chat(self, request: Request) -> Response:
        asked = read_chat(await read_body(request))
        adapter = await self._adapter(asked.model)
        self._check_count(asked, 1)
        prompt = await self._engine.chat(asked.messages)
        reply = ChatReply(self._engine.codec, asked.model)
        return await self._generate(request, asked, adapter, [prompt], reply)

    def _check_count(self, asked: Asked, prompts: int) -> None:
        try:
            self._engine.check_count(prompts * asked.n)
        except RequestError as error:
            raise refused(error, "n" if asked.n > 1 else "prompt") from error

    async def _generate(
        self,
        request: Request,
        asked: Asked,
        adapter: str | None,
        prompts: list[list[int]],
        reply: CompletionReply,
    ) -> Response:
        """Choice i of prompt p is request p * n + i of the engine, and its index in the answer."""
        for prompt in prompts:
            self._check_length(asked, len(prompt))
        each = [(prompt, i) for prompt in prompts for i in range(asked.n)]
        params = [self._params(asked, prompt, i) for prompt, i in each]
        deltas = await self._engine.stream(
            [prompt for prompt, _ in each], params, [adapter] * len(each), asked.priority
        )
        if asked.stream:
            return _EventStream(_events(deltas, asked, len(each), reply), deltas)
        with deltas:
            return await _unless_gone(request, _response(deltas, asked, len(each), reply))

    def _check_length(self, asked: Asked, prompt: int) -> None:
        """Raises ApiError for a prompt of so many tokens, if there is no room for what is asked."""
        longest = self._engine.options.max_length
        if prompt >= longest:
            raise too_long(prompt, 0, longest, "messages" if asked.messages else "prompt")
        if not asked.to_the_end and prompt + asked.params.max_tokens > longest:
            raise too_long(prompt, asked.params.max_tokens, longest, "max_tokens")

    def _params(self, asked: Asked, prompt: list[int], choice: int) -> SamplingParams:
        params = asked.params
        if params.seed is not None:
            params = replace(params, seed=(params.seed + choice) % 2**32)
        room = self._engine.options.max_length - len(prompt)
        if asked.to_the_end:
            params = replace(params, max_tokens=min(room, asked.most_by_default or room))
        return params

    # For who runs the server

    async def health(self, request: Request) -> Response:
        if not self._engine.alive:
            raise ApiError(503, "the engine has stopped", kind="server_error")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        text = exposition(await self._engine.stats(), self._responses)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)


async def _response(
    deltas: DeltaStream, asked: Asked, count: int, reply: CompletionReply
) -> Response:
    """The whole answer."""
    choices, usage = [[] for _ in range(count)], Usage(asked.n)
    async for delta in deltas:
        choices[delta.index].append(delta)
        usage.add(delta)
    return JSONResponse(reply.response(choices, usage))


async def _events(
    deltas: DeltaStream, asked: Asked, count: int, reply: CompletionReply
) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    usage = Usage(asked.n)
    extra = {"usage": None} if asked.include_usage else {}
    try:
        for chunk in reply.opening(count):
            yield event(chunk | extra)
        async for delta in deltas:
            usage.add(delta)
            chunk = reply.chunk(delta)
            if chunk is not None:
                yield event(chunk | extra)
    except LoraMoeError as error:
        yield event(refused(error).body)
        return
    except Exception:  # the status is sent, so all that is left is to end the stream with an error
        _log.exception("a stream failed")
        yield event(failed().body)
        return
    if asked.include_usage:
        yield event(reply.last(usage))
    yield event("[DONE]")


class _EventStream(StreamingResponse):
    """Server-sent events of `deltas`, which end with the response, whatever ends it."""

    def __init__(self, events: AsyncIterator[str], deltas: DeltaStream):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._deltas:
            await super().__call__(scope, receive, send)


async def _unless_gone(request: Request, work: Coroutine[None, None, T]) -> T:
    """What `work` gives. If the client goes away first, cancels it and raises ClientDisconnect."""
    job = asyncio.create_task(work)
    watch = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return job.result()
    finally:
        job.cancel()
        watch.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _http_error(request: Request, error: HTTPException) -> Response:
    return ApiError(error.status_code, error.detail, headers=error.headers).response()


class _Gate:
    """Asks for the key, and counts responses by status."""

    def __init__(self, app: ASGIApp, responses: Counter[int], api_key: str | None):
        self._app = app
        self._responses = responses
        self._expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._responses[message["status"]] += 1
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._admits(scope):
            try:
                await self._app(scope, receive, counting)
            except Exception:
                # Not a handler of the app's: that one answers past the count, and the connection,
                # which may serve other requests, is closed after it.
                if begun:
                    raise
                _log.exception("a request failed")
                await failed().response()(scope, receive, counting)
        else:
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await error.response()(scope, receive, counting)

    def _admits(self, scope: Scope) -> bool:
        if self._expected is None or not scope["path"].startswith("/v1/"):
            return True
        kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key, self._expected)
