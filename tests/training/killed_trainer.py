"""A program that kills trainers: `python -m tests.training.killed_trainer FOLDER ROUNDS SEED`.

Every round forks a process that restores the newest state of FOLDER, trains, and saves after every
step, and kills it at some moment of this. The last one goes on to an end of its own. A line of JSON
says, for each step that any of them has come to, what it had then.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401 - before the forks, as it takes a second

import tests.conftest  # noqa: F401 - as many devices as in tests, which share what is compiled
from lora_moe_jax import Datum, Engine, LoraConfig, Trainer
from tests.adapters.tables import GOLDEN
from tests.training.conftest import BUCKETS, ENGINE
from tests.training.helpers import arrays

FAMILY = "qwen3"  # compiles fastest
SAVES = (2, 3, 4)  # a process is killed in one of these, or in the step after it


def begin(trainer: Trainer) -> None:
    trainer.add_adapter("a", LoraConfig(rank=4, alpha=8))
    trainer.add_adapter("b", LoraConfig(rank=2, alpha=8, target_modules=["o_proj"], seed=5))


def train(trainer: Trainer, step: int, rng: np.random.Generator) -> None:
    """One step of "a"; "b" is stepped by the gradients of two passes."""
    sizes = (("a", 11), ("b", 9))
    batch = [Datum(rng.integers(3, 250, size).tolist(), name) for name, size in sizes]
    trainer.forward_backward(batch)
    trainer.optim_step(["a", "b"] if step % 2 else ["a"], 0.01, weight_decay=0.1)


def digest(trainer: Trainer, rng: np.random.Generator) -> str:
    """Of all that a loop has to go on with."""
    bits = hashlib.sha256(json.dumps(rng.bit_generator.state).encode())
    for name, training in trainer._adapters.items():
        bits.update(f"{name} {training.steps}".encode())
        for array in arrays((training.masters, training.moments, training.gradients)):
            bits.update(array.tobytes())
    return bits.hexdigest()


def kill_rounds(folder: Path, rounds: int, seed: int) -> None:
    moments, saved = random.Random(seed), 0
    for number in range(rounds + 1):
        last = number == rounds
        lines = run(folder, None if last else moments)
        step = lines[0]["step"]
        assert step >= saved, f"step {step} was found, {saved} had been written"
        saved = max(line["saved"] for line in lines)
        for line in lines:
            print(json.dumps({"round": number, "restored": line is lines[0]} | line), flush=True)


def run(folder: Path, moments: random.Random | None) -> list[dict]:
    """What a process told that was killed at a random moment; or that trained for two steps."""
    read, write = os.pipe()
    child = os.fork()  # JAX has started nothing yet in this process
    if child == 0:
        os.close(read)
        _go_on_and_end(folder, write, range(2) if moments is None else itertools.count())
    os.close(write)
    with open(read) as pipe:
        lines = [pipe.readline()]
        if moments is not None:
            for _ in range(moments.choice(SAVES)):
                begun = time.monotonic()
                lines.append(pipe.readline())
            time.sleep(moments.uniform(0, time.monotonic() - begun))  # so long takes a step
            os.kill(child, signal.SIGKILL)
        lines += pipe
    _, status = os.waitpid(child, 0)
    expected = 0 if moments is None else -signal.SIGKILL
    assert os.waitstatus_to_exitcode(status) == expected, "it ended by itself: see above"
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be torn


def _go_on_and_end(folder: Path, write: int, steps: Iterable[int]) -> None:
    """Never returns."""
    try:
        warnings.simplefilter("error")  # that a state is damaged, too
        # Reads what others have compiled, and writes nothing that a kill would leave torn.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
        with open(write, "w") as pipe:
            _go_on(folder, steps, pipe)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def _go_on(folder: Path, steps: Iterable[int], pipe: TextIO) -> None:
    """The loop of a user; the batches follow from random numbers that are saved too."""
    engine = Engine.from_pretrained(GOLDEN / FAMILY / "base", dtype="float32", **ENGINE)
    rng = np.random.default_rng(1)
    step = 0
    if folder.exists() and any(folder.glob("0*")):
        trainer, extra = Trainer.restore(engine, folder, token_buckets=BUCKETS)
        rng.bit_generator.state = extra["random"]
        step = trainer.adapters()[0].steps
    else:
        trainer = Trainer(engine, token_buckets=BUCKETS)
        begin(trainer)

    def tell(saved: int) -> None:
        line = {"step": step, "saved": saved, "bits": digest(trainer, rng)}
        print(json.dumps(line), file=pipe, flush=True)

    tell(step)
    for _ in steps:
        train(trainer, step, rng)
        step += 1
        trainer.save(folder, {"random": rng.bit_generator.state})  # the one before is written now
        tell(step - 1)
    trainer.wait()


if __name__ == "__main__":
    kill_rounds(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
