"""One engine and one thread for all server tests; servers on free ports; real clients."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from lora_moe_jax import Engine
from lora_moe_jax.pocket import ADAPTERS, BASE
from lora_moe_jax.server.app import create_app
from lora_moe_jax.server.names import ModelNames
from lora_moe_jax.server.run import open_socket
from lora_moe_jax.serving.async_engine import AsyncEngine

LOADED = ("shout", "tester", "prose")
ENGINE = {
    "dtype": "float32",
    "max_adapters": len(LOADED) + 1,
    "max_rank": 16,
    "max_requests": 4,
    "max_length": 128,
    "token_buckets": (16,),
}
PROMPT = "def read_config(path):\n"


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Its address, while uvicorn serves it in a thread."""
    listener = open_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def wait_for(holds: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """For a test's own use only while no request is open."""
    engine = Engine.from_pretrained(BASE, **ENGINE)
    for name in LOADED:
        engine.load_adapter(name, ADAPTERS[name])
    return engine


@pytest.fixture(scope="session")
def running(engine) -> Iterator[AsyncEngine]:
    one = AsyncEngine(engine)
    yield one
    one.close()


@pytest.fixture(scope="session")
def address(running) -> Iterator[str]:
    """A server as it is without options."""
    with serving(create_app(running, ModelNames("pocket"))) as address:
        yield address


@pytest.fixture(scope="session")
def adapter_root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session")
def open_address(running, adapter_root) -> Iterator[str]:
    """A server that loads adapters from `adapter_root`, for those who have the key."""
    app = create_app(running, ModelNames("pocket"), adapter_root=adapter_root, api_key="secret")
    with serving(app) as address:
        yield address


@pytest.fixture(scope="session")
def http(address) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def admin(open_address) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(
        base_url=open_address, timeout=60, trust_env=False, headers=headers
    ) as client:
        yield client


@pytest.fixture(scope="session")
def client(address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def slow_steps(engine, monkeypatch) -> None:
    """A request of a hundred tokens takes more than three seconds."""
    step = engine._runner.step

    def slow() -> None:
        time.sleep(0.03)
        step()

    monkeypatch.setattr(engine._runner, "step", slow)


def metrics(http: httpx.Client) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    text = http.get("/metrics").text
    return {
        name: float(value)
        for name, value in re.findall(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    }
