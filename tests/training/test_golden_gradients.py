"""Loss and gradients of every kind of projection, as torch and PEFT have them."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax.training import Datum, LoraConfig, Trainer
from lora_moe_jax.training.masters import Master
from tests.adapters.tables import FAMILIES
from tests.training.golden_gradients import (
    ALPHA,
    O_PROJ_RANK,
    RANK,
    SHARED_FAMILIES,
    adapter,
    compare,
    sequences,
)

TOLERANCE = 3e-5  # of a factor's largest gradient
QUICK = ("deepseek_v3",)  # what other quick tests compile, too
SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES if x not in QUICK]


def gradients(trainer: Trainer, family: str, shared: bool) -> dict[str, np.ndarray]:
    """As the golden files have them."""
    pairs = adapter(family, shared)
    config = LoraConfig(RANK, ALPHA, list(pairs), rank_pattern={"o_proj": O_PROJ_RANK})
    trainer.add_adapter("a", config)
    training = trainer._adapters["a"]
    masters = training.stacks.join(lambda name: Master(pairs[name].a, pairs[name].b))
    training.masters, training.stale = trainer._placed(masters), True
    batch = [Datum(ids.tolist(), "a", w) for ids, w in zip(*sequences(family), strict=True)]
    loss = trainer.forward_backward(batch).losses["a"]
    found = {"loss": np.float32([loss])}
    for name, master in training.stacks.split(training.gradients).items():
        found |= {f"{name}.a": master.a, f"{name}.b": master.b}
    return found


@pytest.mark.parametrize("family", [*QUICK, *SLOW])
def test_every_projection(pair, family):
    """Attention, MLA, dense and shared-expert MLPs, experts, router, embedding and head."""
    _, trainer = pair(family)
    compare(family, False, gradients(trainer, family, False), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARED_FAMILIES)
def test_shared_outer(pair, family):
    """A shared factor's gradient is the sum of what the experts' own copies would have."""
    _, trainer = pair(family, shared_outer=True)
    compare(family, True, gradients(trainer, family, True), TOLERANCE)
