"""Trainers that are killed and go on from the disk have the bits of one that never was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from lora_moe_jax.training import Trainer
from tests.training.killed_trainer import FAMILY, begin, digest, train

ROOT = Path(__file__).parents[2]


def killed(folder: Path, rounds: int, seed: int) -> list[dict]:
    """Runs the program: what each process had after each step."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.training.killed_trainer"]
        + [str(folder), str(rounds), str(seed)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-5000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def never_killed(trainer: Trainer) -> Iterator[str]:
    """What a trainer has at the start, and after each step."""
    begin(trainer)
    rng = np.random.default_rng(1)
    yield digest(trainer, rng)
    for step in count():
        train(trainer, step, rng)
        yield digest(trainer, rng)


LONG = [(25, seed) for seed in range(8)]  # 200 in all; `-n 8` runs them side by side


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "seed"), [(1, 0), *LONG])
def test_killed_at_some_moments(pair, tmp_path, rounds, seed):
    _, trainer = pair(FAMILY)
    steps = never_killed(trainer)
    bits = list(islice(steps, 3))  # compiles first, as those that are killed only read the cache
    told = killed(tmp_path / "states", rounds, seed)
    assert len({line["round"] for line in told if line["restored"]}) == rounds + 1
    assert told[-1]["step"] >= rounds + 2, "the disk has a step more of each"

    bits += islice(steps, told[-1]["step"] + 1 - len(bits))
    assert [line for line in told if line["bits"] != bits[line["step"]]] == []
