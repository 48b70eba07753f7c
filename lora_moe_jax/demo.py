"""The demo: one base model, real adapters in several file layouts, one mixed batch."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file, save_file

from lora_moe_jax.adapters import read_adapter, write_adapter
from lora_moe_jax.errors import LoraMoeError
from lora_moe_jax.inspect import megabytes
from lora_moe_jax.pocket import ADAPTERS, BASE
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.request import Completion
from lora_moe_jax.serving.sampling_params import SamplingParams

PROMPTS = ("def read_config(path):\n", "The import statement")
MAX_TOKENS = 40
MAX_RANK = 16


def run_demo(console: Console) -> None:
    """Loads, serves, checks, swaps, and shows what a broken adapter is answered."""
    console.rule("One base model, many adapters")
    engine = Engine.from_pretrained(
        BASE,
        dtype="float32",
        max_adapters=len(ADAPTERS) + 2,  # one more layout, and a slot to try broken ones in
        max_rank=MAX_RANK,
        max_requests=2 * (len(ADAPTERS) + 2),
        max_length=128,
        token_buckets=(32,),  # one step to compile
        max_logprobs=0,
        progress=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folders = _adapter_folders(engine, Path(scratch))
        for name, folder in folders.items():
            engine.load_adapter(name, folder)
        console.print(_adapter_table(engine))
        _serve(console, engine)
        _swap(console, engine, folders)
        _break(console, engine, Path(scratch))


def _adapter_folders(engine: Engine, scratch: Path) -> dict[str, Path]:
    """The packaged adapters, and one of them again in the layout that vLLM and SGLang read."""
    packed = next(
        name
        for name, folder in ADAPTERS.items()
        if read_adapter(folder, engine.bank.projections).layout == "packed"
    )
    copy = scratch / f"{packed}-per-expert"
    adapter = read_adapter(ADAPTERS[packed], engine.bank.projections)
    write_adapter(copy, adapter, engine.bank.projections, layout="per_expert")
    return {**ADAPTERS, copy.name: copy}


def _adapter_table(engine: Engine) -> Table:
    table = Table("adapter", "slot", "rank", "layout", "size", "targets", title="Loaded")
    for info in engine.adapters():
        targets = ", ".join(dict.fromkeys(target.rsplit(".", 1)[-1] for target in info.targets))
        row = (info.name, info.slot, info.rank, info.layout, megabytes(info.nbytes), targets)
        table.add_row(*map(str, row))
    return table


def _serve(console: Console, engine: Engine) -> None:
    """Streams a mixed batch, then runs every request again alone and compares the bits."""
    names = [None, *(info.name for info in engine.adapters())]
    requests = [(prompt, name) for prompt in PROMPTS for name in names]
    prompts, adapters = zip(*requests, strict=True)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=True)
    completions, seconds = _stream(console, engine, prompts, adapters, params)
    columns = ("prompt", "adapter", "tokens", "tokens/s", "mean logprob", "bits as alone")
    table = Table(*columns, title="Each request of the batch, and the same request served alone")
    for i, (prompt, name) in enumerate(requests):
        together = completions[i]
        (alone,) = engine.generate([prompt], params, [name])
        equal = alone.token_ids == together.token_ids and np.array_equal(
            np.float32(alone.logprobs), np.float32(together.logprobs)
        )
        table.add_row(
            prompt.split()[0],
            name or "(base)",
            str(len(together.token_ids)),
            f"{len(together.token_ids) / seconds[i]:.0f}",
            f"{np.mean(together.logprobs):.3f}",
            "equal" if equal else "NOT EQUAL",
        )
    console.print(table)
    generated = sum(len(completion.token_ids) for completion in completions)
    console.print(
        f"{len(requests)} requests, {generated} tokens in {max(seconds):.1f} s: "
        f"{generated / max(seconds):.0f} tokens/s over the batch"
    )


def _stream(
    console: Console, engine: Engine, prompts, adapters, params
) -> tuple[list[Completion], list[float]]:
    """Shows all texts as they grow; returns the completions and each one's seconds."""
    texts = [""] * len(prompts)
    completions, seconds = [None] * len(prompts), [0.0] * len(prompts)
    start = time.perf_counter()
    with _live(console) as show:
        for delta in engine.stream(prompts, params, adapters):
            texts[delta.index] += delta.text
            if delta.completion is not None:
                completions[delta.index] = delta.completion
                seconds[delta.index] = time.perf_counter() - start
            show(_texts_panel(prompts, adapters, texts))
    return completions, seconds


@contextmanager
def _live(console: Console) -> Iterator:
    """A display that is redrawn on a terminal, and printed once at the end elsewhere."""
    last = None
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8, vertical_overflow="visible") as live:
            yield live.update
        return

    def remember(renderable) -> None:
        nonlocal last
        last = renderable

    yield remember
    console.print(last)


def _texts_panel(prompts, adapters, texts) -> Group:
    panels = []
    for prompt, name, text in zip(prompts, adapters, texts, strict=True):
        body = Text(prompt, style="dim", end="")
        body.append(text, style="default")
        panels.append(Panel(body, title=name or "(base)", title_align="left", padding=(0, 1)))
    return Group(*panels)


def _swap(console: Console, engine: Engine, folders: dict[str, Path]) -> None:
    """Unloads one adapter, loads another into its slot, and counts compilations."""
    first, second = list(folders)[:2]
    before = engine.stats().compilations
    start = time.perf_counter()
    engine.unload_adapter(first)
    info = engine.load_adapter("swapped-in", folders[second])
    milliseconds = 1e3 * (time.perf_counter() - start)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=True)
    original, swapped = engine.generate([PROMPTS[0]] * 2, params, [second, "swapped-in"])
    after = engine.stats().compilations
    table = Table("swap", "value", title="Swapping an adapter in a running engine")
    table.add_row("unloaded, loaded", f"{first}, {second} as {info.name} (slot {info.slot})")
    table.add_row("time", f"{milliseconds:.0f} ms")
    table.add_row("compiled functions before, after", f"{before}, {after}")
    same = original.token_ids == swapped.token_ids and original.logprobs == swapped.logprobs
    table.add_row("same bits as from its first slot", "yes" if same else "NO")
    console.print(table)


def _break(console: Console, engine: Engine, scratch: Path) -> None:
    """Tries adapters that must be refused, and checks that the engine serves on as before."""
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=True)
    name = engine.adapters()[0].name
    (before,) = engine.generate([PROMPTS[0]], params, [name])
    table = Table("broken adapter", title="What broken adapters are answered")
    table.add_column("answer", overflow="fold")  # whole keys, on narrow terminals too
    for title, folder in _broken_adapters(scratch):
        try:
            engine.load_adapter("broken", folder)
            table.add_row(title, "LOADED")
        except LoraMoeError as error:
            message = str(error).replace(str(scratch), "…")
            table.add_row(title, Text(f"{type(error).__name__}: {message}"))
    console.print(table)
    (after,) = engine.generate([PROMPTS[0]], params, [name])
    same = before.token_ids == after.token_ids and before.logprobs == after.logprobs
    console.print(f"Served on after these, same bits as before: {'yes' if same else 'NO'}")


def _broken_adapters(scratch: Path) -> Iterator[tuple[str, Path]]:
    source = next(iter(ADAPTERS.values()))

    def copy(name: str) -> Path:
        return Path(shutil.copytree(source, scratch / name))

    folder = copy("nan")
    tensors = load_file(folder / "adapter_model.safetensors")
    key = sorted(tensors)[0]
    tensors[key] = tensors[key].copy()
    tensors[key].flat[0] = np.nan
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    yield "one NaN", folder

    folder = copy("dora")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    yield "DoRA", folder

    folder = copy("truncated")
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    yield "half a file", folder
