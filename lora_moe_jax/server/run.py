"""Runs the server until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from pathlib import Path

import uvicorn

from lora_moe_jax.errors import ConfigError
from lora_moe_jax.server.app import create_app
from lora_moe_jax.server.names import ModelNames
from lora_moe_jax.serving.async_engine import AsyncEngine
from lora_moe_jax.serving.engine import Engine

SHUTDOWN_SECONDS = 10  # how long open responses may go on after the first Ctrl-C
LAST_SECONDS = 5  # how long their clients may take to read that they have ended


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port that is taken is known before a model is loaded.

    Until it is served clients wait: two sockets that do not listen yet could be bound to one port.

    Raises:
      ConfigError: the address cannot be listened on.
    """
    if not host.strip():  # which to a socket means all of them, as of a variable that is not set
        raise ConfigError(
            "the host is empty",
            key="--host",
            expected="an address of this machine; 0.0.0.0 or :: for all of them",
        )
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, OverflowError, UnicodeError) as error:
        listener.close()
        raise ConfigError(
            "the server cannot listen there",
            key="--host, --port",
            expected="an address of this machine and a free port",
            found=f"{host}:{port}: {error}",
        ) from error
    return listener


def check_adapter_root(root: Path | None) -> None:
    """Raises ConfigError for a root that is not a folder."""
    if root is not None and not root.is_dir():
        raise ConfigError(
            "the adapter root is not a folder", file=root, key="--adapter-root", expected="a folder"
        )


def check_api_key(key: str | None) -> None:
    """Raises ConfigError for a key that is empty, as of a variable that is not set, or that no
    client can send."""
    if key is not None and (not key or key != key.strip()):
        raise ConfigError(
            "the API key is empty" if not key.strip() else "the API key has spaces around it",
            key="--api-key",
            expected="what clients must send; without the option anybody is served",
        )


def run_server(
    engine: Engine,
    listener: socket.socket,
    names: ModelNames,
    *,
    max_waiting: int,
    adapter_root: Path | None,
    api_key: str | None,
) -> None:
    """Serves until Ctrl-C or SIGTERM, then lets open responses end; a second Ctrl-C ends them."""
    running = AsyncEngine(engine, max_waiting=max_waiting)
    app = create_app(running, names, adapter_root=adapter_root, api_key=api_key)
    last = SHUTDOWN_SECONDS + LAST_SECONDS
    config = uvicorn.Config(app, timeout_graceful_shutdown=last, lifespan="off")
    host, port = listener.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"Serving {names.base} at http://{where}/v1", flush=True)
    try:
        # uvicorn shuts down first and raises the signal again when it is done
        with contextlib.suppress(KeyboardInterrupt):
            _Server(config, running).run(sockets=[listener])
    finally:
        running.close()


class _Server(uvicorn.Server):
    """Ends responses by closing the engine, which they tell their clients.

    uvicorn itself cancels them, and a stream that is cut looks like one that has ended.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine):
        super().__init__(config)
        self._engine = engine
        self._hurry = False

    def handle_exit(self, sig: int, frame) -> None:
        if self.should_exit and sig == signal.SIGINT and not self._hurry:
            self._hurry = True
        else:
            super().handle_exit(sig, frame)  # the third time it waits for nobody

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_responses())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_responses(self) -> None:
        end = time.monotonic() + SHUTDOWN_SECONDS
        while not self._hurry and time.monotonic() < end:
            await asyncio.sleep(0.1)
        await asyncio.to_thread(self._engine.close)
