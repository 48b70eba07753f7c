"""`lora-moe-jax rl`: two adapters of the pocket model learn by GRPO, in one loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from lora_moe_jax.pocket import BASE
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.interrupts import uninterrupted
from lora_moe_jax.training.config import LoraConfig
from lora_moe_jax.training.curve import sparkline
from lora_moe_jax.training.out_folder import check_out
from lora_moe_jax.training.rl_loop import (
    GrpoConfig,
    GrpoReport,
    GrpoTask,
    Reward,
    TaskReport,
    run_grpo,
)
from lora_moe_jax.training.trainer import Trainer
from lora_moe_jax.training.whole_steps import WholeSteps

PROMPTS = (
    "def read_config(path):\n",
    "The import statement",
    "class Reader:\n    ",
    "# This is",
    "import os\n",
    "Return the",
    "    for name in names:\n",
    "Write join_lines:",
)
GOALS: dict[str, Callable[[str], bool]] = {"upper": str.isupper, "digits": str.isdigit}
EARLY_AND_LATE = 5  # steps at both ends whose mean rewards are compared
REWARDS = "rewards"  # the title of the column of curves


def run_rl(
    console: Console, steps: int, seed: int = 0, out: Path | None = None
) -> list[GrpoReport]:
    """Trains, showing every step, and sums up; returns the reports.

    Args:
      out: in the end each adapter is written to a folder of its name in it. None: nothing is.

    Raises:
      AdapterError: one of these is there already, which is said at once, or cannot be written.
      KeyboardInterrupt: Ctrl-C came; steps that had ended are summed up, their adapters written.
    """
    folders = {} if out is None else {name: out / name for name in GOALS}
    for folder in folders.values():
        check_out(folder)
    console.rule("GRPO: two adapters, one loop, one engine")
    engine = Engine.from_pretrained(
        BASE,
        dtype="float32",
        max_adapters=len(GOALS),
        max_rank=8,
        max_requests=64,
        max_length=64,
        token_buckets=(64, 256),
        max_logprobs=0,
        progress=console.is_terminal,
    )
    trainer = Trainer(engine, token_buckets=(256,))  # a pack has at most 8 short sequences
    for name in GOALS:
        trainer.add_adapter(name, LoraConfig(rank=8, alpha=16, seed=seed))
    tasks = {name: GrpoTask(PROMPTS, _share(engine, goal)) for name, goal in GOALS.items()}
    config = GrpoConfig(steps=steps, max_tokens=16, learning_rate=3e-3, clip_norm=1.0, seed=seed)
    start, run = time.perf_counter(), WholeSteps(run_grpo(trainer, tasks, config))
    with run, _Display(console, steps) as display:
        for report in run:
            display.show(report)
    seconds = time.perf_counter() - start
    with uninterrupted():  # a second Ctrl-C would come between the adapters
        for name, folder in folders.items():
            trainer.save_adapter(name, folder)
            console.out(f"adapter {name} is in {folder}", highlight=False)
    _summary(console, run.reports, seconds)
    if run.interrupted:
        raise KeyboardInterrupt(f"interrupted after {len(run.reports)} of {steps} steps")
    return run.reports


def _share(engine: Engine, goal: Callable[[str], bool]) -> Reward:
    """Rewards the share of tokens that have a character of a kind."""
    texts = [engine.codec.decode([token]) for token in range(engine.config.vocab_size)]
    good = np.array([any(map(goal, text)) for text in texts])
    return lambda prompt, completion: float(good[completion].mean())


class _Display:
    """A bar and a row for each adapter; one line a step where there is no terminal."""

    def __init__(self, console: Console, steps: int):
        self._console = console
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console)
        self._task = self._bar.add_task("compiling", total=steps)
        self._rewards: dict[str, list[float]] = {}
        self._live = Live(self._bar, console=console) if console.is_terminal else None

    def __enter__(self) -> _Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, report: GrpoReport) -> None:
        columns = ("adapter", "reward", "KL", "largest difference", "loss", "gradient")
        table = Table(*columns, Column(REWARDS, no_wrap=True))
        rows = [_cells(name, task) for name, task in report.tasks.items()]
        width = _curve_width(self._console, columns, *rows)
        for cells, (name, task) in zip(rows, report.tasks.items(), strict=True):
            self._rewards.setdefault(name, []).append(task.reward)
            table.add_row(*cells, sparkline(self._rewards[name], width))
            if self._live is None:
                line = "  ".join(map("{} {}".format, columns, cells))
                self._console.print(f"step {report.step}  {line}", highlight=False)
        self._bar.update(self._task, completed=report.step, description="training")
        if self._live:
            self._live.update(Group(self._bar, table))


def _cells(name: str, task: TaskReport) -> tuple[str, ...]:
    return (
        name,
        f"{task.reward:.3f}",
        f"{task.kl:g}",
        f"{task.max_difference:g}",
        f"{task.loss:+.4f}",
        f"{task.optimizer.gradient_norm:.3f}",
    )


def _curve_width(console: Console, *rows: Sequence[str]) -> int:
    """How many characters of a curve there is room for beside these cells: 7 to 30."""
    taken = sum(max(map(len, column)) + 3 for column in zip(*rows, strict=True))  # with borders
    return min(max(console.width - taken - 4, len(REWARDS)), 30)


def _summary(console: Console, reports: list[GrpoReport], seconds: float) -> None:
    columns = ("adapter", "first", "last", "largest KL, difference", "writes now")
    width = _curve_width(console, columns)
    table = Table(*columns[:3], Column(REWARDS, no_wrap=True), *columns[3:])
    for name, last in reports[-1].tasks.items():
        rewards = [report.tasks[name].reward for report in reports]
        kl = max(abs(report.tasks[name].kl) for report in reports)
        difference = max(report.tasks[name].max_difference for report in reports)
        table.add_row(
            name,
            f"{np.mean(rewards[:EARLY_AND_LATE]):.3f}",
            f"{np.mean(rewards[-EARLY_AND_LATE:]):.3f}",
            sparkline(rewards, width),
            f"{kl:g}, {difference:g}",
            Text(ascii(last.completions[0].text)),
        )
    console.print(table)
    console.print(
        f"{len(reports)} steps in {seconds:.0f} s, compiling included; first and last are means "
        f"of {min(EARLY_AND_LATE, len(reports))} steps"
    )
