"""What loss and gradients are golden for: a batch, and an adapter of random numbers on everything.

`tests/golden/FAMILY/gradients.safetensors` has what torch and PEFT give for them, and
`gradients_shared_outer.safetensors` the same of experts that share their outer factors: "loss", and
"PROJECTION.a" and "PROJECTION.b". `python -m tests.training.test_parity_peft` writes them.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lora_moe_jax.adapters import LoraPair
from tests.adapters.tables import GOLDEN, table

RANK, ALPHA = 3, 5.0
O_PROJ_RANK = 2
SHARED_FAMILIES = ("qwen3_moe", "deepseek_v2", "deepseek_v3")


def file(family: str, shared: bool) -> Path:
    return GOLDEN / family / f"gradients{'_shared_outer' if shared else ''}.safetensors"


def sequences(family: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [4, 20] whose routing is clear, and weights [4, 19]."""
    ids = load_file(GOLDEN / family / "golden.safetensors")["input_ids"]
    shape = ids.shape[0], ids.shape[1] - 1
    return ids, np.random.default_rng(5).uniform(-0.5, 1, shape).astype(np.float32)


def adapter(family: str, shared: bool) -> dict[str, LoraPair]:
    """A pair for every projection that PEFT can target; or for the experts', one side shared.

    Without the tied embedding and head of Qwen3, of which PEFT would train one without the other.
    """
    tied = ("model.embed_tokens", "lm_head") if family == "qwen3" else ()
    found = {}
    for name, projection in table(family).items():
        if name in tied or (shared and projection.kind != "expert"):
            continue
        rank = O_PROJ_RANK if name.endswith("o_proj") else RANK
        groups, inwards = projection.groups, name.endswith("down_proj")
        random = np.random.default_rng([7, zlib.crc32(name.encode())])
        a_groups, b_groups = (1 if shared and side else groups for side in (not inwards, inwards))
        a = random.standard_normal((a_groups, rank, projection.in_features), np.float32)
        b = random.standard_normal((b_groups, rank, projection.out_features), np.float32)
        scaling = np.full(groups, ALPHA / rank, np.float32)
        ranks = np.full(groups, rank, np.int32)
        a /= np.sqrt(np.float32(projection.in_features))
        found[name] = LoraPair(a, np.float32(0.2) * b, scaling, ranks)
    return found


def compare(family: str, shared: bool, found: dict[str, np.ndarray], tolerance: float) -> None:
    """Of every factor within a part of its largest gradient: orders of summation differ."""
    golden = load_file(file(family, shared))
    assert found.keys() == golden.keys()
    for name, expected in golden.items():
        assert found[name].shape == expected.shape, name
        scale = np.abs(expected).max()
        assert scale > 0, name
        error = np.abs(found[name] - expected).max() / scale
        assert error <= tolerance, (name, error)
