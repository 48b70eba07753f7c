"""`lora-moe-jax train`: an adapter from a JSONL file, with a loss curve beside it."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lora_moe_jax.config.reader import read_config
from lora_moe_jax.errors import AdapterError, RequestError
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.options import DEFAULT_MAX_LENGTH
from lora_moe_jax.serving.text import TextCodec
from lora_moe_jax.training.config import LoraConfig
from lora_moe_jax.training.curve import sparkline
from lora_moe_jax.training.data_order import DataOrder
from lora_moe_jax.training.sft import SftConfig, SftReport, count_steps, run_sft
from lora_moe_jax.training.sft_data import Example, read_examples
from lora_moe_jax.training.trainer import Trainer

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
    """
    _check_out(out)
    lora.peft()  # refuses what is out of range before anything is built, as this does with data
    examples = _examples(model, data, max_length)
    engine = Engine.from_pretrained(
        model,
        dtype=dtype,
        max_adapters=1,
        max_rank=lora.rank,
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
    reports = _train(console, trainer, examples, config, order)
    trainer.save_adapter(NAME, out)
    _write_losses(out / LOSS_FILE, reports, order)
    losses = [report.loss for report in reports]
    console.print(f"loss  {losses[0]:.4f}  {sparkline(losses)}  {losses[-1]:.4f}", highlight=False)
    console.out(f"adapter and {LOSS_FILE} are in {out}", highlight=False)
    _check_reports(console, reports, out)
    return reports


def _check_out(out: Path) -> None:
    """Refuses a folder that is there already, or cannot be made, before anything is trained."""
    if out.exists() or out.is_symlink():
        raise AdapterError(
            "there is something already where the adapter goes",
            file=out,
            expected="a new folder",
            hint="choose another --out, or remove it",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=out.parent).cleanup()
    except OSError as cause:
        raise AdapterError(
            "the adapter could not be written there",
            file=out,
            expected="a folder that can be made",
            found=str(cause),
            hint="choose another --out",
        ) from cause


def _examples(model: Path, data: Path, max_length: int | None) -> list[Example]:
    config, codec = read_config(model), TextCodec.from_folder(model)
    if codec is None:
        raise RequestError(
            "the model has no tokenizer", file=model, expected="tokenizer.json in its folder"
        )
    longest = min(DEFAULT_MAX_LENGTH, config.max_position) if max_length is None else max_length
    ends = config.eos_token_ids
    return read_examples(data, codec, ends[0] if ends else None, longest)


def _train(
    console: Console,
    trainer: Trainer,
    examples: list[Example],
    config: SftConfig,
    order: DataOrder,
) -> list[SftReport]:
    reports = []
    run = run_sft(trainer, NAME, examples, config, order)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("compiling", total=count_steps(examples, order, config))
        for report in run:
            reports.append(report)
            bar.update(task, advance=1, description=f"loss {report.loss:.4f}")
    return reports


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


def _check_reports(console: Console, reports: list[SftReport], out: Path) -> None:
    """Says how many steps were skipped; where the last one was, it refuses to call it a success."""
    skipped = sum(report.skipped for report in reports)
    if reports[-1].skipped:
        raise RequestError(
            "the training diverged: gradients were not finite, and these steps changed nothing",
            file=out / LOSS_FILE,
            key="skipped",
            expected="no step",
            found=f"{skipped} of {len(reports)} steps",
            hint="choose a smaller --learning-rate",
        )
    if skipped:
        said = f"{skipped} of {len(reports)} steps changed nothing: their gradients were not finite"
        console.print(said, style="yellow", highlight=False)
