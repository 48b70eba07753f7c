"""Loading and unloading adapters over HTTP: off by default, and from one folder only."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_moe_jax.pocket import ADAPTERS
from lora_moe_jax.server import app
from tests.server.conftest import LOADED, PROMPT

GREEDY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}


@pytest.fixture(autouse=True)
def only_the_usual_adapters(engine):
    yield
    assert sorted(info.name for info in engine.adapters()) == sorted(LOADED)


@pytest.fixture
def quiet(adapter_root):
    """An adapter in the root."""
    folder = shutil.copytree(ADAPTERS["quiet"], adapter_root / "quiet")
    yield folder
    shutil.rmtree(folder)


def load(client, name, path):
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def unload(client, name):
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def refusal(answer, status: int, param: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert param in (None, error["param"])
    return error["message"]


def test_off_by_default(http, quiet):
    assert "--adapter-root" in refusal(load(http, "new", quiet), 403)
    assert "--adapter-root" in refusal(unload(http, "shout"), 403)


@pytest.mark.parametrize("relative", [True, False])
def test_load_use_and_unload(admin, engine, quiet, relative):
    assert load(admin, "new", "quiet" if relative else quiet).status_code == 200
    listed = admin.get("/v1/models").json()["data"]
    assert {"new": "pocket"}.items() <= {model["id"]: model["parent"] for model in listed}.items()
    got = admin.post("/v1/completions", json=GREEDY | {"model": "new"}).json()["choices"][0]
    assert unload(admin, "new").status_code == 200
    assert admin.get("/v1/models/new").status_code == 404
    assert admin.post("/v1/completions", json=GREEDY | {"model": "new"}).status_code == 404
    base = admin.post("/v1/completions", json=GREEDY | {"model": "pocket"}).json()["choices"][0]
    assert got["text"] != base["text"]


def test_paths_outside_of_the_root(admin, adapter_root, quiet):
    outside = ADAPTERS["quiet"]
    neighbour = adapter_root.with_name(adapter_root.name + "-2")
    for path in (outside, "/", "..", "../..", f"../{neighbour.name}", neighbour, "/nowhere/at/all"):
        assert "leads out" in refusal(load(admin, "new", path), 403)
    assert "leads out" in refusal(load(admin, "new", f"quiet/../../{neighbour.name}"), 403)


def test_links_out_of_the_root(admin, adapter_root, tmp_path):
    link = adapter_root / "link"
    link.symlink_to(ADAPTERS["quiet"])
    assert "leads out" in refusal(load(admin, "new", "link"), 403)
    link.unlink()
    (adapter_root / "files").mkdir()
    for file in ADAPTERS["quiet"].iterdir():
        (adapter_root / "files" / file.name).symlink_to(file)
    assert "leads out" in refusal(load(admin, "new", "files"), 403)
    shutil.rmtree(adapter_root / "files")


def test_links_inside_the_root(admin, adapter_root, quiet):
    link = adapter_root / "link"
    link.symlink_to(quiet)
    assert load(admin, "new", "link").status_code == 200
    assert unload(admin, "new").status_code == 200
    link.unlink()


def test_paths_to_nothing(admin, adapter_root, quiet):
    for path in ("missing", "quiet/adapter_config.json", "quiet/deeper"):
        assert "no such folder" in refusal(load(admin, "new", path), 404)
    refusal(load(admin, "new", "a\0b"), 400)
    refusal(load(admin, "new", "x" * 5000), 400)
    loop = adapter_root / "loop"
    loop.symlink_to(loop)
    assert load(admin, "new", "loop").status_code in (400, 404)
    loop.unlink()
    (adapter_root / "empty").mkdir()
    refusal(load(admin, "new", "empty"), 400)


def test_bad_adapters_and_names(admin, quiet):
    refusal(load(admin, "a/b", "quiet"), 400, "lora_name")
    assert "base model's name" in refusal(load(admin, "pocket", "quiet"), 400, "lora_name")
    tensors = load_file(quiet / "adapter_model.safetensors")
    key = min(tensors)
    save_file(
        tensors | {key: np.full_like(tensors[key], np.nan)}, quiet / "adapter_model.safetensors"
    )
    assert key in refusal(load(admin, "new", "quiet"), 400, "lora_path")
    (quiet / "adapter_config.json").write_text("{")
    assert "(adapter_config.json)" in refusal(load(admin, "new", "quiet"), 400, "lora_path")


def test_what_overflows_has_no_logprobs(admin, engine, quiet):
    """Its values are finite, what they give is not: JSON has no number for that."""
    path = quiet / "adapter_model.safetensors"
    save_file({key: np.full_like(x, 1e30) for key, x in load_file(path).items()}, path)
    assert load(admin, "huge", "quiet").status_code == 200
    asked = GREEDY | {"model": "huge", "ignore_eos": True, "logprobs": 2}
    whole = admin.post("/v1/completions", json=asked)
    assert whole.status_code == 200, whole.text
    assert whole.json()["choices"][0]["logprobs"]["token_logprobs"] == [None] * 6
    events = admin.post("/v1/completions", json=asked | {"stream": True}).text
    assert "NaN" not in events and "Infinity" not in events and "[DONE]" in events
    talk = {"model": "huge", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    chat = admin.post("/v1/chat/completions", json=talk | {"max_tokens": 2, "temperature": 0})
    assert chat.status_code == 200, chat.text
    assert chat.json()["choices"][0]["logprobs"]["content"][0]["logprob"] is None
    assert unload(admin, "huge").status_code == 200


def test_bad_bodies(admin):
    for path in ("load", "unload"):
        for body in ({}, {"lora_name": 5, "lora_path": "x"}, {"lora_name": "a", "wat": 1}):
            refusal(admin.post(f"/v1/{path}_lora_adapter", json=body), 400)
    body = {"lora_name": "nobody", "lora_int_id": 1}
    assert "nobody" in refusal(admin.post("/v1/unload_lora_adapter", json=body), 404)
    refusal(unload(admin, "nobody"), 404)


def test_a_name_that_is_taken_gets_a_new_version_if_asked_for(admin, quiet):
    """vLLM's field, with its default."""
    body = {"lora_name": "new", "lora_path": str(quiet)}
    for in_place, status in ((False, 200), (False, 400), (True, 200), (None, 400)):
        answer = admin.post("/v1/load_lora_adapter", json=body | {"load_inplace": in_place})
        assert answer.status_code == status, answer.text
    assert "load_inplace" in refusal(
        admin.post("/v1/load_lora_adapter", json=body | {"load_inplace": 1}), 400
    )
    assert unload(admin, "new").status_code == 200


@pytest.mark.parametrize("in_place, statuses", [(False, [200, 400, 400]), (True, [200] * 3)])
def test_clients_that_load_one_name(admin, quiet, monkeypatch, in_place, statuses):
    """Without load_inplace who comes while the first one's files are read finds it taken."""
    real = app.folder_inside

    def slowly(root, path):
        time.sleep(0.3)
        return real(root, path)

    monkeypatch.setattr(app, "folder_inside", slowly)
    with ThreadPoolExecutor() as threads:
        body = {"lora_name": "new", "lora_path": str(quiet), "load_inplace": in_place}
        answers = threads.map(
            lambda _: admin.post("/v1/load_lora_adapter", json=body).status_code, range(3)
        )
        assert sorted(answers) == statuses
    assert unload(admin, "new").status_code == 200


def test_an_adapter_in_use_stays(admin, slow_steps):
    body = GREEDY | {"model": "shout", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with admin.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # the connection ends with it
        next(lines)
        assert "in use (lora_name)" in refusal(unload(admin, "shout"), 409, "lora_name")
