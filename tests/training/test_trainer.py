"""Adapters in training: their first values, steps, memory, files, and what is refused."""

from __future__ import annotations

import dataclasses
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lora_moe_jax import AdapterError, ConfigError, Engine, RequestError, read_adapter
from lora_moe_jax.training import Datum, LoraConfig, Trainer
from tests.adapters.tables import table
from tests.training.helpers import (
    arrays,
    data,
    every_module,
    gradients,
    master,
    same,
    scores,
    state,
)

EXPERTS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]


def test_a_new_adapter_computes_what_the_base_does(pair):
    engine, trainer = pair()
    info = trainer.add_adapter("new", LoraConfig(rank=1, alpha=6))
    assert (info.version, info.rank) == (1, 1)
    kinds = {engine.bank.projections[name].kind for name in trainer._adapters["new"].stacks.shapes}
    assert kinds == {"linear", "expert"}
    batch = data([("new", 30)])
    base = engine.score([list(batch[0].tokens)])[0].logprobs
    assert same(trainer.forward_backward(batch).logprobs, [base])


def test_first_values(pair):
    engine, trainer = pair()
    for init, seed in (("default", 0), ("default", 1), ("gaussian", 0)):
        config = LoraConfig(rank=4, alpha=8, init=init, seed=seed, use_rslora=seed == 1)
        trainer.add_adapter(f"{init}{seed}", config)
    name = next(n for n in engine.bank.projections if n.endswith("experts.up_proj"))
    first, second, normal = (master(trainer, its, name) for its in trainer._adapters)
    bound = engine.bank.projections[name].in_features ** -0.5
    a = first.a
    assert 0.9 * bound < np.abs(a).max() <= bound and abs(a.mean()) < 0.1 * bound
    np.testing.assert_allclose(a.std(), bound / np.sqrt(3), rtol=0.1)
    assert not np.array_equal(a, second.a)
    np.testing.assert_allclose(normal.a.std(), 1 / 4, rtol=0.1)
    assert not any(its.b.any() for its in (first, second, normal))
    shapes = [training.stacks.shapes[name].scaling for training in trainer._adapters.values()]
    assert [scaling[0] for scaling in shapes] == [2, 4, 2]


def test_ranks_by_pattern(pair):
    """PEFT's meaning: every expert has the rank that its name's pattern gives."""
    engine, trainer = pair()
    config = LoraConfig(
        rank=2, alpha=4, target_modules=EXPERTS, rank_pattern={r"experts\.3\.up_proj": 4}
    )
    trainer.add_adapter("a", config)
    name = next(n for n in engine.bank.projections if n.endswith("experts.up_proj"))
    shape = trainer._adapters["a"].stacks.shapes[name]
    groups = engine.bank.projections[name].groups
    assert shape.ranks.tolist() == [4 if i == 3 else 2 for i in range(groups)]
    assert shape.scaling.tolist() == [1.0 if i == 3 else 2.0 for i in range(groups)]
    for _ in range(2):
        trainer.forward_backward(data([("a", 60)]))
        trainer.optim_step("a", 0.01, weight_decay=0.1)
    a, b = master(trainer, "a", name)
    assert not a[:3, 2:].any() and not b[:3, 2:].any()
    assert b[3, 2:].any() and b[0, :2].any()


def test_a_step_is_adamw(pair):
    """With a schedule of the adapter's own steps, weight decay, and the gradient clipped."""
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=4, alpha=8))
    training, rates, clip, decay = trainer._adapters["a"], [0.02, 0.01, 0.03], 0.5, 0.03
    values = [x.astype(np.float64) for x in arrays(training.masters)]
    first, second = ([np.zeros_like(x) for x in values] for _ in range(2))
    schedule = optax.join_schedules(list(map(optax.constant_schedule, rates)), [1, 2])
    for step, rate in enumerate(rates):
        trainer.forward_backward(data([("a", 40)], seed=step))
        found = [x.astype(np.float64) for x in arrays(training.gradients)]
        norm = np.sqrt(sum(np.sum(x**2) for x in found))
        assert norm > clip
        report = trainer.optim_step("a", schedule, weight_decay=decay, clip_norm=clip)["a"]
        assert report.learning_rate == np.float32(rate) and not report.skipped
        np.testing.assert_allclose(report.gradient_norm, norm, rtol=1e-5)
        now = arrays(training.masters)
        for i, gradient in enumerate(found):
            gradient = gradient * clip / norm
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.999 * second[i] + 0.001 * gradient**2
            m, v = first[i] / (1 - 0.9 ** (step + 1)), second[i] / (1 - 0.999 ** (step + 1))
            values[i] = values[i] - rate * (m / (np.sqrt(v) + 1e-8) + decay * values[i])
            # Where a gradient is as small as epsilon, its last bits decide.
            clear = np.sqrt(v) > 1e-6
            np.testing.assert_allclose(now[i][clear], values[i][clear], rtol=1e-3, atol=1e-5)
            values[i] = now[i].astype(np.float64)


def test_bytes_are_linear_in_adapters(pair):
    engine, trainer = pair()
    sizes = []
    for i in range(3):
        trainer.add_adapter(f"r{i}", LoraConfig(rank=1, seed=i))
        sizes.append(sum(info.nbytes for info in trainer.adapters()))
    training = trainer._adapters["r0"]
    parameters = sum(x.size for x in arrays(training.masters))
    assert sizes[0] == 3 * 4 * parameters + 4  # masters, two moments, and their count
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]
    trainer.add_adapter("narrow", LoraConfig(rank=1, target_modules=["o_proj"]))
    narrow = trainer.adapters()[-1].nbytes
    widths = [p for n, p in engine.bank.projections.items() if n.endswith("o_proj")]
    assert narrow == 3 * 4 * sum(p.in_features + p.out_features for p in widths) + 4


def test_losses_fall_in_a_small_run(pair):
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=4, alpha=8))
    trainer.add_adapter("b", LoraConfig(rank=2, alpha=8, target_modules=["o_proj"]))
    batch = data([("a", 30), ("b", 25), ("a", 12)])
    losses = []
    for _ in range(12):
        losses.append(trainer.forward_backward(batch).losses)
        trainer.optim_step(["a", "b"], 0.02)
    for name in "ab":
        values = [loss[name] for loss in losses]
        assert values[-1] < 0.8 * values[0] and np.isfinite(values).all()


def test_files(pair, tmp_path):
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=4, alpha=8))
    trainer.forward_backward(data([("a", 40)]))
    trainer.optim_step("a", 0.02)
    batch = data([("a", 50)])
    expected = scores(engine, batch)
    for layout in ("peft", "per_expert"):
        trainer.save_adapter("a", tmp_path / layout, layout)
        written = read_adapter(tmp_path / layout, table("deepseek_v3"))
        assert written.config.base_model == engine.folder
        engine.load_adapter("loaded", tmp_path / layout)
        assert same(scores(engine, [Datum(batch[0].tokens, "loaded")]), expected)
    with pytest.raises(AdapterError):
        trainer.save_adapter("a", tmp_path / "shared", "shared_outer")
    with pytest.raises(AdapterError):
        trainer.save_adapter("b", tmp_path / "b")


BAD_BATCHES = [
    ([], "batch"),
    (None, "batch"),
    (Datum([1, 2], "a"), "batch"),
    ([[1, 2]], "batch[0]"),
    ([Datum([1, 2], "a"), Datum([1], "a")], "batch[1].tokens"),
    ([Datum([], "a")], "batch[0].tokens"),
    ([Datum([1] * 193, "a")], "batch[0].tokens"),
    ([Datum([1, -1], "a")], "batch[0].tokens[1]"),
    ([Datum([1, 2, 10**6], "a")], "batch[0].tokens[2]"),
    ([Datum([1.0, 2.0], "a")], "batch[0].tokens"),
    ([Datum("text", "a")], "batch[0].tokens"),
    ([Datum([1, [2]], "a")], "batch[0].tokens"),
    ([Datum([1, 2], "a", [1.0, 1.0])], "batch[0].weights"),
    ([Datum([1, 2], "a", [float("nan")])], "batch[0].weights"),
    ([Datum([1, 2], "a", "much")], "batch[0].weights"),
    ([Datum([1, 2], None)], "batch[0].adapter"),
    ([Datum([1, 2], "a"), Datum([1, 2], "b")], "batch[1].adapter"),
]


@pytest.mark.parametrize("batch, key", BAD_BATCHES)
def test_bad_batches_change_nothing(pair, batch, key):
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=1))
    with pytest.raises((RequestError, AdapterError)) as caught:
        trainer.forward_backward(batch)
    assert caught.value.key == key
    assert trainer._adapters["a"].gradients is None


def test_bad_losses_change_nothing(pair):
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=1))
    batch = data([("a", 20)])
    for loss, options in (
        ("ppo", {}),  # needs old_logprobs
        ("nothing", {}),
        ("cross_entropy", {"beta": 1.0}),
        ("dpo", {}),
        (lambda logprobs, batch: logprobs[0], {}),
    ):
        with pytest.raises(RequestError):
            trainer.forward_backward(batch, loss, **options)
    assert trainer._adapters["a"].gradients is None
    custom = trainer.forward_backward(batch, lambda logprobs, batch: -batch.weights * logprobs)
    first = gradients(trainer, "a")
    assert trainer.forward_backward(batch).losses == custom.losses
    assert same(gradients(trainer, "a"), first)


def test_nobody_else_touches_an_adapter_in_training(pair, tmp_path):
    engine, trainer = pair()
    for name in "ab":
        trainer.add_adapter(name, LoraConfig(rank=1))
    trainer.forward_backward(data([("a", 20)]))
    trainer.save_adapter("a", tmp_path / "a")
    loaded, slots = engine.adapters(), state(trainer, engine, "a")
    for call in (
        lambda: engine.unload_adapter("a"),
        lambda: engine.unload_adapter("a", when_busy="finish"),
        lambda: engine.load_adapter("a", tmp_path / "a"),
        lambda: engine.update_adapter("a", {}),
        lambda: engine.update_adapter("a", {}, trainer=Trainer(engine, token_buckets=[64])),
    ):
        with pytest.raises(AdapterError, match="in training") as error:
            call()
        assert error.value.key == "a" and "Trainer.remove_adapter" in error.value.hint
        assert engine.adapters() == loaded and same(state(trainer, engine, "a"), slots)
    version = trainer.optim_step("a", 0.1)["a"].version
    assert version == loaded[0].version + 1

    trainer.remove_adapter("a")
    with pytest.raises(AdapterError, match="in training"):
        trainer.optim_step("a", 0.1)
    assert engine.load_adapter("a", tmp_path / "a").version == version + 1
    engine.unload_adapter("a")
    trainer.forward_backward(data([("b", 20)]))
    trainer.optim_step("b", 0.1)


def test_the_adapters_of_a_trainer_that_is_gone(pair):
    engine, _ = pair()
    trainer = Trainer(engine, token_buckets=[64])
    trainer.add_adapter("a", LoraConfig(rank=1))
    with pytest.raises(AdapterError, match="in training"):
        engine.unload_adapter("a")
    del trainer
    engine.unload_adapter("a")


def test_more_adapters_in_a_batch_than_slots(pair):
    engine, trainer = pair()
    for name in "abcde":
        trainer.add_adapter(name, LoraConfig(rank=1))
    with pytest.raises(AdapterError, match="no slot can be had") as error:
        trainer.forward_backward(data([(name, 20) for name in "abcde"]))
    assert error.value.found == "5 in the batch"
    trainer.forward_backward(data([(name, 20) for name in "abcd"]))
    trainer.forward_backward(data([("e", 20)]))


def test_bad_adapters_and_steps(pair, tmp_path):
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=1))
    loaded = engine.adapters()
    for name, config in (
        ("a", LoraConfig(rank=1)),
        ("no/name", LoraConfig(rank=1)),
        ("b", LoraConfig(rank=5)),
        ("b", LoraConfig(rank=0)),
        ("b", LoraConfig(rank=1, alpha=float("inf"))),
        ("b", LoraConfig(rank=1, init="pissa")),
        ("b", LoraConfig(rank=1, alpha=10**400)),
        ("b", LoraConfig(rank=1, alpha=1e31)),
        ("b", LoraConfig(rank=1, seed=0.5)),
        ("b", LoraConfig(rank=1, seed=-1)),
        ("b", LoraConfig(rank=1, target_modules=["o_proj", "nothing"])),
        ("b", LoraConfig(rank=1, target_modules="nothing")),
        ("b", LoraConfig(rank=1, target_modules="(")),
        ("b", LoraConfig(rank=1, target_modules=[])),
        ("b", LoraConfig(rank=1, rank_pattern={"o_proj": "two"})),
        ("b", LoraConfig(rank=1, rank_pattern={"oproj": 2})),
        ("b", LoraConfig(rank=1, exclude_modules=["oproj"])),
        ("b", LoraConfig(rank=1, target_modules=["o_proj"], exclude_modules=["o_proj"])),
        ("b", {"rank": 1}),
    ):
        with pytest.raises(AdapterError):
            trainer.add_adapter(name, config)
    assert engine.adapters() == loaded and len(trainer.adapters()) == 1
    with pytest.raises(RequestError, match="no gradient"):
        trainer.optim_step("a", 0.1)
    trainer.forward_backward(data([("a", 20)]))
    for settings in (
        {"learning_rate": float("nan")},
        {"learning_rate": "fast"},
        {"learning_rate": 1e300},
        {"learning_rate": 10**400},
        {"learning_rate": 0.1, "weight_decay": -1},
        {"learning_rate": -0.1},
        {"learning_rate": lambda steps: -0.1},
        {"learning_rate": 0.1, "clip_norm": float("inf")},
    ):
        with pytest.raises(RequestError):
            trainer.optim_step("a", **settings)
    for names in (None, 5, [5], [["a"]]):
        with pytest.raises(RequestError):
            trainer.optim_step(names, 0.1)
    for buckets in ([], [0], "many", [1.5]):
        with pytest.raises(ConfigError):
            Trainer(engine, token_buckets=buckets)
    for optimizer in ("adam", optax.scale_by_adam):
        with pytest.raises(ConfigError, match="GradientTransformation"):
            Trainer(engine, optimizer=optimizer)
    with pytest.raises(ConfigError, match="an Engine"):
        Trainer("engine")
    for folder, layout in ((None, "peft"), ("a\0b", "peft"), (tmp_path / "a", ["peft"])):
        with pytest.raises(AdapterError):
            trainer.save_adapter("a", folder, layout)
    assert not any(tmp_path.iterdir())


def test_weights_of_any_kind_of_number(pair):
    _, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=1))
    found = []
    for kind in (np.bool_, np.int8, np.float64, jnp.bfloat16):
        weights = (np.arange(19) % 3 > 0).astype(kind)
        (datum,) = data([("a", 20)])
        batch = [dataclasses.replace(datum, weights=weights)]
        found.append(trainer.forward_backward(batch).losses["a"])
    assert found[0] != 0 and len(set(found)) == 1


def test_a_step_that_finds_no_bank_is_whole(pair):
    """Masters, counts and what the next batch runs stay together."""
    engine, trainer = pair()
    for name in "ab":
        trainer.add_adapter(name, LoraConfig(rank=2, target_modules=every_module(engine)))
    batch = data([("a", 20), ("b", 20)])
    trainer.forward_backward(batch)
    engine.sleep(2)
    with pytest.raises(RequestError, match="asleep"):
        trainer.optim_step(["a", "b"], 0.1)
    with pytest.raises(RequestError, match="asleep"):
        trainer.add_adapter("c")
    engine.wake()
    assert [info.steps for info in trainer.adapters()] == [1, 1]
    after = trainer.forward_backward(batch)
    assert same(scores(engine, batch), after.logprobs)
    for name in "ab":
        trainer.remove_adapter(name)
        engine.unload_adapter(name)
        trainer.add_adapter(name, LoraConfig(rank=2, target_modules=every_module(engine)))
    trainer.forward_backward(batch)
    trainer.optim_step(["a", "b"], 0.1)
    assert same(trainer.forward_backward(batch).logprobs, after.logprobs)


def test_an_optimizer_that_fails_for_one_adapter(pair, monkeypatch):
    """The others' steps are whole, and its own can be taken later."""
    engine, trainer = pair()
    for name in "ab":
        trainer.add_adapter(name, LoraConfig(rank=2, target_modules=every_module(engine)))
    batch = data([("a", 20), ("b", 20)])
    trainer.forward_backward(batch)
    step, taken = trainer._optimizer.step, []

    def failing(*arguments):
        taken.append(arguments)
        if len(taken) == 2:
            raise RuntimeError("out of memory")
        return step(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(trainer._optimizer, "step", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.optim_step(["a", "b"], 0.1)
    assert [info.steps for info in trainer.adapters()] == [1, 0]
    trainer.optim_step("b", 0.1)
    assert [info.steps for info in trainer.adapters()] == [1, 1]
    assert same(scores(engine, batch), trainer.forward_backward(batch).logprobs)


def test_an_interrupt_waits_for_the_end_of_a_step(pair, monkeypatch):
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=2))
    trainer.forward_backward(data([("a", 20)]))
    begin_step = trainer._begin_step

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return begin_step(*arguments)

    monkeypatch.setattr(trainer, "_begin_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.optim_step("a", 0.1)
    (info,) = trainer.adapters()
    assert info.steps == 1 and not trainer._adapters["a"].stale
    assert engine.adapters()[0].version == info.version


def test_an_engine_with_a_mesh_cannot_train():
    from tests.adapters.tables import GOLDEN
    from tests.training.conftest import ENGINE

    base = GOLDEN / "qwen3" / "base"
    engine = Engine.from_pretrained(base, dtype="float32", mesh={"tensor": 1}, **ENGINE)
    with pytest.raises(ConfigError, match="this engine cannot train") as error:
        Trainer(engine)
    assert error.value.key == "mesh" and "without a mesh" in error.value.hint


def check_training(batch, steps: int, modules, **options):
    """An engine of its own and its trainer, that bring the losses of adapter "a" down."""
    from tests.adapters.tables import GOLDEN
    from tests.training.conftest import ENGINE

    base = GOLDEN / "qwen3_moe" / "base"
    engine = Engine.from_pretrained(base, dtype="float32", **options, **ENGINE)
    trainer, losses = Trainer(engine, token_buckets=[128]), []
    trainer.add_adapter("a", LoraConfig(rank=4, alpha=8, target_modules=modules))
    for _ in range(steps):
        result = trainer.forward_backward(batch)
        assert same(scores(engine, batch), result.logprobs)
        losses.append(result.losses["a"])
        trainer.optim_step("a", 0.01)
    assert losses[-1] < losses[0]
    return engine, trainer


@pytest.mark.slow
def test_adapters_of_attention_alone():
    """In a bank that has nothing for experts, through whose layers gradients go all the same."""
    modules = ["q_proj", "o_proj"]
    check_training(data([("a", 60)]), 3, modules, target_modules=modules)


@pytest.mark.slow
def test_shared_outer_adapters(tmp_path):
    """In a bank that keeps one outer factor for all experts they are trained as such."""
    batch = data([("a", 60)])
    engine, trainer = check_training(batch, 5, EXPERTS, shared_outer=True)
    shapes = trainer._adapters["a"].stacks.shapes
    assert {shape.a[0] for name, shape in shapes.items() if "down" not in name} == {1}
    trainer.save_adapter("a", tmp_path / "a", "shared_outer")
    engine.load_adapter("loaded", tmp_path / "a")
    again = [Datum(datum.tokens, "loaded") for datum in batch]
    assert same(scores(engine, again), trainer.forward_backward(batch).logprobs)
