"""Which experts routers choose: in the engine's steps, and in the trainer's pass.

Neither keeps that. So the engine's steps are taken a second time, each from the array that the host
sent for it or that the step before gives, with the same weights, slots and pages, by a function
that does what the step does and also hands out the choices. What it samples must be what was
sampled, bit for bit. The trainer's pass forward is run a second time too, and each router's choice
found from its layer's input there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.kernel_programs import compile_kernels
from lora_moe_jax.serving.request import Request
from lora_moe_jax.serving.step_batch import Chunk, StepBatch
from lora_moe_jax.serving.step_functions import routed_step
from lora_moe_jax.serving.step_layout import split_chosen
from lora_moe_jax.serving.stream import RequestStream
from lora_moe_jax.training import Datum, Trainer
from lora_moe_jax.training.datum import checked_rows
from lora_moe_jax.training.packing import packs, places

# Of each sequence of S tokens int32 [layers with a router, S - 1, choices]; entry i of the second
# dimension is of the token after which token i + 1 is predicted, as in `Score.logprobs`. What was
# found in the prefix cache is not there: fewer entries, the last ones.
Choices = list[np.ndarray]


class ReplayError(RuntimeError):
    """What the steps choose when they are taken again is not known to be what they chose."""


class Recorded(NamedTuple):
    """The batches of some requests' steps, and how many tokens the prefix cache gave them."""

    batches: list[StepBatch]
    cached: int


def run_recorded(engine: Engine, stream: RequestStream) -> Recorded:
    """Runs the requests of a stream to their end."""
    runner, batches = engine._runner, []
    before = engine.stats().prefix_hit_tokens
    while not all(request.done for request in stream.requests):
        runner.step()
        batches += [begun.batch for begun in runner._under_way]  # it has read all others
    return Recorded(batches, engine.stats().prefix_hit_tokens - before)


class Replay:
    """Takes steps of an engine again, which is on one device and takes one step at a time."""

    def __init__(self, engine: Engine):
        self._steps = engine._runner.steps
        function = functools.partial(_step, self._steps.layout, engine.arrays)
        self._function = jax.jit(function, donate_argnums=(2, 3))
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def choices(self, requests: Sequence[Request], recorded: Recorded) -> Choices:
        """Of each request that has ended, from the batches of all; adapters are where they were.

        The prefix cache must have been empty before them, and holds other pages' tokens afterwards.

        Raises:
          ReplayError: a step does not sample the same tokens with the same logprobs, or a request
            has not computed each token once in these steps, after those that the prefix cache gave
            it: it had to make room for another.
        """
        _check_whole(requests, recorded)
        steps, found = self._steps, {request: [] for request in requests}
        base, bank = steps.arrays.base, steps.arrays.bank.stacks
        # None is fed back that these steps have not sampled themselves.
        last_tokens, packed = jnp.zeros_like(steps.last_tokens), None
        for batch in recorded.batches:
            packed = packed if batch.packed is None else batch.packed
            arguments = base, bank, steps.pages, last_tokens, packed
            if batch.size not in self._compiled:
                self._compiled[batch.size] = self._compile(*arguments)
            results = self._compiled[batch.size](*arguments)
            steps.pages, last_tokens, packed, chosen, experts = results
            _check_same(batch, np.asarray(chosen))
            experts = np.asarray(experts)
            for chunk in batch.chunks_now():
                places = slice(chunk.offset, chunk.offset + chunk.length)
                found[chunk.request].append(experts[:, places])
        for request, chunk in _first_chunks(recorded).items():
            whole = np.concatenate(found[request], axis=1)
            found[request] = whole[:, : len(request.tokens) - 1 - chunk.start]
        return [found[request] for request in requests]

    def _compile(self, *arguments) -> jax.stages.Compiled:
        lowered = self._function.lower(*arguments)
        with ThreadPoolExecutor() as kernels:
            compile_kernels(lowered, kernels)
            return lowered.compile()


def _step(layout, arrays, base, bank, pages, last_tokens, packed):
    """A step's pages, last tokens, `packed` and `chosen`, and int32 [layers, T, choices]."""
    *rest, experts = routed_step(layout, arrays, base, bank, pages, last_tokens, packed)
    return *rest, jnp.stack(experts)


def _first_chunks(recorded: Recorded) -> dict[Request, Chunk]:
    chunks = (
        chunk for batch in reversed(recorded.batches) for chunk in reversed(batch.chunks_now())
    )
    return {chunk.request: chunk for chunk in chunks}


def _check_whole(requests: Sequence[Request], recorded: Recorded) -> None:
    first = _first_chunks(recorded)
    computed = {request: first[request].start if request in first else 0 for request in requests}
    for chunk in (chunk for batch in recorded.batches for chunk in batch.chunks_now()):
        if chunk.start == computed[chunk.request]:
            computed[chunk.request] += chunk.length
    for request, tokens in computed.items():
        if tokens < len(request.tokens) - 1:
            raise ReplayError(
                f"of the {len(request.tokens)} tokens of request {request.index} these steps have "
                f"computed the first {tokens} in one go"
            )
    begun = sum(chunk.start for chunk in first.values())
    if begun != recorded.cached:
        raise ReplayError(
            f"these steps begin after {begun} tokens of their requests, and {recorded.cached} were "
            "in the prefix cache"
        )


def _check_same(batch: StepBatch, chosen: np.ndarray) -> None:
    (tokens,), (logprobs,) = split_chosen(chosen)
    for chunk in batch.chunks_now():
        if not chunk.samples:
            continue
        request, place = chunk.request, chunk.start + chunk.length
        first = request.tokens[place], request.logprobs[place - request.prompt_length]
        again = tokens[chunk.row], logprobs[chunk.row]
        if first != again:
            raise ReplayError(
                f"request {request.index} sampled (token, logprob) {first} at position {place}, "
                f"and {again} when its steps were taken again"
            )


def trainer_choices(engine: Engine, trainer: Trainer, batch: Sequence[Datum]) -> Choices:
    """Of each sequence, packed as `forward_backward` packs them."""
    model, found = trainer._pass, {}
    names = list(dict.fromkeys(datum.adapter for datum in batch))
    slots = dict(zip(names, engine.adapter_slots(names), strict=True))
    largest = model.sizes[-1]
    rows = checked_rows(batch, engine.config.vocab_size, largest.tokens, ())
    for pack in packs(rows, largest):
        choices = model.choices(model.placed(pack, slots))
        experts = np.stack([np.asarray(layer) for layer in choices])
        for row, place in zip(pack.rows, places(pack), strict=True):
            found[row.place] = experts[:, place]
    return [found[place] for place in range(len(batch))]


def rerouted(sampler: np.ndarray, trainer: np.ndarray) -> np.ndarray:
    """bool [layers, tokens]: whose experts differ, in which they are or in their order."""
    return (sampler != trainer).any(-1)
