"""Adapters that this library writes, loaded by PEFT: the logits are those of the original.

Needs torch, transformers and peft. The per_expert and shared_outer goldens were made by merging
the deltas into the base weights, so PEFT is not the oracle of its own input.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lora_moe_jax.adapters import Adapter, AdapterConfig, LoraPair, read_adapter, write_adapter
from tests.adapters.tables import FAMILIES, GOLDEN, golden_adapters, table

# PEFT's own warnings, as of a missing key, stay errors. It wrongly warns of every pattern that is
# for a parameter: it looks for a module of that name (0.21.2, tuners_utils.inject_adapter).
pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TOLERANCE = 1e-4  # transformers' own noise in float32 is 1e-5

CASES = [(family, name) for family in FAMILIES for name in golden_adapters(family)]


def peft_logits(family: str, folder) -> tuple[np.ndarray, object]:
    import torch
    from peft import PeftModel
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        GOLDEN / family / "base",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    golden = load_file(GOLDEN / family / "golden.safetensors")
    model = PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        ids = torch.from_numpy(golden["input_ids"])
        return model(input_ids=ids, use_cache=False).logits.float().numpy(), golden


@pytest.mark.parametrize(("family", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_golden_logits_after_rewriting(family, name, tmp_path):
    projections = table(family)
    adapter = read_adapter(GOLDEN / family / "adapters" / name, projections)
    write_adapter(tmp_path / "out", adapter, projections, layout="peft")
    logits, golden = peft_logits(family, tmp_path / "out")
    assert np.abs(logits - golden[f"logits.{name}"]).max() <= TOLERANCE
    assert np.abs(logits - golden["logits.base"]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_router_head_embedding_and_lone_gate(family, tmp_path):
    """What the goldens lack: every kind of projection, mixed ranks, an expert gate without up."""
    projections = table(family)
    rng = np.random.default_rng(7)
    pairs = {}
    for number, (name, p) in enumerate(projections.items()):
        if name.endswith("experts.up_proj") and p.kind == "expert":
            continue
        rank = 2 + number % 3
        a = rng.standard_normal((p.groups, rank, p.in_features)) / np.sqrt(p.in_features)
        b = 0.2 * rng.standard_normal((p.groups, rank, p.out_features))
        scaling = np.full(p.groups, 0.5 + 0.1 * (number % 4), np.float32)
        ranks = np.full(p.groups, rank, np.int32)
        pairs[name] = LoraPair(a.astype(np.float32), b.astype(np.float32), scaling, ranks)
    adapter = Adapter(pairs, "module", AdapterConfig())
    write_adapter(tmp_path / "out", adapter, projections, layout="peft")
    logits, golden = peft_logits(family, tmp_path / "out")
    expected = merged_logits(family, pairs, golden["input_ids"], tmp_path / "merged")
    assert np.abs(logits - expected).max() <= TOLERANCE
    assert np.abs(logits - golden["logits.base"]).max() > 100 * TOLERANCE


def merged_logits(family: str, pairs: dict[str, LoraPair], ids: np.ndarray, scratch) -> np.ndarray:
    """Logits of the base with every delta added to its weight. The head and the embedding are
    separate weights in these families."""
    import shutil

    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoModelForCausalLM

    base, projections = GOLDEN / family / "base", table(family)
    weights = load_file(base / "model.safetensors")
    for name, pair in pairs.items():
        delta = pair.scaling[:, None, None] * np.einsum("gri,gro->goi", pair.a, pair.b)
        block, _, leaf = name.rpartition(".")
        if projections[name].interleaved:
            add_interleaved(weights, block, leaf, delta)
            continue
        for group, change in enumerate(delta):
            key = f"{block}.{group}.{leaf}.weight" if len(delta) > 1 else f"{name}.weight"
            weights[key] = weights[key] + (change.T if name == "model.embed_tokens" else change)
    scratch.mkdir()
    shutil.copy(base / "config.json", scratch)
    save_file(weights, scratch / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        scratch,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids), use_cache=False).logits.float().numpy()


def add_interleaved(weights: dict[str, np.ndarray], block: str, leaf: str, delta) -> None:
    """Adds [E, out, in] to gpt-oss's [E, in, out], in which gate and up take turns."""
    key = f"{block}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"
    places = {
        "gate_proj": slice(0, None, 2),
        "up_proj": slice(1, None, 2),
        "down_proj": slice(None),
    }
    weights[key] = weights[key].copy()
    weights[key][..., places[leaf]] += delta.swapaxes(1, 2)


def test_peft_saves_back_what_it_loaded(tmp_path):
    """PEFT's copy of our file, which has lost our metadata, still reads as the same adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    projections = table("deepseek_v3")
    adapter = read_adapter(GOLDEN / "deepseek_v3/adapters/per_expert", projections)
    write_adapter(tmp_path / "ours", adapter, projections, layout="peft")
    base = AutoModelForCausalLM.from_pretrained(GOLDEN / "deepseek_v3/base")
    PeftModel.from_pretrained(base, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = read_adapter(tmp_path / "theirs", projections)
    assert again.pairs.keys() == adapter.pairs.keys()
    for name, pair in adapter.pairs.items():
        for field in dataclasses.fields(pair):
            mine, theirs = getattr(pair, field.name), getattr(again.pairs[name], field.name)
            np.testing.assert_array_equal(mine, theirs, err_msg=f"{name} {field.name}")
