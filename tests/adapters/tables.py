"""Projection tables of the tiny golden models, built from their config.json without the library."""

from __future__ import annotations

import json
from pathlib import Path

from lora_moe_jax.adapters import Projection

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")


def golden_adapters(family: str) -> list[str]:
    return sorted(path.name for path in (GOLDEN / family / "adapters").iterdir())


def table(family: str) -> dict[str, Projection]:
    """What the golden model of `family` offers to adapters."""
    c = json.loads((GOLDEN / family / "base" / "config.json").read_text())
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    found: dict[str, Projection] = {}

    gpt_oss = family == "gpt_oss"

    def add(name: str, n_in: int, n_out: int, groups: int = 1, kind: str = "linear") -> None:
        interleaved = gpt_oss and kind == "expert"
        found[name] = Projection(name, n_in, n_out, groups, kind, interleaved)

    add("model.embed_tokens", vocab, hidden, kind="embedding")
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, n_in, n_out in _attention(c):
            add(f"{layer}.self_attn.{name}", n_in, n_out)
        if _is_sparse(c, i):
            experts = c.get("n_routed_experts") or c["num_local_experts"]
            width = c["intermediate_size" if gpt_oss else "moe_intermediate_size"]
            add(f"{layer}.mlp.{'router' if gpt_oss else 'gate'}", hidden, experts, kind="router")
            _mlp(add, f"{layer}.mlp.experts", hidden, width, experts, "expert")
            if shared := c.get("n_shared_experts"):
                _mlp(add, f"{layer}.mlp.shared_experts", hidden, shared * width)
        else:
            _mlp(add, f"{layer}.mlp", hidden, c["intermediate_size"])
    add("lm_head", hidden, vocab, kind="head")
    return found


def _mlp(add, parent: str, hidden: int, width: int, groups: int = 1, kind: str = "linear") -> None:
    add(f"{parent}.gate_proj", hidden, width, groups, kind)
    add(f"{parent}.up_proj", hidden, width, groups, kind)
    add(f"{parent}.down_proj", width, hidden, groups, kind)


def _is_sparse(c: dict, layer: int) -> bool:
    if "first_k_dense_replace" in c:
        return layer >= c["first_k_dense_replace"]
    return "num_local_experts" in c and layer not in c.get("mlp_only_layers", ())


def _attention(c: dict) -> list[tuple[str, int, int]]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" not in c:
        q, kv = heads * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        return [("q_proj", hidden, q), ("k_proj", hidden, kv), ("v_proj", hidden, kv),
                ("o_proj", q, hidden)]  # fmt: skip
    nope, rope, v, latent = (
        c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    q = heads * (nope + rope)
    if c["q_lora_rank"] is None:
        queries = [("q_proj", hidden, q)]
    else:
        queries = [("q_a_proj", hidden, c["q_lora_rank"]), ("q_b_proj", c["q_lora_rank"], q)]
    return [
        *queries,
        ("kv_a_proj_with_mqa", hidden, latent + rope),
        ("kv_b_proj", latent, heads * (nope + v)),
        ("o_proj", heads * v, hidden),
    ]
