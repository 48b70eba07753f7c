"""Adapters with the base's embedding and head in their files, as PEFT saves them."""

from __future__ import annotations

import shutil

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from lora_moe_jax import AdapterError
from lora_moe_jax.adapters.reader import TENSOR_FILE
from lora_moe_jax.checkpoint.safetensors_file import SafetensorsFile
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import probe

PREFIX = "base_model.model."


def with_copies(tmp_path, family, **changed):
    """The adapter `attn` with copies; of those that are changed, the last row is."""
    folder = shutil.copytree(GOLDEN / family / "adapters/attn", tmp_path / "adapter")
    base = SafetensorsFile(GOLDEN / family / "base/model.safetensors")
    tensors = load_file(folder / TENSOR_FILE)
    for name, source in (("model.embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
        weight = f"{source}.weight"
        if weight not in base.tensors:  # tied
            weight = "model.embed_tokens.weight"
        copy = base.read(weight).astype(jnp.float32)
        if name in changed:
            copy[-1] += 1
        tensors[f"{PREFIX}{name}.base_layer.weight"] = copy
    save_file(tensors, folder / TENSOR_FILE)
    return folder


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_bases_own_change_nothing(engine, tmp_path, family):
    """One with tied embeddings, one without."""
    one = engine(family)
    info = one.load_adapter("plain", GOLDEN / family / "adapters/attn")
    copied = one.load_adapter("copied", with_copies(tmp_path, family))
    assert copied.nbytes == info.nbytes
    assert probe(one, "copied") == probe(one, "plain")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_others_are_refused(engine, tmp_path, family, name):
    one = engine(family)
    with pytest.raises(AdapterError, match="differs from the base") as caught:
        one.load_adapter("new", with_copies(tmp_path, family, **{name: True}))
    assert caught.value.key == f"{name}.base_layer.weight"
    assert "row 255" in str(caught.value) and not one.adapters()
