"""What is answered to requests that cannot be served: OpenAI's error form, the field by name."""

from __future__ import annotations

import json
import socket

import openai
import pytest

from lora_moe_jax.server import protocol
from lora_moe_jax.server.errors import refused
from lora_moe_jax.serving.intake import UnknownAdapterError
from tests.server.conftest import PROMPT, metrics

COMPLETION = {"model": "pocket", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
CHAT = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
    "temperature": 0,
}

BAD_COMPLETIONS = [
    ({"wat": 1}, "wat"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True}, "echo"),
    ({"echo": 0}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": []}, "messages"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[1, True]]}, "prompt[1]"),
    ({"prompt": [[1, "a"]]}, "prompt[1]"),
    ({"prompt": [1, 2048]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1] * 127}, "max_tokens"),
    ({"prompt": [1] * 128}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "2"}, "max_tokens"),
    ({"max_tokens": 2000}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 2}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop_token_ids": 1}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"priority": "high"}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"priority": True}, "priority"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.0}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"user": 1}}, "stream_options.user"),
    ({"stream": True, "stream_options": [1]}, "stream_options"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"prompt": ["a"] * 100, "n": 128}, "n"),
    ({"prompt": ["a"] * 1000}, "prompt"),
]

BAD_CHATS = [
    ({"prompt": "x"}, "prompt"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "user": "y"}]}, "messages[0].user"),
    ({"messages": [{"role": "user", "content": "word " * 500}]}, "messages"),
    ({"max_tokens": 2000}, "max_tokens"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"priority": []}, "priority"),
    ({"logprobs": 1}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


def check_refused(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("change", "param"), BAD_COMPLETIONS, ids=lambda v: str(v)[:40])
def test_bad_completions(http, change, param):
    error = check_refused(http.post("/v1/completions", json=COMPLETION | change))
    assert error["param"] == param


def test_messages_name_fields_too(http):
    for change, field in (
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 99}, "n"),
    ):
        error = check_refused(http.post("/v1/completions", json=COMPLETION | change))
        assert f"too many requests in one call ({field})" in error["message"]


def test_a_request_that_is_too_long_has_its_own_code(http):
    for change in ({"prompt": [1] * 500}, {"max_tokens": 500}):
        error = check_refused(http.post("/v1/completions", json=COMPLETION | change))
        assert error["code"] == "context_length_exceeded" and "500" in error["message"]


def test_nobody_is_told_of_tokens_that_he_did_not_ask_for(http):
    """OpenAI's default of completions is 16; near the end of the context as many as fit."""
    body = {"model": COMPLETION["model"], "prompt": [1] * 120, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 8
    answer = http.post("/v1/completions", json=body | {"prompt": [1]}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_tokens_that_are_none_of_the_models(http):
    error = check_refused(
        http.post("/v1/completions", json=COMPLETION | {"stop_token_ids": [10**6]})
    )
    assert error["param"] == "stop_token_ids" and "1000000" in error["message"]


def test_half_a_character_is_not_called_bad_json(http):
    body = b'{"model": "pocket", "prompt": "\\ud800"}'
    error = check_refused(http.post("/v1/completions", content=body))
    assert "no lone surrogates" in error["message"]


@pytest.mark.parametrize(("change", "param"), BAD_CHATS, ids=lambda v: str(v)[:40])
def test_bad_chats(http, change, param):
    error = check_refused(http.post("/v1/chat/completions", json=CHAT | change))
    assert error["param"] == param


def test_bad_requests_with_stream_are_refused_before_it_begins(http):
    for change in ({"wat": 1}, {"max_tokens": 500}, {"prompt": [5000]}):
        check_refused(http.post("/v1/completions", json=COMPLETION | change | {"stream": True}))


def test_nothing_runs_after_all_that(http):
    now = metrics(http)
    assert now["lora_moe_jax_running"] == now["lora_moe_jax_waiting"] == 0
    assert now["lora_moe_jax_free_pages"] == now["lora_moe_jax_total_pages"]


def test_what_changes_nothing_is_accepted(http):
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "best_of": 1,
        "echo": False,
        "seed": None,
        "logprobs": None,
        "never_heard_of": None,
    }
    plain = http.post("/v1/completions", json=COMPLETION).json()
    got = http.post("/v1/completions", json=COMPLETION | harmless)
    assert got.status_code == 200, got.text
    assert got.json()["choices"] == plain["choices"]
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    neutral |= {"functions": [], "parallel_tool_calls": True}
    message = CHAT["messages"][0] | {"tool_calls": [], "annotations": []}
    asked = CHAT | neutral | {"messages": [message, *CHAT["messages"][1:]]}
    assert http.post("/v1/chat/completions", json=asked).status_code == 200


BODIES = {
    "nothing": b"",
    "half": b'{"model": "pocket", "prompt": ',
    "a list": b"[1, 2]",
    "not utf-8": b'{"model": "\xff"}',
    "twice": b'{"model": "pocket", "model": "shout", "prompt": "x"}',
    "nan": b'{"model": "pocket", "prompt": "x", "temperature": NaN}',
    "half a character": b'{"model": "pocket", "prompt": "\\ud800"}',
    "deep": b'{"model": ' + b"[" * 100_000,
    "a long number": b'{"model": "pocket", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_malformed_bodies(http, path, body):
    assert check_refused(http.post(path, content=body))["code"] == "invalid_json"


def test_large_bodies(http, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_BODY_BYTES", 100)
    check_refused(http.post("/v1/completions", content=b"x" * 101), 413)
    body = json.dumps({"model": "pocket", "prompt": "x", "max_tokens": 1}).encode()
    assert len(body) <= 100
    assert http.post("/v1/completions", content=body).status_code == 200


def test_a_body_that_does_not_come(client, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_BODY_SECONDS", 0.2)
    address = client.base_url.host, client.base_url.port
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_unknown_paths_and_methods(http):
    check_refused(http.get("/v1/nothing"), 404)
    check_refused(http.get("/v1/completions"), 405)
    check_refused(http.post("/v1/models", json={}), 405)


def test_openais_client_understands_refusals(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="pocket", prompt="x", extra_body={"wat": 1})
    assert (error.value.param, error.value.code) == ("wat", "unknown_parameter")
    assert "wat is not known" in str(error.value)


def test_an_adapter_that_goes_while_a_text_becomes_tokens_is_an_unknown_model():
    error = refused(UnknownAdapterError("not loaded", key="adapters[3]", found="'a'"))
    assert (error.status, error.body["error"]["code"]) == (404, "model_not_found")
    assert error.body["error"]["param"] == "model"
