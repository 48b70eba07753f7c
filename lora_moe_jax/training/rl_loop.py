"""GRPO in one loop: sample, reward, advantages, gradient, step; any number of adapters at once.

    for report in run_grpo(trainer, {"poet": GrpoTask(prompts, reward)}, GrpoConfig(steps=50)):
        print(report.step, report.tasks["poet"].reward)

Each step samples from the adapters as the step before left them, so the sampler's logprobs must be
the trainer's. Every report says how far apart they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from lora_moe_jax.errors import AdapterError, RequestError
from lora_moe_jax.serving.queue_limit import check_count
from lora_moe_jax.serving.request import Completion
from lora_moe_jax.serving.sampling_params import SamplingParams
from lora_moe_jax.training.arguments import check_step_settings
from lora_moe_jax.training.data_order import DataOrder
from lora_moe_jax.training.datum import Datum
from lora_moe_jax.training.losses import Loss, grpo_advantages, loss_of
from lora_moe_jax.training.reports import StepReport
from lora_moe_jax.training.trainer import Schedule, Trainer

INPUTS = "old_logprobs", "advantages"  # of the loss
LARGEST = float(np.finfo(np.float32).max)  # reward: squares of larger ones have no float64
Reward = Callable[[list[int], list[int]], float]


@dataclass(frozen=True)
class GrpoTask:
    """What one adapter learns.

    Attributes:
      prompts: strings or lists of token ids.
      reward: `(prompt's token ids, completion's token ids) -> a finite number` of Python, NumPy or
        JAX, within float32's range. A completion that ended by itself has its stop token.
    """

    prompts: Sequence[str | Sequence[int]]
    reward: Reward


@dataclass(frozen=True)
class GrpoConfig:
    """Settings of a run, the same for all its adapters.

    Attributes:
      steps: optimizer steps of this run.
      prompts_per_step: of each task, in an order by the seed.
      group_size: completions of each prompt, which are compared with each other.
      max_tokens: of a completion.
      learning_rate, weight_decay, clip_norm: see `Trainer.optim_step`.
      loss: the name of one that takes `old_logprobs` and `advantages`, or a `Loss` that does. It is
        a mean over sequences.
      loss_options: such as `clip_low`.
      seed: of prompts and samples.
    """

    steps: int = 50
    prompts_per_step: int = 4
    group_size: int = 8
    max_tokens: int = 32
    learning_rate: float | Schedule = 1e-3
    weight_decay: float = 0.0
    clip_norm: float | None = None
    loss: str | Loss = "grpo"
    loss_options: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, eq=False)
class TaskReport:
    """What a step found for one adapter.

    Attributes:
      rewards: float64 [prompts, group].
      completions: in the same order, group by group.
      kl: of the sampler from the trainer, estimated by its samples: the mean over their tokens of
        sampler's logprob - trainer's logprob.
      max_difference: the largest absolute difference of the two.
      loss: of the step. Before a policy has moved from the one that sampled it is about zero.
      optimizer: what `optim_step` said.
    """

    rewards: np.ndarray
    completions: list[Completion]
    kl: float
    max_difference: float
    loss: float
    optimizer: StepReport

    @property
    def reward(self) -> float:
        """The mean reward."""
        return float(self.rewards.mean())


@dataclass(frozen=True)
class GrpoReport:
    """One step, counted from 1 over all runs, of all adapters by name."""

    step: int
    tasks: dict[str, TaskReport]


def run_grpo(
    trainer: Trainer,
    tasks: Mapping[str, GrpoTask],
    config: GrpoConfig | None = None,
    start: int = 0,
) -> Iterator[GrpoReport]:
    """Trains adapters on their tasks, a step for each report that is taken.

    What an adapter becomes does not depend, by a single bit, on the others of the loop. It begins
    without a gradient: what one that failed has left is forgotten.

    Args:
      trainer: whose engine samples.
      tasks: by the name of an adapter in training.
      start: steps that runs before have taken: prompts and samples go on behind theirs, and
        adapters become what one run of all steps would have made them.

    Raises:
      AdapterError: an adapter is not in training, or there are more than the engine has slots for.
      RequestError: a setting or a prompt is of no use, at once; a reward, or what
        `forward_backward` and `optim_step` refuse, in the step that meets it.
    """
    config = GrpoConfig() if config is None else config
    _check(config, tasks)
    _check_integer("start", start, 0)
    for name, task in tasks.items():
        trainer._training(name)
        _check_prompts(trainer, name, task, config)
    _check_slots(trainer, tasks)
    _check_room(trainer, tasks, config)
    return _run(trainer, dict(tasks), config, range(start, start + config.steps))


def _run(
    trainer: Trainer, tasks: dict[str, GrpoTask], config: GrpoConfig, steps: range
) -> Iterator[GrpoReport]:
    trainer.zero_gradients(list(tasks))
    for step in steps:
        samples = _sample(trainer, tasks, config, step)
        rewards = {name: _rewards(name, tasks[name], samples[name], config) for name in tasks}
        batch = [datum for name in tasks for datum in _data(name, samples[name], rewards[name])]
        found = trainer.forward_backward(batch, config.loss, **config.loss_options)
        stepped = trainer.optim_step(
            list(tasks),
            config.learning_rate,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
        )
        logprobs, reports = iter(found.logprobs), {}
        for name, completions in samples.items():
            differences = _differences(completions, logprobs)
            reports[name] = TaskReport(
                rewards[name],
                completions,
                float(differences.mean()),
                float(np.abs(differences).max()),
                found.losses[name],
                stepped[name],
            )
        yield GrpoReport(step + 1, reports)


def _sample(
    trainer: Trainer, tasks: dict[str, GrpoTask], config: GrpoConfig, step: int
) -> dict[str, list[Completion]]:
    """Every task's completions, group by group, all generated in one batch.

    At temperature 1 without filters: only then are a token's logprob and the probability that it
    was sampled with the same.
    """
    count = config.prompts_per_step * config.group_size
    # Every task has the same seeds, so that none depends on which others there are.
    seeds = np.random.default_rng([config.seed, step]).integers(2**31, size=count)
    params = [
        SamplingParams(max_tokens=config.max_tokens, seed=int(seed), logprobs=True)
        for seed in seeds
    ]
    prompts = []
    for task in tasks.values():
        order = DataOrder(len(task.prompts), config.seed, taken=step * config.prompts_per_step)
        for _ in range(config.prompts_per_step):
            prompts += [task.prompts[order.take()]] * config.group_size
    names = [name for name in tasks for _ in range(count)]
    found = trainer._engine.generate(prompts, params * len(tasks), names)
    return {name: found[i * count : (i + 1) * count] for i, name in enumerate(tasks)}


def _rewards(
    name: str, task: GrpoTask, completions: list[Completion], config: GrpoConfig
) -> np.ndarray:
    values = []
    for completion in completions:
        value = task.reward(list(completion.prompt_token_ids), list(completion.token_ids))
        number = _real(value)
        if number is None:
            raise RequestError(
                "a reward is not a finite number",
                key=name,
                expected="a real number of Python, NumPy or JAX, within float32's range",
                found=repr(value)[:200],
            )
        values.append(number)
    return np.reshape(values, (config.prompts_per_step, config.group_size))


def _real(value: object) -> float | None:
    """A finite real number; None of anything else."""
    number = np.asarray(value)
    if number.ndim or not jnp.isdtype(number.dtype, ("bool", "integral", "real floating")):
        return None
    number = float(number)
    return number if abs(number) <= LARGEST else None


def _data(name: str, completions: list[Completion], rewards: np.ndarray) -> Iterator[Datum]:
    """The completions as sequences to train on; prompts count nothing."""
    advantages = grpo_advantages(rewards).reshape(-1) / np.float32(rewards.size)
    for completion, advantage in zip(completions, advantages, strict=True):
        before = [0.0] * (len(completion.prompt_token_ids) - 1)
        yield Datum(
            [*completion.prompt_token_ids, *completion.token_ids],
            name,
            before + [1.0] * len(completion.token_ids),
            {"old_logprobs": before + completion.logprobs, "advantages": advantage},
        )


def _differences(completions: list[Completion], logprobs: Iterator[np.ndarray]) -> np.ndarray:
    """Sampler's logprob - trainer's, of all sampled tokens."""
    return np.concatenate(
        [
            np.float32(completion.logprobs) - next(logprobs)[-len(completion.token_ids) :]
            for completion in completions
        ]
    )


def _check(config: object, tasks: object) -> None:
    if not isinstance(config, GrpoConfig):
        raise RequestError("these are no settings", key="config", expected="a GrpoConfig")
    for key in ("steps", "prompts_per_step", "group_size", "max_tokens", "seed"):
        _check_integer(key, getattr(config, key), {"seed": 0, "group_size": 2}.get(key, 1))
    if not isinstance(config.loss_options, Mapping):
        raise RequestError(
            "these are no options",
            key="loss_options",
            expected="numbers by name",
            found=repr(config.loss_options)[:200],
        )
    check_step_settings(config.learning_rate, config.weight_decay, config.clip_norm)
    loss, _ = loss_of(config.loss, dict(config.loss_options))
    if set(loss.needs) != set(INPUTS):
        raise RequestError(
            "the loss does not take what a step has for it",
            key="loss",
            expected=f"one that takes {' and '.join(INPUTS)}",
            found=f"{config.loss!r} takes {' and '.join(loss.needs) or 'neither'}"[:200],
        )
    if not isinstance(tasks, Mapping) or not tasks:
        raise RequestError("there is nothing to learn", key="tasks", expected="a GrpoTask by name")
    for name, task in tasks.items():
        if not _is_task(task):
            raise RequestError(
                "this is no task",
                key=str(name)[:200],
                expected="a GrpoTask with a list of prompts and a function",
            )


def _is_task(task: object) -> bool:
    if not isinstance(task, GrpoTask) or not callable(task.reward):
        return False
    is_list = isinstance(task.prompts, Sequence) and not isinstance(task.prompts, str)
    return is_list and len(task.prompts) > 0


def _check_integer(key: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise RequestError(
            "a setting is out of range",
            key=key,
            expected=f"an integer of at least {least}",
            found=repr(value)[:200],
        )


def _check_slots(trainer: Trainer, tasks: Mapping[str, GrpoTask]) -> None:
    """A step trains all adapters at once."""
    if len(tasks) > (slots := trainer._engine.options.max_adapters):
        raise AdapterError(
            "there are more adapters than slots",
            key="tasks",
            expected=f"at most {slots}, the engine's max_adapters",
            found=len(tasks),
            hint="build the engine with a larger max_adapters, or run loops one after another",
        )


def _check_room(trainer: Trainer, tasks: Mapping[str, GrpoTask], config: GrpoConfig) -> None:
    """A step asks for all completions in one call."""
    options = trainer._engine.options
    if options.max_waiting is not None:
        count = len(tasks) * config.prompts_per_step * config.group_size
        check_count(count, options.max_requests + options.max_waiting)


def _check_prompts(trainer: Trainer, name: str, task: GrpoTask, config: GrpoConfig) -> None:
    """Raises RequestError unless engine and trainer take all of a task's prompts."""
    params = SamplingParams(max_tokens=config.max_tokens)
    try:
        requests = trainer._engine._intake.generate(task.prompts, params, None, 0)
    except RequestError as error:
        raise RequestError(
            error.message,
            key=f"tasks[{name!r}].{error.key}",
            expected=error.expected,
            found=error.found,
            hint=error.hint,
        ) from error
    longest = max(requests, key=lambda request: request.prompt_length)
    if longest.prompt_length + config.max_tokens > trainer.longest:
        raise RequestError(
            "the trainer takes no sequence as long as a completion may make it",
            key=f"tasks[{name!r}].prompts[{longest.index}]",
            expected=f"at most {trainer.longest} tokens, prompt and completion together",
            found=f"{longest.prompt_length} prompt tokens and max_tokens {config.max_tokens}",
            hint="lower max_tokens, or build the Trainer with larger token_buckets",
        )
