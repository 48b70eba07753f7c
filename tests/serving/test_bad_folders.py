"""Engines that cannot be built: refused by name, before anything is compiled."""

from __future__ import annotations

import shutil

import pytest

from lora_moe_jax import CheckpointError, ConfigError, Engine
from lora_moe_jax.serving.compile_guard import compile_count
from tests.adapters.tables import GOLDEN
from tests.checkpoint.corpus import CORPUS

BASE = GOLDEN / "qwen3_moe" / "base"


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_of_bad_checkpoints(name, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(BASE, folder)
    CORPUS[name](folder)
    before = compile_count()
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        Engine.from_pretrained(folder, dtype="float32")
    assert caught.value.file is not None and str(folder) in caught.value.file
    assert compile_count() == before


def test_damaged_tokenizer(tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(BASE, folder)
    (folder / "tokenizer.json").write_text("{")
    before = compile_count()
    with pytest.raises(CheckpointError, match="tokenizer"):
        Engine.from_pretrained(folder, dtype="float32")
    assert compile_count() == before


@pytest.mark.parametrize("folder", ["no/such/folder", "a\0b", "", __file__])
def test_no_model_there(folder):
    with pytest.raises(ConfigError):
        Engine.from_pretrained(folder)


BAD_OPTIONS = [
    ("dtype", ("float16", "f32", None, 32, ["float32"])),
    ("max_adapters", (-1, 1.0, "8", None, True)),
    ("max_rank", (0, -1, 2.0, None, {}, {16: 7}, {16: 9}, {0: 8}, {16: 8.0}, {"16": 8})),
    ("max_requests", (0, None, "8")),
    ("max_length", (0, 257, 1.5, "64")),
    ("page_size", (0, -16, None, 16.0)),
    ("token_buckets", ((), 8, "96", [0], [7], ["8"], [8.0], [True], {8: 1})),
    ("prefill_chunk", (0, -1, 1.5, "8")),
    ("cache_tokens", (0, 15, 1.5, "512")),
    ("target_modules", (["z_proj"], "q_proj", 5, [], [3], ["q_proj", ""], [None])),
]


@pytest.mark.parametrize(("key", "values"), BAD_OPTIONS)
def test_bad_options(key, values):
    before = compile_count()
    for value in values:
        with pytest.raises(ConfigError) as caught:
            Engine.from_pretrained(BASE, **{key: value})
        assert caught.value.key == key, value
    assert compile_count() == before
