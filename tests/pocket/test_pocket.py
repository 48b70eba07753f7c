"""The packaged model and adapters against PEFT's logits, and the demo that shows them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console
from safetensors.numpy import load_file

from lora_moe_jax import Engine
from lora_moe_jax.demo import run_demo
from lora_moe_jax.pocket import ADAPTERS, BASE
from tests.server.conftest import ENGINE  # compiled once for both

GOLDEN = Path(__file__).parents[1] / "golden/pocket.safetensors"


def test_sizes():
    base = sum(file.stat().st_size for file in BASE.iterdir())
    assert base <= 8 * 2**20
    assert len(ADAPTERS) >= 3


def test_logits_equal_peft():
    golden = load_file(GOLDEN)
    engine = Engine.from_pretrained(BASE, **ENGINE)
    for name, folder in ADAPTERS.items():
        engine.load_adapter(name, folder)
    for name in (None, *ADAPTERS):
        scores = engine.score(golden["ids"].tolist(), [name] * 2, return_logits=True)
        logits = np.stack([score.logits[-8:] for score in scores])
        np.testing.assert_allclose(logits, golden[f"logits.{name or 'base'}"], rtol=0, atol=1e-4)


def test_demo():
    text = io.StringIO()
    run_demo(Console(file=text, width=120))
    shown = text.getvalue()
    rows = [line for line in shown.splitlines() if "│ equal" in line]
    assert len(rows) == 2 * (len(ADAPTERS) + 2)
    assert "NOT EQUAL" not in shown and "NO │" not in shown and "LOADED" not in shown
    assert shown.count("AdapterError") == 3
    assert "same bits as before: yes" in shown
