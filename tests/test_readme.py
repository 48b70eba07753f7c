"""The README's Python runs as it is printed, block after block, as a reader would type it in."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp

import lora_moe_jax as lmj
from lora_moe_jax import pocket

README = Path(__file__).parents[1] / "README.md"
ELSEWHERE = "mesh={", "openai.OpenAI"  # several devices; a server: tests of their own


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def given() -> dict:
    """What blocks name, and say in words alone."""
    keys = jax.random.split(jax.random.key(0), 5)
    return dict(
        folder=pocket.ADAPTERS["shout"],
        params=lmj.SamplingParams(max_tokens=5),
        experts=jax.random.randint(keys[0], (10, 2), 0, 64),
        token_slots=jnp.arange(10) % 3 - 1,
        x=jax.random.normal(keys[1], (10, 32)),
        w=jax.random.normal(keys[2], (64, 48, 32)),
        a=jax.random.normal(keys[3], (2, 64, 4, 32)),
        b=jax.random.normal(keys[4], (2, 64, 4, 48)),
        scaling=jnp.ones((2, 64)),
    )


def run(block: str, names: dict) -> None:
    code = compile(block, README.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


def test_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = given()
    for block in blocks():
        if not any(words in block for words in ELSEWHERE):
            run(block.replace("steps=20", "steps=2"), names)
    assert "even" in names["report"].tasks and names["found"].max_difference == 0
    assert names["y"].shape == (20, 48)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "even-adapter",
        "out",
        "poet-folder",
        "states",
    ]
    assert "shout 1 length" in capsys.readouterr().out
