"""Reference logits of the pocket model for the tests of this repository.

`tests/golden/pocket.safetensors` holds

  ids              int64[2, 32]          two prompts, the same for every model
  logits.base      float32[2, 8, 2048]   logits of the last 8 positions of each prompt
  logits.NAME      float32[2, 8, 2048]   the same with the adapter NAME

computed by transformers and PEFT in float32. The prompts are the first ones of the text whose
experts stay the same in every model when the embeddings are disturbed by 1e-3, so that rounding
cannot choose another expert.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from sample import load_model, names
from tokenizers import Tokenizer
from torch import Tensor

TOKENS, POSITIONS, PROMPTS = 32, 8, 2


@torch.no_grad()
def forward(model: torch.nn.Module, row: Tensor, noise: float = 0.0) -> tuple[Tensor, list[Tensor]]:
    """Logits float32[tokens, vocabulary] of one row, and the experts each router chose."""
    chosen = []
    hooks = [
        module.register_forward_hook(lambda m, i, out: chosen.append(out[2].sort(-1).values))
        for module in model.modules()
        if type(module).__name__ == "DeepseekV3TopkRouter"
    ]
    embedded = model.get_input_embeddings()(row[None])
    embedded = embedded * (1 + noise * torch.randn(embedded.shape))
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, chosen


def is_stable(model: torch.nn.Module, row: Tensor) -> bool:
    _, exact = forward(model, row)
    for _ in range(4):
        _, disturbed = forward(model, row, noise=1e-3)
        if any(not torch.equal(a, b) for a, b in zip(exact, disturbed, strict=True)):
            return False
    return True


def write_golden(styles: dict[str, list[str]], pocket: Path, file: Path) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(pocket / "base" / "tokenizer.json"))
    models = {name or "base": load_model(pocket, name) for name in [None, *names(pocket)]}
    rows = []
    for text in styles["code"]:
        row = torch.tensor(tokenizer.encode(text).ids[:TOKENS])
        if len(row) == TOKENS and all(is_stable(model, row) for model in models.values()):
            rows.append(row)
        if len(rows) == PROMPTS:
            break
    tensors = {"ids": torch.stack(rows)}
    for name, model in models.items():
        logits = [forward(model, row)[0][-POSITIONS:] for row in rows]
        tensors[f"logits.{name}"] = torch.stack(logits).contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})
    print(f"{file.name}: {file.stat().st_size} bytes, prompts:", flush=True)
    for row in rows:
        print(repr(tokenizer.decode(row.tolist())), flush=True)
