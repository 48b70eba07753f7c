"""Supervised training of one adapter on examples, in an order that only the seed decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lora_moe_jax.errors import RequestError
from lora_moe_jax.serving.interrupts import uninterrupted
from lora_moe_jax.training.arguments import check_step_settings
from lora_moe_jax.training.data_order import DataOrder
from lora_moe_jax.training.datum import Datum
from lora_moe_jax.training.sft_data import Example
from lora_moe_jax.training.trainer import Schedule, Trainer


@dataclass(frozen=True)
class SftConfig:
    """Settings of a run.

    Attributes:
      steps: optimizer steps; None for as many as the epochs have.
      epochs: how often the data are gone through, unless `steps` is given.
      batch_tokens: most tokens of a step; one example is always taken. A step's examples are all
        of one epoch.
      learning_rate, weight_decay, clip_norm: see `Trainer.optim_step`.
    """

    steps: int | None = None
    epochs: int = 1
    batch_tokens: int = 2048
    learning_rate: float | Schedule = 1e-3
    weight_decay: float = 0.0
    clip_norm: float | None = None


@dataclass(frozen=True)
class SftReport:
    """One step.

    Attributes:
      step: how many steps have changed the adapter, this one included, over all its runs.
      loss: nats per learned token, before the step.
      tokens: read in it, of which `learned` were learned.
      epochs: how often the data have been gone through.
      gradient_norm: before it was clipped.
      skipped: whether the gradient was not finite, so that nothing has changed.
    """

    step: int
    loss: float
    tokens: int
    learned: int
    epochs: float
    gradient_norm: float
    skipped: bool


def batches(
    examples: Sequence[Example], order: DataOrder, config: SftConfig
) -> Iterator[list[Example]]:
    """The examples of each step of a run that goes on from `order`, which moves along."""
    end = config.epochs * len(examples) if config.steps is None else None
    step = 0
    while order.taken < end if config.steps is None else step < config.steps:
        batch = [examples[order.take()]]
        room = config.batch_tokens - len(batch[0].tokens)
        while order.taken % order.size:
            room -= len(examples[order.peek()].tokens)
            if room < 0:
                break
            batch.append(examples[order.take()])
        step += 1
        yield batch


def count_steps(examples: Sequence[Example], order: DataOrder, config: SftConfig) -> int:
    """How many steps a run from `order` on has."""
    return sum(1 for _ in batches(examples, replace(order), config))


def run_sft(
    trainer: Trainer,
    name: str,
    examples: Sequence[Example],
    config: SftConfig | None = None,
    order: DataOrder | None = None,
) -> Iterator[SftReport]:
    """Trains an adapter by cross-entropy, a step for each report that is taken.

    It begins without a gradient: what one that failed has left is forgotten.

    Args:
      name: an adapter in training.
      examples: see `read_examples`.
      order: where to begin; it moves along with the steps, so that after each it says where to go
        on. Default: the beginning, with seed 0.

    Raises:
      AdapterError: the adapter is not in training.
      RequestError: a setting is out of range, at once; and see `Trainer.forward_backward`.
    """
    config = SftConfig() if config is None else config
    order = DataOrder(len(examples)) if order is None else order
    _check(config, examples, order)
    trainer._training(name)
    return _run(trainer, name, examples, config, order)


def _run(
    trainer: Trainer,
    name: str,
    examples: Sequence[Example],
    config: SftConfig,
    order: DataOrder,
) -> Iterator[SftReport]:
    trainer.zero_gradients(name)
    done = order.taken
    for batch in batches(examples, order, config):
        learned = sum(example.learned for example in batch)
        try:
            found = trainer.forward_backward([_datum(name, one, learned) for one in batch])
            with uninterrupted():
                stepped = trainer.optim_step(
                    name,
                    config.learning_rate,
                    weight_decay=config.weight_decay,
                    clip_norm=config.clip_norm,
                )[name]
                done = order.taken
        finally:
            order.taken = done  # a step that failed has taken nothing
        yield SftReport(
            stepped.steps,
            found.losses[name],
            sum(len(example.tokens) for example in batch),
            learned,
            order.epochs,
            stepped.gradient_norm,
            stepped.skipped,
        )


def _datum(name: str, example: Example, learned: int) -> Datum:
    """A sequence whose weights make the batch's loss a mean over learned tokens."""
    given = len(example.tokens) - 1 - example.learned
    return Datum(example.tokens, name, [0.0] * given + [1.0 / learned] * example.learned)


def _check(config: object, examples: Sequence[Example], order: DataOrder) -> None:
    if not isinstance(config, SftConfig):
        raise RequestError("these are no settings", key="config", expected="an SftConfig")
    for key in ("steps", "epochs", "batch_tokens"):
        value = getattr(config, key)
        if (type(value) is not int or value < 1) and not (key == "steps" and value is None):
            raise RequestError(
                "a setting is out of range",
                key=key,
                expected="an integer of at least 1",
                found=repr(value)[:200],
            )
    check_step_settings(config.learning_rate, config.weight_decay, config.clip_norm)
    if not examples or order.size != len(examples):
        raise RequestError(
            "the order is not one of these examples",
            key="order",
            expected=f"of {len(examples)} examples, at least one",
            found=order.size,
        )
