"""The base of the pocket model: its tokenizer, its configuration, and its training."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from text import ASSISTANT, BOS, EOS, USER
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

VOCABULARY = 2048
CONTEXT = 512
MIXTURE = {"code": None, "chat": None, "prose": None, "tests": 1200, "shout": 600, "comments": 300}
TWICE = ("prose",)  # a small but important part of the text
BALANCE = 0.01  # step of the router's correction bias
PEAK = 3e-3  # learning rate

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def configuration() -> DeepseekV3Config:
    """Every part of DeepSeek-V3, small: 3.4 million parameters, 1.6 million used by a token."""
    return DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=128,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        max_position_embeddings=CONTEXT,
        initializer_range=0.04,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE. Encoding with special tokens puts <|bos|> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


def encode(tokenizer: Tokenizer, document: str) -> list[int]:
    """The ids of a document between <|bos|> and <|eos|>."""
    return [*tokenizer.encode(document).ids, tokenizer.token_to_id(EOS)]


def batches(documents: list[list[int]], rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless int64[rows, length]: half of the rows begin with a document, half anywhere in the
    stream of all documents."""
    rng = random.Random(seed)
    starts, stream = [], []
    for ids in documents:
        starts.append(len(stream))
        stream += ids
    data = torch.tensor(stream + stream[:length])
    while True:
        firsts = [rng.choice(starts) for _ in range(rows // 2)]
        firsts += [rng.randrange(len(stream)) for _ in range(rows - len(firsts))]
        yield torch.stack([data[first : first + length] for first in firsts])


class Balancer:
    """DeepSeek's balancing without a loss: each step moves an expert's correction bias up if it
    had fewer rows than the mean, down if it had more. `load` is the share of rows of the last
    step, float32[layers, experts]."""

    def __init__(self, model: DeepseekV3ForCausalLM):
        layers = model.model.layers[model.config.first_k_dense_replace :]
        self.routers = [layer.mlp.gate for layer in layers]
        self.load = torch.zeros(len(self.routers), model.config.n_routed_experts)
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(self._counter(layer))

    def _counter(self, layer: int) -> Callable:
        def count(router, inputs, outputs):
            rows = outputs[2].flatten()
            self.load[layer] = torch.bincount(rows, minlength=len(self.load[layer])) / len(rows)

        return count

    def step(self, size: float) -> None:
        for router, load in zip(self.routers, self.load, strict=True):
            router.e_score_correction_bias += size * torch.sign(load.mean() - load)


def schedule(step: int, steps: int, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine down to 2 %."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * cosine)


@torch.no_grad()
def evaluate(model: torch.nn.Module, documents: list[list[int]]) -> float:
    """Mean loss per token of held-out documents, each read from its start."""
    model.eval()
    total = tokens = 0
    for ids in documents:
        row = torch.tensor([ids[:256]])
        total += model(row, labels=row).loss.item() * (row.shape[1] - 1)
        tokens += row.shape[1] - 1
    model.train()
    return total / tokens


def train_base(styles: dict[str, list[str]], folder: Path, steps: int, seed: int) -> None:
    """Trains the tokenizer and the base and writes them to `folder`."""
    started = time.monotonic()
    parts = {name: styles[name][:count] for name, count in MIXTURE.items()}
    tokenizer = train_tokenizer([text for documents in parts.values() for text in documents])
    save_tokenizer(tokenizer, folder)
    held_out, training = {}, []
    for name, documents in parts.items():
        ids = [encode(tokenizer, text) for text in documents]
        held_out[name] = ids[:40]
        training += ids[40:] * (2 if name in TWICE else 1)
    random.Random(seed).shuffle(training)
    print(
        f"{sum(map(len, training))} tokens of text, {time.monotonic() - started:.0f} s", flush=True
    )

    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM._from_config(
        configuration(), dtype=torch.float32, experts_implementation="eager"
    )
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    balancer = Balancer(model)
    fit_base(model, balancer, training, steps, seed)
    for name, documents in held_out.items():
        print(f"held-out loss, {name}: {evaluate(model, documents):.3f}", flush=True)
    rows = next(batches(training, 32, 256, seed + 2))
    with torch.no_grad():
        model(rows)
    print(f"expert load per layer, 0.125 is even:\n{balancer.load.numpy().round(3)}", flush=True)
    save_base(model, folder)


def fit_base(
    model: DeepseekV3ForCausalLM,
    balancer: Balancer,
    training: list[list[int]],
    steps: int,
    seed: int,
) -> None:
    """The last tenth of the steps reads rows of the full context, half as many at once."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    short = batches(training, 8, CONTEXT // 2, seed)
    full = batches(training, 4, CONTEXT, seed + 1)
    started, mean = time.monotonic(), None
    for step in range(steps):
        rows = next(full if step > 0.9 * steps else short)
        now = schedule(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * now
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        balancer.step(BALANCE * now)
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 49:
            seconds = time.monotonic() - started
            left = seconds / (step + 1) * (steps - step - 1)
            print(f"step {step + 1}/{steps}  loss {mean:.3f}  {left:.0f} s left", flush=True)


def save_base(model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """Writes the hub layout in bfloat16; the correction bias stays float32, as on the hub."""
    biases = {n: b.clone() for n, b in model.named_buffers() if n.endswith("correction_bias")}
    model.to(torch.bfloat16)
    for name, bias in biases.items():
        module, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(module), leaf, torch.nn.Buffer(bias))
    model.save_pretrained(folder)
