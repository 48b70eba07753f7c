"""Every bad adapter is refused with an error that says where and what; damage never escapes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from lora_moe_jax.adapters import describe, read_adapter
from lora_moe_jax.errors import AdapterError
from tests.adapters.breaking import CONFIG, SOURCES, TENSORS
from tests.adapters.corpus import CORPUS, MAX_RANK
from tests.adapters.tables import table

PROJECTIONS = table("deepseek_v3")


@pytest.mark.parametrize("name", CORPUS)
def test_refused(name, tmp_path):
    break_it = CORPUS[name]
    folder = tmp_path / "adapter"
    break_it(folder)
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, PROJECTIONS, max_rank=MAX_RANK)
    error, text = caught.value, str(caught.value)
    assert error.file is not None and str(folder) in error.file
    assert break_it.key in (error.key or ""), text
    assert error.key is not None or not break_it.key
    for words in break_it.says:
        assert words in text
    assert error.expected is not None or error.found is not None
    assert len(text) < 2000
    assert before == sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    with pytest.raises(AdapterError):
        describe(folder, PROJECTIONS, MAX_RANK)


def test_corpus_is_large_and_its_sources_are_good():
    assert len(CORPUS) >= 45
    for source in {broken.source for broken in CORPUS.values()}:
        read_adapter(SOURCES / source, PROJECTIONS, max_rank=MAX_RANK)


@pytest.mark.parametrize("where", ["missing", "a file"])
def test_no_folder(where, tmp_path):
    folder = tmp_path / "adapter"
    if where == "a file":
        folder.write_text("hello")
    with pytest.raises(AdapterError, match="does not exist"):
        read_adapter(folder, PROJECTIONS)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(SOURCES / "rslora", folder)
    whole = (folder / TENSORS).read_bytes()
    for size in [*range(0, 2000, 37), *range(2000, len(whole), 501)]:
        (folder / TENSORS).write_bytes(whole[:size])
        with pytest.raises(AdapterError):
            read_adapter(folder, PROJECTIONS)


@pytest.mark.parametrize("file", [CONFIG, TENSORS])
def test_flipped_bytes_never_escape_as_other_errors(file, tmp_path):
    """One random byte of the config or the header is changed: refused, or still an adapter."""
    folder = tmp_path / "adapter"
    shutil.copytree(SOURCES / "rslora", folder)
    whole = (folder / file).read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        changed[rng.integers(min(len(whole), 1500))] = rng.integers(256)
        (folder / file).write_bytes(changed)
        try:
            read_adapter(folder, PROJECTIONS, max_rank=MAX_RANK)
        except AdapterError:
            refused += 1
    assert refused > 100
