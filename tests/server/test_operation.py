"""A server at work: health, metrics, keys, clients who leave, a full queue, faults; `serve`."""

from __future__ import annotations

import asyncio
import builtins
import json
import logging.config
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack

import httpx
import openai
import pytest

from lora_moe_jax import Engine
from lora_moe_jax.cli import main
from lora_moe_jax.parallel.mesh import mesh_of
from lora_moe_jax.pocket import ADAPTERS
from lora_moe_jax.server.run import open_socket
from tests.server.conftest import PROMPT, metrics, wait_for

LONG = {"model": "shout", "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
SHORT = {"model": "pocket", "prompt": PROMPT, "max_tokens": 2}
FAILED = 'lora_moe_jax_http_responses_total{status="500"}'
GENERATED = "lora_moe_jax_generated_tokens_total"


def test_health(http):
    answer = http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_metrics(http):
    before = metrics(http)
    http.post("/v1/completions", json=SHORT | {"ignore_eos": True})
    http.post("/v1/completions", json=SHORT | {"wat": 1})
    after = metrics(http)
    grown = {name for name, value in after.items() if value != before.get(name, 0)}
    assert grown == {
        GENERATED,
        "lora_moe_jax_host_ms_per_step",
        "lora_moe_jax_prompt_tokens_total",
        "lora_moe_jax_steps_total",
        'lora_moe_jax_http_responses_total{status="200"}',
        'lora_moe_jax_http_responses_total{status="400"}',
    }
    assert after[GENERATED] - before[GENERATED] == 2
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in lines:
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            kind = "counter" if name.endswith("_total") else "gauge"
            assert f"# TYPE {name} {kind}" in lines
            assert any(other.startswith(f"# HELP {name} ") for other in lines)


def test_the_key(open_address, admin):
    assert admin.get("/v1/models").status_code == 200
    spelled = {"Authorization": admin.headers["Authorization"].replace("Bearer", "bearer")}
    assert admin.get("/v1/models", headers=spelled).status_code == 200
    with httpx.Client(base_url=open_address, trust_env=False) as stranger:
        assert stranger.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = stranger.post("/v1/completions", json=SHORT, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    with (
        openai.OpenAI(base_url=f"{open_address}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def idle(http) -> bool:
    now = metrics(http)
    return now["lora_moe_jax_running"] == now["lora_moe_jax_waiting"] == 0


def test_a_client_that_leaves_a_stream_ends_its_request(http, slow_steps):
    before = metrics(http)[GENERATED]
    with http.stream("POST", "/v1/completions", json=LONG | {"n": 2, "stream": True}) as answer:
        lines = answer.iter_lines()  # the connection ends with it
        next(lines)
        assert not idle(http)
    wait_for(lambda: idle(http))
    assert metrics(http)[GENERATED] - before < 200


def test_a_client_that_leaves_before_the_answer_ends_its_request(http, slow_steps):
    before = metrics(http)[GENERATED]
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=LONG, timeout=0.3)
    wait_for(lambda: idle(http))
    assert metrics(http)[GENERATED] - before < 100


def test_a_full_queue(http, client, running, slow_steps, monkeypatch):
    monkeypatch.setattr(running, "max_waiting", 1)
    with ExitStack() as stack:
        for _ in range(5):  # four run, one waits
            answer = stack.enter_context(
                http.stream("POST", "/v1/completions", json=LONG | {"stream": True})
            )
            assert answer.status_code == 200
        now = metrics(http)
        assert (now["lora_moe_jax_running"], now["lora_moe_jax_waiting"]) == (4, 1)
        answer = http.post("/v1/completions", json=SHORT)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**SHORT)
    wait_for(lambda: idle(http))
    assert http.post("/v1/completions", json=SHORT).status_code == 200
    answer = http.post("/v1/completions", json=SHORT | {"n": 6})  # would never fit
    assert answer.status_code == 400


def test_a_failing_step_is_answered_and_the_server_goes_on(http, client, engine, monkeypatch):
    expected = http.post("/v1/completions", json=SHORT | {"temperature": 0}).json()["choices"]
    before = metrics(http)

    def fail(*batch):
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner.steps, "run", fail)
        answer = http.post("/v1/completions", json=SHORT)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "out of order" not in answer.text
        after = metrics(http)  # by the same connection, which goes on
        assert after[FAILED] == before.get(FAILED, 0) + 1
        with pytest.raises(openai.APIError, match="the server failed"):
            list(client.completions.create(**SHORT, stream=True))
    assert idle(http)
    got = http.post("/v1/completions", json=SHORT | {"temperature": 0}).json()["choices"]
    assert got == expected


def test_a_server_whose_cache_is_lost_is_not_well(http, engine, monkeypatch):
    """Every request would fail: whoever watches it is to start it anew."""
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner.steps, "lost", True)
        assert http.get("/health").status_code == 503
    assert http.get("/health").status_code == 200


def test_an_engine_that_is_put_to_sleep(http, running, slow_steps):
    """By the program that serves it: what is open ends, what comes is told, /health is well."""
    body = LONG | {"logprobs": 2}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        asyncio.run(running.sleep(abort=True))
        parts = [line for line in lines if line]
    assert parts[-1] == "data: [DONE]"
    last = json.loads(parts[-2].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] == "abort" and last["logprobs"] is None
    answer = http.post("/v1/completions", json=SHORT)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "asleep"
    assert http.get("/health").status_code == 200
    assert metrics(http)["lora_moe_jax_cache_bytes"] == 0
    asyncio.run(running.wake())
    assert http.post("/v1/completions", json=SHORT).status_code == 200


# ---- the command ---------------------------------------------------------------------------------
@pytest.fixture
def port(engine, monkeypatch) -> int:
    """A free one; the command builds no engine of its own."""
    monkeypatch.setattr(Engine, "from_pretrained", lambda folder, **options: engine)
    # It closes the handlers there are, and absl's handler closes the stderr that pytest gave it.
    monkeypatch.setattr(logging.config, "dictConfig", lambda settings: None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve_while(visit, port: int, *arguments: str) -> list:
    """What visit(http, answers) puts there while the command serves; it ends with Ctrl-C."""
    answers = []

    def work() -> None:
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30
            ) as http:
                wait_for(lambda: answered(http))
                visit(http, answers)
        except BaseException:
            interrupt()
            raise

    visitor = threading.Thread(target=work)
    visitor.start()
    assert main(["serve", "--port", str(port), *arguments]) == 0
    visitor.join()
    return answers


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_serve_until_interrupted(engine, port, monkeypatch, capsys, tmp_path):
    """The whole command; Ctrl-C while a stream is open, which ends by itself."""
    asked = {}

    def from_pretrained(folder, **options):
        asked.update(options, folder=folder)
        return engine

    monkeypatch.setattr(Engine, "from_pretrained", from_pretrained)

    def visit(http, answers) -> None:
        answers.append(http.get("/v1/models").json()["data"][0]["id"])
        body = LONG | {"max_tokens": 30, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            interrupt()
            answers.append(list(answer.iter_lines())[-2])

    arguments = ["--adapter", "shout", "--served-name", "mine"]
    arguments += ["--adapter-root", str(tmp_path), "--max-length", "64"]
    arguments += ["--mesh", "expert=2,tensor=2", "--cache-tokens", "320"]
    assert serve_while(visit, port, *arguments) == ["mine", "data: [DONE]"]
    assert f"Serving mine at http://127.0.0.1:{port}/v1" in capsys.readouterr().out
    assert asked["adapters"] == {"shout": ADAPTERS["shout"]}
    assert asked["max_adapters"] == 8 and asked["max_length"] == 64
    assert asked["cache_tokens"] == 320 and asked["dtype"] in ("float32", "bfloat16")
    assert mesh_of(asked["mesh"]).shape == {"expert": 2, "tensor": 2}


@pytest.mark.parametrize("twice", [False, True], ids=["too_long", "ctrl_c_twice"])
def test_responses_that_the_end_cuts_say_so(port, slow_steps, monkeypatch, twice):
    """One stream and one whole answer are open when the time is up, or at a second Ctrl-C."""
    if not twice:
        monkeypatch.setattr("lora_moe_jax.server.run.SHUTDOWN_SECONDS", 0.3)

    def visit(http, answers) -> None:
        whole = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json=LONG))
        )
        whole.start()
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            interrupt()
            if twice:
                time.sleep(0.5)
                interrupt()
            answers.append([line for line in lines if line][-1])
        whole.join()

    began = time.monotonic()
    stream, whole = sorted(serve_while(visit, port), key=lambda its: not isinstance(its, str))
    assert time.monotonic() - began < 8
    error = json.loads(stream.removeprefix("data: "))["error"]
    assert error["code"] == "shutting_down"
    assert whole.status_code == 503 and whole.json()["error"] == error


def answered(http) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


def test_what_the_command_refuses_before_it_loads_a_model(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Engine, "from_pretrained", None)

    def refusal(*arguments: str) -> str:
        assert main(["serve", *arguments]) == 2
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen" in refusal("--port", str(taken.getsockname()[1]))
    with open_socket("127.0.0.1", 0) as taken:  # by a server that is loading its model
        assert "cannot listen" in refusal("--port", str(taken.getsockname()[1]))
    assert "API key is empty" in refusal("--api-key", "")
    assert "the host is empty" in refusal("--host", " ")
    assert "spaces around" in refusal("--api-key", "key ")
    assert "cannot listen" in refusal("--port", "70000")
    assert "cannot listen" in refusal("--host", "no.such.host.invalid")
    assert "not a folder" in refusal("--adapter-root", str(tmp_path / "missing"))
    assert "base model's name" in refusal(
        "--adapter", f"mine={ADAPTERS['shout']}", "--served-name", "mine"
    )
    assert "NAME=FOLDER" in refusal("--adapter", "nobody")
    assert "NAME=FOLDER" in refusal("--adapter", "=shout")
    assert "is not there" in refusal("--adapter", f"a={tmp_path / 'missing'}")
    assert "no slot" in refusal("--adapter", "shout", "--max-adapters", "0")
    assert "max_waiting" in refusal("--max-waiting", "-1")
    assert "tokenizer.json" in refusal("--model", str(tmp_path))


def test_without_the_extra(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name == "lora_moe_jax.server.run":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["serve"]) == 2
    assert 'pip install "lora-moe-jax[serve]"' in capsys.readouterr().err
