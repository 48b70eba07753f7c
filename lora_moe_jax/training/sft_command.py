"""`lora-moe-jax train`: an adapter from a JSONL file, with a loss curve beside it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import AdapterError, RequestError
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.interrupts import uninterrupted
from lora_moe_jax.serving.options import DEFAULT_MAX_LENGTH
from lora_moe_jax.serving.text import TextCodec
from lora_moe_jax.training.arguments import check_step_settings
from lora_moe_jax.training.config import LoraConfig
from lora_moe_jax.training.curve import sparkline
from lora_moe_jax.training.data_order import DataOrder
from lora_moe_jax.training.out_folder import check_out
from lora_moe_jax.training.sft import SftConfig, SftReport, count_steps, run_sft
from lora_moe_jax.training.sft_data import Example, read_examples
from lora_moe_jax.training.trainer import Trainer
from lora_moe_jax.training.whole_steps import WholeSteps

LOSS_FILE = "loss.json"
NAME = "adapter"  # in this engine, which nobody else sees


def train_adapter(
    console: Console,
    model: Path,
    data: Path,
    out: Path,
    lora: LoraConfig,
    config: SftConfig,
    *,
    dtype: str,
    max_length: int | None,
    seed: int,
) -> list[SftReport]:
    """Trains, writes adapter and `loss.json` into `out`, and prints the curve.

    Raises:
      AdapterError, CheckpointError, ConfigError, RequestError: what is wrong with the model, the
        data or the settings.
      RequestError: the last gradient was not finite; adapter and losses are written all the same.
      KeyboardInterrupt: Ctrl-C came; adapter and losses of the steps that had ended are written.
    """
    check_out(out)
    # They refuse what is out of range before anything is built, as this does with data.
    lora.peft()
    check_step_settings(config.learning_rate, config.weight_decay, config.clip_norm)
    examples = _examples(model, data, max_length)
    engine = Engine.from_pretrained(
        model,
        dtype=dtype,
        max_adapters=1,
        max_rank=lora.rank,
        target_modules=None if isinstance(lora.target_modules, str) else lora.target_modules,
        max_requests=1,
        max_length=max_length,
        token_buckets=(8,),  # nothing is served here
        max_logprobs=0,
        progress=console.is_terminal,
    )
    bucket = max(engine.options.max_length, config.batch_tokens)
    trainer = Trainer(engine, token_buckets=(bucket,))
    trainer.add_adapter(NAME, lora)
    order = DataOrder(len(examples), seed)
    steps = count_steps(examples, order, config)
    run = WholeSteps(run_sft(trainer, NAME, examples, config, order))
    _train(console, run, steps)
    with uninterrupted():  # a second Ctrl-C would come between the files
        trainer.save_adapter(NAME, out)
        _write_losses(out / LOSS_FILE, run.reports, order)
        _print_losses(console, run.reports, out)
    if run.interrupted:
        _print_skipped(console, run.reports)
        done = f"{len(run.reports)} of {steps} steps"
        raise KeyboardInterrupt(f"interrupted after {done}; saved in {out}")
    _check_reports(console, run.reports, out)
    return run.reports


def _examples(model: Path, data: Path, max_length: int | None) -> list[Example]:
    config, codec = read_config(model), TextCodec.from_folder(model)
    if codec is None:
        raise RequestError(
            "the model has no tokenizer", file=model, expected="tokenizer.json in its folder"
        )
    longest = min(DEFAULT_MAX_LENGTH, config.max_position) if max_length is None else max_length
    ends = config.eos_token_ids
    return read_examples(data, codec, ends[0] if ends else None, longest)


def _train(console: Console, run: WholeSteps[SftReport], steps: int) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with run, Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("compiling", total=steps)
        for report in run:
            bar.update(task, advance=1, description=f"loss {report.loss:.4f}")


def _write_losses(file: Path, reports: list[SftReport], order: DataOrder) -> None:
    steps = [_finite(dataclasses.asdict(report)) for report in reports]
    content = {"steps": steps, "order": dataclasses.asdict(order)}
    text = json.dumps(content, indent=1, allow_nan=False)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as cause:
        raise AdapterError("the losses cannot be written", file=file, found=str(cause)) from cause


def _finite(fields: dict[str, object]) -> dict[str, object]:
    """The fields, None for what is no number: JSON has none of these."""

    def is_lost(value: object) -> bool:
        return isinstance(value, float) and not math.isfinite(value)

    return {key: None if is_lost(value) else value for key, value in fields.items()}


def _print_losses(console: Console, reports: list[SftReport], out: Path) -> None:
    losses = [report.loss for report in reports]
    console.print(f"loss  {losses[0]:.4f}  {sparkline(losses)}  {losses[-1]:.4f}", highlight=False)
    console.out(f"adapter and {LOSS_FILE} are in {out}", highlight=False)


def _check_reports(console: Console, reports: list[SftReport], out: Path) -> None:
    """Says how many steps were skipped; where the last one was, it refuses to call it a success."""
    if reports[-1].skipped:
        skipped = sum(report.skipped for report in reports)
        raise RequestError(
            "the training diverged: gradients were not finite, and these steps changed nothing",
            file=out / LOSS_FILE,
            key="skipped",
            expected="no step",
            found=f"{skipped} of {len(reports)} steps",
            hint="choose a smaller --learning-rate",
        )
    _print_skipped(console, reports)


def _print_skipped(console: Console, reports: list[SftReport]) -> None:
    skipped = sum(report.skipped for report in reports)
    if skipped:
        said = f"{skipped} of {len(reports)} steps changed nothing: their gradients were not finite"
        console.print(said, style="yellow", highlight=False)
