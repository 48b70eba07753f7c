"""What is written is read back bit for bit, and a folder is written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_jax.adapters import (
    Adapter,
    AdapterConfig,
    LoraPair,
    Projection,
    read_adapter,
    write_adapter,
)
from lora_moe_jax.adapters.naming import alpha_for, cover, patterns
from lora_moe_jax.errors import AdapterError
from tests.adapters.files import CONFIG, TENSORS, assert_same, load
from tests.adapters.tables import FAMILIES, GOLDEN, golden_adapters, table

ALL_LAYOUTS = ("peft", "per_expert", "shared_outer")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
GOLDENS = [(family, name) for family in FAMILIES for name in golden_adapters(family)]


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("family", "name"), GOLDENS, ids=["-".join(g) for g in GOLDENS])
def test_goldens_come_back(family, name, layout, tmp_path):
    projections = table(family)
    adapter = read_adapter(GOLDEN / family / "adapters" / name, projections)
    separate = adapter.layout in ("packed", "per_expert")
    if layout == "shared_outer" and separate:
        with pytest.raises(AdapterError, match="different ones"):
            write_adapter(tmp_path / "x", adapter, projections, layout=layout)
        assert os.listdir(tmp_path) == []
        return
    write_adapter(tmp_path / "x", adapter, projections, layout=layout)
    assert os.listdir(tmp_path) == ["x"]
    assert sorted(os.listdir(tmp_path / "x")) == [CONFIG, TENSORS]
    again = read_adapter(tmp_path / "x", projections)
    assert_same(adapter, again)
    if any(".experts." in n for n in adapter.pairs):
        assert again.layout == {"peft": "packed"}.get(layout, layout)


@st.composite
def adapters(draw, layout: str):
    """A random adapter that `layout` can hold, and the projections it is for."""
    projections = table(draw(st.sampled_from(FAMILIES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = draw(st.lists(st.sampled_from(sorted(projections)), min_size=1, unique=True))
    dtype = draw(st.sampled_from(DTYPES))
    fresh = draw(st.booleans())  # lora_B still zero, as before training
    one_a = draw(st.booleans())
    config = AdapterConfig(use_rslora=draw(st.booleans()))
    pairs: dict[str, LoraPair] = {}
    for name in names:
        p = projections[name]
        rank = draw(st.integers(1, 5))
        ranks = np.full(p.groups, rank, np.int32)
        alpha = draw(st.floats(0.01, 64))
        if p.kind == "expert" and layout != "shared_outer" and draw(st.booleans()):
            ranks = rng.integers(0, rank + 1, p.groups).astype(np.int32)
            ranks[rng.integers(p.groups)] = rank
        scaling = np.full(p.groups, alpha / rank, np.float32)
        if config.use_rslora:
            scaling = np.full(p.groups, alpha / np.sqrt(rank), np.float32)
        if p.kind == "expert" and layout == "per_expert":
            scaling = (alpha / rng.integers(1, 9, p.groups)).astype(np.float32)
        block, _, leaf = name.rpartition(".")
        sibling = pairs.get(f"{block}.{'up' if leaf == 'gate_proj' else 'gate'}_proj")
        if p.kind == "expert" and layout == "peft" and leaf != "down_proj" and sibling is not None:
            scaling = np.full(p.groups, sibling.scaling.max(), np.float32)
        a = rng.standard_normal((p.groups, rank, p.in_features)).astype(dtype)
        b = rng.standard_normal((p.groups, rank, p.out_features)).astype(dtype)
        b = np.zeros_like(b) if fresh else b
        if p.kind == "expert" and layout == "shared_outer":
            a, b = (a, b[:1]) if leaf == "down_proj" else (a[:1], b)
        else:
            past = np.arange(rank)[None, :, None] >= ranks[:, None, None]
            a, b = np.where(past, dtype(0), a), np.where(past, dtype(0), b)
            scaling = np.where(ranks > 0, scaling, np.float32(0))
        if one_a and sibling is not None and sibling.a.shape == a.shape:
            if (sibling.ranks == ranks).all():
                a = sibling.a
        pairs[name] = LoraPair(a, b, scaling, ranks)
    return Adapter(pairs, "", config), projections


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_adapters_come_back(layout, data, tmp_path_factory):
    adapter, projections = data.draw(adapters(layout))
    folder = tmp_path_factory.mktemp("adapter") / "x"
    write_adapter(folder, adapter, projections, layout=layout)
    found = read_adapter(folder, projections, max_rank=5)
    assert_same(adapter, found, zero_pairs_added=layout == "per_expert")
    write_adapter(folder, found, projections, layout=layout)
    assert_same(found, read_adapter(folder, projections))


@given(alpha=st.floats(1e-6, 1e6), rank=st.integers(1, 4096), rslora=st.booleans())
def test_alpha_gives_back_the_scaling_exactly(alpha, rank, rslora):
    scaling = np.float32(alpha / (np.sqrt(rank) if rslora else rank))
    found = alpha_for(scaling, rank)
    assert np.float32(found / rank) == scaling
    assert np.float32(json.loads(json.dumps(found)) / rank) == scaling


def test_alpha_is_round_where_it_can_be():
    assert repr(alpha_for(np.float32(16 / 3), 3)) == "16"
    assert repr(alpha_for(np.float32(0.1), 4)) == "0.4"


def test_per_expert_is_what_other_servers_read(tmp_path):
    """All experts, all three projections, 2D names, and a scaling that alpha / r gives."""
    projections = table("deepseek_v3")
    adapter = read_adapter(GOLDEN / "deepseek_v3/adapters/experts", projections)
    gate = {n: p for n, p in adapter.pairs.items() if n.endswith(".experts.gate_proj")}
    write_adapter(
        tmp_path / "x", Adapter(gate, "", AdapterConfig()), projections, layout="per_expert"
    )
    tensors, config = load(tmp_path / "x")
    assert len(tensors) == 2 * 8 * 3 * 2
    for i in (1, 2):
        for e in range(8):
            for leaf, n_in, n_out in (("gate", 64, 24), ("up", 64, 24), ("down", 24, 64)):
                name = f"base_model.model.model.layers.{i}.mlp.experts.{e}.{leaf}_proj"
                assert tensors[f"{name}.lora_A.weight"].shape == (2, n_in)
                assert tensors[f"{name}.lora_B.weight"].shape == (n_out, 2)
                assert tensors[f"{name}.lora_A.weight"].any() == (leaf == "gate")
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 6, False)
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"]


def test_the_router_of_gpt_oss_is_a_parameter(tmp_path):
    """PEFT wraps linear modules, and the router is none; in what experts share a rank, B alone has
    gate and up in turn."""
    projections = table("gpt_oss")
    rng = np.random.default_rng(3)
    block = "model.layers.1.mlp"
    pairs = {
        f"{block}.router": ((1, 2, 64), (1, 2, 8)),
        f"{block}.experts.gate_proj": ((8, 2, 64), (8, 2, 24)),
        f"{block}.experts.up_proj": ((8, 2, 64), (8, 2, 24)),
    }
    for name, (a, b) in pairs.items():
        random = (rng.standard_normal(shape).astype(np.float32) for shape in (a, b))
        groups = np.ones(a[0], np.float32)
        pairs[name] = LoraPair(*random, groups, 2 * groups.astype(np.int32))
    adapter = Adapter(pairs, "", AdapterConfig())
    write_adapter(tmp_path / "x", adapter, projections)
    assert_same(adapter, read_adapter(tmp_path / "x", projections))
    tensors, config = load(tmp_path / "x")
    assert config["target_modules"] == []
    assert config["target_parameters"] == [
        "layers.1.mlp.experts.gate_up_proj",
        "layers.1.mlp.router.weight",
    ]
    b = tensors[f"base_model.model.{block}.experts.lora_B.weight"].reshape(48, 4, 8)
    gate, up = (pairs[f"{block}.experts.{leaf}_proj"].b for leaf in ("gate", "up"))
    np.testing.assert_array_equal(b[0::2, :2], gate.transpose(2, 1, 0))
    np.testing.assert_array_equal(b[1::2, 2:], up.transpose(2, 1, 0))
    assert not b[0::2, 2:].any() and not b[1::2, :2].any()


def test_rslora_needs_no_flag(tmp_path):
    projections = table("deepseek_v3")
    adapter = read_adapter(GOLDEN / "deepseek_v3/adapters/rslora", projections)
    write_adapter(tmp_path / "x", adapter, projections)
    config = load(tmp_path / "x")[1]
    assert config["use_rslora"] is False and config["r"] == 8
    assert np.float32(config["lora_alpha"] / 8) == np.float32(16 / np.sqrt(8))
    assert list(config["rank_pattern"].values()) == [3]


def small_adapter(**changes) -> tuple[Adapter, dict[str, Projection]]:
    projections = {"lm_head": Projection("lm_head", 6, 4, kind="head")}
    pair = LoraPair(
        np.ones((1, 2, 6), np.float32),
        np.ones((1, 2, 4), np.float32),
        np.ones(1, np.float32),
        np.full(1, 2, np.int32),
    )
    return Adapter(
        {"lm_head": dataclasses.replace(pair, **changes)}, "", AdapterConfig()
    ), projections


def test_padding_to_a_larger_rank_is_not_written(tmp_path):
    a, b = np.zeros((1, 8, 6), np.float32), np.zeros((1, 8, 4), np.float32)
    a[:, :2], b[:, :2] = 1, 1
    adapter, projections = small_adapter(a=a, b=b)
    write_adapter(tmp_path / "x", adapter, projections)
    assert_same(small_adapter()[0], read_adapter(tmp_path / "x", projections))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"a": np.ones((1, 2, 5), np.float32)}, "wrong shape"),
        ({"b": np.ones((1, 3, 4), np.float32)}, "wrong shape"),
        ({"b": np.ones((2, 2, 4), np.float32)}, "wrong shape"),
        ({"a": np.ones((1, 2, 6), np.float64)}, "dtype"),
        ({"a": np.full((1, 2, 6), np.nan, np.float32)}, "not finite"),
        ({"scaling": np.full(1, np.inf, np.float32)}, "not finite"),
        ({"scaling": np.ones(3, np.float32)}, "scaling"),
        ({"ranks": np.full(1, 3, np.int32)}, "ranks"),
        ({"ranks": np.full(1, 1, np.int32)}, "past the rank"),
        ({"ranks": np.zeros(1, np.int32)}, "empty"),
    ],
)
def test_wrong_adapters_are_not_written(changes, says, tmp_path):
    adapter, projections = small_adapter(**changes)
    with pytest.raises(AdapterError, match=says):
        write_adapter(tmp_path / "x", adapter, projections)
    assert os.listdir(tmp_path) == []


def test_layout_and_projection_must_be_known(tmp_path):
    adapter, projections = small_adapter()
    with pytest.raises(AdapterError, match="peft, per_expert, shared_outer"):
        write_adapter(tmp_path / "x", adapter, projections, layout="zip")
    with pytest.raises(AdapterError, match="lm_head"):
        write_adapter(tmp_path / "x", adapter, {})


def test_packed_layout_refuses_what_it_cannot_hold(tmp_path):
    projections = table("deepseek_v3")
    adapter = read_adapter(GOLDEN / "deepseek_v3/adapters/per_expert", projections)
    name = "model.layers.1.mlp.experts.gate_proj"
    pair = adapter.pairs[name]
    other = dataclasses.replace(pair, scaling=pair.scaling * 3)
    mixed = dataclasses.replace(pair, scaling=pair.scaling * np.arange(1, 9, dtype=np.float32))
    half = dataclasses.replace(pair, a=pair.a.astype(np.float16))
    for changed, says in ((other, "one scaling"), (mixed, "one scaling"), (half, "one dtype")):
        bad = dataclasses.replace(adapter, pairs={**adapter.pairs, name: changed})
        with pytest.raises(AdapterError, match=says) as caught:
            write_adapter(tmp_path / "x", bad, projections)
        assert "per_expert" in caught.value.hint
        write_adapter(tmp_path / "y", bad, projections, layout="per_expert")
        assert_same(bad, read_adapter(tmp_path / "y", projections))
    assert os.listdir(tmp_path) == ["y"]


# ---- the folder ----------------------------------------------------------------------------------
def test_others_may_read_what_is_written(tmp_path):
    """As much as any other new file of the process."""
    before = os.umask(0o022)
    try:
        write_adapter(tmp_path / "a", *small_adapter())
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
    assert modes == {CONFIG: 0o644, TENSORS: 0o644}


def test_an_adapter_is_replaced_and_other_folders_are_not(tmp_path):
    adapter, projections = small_adapter()
    other, _ = small_adapter(a=np.full((1, 2, 6), 7, np.float32))
    folder = tmp_path / "new" / "x"
    write_adapter(folder, adapter, projections)
    write_adapter(folder, other, projections)
    assert_same(other, read_adapter(folder, projections))
    assert os.listdir(tmp_path / "new") == ["x"]
    (folder / "optimizer.bin").write_text("precious")
    with pytest.raises(AdapterError, match="optimizer.bin"):
        write_adapter(folder, adapter, projections)
    assert (folder / "optimizer.bin").read_text() == "precious"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(folder)
    for taken in ("notes", "file", "link"):
        with pytest.raises(AdapterError, match="replaced"):
            write_adapter(tmp_path / taken, adapter, projections)
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "new", "notes"]


def test_a_failed_write_leaves_the_old_adapter(tmp_path, monkeypatch):
    adapter, projections = small_adapter()
    folder = tmp_path / "x"
    write_adapter(folder, adapter, projections)

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_moe_jax.adapters.writer.save_file", full_disk)
    with pytest.raises(AdapterError, match="No space left"):
        write_adapter(folder, small_adapter(a=np.zeros((1, 2, 6), np.float32))[0], projections)
    assert os.listdir(tmp_path) == ["x"]
    assert_same(adapter, read_adapter(folder, projections))


@pytest.mark.parametrize("rename", [0, 1])
def test_an_interrupt_leaves_the_old_adapter(tmp_path, monkeypatch, rename):
    """Also between the two renames that put a new one into its place."""
    adapter, projections = small_adapter()
    folder = tmp_path / "x"
    write_adapter(folder, adapter, projections)
    renamed, rename_it = [], Path.rename

    def interrupted(self, target):
        renamed.append(target)
        if len(renamed) == rename + 1:
            raise KeyboardInterrupt
        return rename_it(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_adapter(folder, small_adapter(a=np.zeros((1, 2, 6), np.float32))[0], projections)
    assert os.listdir(tmp_path) == ["x"]
    assert_same(adapter, read_adapter(folder, projections))


# ---- names in the config -------------------------------------------------------------------------
def test_cover_is_short_and_exact():
    universe = ["m.0.attn.q", "m.1.attn.q", "m.0.mlp.up", "m.0.shared.up", "m.1.shared.up"]
    assert cover(["m.0.attn.q", "m.1.attn.q"], universe) == ["q"]
    assert cover(["m.0.attn.q"], universe) == ["m.0.attn.q"]
    assert cover(["m.0.shared.up", "m.1.shared.up"], universe) == ["shared.up"]
    assert cover(universe, universe) == ["q", "up"]


def test_patterns_are_few_and_do_not_overlap():
    values = {f"m.{i}.experts.{e}.up": 8 for i in range(3) for e in range(4)}
    assert patterns(values, 8) == {}
    assert patterns(values, 4) == {r"m\.\d+\.experts\.\d+\.up": 8}
    values["m.1.experts.2.up"] = values["m.1.experts.3.up"] = 5
    assert patterns(values, 8) == {r"m\.1\.experts\.(2|3)\.up": 5}
    assert patterns({"m.0.q": 1, "m.1.q": 2}, 1) == {r"m\.1\.q": 2}


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_block_of_one_expert(layout, tmp_path):
    rng = np.random.default_rng(4)
    block = "model.layers.0.mlp.experts"
    sizes = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    projections, pairs = {}, {}
    for leaf, (n_in, n_out) in sizes.items():
        name = f"{block}.{leaf}"
        projections[name] = Projection(name, n_in, n_out, 1, "expert")
        a = rng.standard_normal((1, 2, n_in)).astype(np.float32)
        b = rng.standard_normal((1, 2, n_out)).astype(np.float32)
        pairs[name] = LoraPair(a, b, np.ones(1, np.float32), np.full(1, 2, np.int32))
    adapter = Adapter(pairs, "", AdapterConfig())
    write_adapter(tmp_path / "x", adapter, projections, layout=layout)
    assert_same(adapter, read_adapter(tmp_path / "x", projections))
