"""Gradients against finite differences of what serving says, kind by kind of projection."""

from __future__ import annotations

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax.adapters import LoraPair
from lora_moe_jax.training import batch_run
from tests.training.helpers import add, data, gradients, same, scores

STEP = 5e-4


def total(engine, batch) -> float:
    return -sum(
        float(np.sum(np.float64(datum.weights) * logprobs))
        for datum, logprobs in zip(batch, scores(engine, batch), strict=True)
    )


# Where no token changes its experts within the step. All families, and both layouts of experts'
# factors, are compared with slopes of a float64 model in `test_parity_peft.py`.
CASES = [
    ("deepseek_v3", False),
    pytest.param("qwen3", False, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", False, marks=pytest.mark.slow),
    pytest.param("deepseek_v3", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "shared_outer"), CASES)
def test_gradients_are_slopes(pair, family, shared_outer):
    """Along a gradient the loss climbs by its norm, if it is the gradient of this loss."""
    engine, trainer = pair(family, shared_outer=shared_outer)
    add(trainer, engine, "a", seed=3)
    batch = data([("a", 40), ("a", 17), ("a", 65)])
    losses = trainer.forward_backward(batch).losses
    np.testing.assert_allclose(losses["a"], total(engine, batch), rtol=1e-5)
    training = trainer._adapters["a"]
    found, training.gradients = training.stacks.split(training.gradients), None
    kinds = defaultdict(list)
    for name in found:
        kinds[name.split(".", 3)[-1]].append(name)
    routed = set() if family == "qwen3" else {"mlp.gate", "mlp.experts.down_proj"}
    assert {"embed_tokens", "lm_head", "self_attn.o_proj"} | routed <= set(kinds)
    for kind, names in kinds.items():
        for field in ("a", "b"):
            directions = {name: getattr(found[name], field) for name in names}
            norm = np.sqrt(sum(float(np.sum(np.float64(d) ** 2)) for d in directions.values()))
            slope = _slope(engine, training, batch, directions, field, norm)
            assert norm > 0, (kind, field)
            assert abs(slope - norm) < 0.005 * norm + 0.03, (kind, field, slope, norm)


def _slope(engine, training, batch, directions, field, norm) -> float:
    """Of the loss along a direction of this norm, made one of norm 1."""
    values = []
    for sign in (1, -1):
        pairs = {}
        for name, master in training.stacks.split(training.masters).items():
            if name in directions:
                value = getattr(master, field) + np.float32(sign * STEP / norm) * directions[name]
                master = master._replace(**{field: value})
            shape = training.stacks.shapes[name]
            pairs[name] = LoraPair(*master, shape.scaling, shape.ranks)
        engine.update_adapter("probe", pairs)
        probes = [type(d)(d.tokens, "probe", d.weights) for d in batch]
        values.append(total(engine, probes))
    return (values[0] - values[1]) / (2 * STEP)


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_every_projection_s_gradient_is_written(pair, family, monkeypatch):
    """Into memory that holds anything: sums are not begun with zeros."""
    engine, trainer = pair(family)
    add(trainer, engine, "a")
    batch = data([("a", 40)])
    trainer.forward_backward(batch)
    expected = gradients(trainer, "a")

    def poisoned(masters):
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), masters)

    monkeypatch.setattr(batch_run, "unset", poisoned)
    trainer.forward_backward(batch)
    assert same(gradients(trainer, "a"), expected)


def test_calls_add_up(pair):
    engine, trainer = pair()
    add(trainer, engine, "a")
    one, two = data([("a", 20)], seed=1), data([("a", 33)], seed=2)
    parts = []
    for batch in (one, two):
        trainer.forward_backward(batch)
        training = trainer._adapters["a"]
        parts.append(training.gradients)
        training.gradients = None
    expected = jax.tree.map(lambda x, y: np.asarray(x) + np.asarray(y), *parts)
    trainer.forward_backward(one)
    trainer.forward_backward(two)
    jax.tree.map(np.testing.assert_array_equal, trainer._adapters["a"].gradients, expected)


def test_many_packs_give_the_sum_of_their_sequences(pair):
    """More tokens than the largest bucket; the order of sums differs, nothing else."""
    engine, trainer = pair()
    add(trainer, engine, "a")
    batch = data([("a", 60 + i) for i in range(7)])
    result = trainer.forward_backward(batch)
    training = trainer._adapters["a"]
    together, training.gradients = training.gradients, None
    losses = 0.0
    for datum in batch:
        losses += trainer.forward_backward([datum]).losses["a"]
    np.testing.assert_allclose(result.losses["a"], losses, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(training.gradients), strict=True):
        scale = np.abs(np.asarray(y)).max() + 1e-6
        np.testing.assert_allclose(x / scale, y / scale, atol=2e-5)
