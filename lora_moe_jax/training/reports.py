"""What the trainer tells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TrainingInfo:
    """What is known of an adapter in training.

    Attributes:
      version: of the engine's adapter that has its values.
      steps: taken so far; those that were skipped do not count.
      nbytes: of masters and moments, and of gradients while there are some.
    """

    name: str
    version: int
    steps: int
    nbytes: int


@dataclass(frozen=True)
class ForwardBackward:
    """What `forward_backward` found.

    Attributes:
      logprobs: float32 [L - 1] for each sequence, the bits that `Engine.score` gives.
      losses: of each adapter.
      weights: of each adapter the sum of its weights, by which its loss may be divided.
    """

    logprobs: list[np.ndarray]
    losses: dict[str, float]
    weights: dict[str, float]


@dataclass(frozen=True)
class StepReport:
    """What a step did to one adapter.

    Attributes:
      steps: taken so far.
      learning_rate: of this step.
      gradient_norm: before it was clipped.
      skipped: the gradient, or what it would have led to, was not finite: nothing has changed.
      version: of the engine's adapter.
    """

    steps: int
    learning_rate: float
    gradient_norm: float
    skipped: bool
    version: int
