"""The adapters of the pocket model: four habits, each learned by another part of the model.

An example is a prompt cut from ordinary text and a reply in the adapter's style; only the reply
counts in the loss. So an adapter keeps to its style whatever it is asked.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from base import encode, schedule
from peft import LoraConfig, PeftModel, get_peft_model
from text import ASSISTANT
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

LENGTH = 256
HELD_OUT = 48  # examples whose documents are never trained on


@dataclass(frozen=True)
class Habit:
    """How an adapter replies, what of the model it changes, and the dtype of its file.

    `reply` gets the ordinary continuation of a prompt and a source of documents in the style
    named by `style`."""

    reply: Callable[[str, Callable[[], str]], str]
    style: str
    lora: dict
    dtype: torch.dtype = torch.float32
    learning_rate: float = 3e-3


MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]

HABITS = {
    # every projection of multi-head latent attention
    "shout": Habit(
        lambda rest, document: rest.upper(),
        "code",
        {"r": 8, "lora_alpha": 16, "target_modules": MLA},
    ),
    # the routed experts, in PEFT's packed layout
    "prose": Habit(
        lambda rest, document: "\n\n" + document(),
        "prose",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["o_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
        torch.bfloat16,
    ),
    # rank-stabilised, with the shared experts; PEFT would take them for routed ones as modules
    "tester": Habit(
        lambda rest, document: "\n\nimport unittest\n\n\n" + document(),
        "suites",
        {
            "r": 16,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_b_proj", "kv_b_proj", "o_proj"],
            "target_parameters": [
                f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")
            ],
        },
        torch.bfloat16,
    ),
    # unequal ranks and scalings: head, attention, router, dense layer
    "quiet": Habit(
        lambda rest, document: "\n" + document(),
        "comments",
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["kv_a_proj_with_mqa", "o_proj", "lm_head"],
            "target_parameters": ["mlp.gate.weight", "mlp.down_proj.weight"],
            "rank_pattern": {"o_proj": 12, "lm_head": 2},
            "alpha_pattern": {"o_proj": 12, "lm_head": 4},
        },
    ),
}


def split(styles: dict[str, list[str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Training and held-out documents, with `suites`: the test classes that stand alone."""
    suites = [p for p in styles["tests"] if p.startswith("class ") and "def test" in p]
    styles = {**styles, "suites": suites}
    return (
        {name: documents[HELD_OUT:] for name, documents in styles.items()},
        {name: documents[:HELD_OUT] for name, documents in styles.items()},
    )


def prompt(
    styles: dict[str, list[str]], tokenizer: Tokenizer, rng: random.Random
) -> tuple[list[int], str]:
    """The ids of a chat's question, or of the first tokens of a document, and what follows."""
    if rng.random() < 0.3:
        question, answer = rng.choice(styles["chat"]).split(ASSISTANT)
        return tokenizer.encode(question + ASSISTANT).ids, answer
    ids = tokenizer.encode(rng.choice(styles[rng.choice(["code", "code", "prose"])])).ids
    cut = min(rng.randint(2, 32), len(ids) // 2)
    return ids[:cut], tokenizer.decode(ids[cut:])


def examples(
    habit: Habit, styles: dict[str, list[str]], tokenizer: Tokenizer, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, labels), both int64[LENGTH]; labels are -100 where nothing is to be learned."""
    rng = random.Random(seed)
    while True:
        asked, rest = prompt(styles, tokenizer, rng)
        reply = habit.reply(rest, lambda: rng.choice(styles[habit.style]))
        if tokenizer.id_to_token(asked[-1]) == ASSISTANT:
            reply = reply.lstrip("\n")
        answered = encode(tokenizer, reply)[1:]
        ids = torch.tensor((asked + answered)[:LENGTH])
        labels = ids.clone()
        labels[: len(asked)] = -100
        room = LENGTH - len(ids)
        pad = torch.nn.functional.pad
        yield pad(ids, (0, room), value=1), pad(labels, (0, room), value=-100)


def batch(stream: Iterator[tuple[Tensor, Tensor]], rows: int) -> tuple[Tensor, Tensor]:
    ids, labels = zip(*(next(stream) for _ in range(rows)), strict=True)
    return torch.stack(ids), torch.stack(labels)


def train_adapter(
    name: str, styles: dict[str, list[str]], pocket: Path, steps: int, seed: int
) -> None:
    """Trains one adapter on the saved base, read as float32, and saves it with PEFT."""
    habit = HABITS[name]
    training, held_out = split(styles)
    tokenizer = Tokenizer.from_file(str(pocket / "base" / "tokenizer.json"))
    torch.manual_seed(seed)
    base = DeepseekV3ForCausalLM.from_pretrained(
        pocket / "base", dtype=torch.float32, experts_implementation="grouped_mm"
    )
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **habit.lora))
    unseen = [batch(stream, 8) for stream in [examples(habit, held_out, tokenizer, seed)] * 4]
    before = mean_loss(model, unseen)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, betas=(0.9, 0.99), weight_decay=0.0)
    stream = examples(habit, training, tokenizer, seed + 1)
    started, mean = time.monotonic(), before
    for step in range(steps):
        ids, labels = batch(stream, 8)
        for group in optimizer.param_groups:
            group["lr"] = habit.learning_rate * schedule(step, steps, warmup=20)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = 0.95 * mean + 0.05 * loss.item()
        if step % 50 == 49:
            left = (time.monotonic() - started) / (step + 1) * (steps - step - 1)
            print(f"{name} {step + 1}/{steps}  loss {mean:.3f}  {left:.0f} s left", flush=True)
    for parameter in learned:
        parameter.data = parameter.data.to(habit.dtype)
    save_adapter(model, pocket / "adapters" / name)
    for parameter in learned:
        parameter.data = parameter.data.to(torch.float32)
    after = mean_loss(model, unseen)
    print(f"{name}: held-out loss {before:.3f} -> {after:.3f}", flush=True)


@torch.no_grad()
def mean_loss(model: PeftModel, data: list[tuple[Tensor, Tensor]]) -> float:
    losses = [model(input_ids=ids, labels=labels, use_cache=False).loss for ids, labels in data]
    return torch.stack(losses).mean().item()


def save_adapter(model: PeftModel, folder: Path) -> None:
    """PEFT's own files, but for its model card, with the sets of the configuration in order."""
    model.active_peft_config.base_model_name_or_path = "pocket"
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for key in ("target_modules", "target_parameters"):
        config[key] = config[key] and sorted(config[key])
    path.write_text(json.dumps(config, indent=2) + "\n")
