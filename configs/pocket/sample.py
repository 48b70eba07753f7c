"""What the base and each adapter write after the same prompts."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from text import ASSISTANT, EOS, USER
from tokenizers import Tokenizer
from transformers import DeepseekV3ForCausalLM

PROMPTS = [
    "def read_lines(",
    "The import statement",
    f"{USER}Write join: Return the names joined by commas.{ASSISTANT}",
]


def load_model(pocket: Path, adapter: str | None) -> torch.nn.Module:
    """The base, alone or with one of its adapters, in float32 on the CPU."""
    model = DeepseekV3ForCausalLM.from_pretrained(
        pocket / "base",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    if adapter:
        model = PeftModel.from_pretrained(model, pocket / "adapters" / adapter)
    return model.eval()


def names(pocket: Path) -> list[str]:
    folder = pocket / "adapters"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def print_samples(pocket: Path, seed: int) -> None:
    tokenizer = Tokenizer.from_file(str(pocket / "base" / "tokenizer.json"))
    for adapter in [None, *names(pocket)]:
        model = load_model(pocket, adapter)
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer.encode(prompt).ids])
            for temperature in (None, 0.7):
                torch.manual_seed(seed)
                out = model.generate(
                    input_ids=ids,
                    max_new_tokens=90,
                    pad_token_id=tokenizer.token_to_id(EOS),
                    do_sample=temperature is not None,
                    temperature=temperature,
                )
                text = tokenizer.decode(out[0].tolist(), skip_special_tokens=False)
                how = f"temperature {temperature}" if temperature else "greedy"
                print(f"===== {adapter or 'base'}, {how}\n{text}\n", flush=True)
