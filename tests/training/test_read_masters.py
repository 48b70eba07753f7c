"""Training that goes on from an adapter which is there already: a folder, or one in memory."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_moe_jax import AdapterError, read_adapter
from lora_moe_jax.adapters import Adapter
from lora_moe_jax.training import Datum, LoraConfig, Trainer
from tests.adapters.tables import GOLDEN, table
from tests.training.conftest import BUCKETS
from tests.training.helpers import add, arrays, data, gradients, master, same, scores

LAYOUTS = ("attn", "experts", "experts_swapped", "per_expert", "shared_outer")


def served(engine, *names: str) -> list[np.ndarray]:
    """What serving says of one sequence under each of the names."""
    tokens = data([("", 40)])[0].tokens
    return scores(engine, [Datum(tokens, name) for name in names])


def same_pairs(left: Adapter, right: Adapter) -> bool:
    """Within what layouts may differ in: whether experts' equal factors are stored once."""
    fields = ("a", "b", "scaling", "ranks")
    return left.pairs.keys() == right.pairs.keys() and all(
        (getattr(left.pairs[name], field) == getattr(right.pairs[name], field)).all()
        for name in left.pairs
        for field in fields
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_numbers(pair, tmp_path, family, layout):
    engine, trainer = pair(family)
    folder = GOLDEN / family / "adapters" / layout
    adapter = read_adapter(folder, table(family))
    engine.load_adapter("loaded", folder)
    info = trainer.add_adapter("file", str(folder))
    trainer.add_adapter("memory", adapter)
    assert (info.rank, info.targets) == (adapter.rank, adapter.targets)
    base, loaded, *others = served(engine, None, "loaded", "file", "memory")
    assert not np.array_equal(base, loaded)
    assert same(others, [loaded, loaded])
    for name in ("file", "memory"):
        trainer.save_adapter(name, tmp_path / name)
        assert same_pairs(read_adapter(tmp_path / name, table(family)), adapter)


def test_a_saved_adapter_goes_on(pair, tmp_path):
    """Its tensors, config and gradients are the same; the optimizer begins anew."""
    engine, trainer = pair()
    add(trainer, engine, "a")
    trainer.save_adapter("a", tmp_path / "a")
    trainer.add_adapter("b", tmp_path / "a")
    trainer.save_adapter("b", tmp_path / "b")
    a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and same(a.values(), [b[name] for name in a])
    a, b = ((tmp_path / name / "adapter_config.json").read_text() for name in "ab")
    assert a == b
    assert [info.steps for info in trainer.adapters()] == [1, 0]
    assert not any(x.any() for x in arrays(trainer._adapters["b"].moments))
    for name in "ab":
        trainer.forward_backward(data([(name, 40)]))
    assert same(gradients(trainer, "a"), gradients(trainer, "b"))

    before = arrays(trainer._adapters["b"].masters)
    trainer.forward_backward(data([("b", 40)]))
    assert trainer.optim_step("b", 0.03)["b"].steps == 1
    assert not same(arrays(trainer._adapters["b"].masters), before)


def test_its_state_is_restored(pair, tmp_path):
    """Of experts of several ranks, which no pattern says."""
    engine, trainer = pair()
    adapter = read_adapter(GOLDEN / "deepseek_v3" / "adapters" / "experts", table("deepseek_v3"))
    trainer.add_adapter("a", with_ranks(adapter))
    saved, (expected,) = arrays(trainer._adapters["a"].masters), served(engine, "a")
    trainer.save(tmp_path)
    trainer.wait()
    trainer.remove_adapter("a")
    engine.unload_adapter("a")
    again, _ = Trainer.restore(engine, tmp_path, token_buckets=BUCKETS)
    assert same(arrays(again._adapters["a"].masters), saved)
    assert same(served(engine, "a"), [expected])
    again.remove_adapter("a")


def with_ranks(adapter: Adapter) -> Adapter:
    """The same but for up_proj's first expert, of rank 1, and a row past all ranks: zero in B."""
    pairs = dict(adapter.pairs)
    for name, pair in adapter.pairs.items():
        if name.endswith("experts.up_proj"):
            a, b = (np.pad(x, [(0, 0), (0, 1), (0, 0)]) for x in (pair.a, pair.b))
            a[:, -1], b[0, 1:], ranks = 1, 0, pair.ranks.copy()
            ranks[0] = 1
            pairs[name] = replace(pair, a=a, b=b, ranks=ranks)
    return replace(adapter, pairs=pairs)


def test_rows_past_a_rank_are_zero_in_both_factors(pair):
    """So that training cannot wake them."""
    engine, trainer = pair()
    adapter = read_adapter(GOLDEN / "deepseek_v3" / "adapters" / "experts", table("deepseek_v3"))
    adapter = with_ranks(adapter)
    engine.load_adapter("loaded", adapter)
    trainer.add_adapter("a", adapter)
    assert same(*([bits] for bits in served(engine, "loaded", "a")))
    name = next(name for name in adapter.pairs if name.endswith("experts.up_proj"))
    a, b = master(trainer, "a", name)
    assert a.shape[1] == 2 and a[0, 0].any() and not a[0, 1:].any() and not b[0, 1:].any()
    assert a[1, 1].any() and b[1, 1].any()


def test_what_cannot_be_loaded_cannot_be_trained(pair, tmp_path):
    engine, trainer = pair()
    golden = GOLDEN / "deepseek_v3" / "adapters"
    for key, value in (("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"])):
        folder = shutil.copytree(golden / "attn", tmp_path / key)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    adapter = read_adapter(golden / "attn", table("deepseek_v3"))
    first = next(iter(adapter.pairs))
    nan = replace(adapter.pairs[first], a=np.full_like(adapter.pairs[first].a, np.nan))
    for source in (
        *tmp_path.iterdir(),
        tmp_path / "none",
        golden / "rslora",  # of rank 8
        GOLDEN / "qwen3_moe" / "adapters" / "attn",
        replace(adapter, pairs={"model.nothing": nan}),
        replace(adapter, pairs={first: nan}),
    ):
        with pytest.raises(AdapterError) as loading:
            engine.load_adapter("a", source)
        with pytest.raises(AdapterError) as training:
            trainer.add_adapter("a", source)
        assert str(training.value) == str(loading.value)
    with pytest.raises(AdapterError, match="empty"):
        trainer.add_adapter("a", replace(adapter, pairs={}))
    with pytest.raises(AdapterError, match="a LoraConfig, an adapter's folder, or an Adapter"):
        trainer.add_adapter("a", {"rank": 1})
    trainer.add_adapter("taken", LoraConfig(rank=1))
    with pytest.raises(AdapterError, match="there already"):
        trainer.add_adapter("taken", golden / "attn")
    assert [info.name for info in engine.adapters()] == ["taken"]


@pytest.mark.slow
def test_shared_factors_in_a_bank_that_shares_them(pair, tmp_path):
    engine, trainer = pair("qwen3_moe", shared_outer=True)
    folder = GOLDEN / "qwen3_moe" / "adapters" / "shared_outer"
    trainer.add_adapter("a", folder)
    engine.load_adapter("loaded", folder)
    assert same(*([bits] for bits in served(engine, "loaded", "a")))
    shapes = trainer._adapters["a"].stacks.shapes
    assert {shape.a[0] for name, shape in shapes.items() if name.endswith("up_proj")} == {1}
    trainer.save_adapter("a", tmp_path / "a", "shared_outer")
    adapters = (read_adapter(its, table("qwen3_moe")) for its in (tmp_path / "a", folder))
    assert same_pairs(*adapters)
    # Layouts that have a factor for each expert hold the same one for all.
    trainer.save_adapter("a", tmp_path / "b", "peft")
    engine.load_adapter("again", tmp_path / "b")
    assert same(*([bits] for bits in served(engine, "again", "a")))
    with pytest.raises(AdapterError, match="shared_outer=False"):
        trainer.add_adapter("b", folder.parent / "experts")
