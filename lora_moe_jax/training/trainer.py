"""`Trainer`: trains adapters of an engine, on the engine's own weights and slots."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
import optax

from lora_moe_jax.adapters import Adapter, AdapterConfig, LoraPair, check_name, write_adapter
from lora_moe_jax.adapters.device_params import DeviceParams
from lora_moe_jax.adapters.entry import AdapterInfo
from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.errors import AdapterError, RequestError
from lora_moe_jax.layers.build import SlotConfig
from lora_moe_jax.models.build import abstract_model, projections
from lora_moe_jax.parallel.own_placement import own_placement
from lora_moe_jax.serving.engine import Engine
from lora_moe_jax.serving.interrupts import uninterrupted
from lora_moe_jax.training.arguments import (
    buckets_of,
    check_engine,
    check_moments,
    check_step_settings,
    checked_number,
    names_of,
    optimizer_of,
)
from lora_moe_jax.training.batch_run import BatchRun, InTraining
from lora_moe_jax.training.config import LoraConfig, pair_shapes
from lora_moe_jax.training.datum import Datum, checked_rows
from lora_moe_jax.training.losses import Loss, LossFunction, loss_of
from lora_moe_jax.training.masters import Masters, Stacks, initial_masters
from lora_moe_jax.training.model_pass import ModelPass
from lora_moe_jax.training.optimizer import Optimizer, Stepped, StepSettings, sums
from lora_moe_jax.training.pack_slots import copy_counts
from lora_moe_jax.training.packing import PackSizes
from lora_moe_jax.training.read_masters import adapter_masters, adapter_shapes
from lora_moe_jax.training.reports import ForwardBackward, StepReport, TrainingInfo
from lora_moe_jax.training.state import (
    AdapterState,
    SavedState,
    extra_of,
    trainer_arrays,
    trainer_document,
)
from lora_moe_jax.training.state_folder import StateWriter

Schedule = Callable[[int], float]


@dataclass(eq=False)
class Training:
    """One adapter in training.

    Attributes:
      stacks: where its projections lie in masters, moments and gradients.
      version: the engine's, that the masters are in as the bank holds them.
      params: of that version, as the engine took them.
      gradients: the sum since the last step; None if there is none.
      stale: whether the masters have moved since the version was made.
    """

    stacks: Stacks
    masters: Masters
    moments: optax.OptState
    version: int = 0
    params: DeviceParams | None = None
    gradients: Masters | None = None
    steps: int = 0
    stale: bool = True


class Trainer:
    """Trains adapters of an engine. Use it from the engine's thread.

    The base weights and the slots are the engine's: a step's result is the engine's next version of
    the adapter, and forward passes run on what the slot holds. Parameters, moments and gradients
    are float32 and belong to an adapter each. While it is in training the engine lets nobody else
    replace or unload it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        token_buckets: Sequence[int] | None = None,
        optimizer: optax.GradientTransformation | None = None,
        progress: bool = False,
    ):
        """Allocates nothing, compiles nothing.

        Args:
          engine: built with a slot for each adapter that is trained at the same time.
          token_buckets: sizes of the flat batch; a batch takes the smallest that holds it, and as
            many of the largest as it needs. Each one in use compiles two functions for each layer
            that is of its own kind, once; if the engine has 8 slots or more, once for up to 2
            adapters in it, once for up to 8, and so on. The largest bounds a sequence and the
            memory. Default: the engine's `max_length`, and four times that.
          optimizer: how optax scales gradients, without learning rate, weight decay and clipping.
            Default: `optax.scale_by_adam()`, which makes it AdamW. Projections of the same shapes
            are one array to it, with an axis for them in front: what looks at a parameter as a
            whole (a trust ratio, the RMS of a block) sees them together.
          progress: show a bar on stderr while functions are compiled.

        Raises:
          ConfigError: the engine has no slots or was built with a mesh, or a size is out of range.
        """
        check_engine(engine)
        length = engine.options.max_length
        buckets = buckets_of((length, 4 * length) if token_buckets is None else token_buckets)
        page, slots = engine.options.page_size, engine.options.max_adapters
        self._engine = engine
        sizes = [
            PackSizes(-(-size // page) * page, page, count)
            for size in buckets
            for count in copy_counts(slots)
        ]
        self._pass = ModelPass(engine.arrays, sizes, progress)
        self._optimizer = Optimizer(optimizer_of(optimizer), engine.options.dtype)
        self._adapters: dict[str, Training] = {}
        self._projections: dict[str, Projection] | None = None
        self._writer = StateWriter()

    # Adapters

    @own_placement()
    def add_adapter(
        self, name: str, source: LoraConfig | Adapter | str | os.PathLike | None = None
    ) -> AdapterInfo:
        """An adapter to train, which the engine serves at once.

        Args:
          source: a `LoraConfig` of a new one; or one that is there already, as
            `Engine.load_adapter` takes it: its values become the float32 parameters, and what it
            targets is trained at its own ranks and scalings. Factors that its experts share are
            trained as one only in an engine with `shared_outer`. Default: `LoraConfig()`.

        Raises:
          AdapterError: the name is taken, the source does not fit the engine or could not be served
            exactly, or no slot can be had. Nothing has changed then.
          ConfigError: the optimizer's state for it could not be saved.
        """
        check_name(name)
        self._check_new(name)
        self._engine._check_new_version(name)  # it has no ranks while it sleeps
        stacks, masters = self._begun(LoraConfig() if source is None else source)
        moments = self._optimizer.init(masters)
        check_moments(moments)
        training = Training(stacks, *self._placed((masters, moments)))
        with uninterrupted():  # the engine's word and this one's belong together
            info = self._publish(name, training)
            self._adapters[name] = training
        return info

    def _begun(self, source: object) -> tuple[Stacks, Masters]:
        """Where an adapter's projections lie, and its first values on the host."""
        engine = self._engine
        if isinstance(source, LoraConfig):
            stacks = Stacks(pair_shapes(source, engine.bank, self._every_projection()))
            return stacks, initial_masters(source, stacks, engine.bank.projections)
        if not isinstance(source, Adapter | str | os.PathLike):
            raise AdapterError(
                "an adapter cannot be trained from this",
                key="source",
                expected="a LoraConfig, an adapter's folder, or an Adapter",
                found=type(source).__name__,
            )
        adapter = engine._read_adapter(source)
        stacks = Stacks(adapter_shapes(adapter, engine.bank))
        return stacks, adapter_masters(adapter, stacks)

    def remove_adapter(self, name: str) -> None:
        """Ends an adapter's training and frees what it has. The engine serves it on.

        Raises:
          AdapterError: it is not in training.
        """
        self._training(name)
        self._engine.end_training(name)
        del self._adapters[name]

    def adapters(self) -> list[TrainingInfo]:
        """The adapters in training."""
        return [
            TrainingInfo(
                name,
                training.version,
                training.steps,
                _nbytes((training.masters, training.moments, training.gradients)),
            )
            for name, training in self._adapters.items()
        ]

    @own_placement()
    def update_engine(self, name: str) -> AdapterInfo:
        """Makes the parameters the engine's newest version, as every good step does by itself.

        Raises:
          AdapterError: it is not in training, or no slot can be had.
        """
        return self._publish(name, self._training(name))

    def save_adapter(
        self,
        name: str,
        folder: str | os.PathLike,
        layout: Literal["peft", "per_expert", "shared_outer"] = "peft",
    ) -> None:
        """Writes an adapter's float32 parameters; loaded again it gives the same bits in a slot.

        Its configuration names the engine's model folder as the base model.

        Raises:
          AdapterError: it is not in training, or see `write_adapter`.
        """
        training = self._training(name)
        shapes = training.stacks.shapes
        pairs = {
            projection: LoraPair(*master, shapes[projection].scaling, shapes[projection].ranks)
            for projection, master in training.stacks.split(training.masters).items()
        }
        config = AdapterConfig(base_model=self._engine.folder)
        adapter = Adapter(pairs, "device", config)
        write_adapter(folder, adapter, self._every_projection(), layout=layout)

    # State

    def save(
        self,
        folder: str | os.PathLike,
        extra: Mapping[str, object] | None = None,
        *,
        keep: int = 2,
    ) -> None:
        """Saves all that `restore` needs to go on bit for bit; returns when it is on the host.

        It is written in the background as the newest of the folder's states, in a folder of its own
        that appears when it is complete. Call `wait` before the process ends. One trainer at a time
        may save to a folder.

        Args:
          extra: whatever the loop around has to know, such as its place in the data and the state
            of its random numbers: a dict that JSON gives back as it was.
          keep: how many states remain in the folder, the newest ones.

        Raises:
          RequestError: an argument is out of range.
          CheckpointError: the folder cannot be had; or the save before failed, which is said once,
            and this one was not begun.
        """
        extra = extra_of(extra)
        if type(keep) is not int or keep < 1:
            raise RequestError(
                "this cannot be kept", key="keep", expected="at least 1", found=repr(keep)[:200]
            )
        self._writer.wait()  # before there is a second copy on the host
        states = {name: _state_of(training) for name, training in self._adapters.items()}
        document = trainer_document(self._engine.config, states, extra)
        self._writer.write(folder, document, trainer_arrays(states), keep)

    def wait(self) -> None:
        """Returns when the last `save` is on the disk.

        Raises:
          CheckpointError: it could not be written, which is said once.
        """
        self._writer.wait()

    @classmethod
    @own_placement()
    def restore(
        cls,
        engine: Engine,
        folder: str | os.PathLike,
        *,
        token_buckets: Sequence[int] | None = None,
        optimizer: optax.GradientTransformation | None = None,
        progress: bool = False,
    ) -> tuple[Trainer, dict[str, object]]:
        """A trainer as the newest whole state of a folder has it, and the `extra` of that.

        Its adapters go on bit for bit on the same base weights in the same dtype, whatever the
        engine's slots are, and the smaller token buckets: by the largest one an adapter's sequences
        are cut where they do not fit together, and gradients of the pieces add up. The engine
        counts their versions anew.

        Args:
          folder: what `save` was given.
          token_buckets, optimizer, progress: as for `Trainer`. The optimizer is the one that was
            saved.

        Raises:
          CheckpointError: there is no whole state, or it does not fit the engine or the optimizer.
          AdapterError: the engine has an adapter of the same name, or finds no slot.
          ConfigError: as for `Trainer`. In every case the engine is as it was.
        """
        trainer = cls(engine, token_buckets=token_buckets, optimizer=optimizer, progress=progress)
        saved = SavedState(folder)
        saved.check_model(engine.config)
        stacks, likes = {}, {}
        for name, adapter in saved.adapters.items():
            trainer._check_new(name)
            stacks[name] = Stacks(saved.shapes(name, engine.bank))
            masters = stacks[name].like()
            moments = jax.eval_shape(trainer._optimizer.init, masters)
            like = {"masters": masters, "moments": moments, "gradients": masters}
            likes[name] = {part: like[part] for part in adapter.arrays}
        for name, parts in saved.arrays(likes).items():
            steps = saved.adapters[name].steps
            training = Training(stacks[name], **trainer._placed(parts), steps=steps)
            trainer._adapters[name] = training
        trainer._publish_all()
        return trainer, saved.extra

    def _publish_all(self) -> None:
        """Makes versions of all adapters, or of none."""
        published = []
        try:
            for name, training in self._adapters.items():
                self._publish(name, training)
                published.append(name)
        except BaseException:
            for name in published:
                self._engine.end_training(name)
                self._engine.unload_adapter(name)
            raise

    # Training

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be trained on."""
        return min(self._pass.sizes[-1].tokens, self._engine.config.max_position)

    @own_placement()
    def forward_backward(
        self,
        batch: Sequence[Datum],
        loss: str | Loss | LossFunction = "cross_entropy",
        **options: float,
    ) -> ForwardBackward:
        """Computes every sequence's logprobs, and adds the loss's gradients to their adapters'.

        An adapter's logprobs, loss and gradient are, bit for bit, those of its sequences alone (on
        a GPU the gradient where attention's has kernels, see `pallas_kernels.paged_attention`).
        Gradients of several calls add up until `optim_step`.

        Args:
          batch: sequences of any adapters in training, in any order.
          loss: a name in `LOSSES`, or see `losses.py`. It is evaluated for each adapter by itself.
            A function is compiled once: what it takes from outside keeps the values of then, and
            numbers that change are to be `options`.
          options: of the loss, such as `clip_low`.

        Raises:
          RequestError: a sequence cannot be trained on, or the loss does not fit.
          AdapterError: an adapter is not in training, or finds no slot. In both cases no gradient
            has changed.
        """
        loss, options = loss_of(loss, options)
        rows = checked_rows(batch, self._engine.config.vocab_size, self.longest, loss.needs)
        for row in rows:
            self._training(row.adapter, f"batch[{row.place}].adapter")
        names = list(dict.fromkeys(row.adapter for row in rows))
        run = BatchRun(self._pass, self._in_slots(names), loss, options)
        run.run(rows)
        with uninterrupted():  # a batch counts for all of its adapters, and sums donate
            for name, gradients in run.gradients.items():
                training = self._adapters[name]
                before = training.gradients
                training.gradients = gradients if before is None else sums(before, gradients)
        weights = dict.fromkeys(names, 0.0)
        for row in rows:
            weights[row.adapter] += float(row.weights.sum(dtype=np.float64))
        return ForwardBackward([run.logprobs[row.place] for row in rows], run.losses, weights)

    def zero_gradients(self, names: str | Sequence[str]) -> None:
        """Forgets what adapters' gradients are since their last step, as after one that failed.

        Raises:
          AdapterError: an adapter is not in training; nothing was forgotten.
        """
        for training in [self._training(name) for name in names_of(names)]:
            training.gradients = None

    @own_placement()
    def optim_step(
        self,
        names: str | Sequence[str],
        learning_rate: float | Schedule,
        *,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> dict[str, StepReport]:
        """Steps adapters by their summed gradients; the engine's next request runs the result.

        An adapter whose gradient is not finite is left as it is and reported; the others go on.

        Args:
          learning_rate: a number, or a schedule of the adapter's own steps so far, as optax's are.
          weight_decay: as AdamW's, times the learning rate.
          clip_norm: the largest norm of an adapter's gradient.

        Raises:
          RequestError: a setting is out of range, or an adapter has no gradient. No step was taken.
          AdapterError: an adapter is not in training, and no step was taken; or no slot can be had
            for a new version. Then all steps were taken, and the next forward_backward of the
            adapter makes its version.
          EngineAsleepError: there is no bank for new versions; else the same.
          Exception: what the optimizer raises for an adapter, whose step was not taken then; those
            of the others were.
        """
        names = names_of(names)
        clip = float("inf") if clip_norm is None else clip_norm
        check_step_settings(learning_rate, weight_decay, clip_norm)
        rates = {}
        for name in names:
            training = self._training(name)
            if training.gradients is None:
                raise RequestError(
                    "the adapter has no gradient",
                    key=name,
                    expected="a forward_backward since the last step",
                )
            rate = learning_rate(training.steps) if callable(learning_rate) else learning_rate
            rates[name] = checked_number("learning_rate", rate, 0.0)
        settings = {name: StepSettings(rate, weight_decay, clip) for name, rate in rates.items()}
        reports, failed = {}, None
        with uninterrupted():  # an adapter's masters, its count and the engine's version are one
            stepped = {}
            for name in names:  # all are begun before the host waits for the first
                try:
                    stepped[name] = self._begin_step(name, settings[name])
                except Exception as error:  # of the optimizer: the others' steps are taken
                    failed = failed or error
            for name, its in stepped.items():
                try:
                    reports[name] = self._end_step(name, settings[name], its)
                except Exception as error:  # of a new version: the step itself was taken
                    failed = failed or error
        if failed is not None:
            raise failed
        return reports

    def _begin_step(self, name: str, settings: StepSettings) -> Stepped:
        training = self._adapters[name]
        settings = StepSettings(*map(np.float32, settings))
        whole = training.masters, training.moments, training.gradients
        stepped = self._optimizer.step(*whole, settings)
        training.masters, training.moments, training.gradients = *stepped[:2], None
        stepped.good.copy_to_host_async()
        stepped.norm.copy_to_host_async()
        return stepped

    def _end_step(self, name: str, settings: StepSettings, stepped: Stepped) -> StepReport:
        training, good = self._adapters[name], bool(stepped.good)
        if good:
            training.steps += 1
            training.stale = True
            self._publish(name, training)
        return StepReport(
            training.steps,
            float(np.float32(settings.learning_rate)),
            float(stepped.norm),
            not good,
            training.version,
        )

    # The engine

    def _training(self, name: object, key: str | None = None) -> Training:
        if not isinstance(name, str) or name not in self._adapters:
            raise AdapterError(
                "no adapter of this name is in training",
                key=key or str(name)[:200],
                expected=f"one of {sorted(self._adapters)[:8]}",
                found=repr(name)[:200],
                hint="add_adapter it first",
            )
        return self._adapters[name]

    def _check_new(self, name: str) -> None:
        if name in self._adapters or any(i.name == name for i in self._engine.adapters()):
            raise AdapterError(
                "an adapter of this name is there already",
                key=name,
                expected="a new name",
                hint="remove_adapter and Engine.unload_adapter it first, or choose another name",
            )

    def _placed(self, tree: object) -> object:
        """Arrays where the bank is, by name: unplaced ones count as something else in compiling."""
        return jax.device_put(tree, self._engine.bank.sharding)

    def _publish(self, name: str, training: Training) -> AdapterInfo:
        """Makes the masters the engine's newest version."""
        if training.params is None:
            scalings = self._placed(training.stacks.scalings())
            places = training.stacks.places
            params = DeviceParams.of_stacks(training.masters, scalings, places)
        else:  # the step has looked whether they are finite
            params = training.params.moved(training.masters)
        info = self._engine.update_adapter(name, params, trainer=self)
        training.version, training.params, training.stale = info.version, params, False
        return info

    def _in_slots(self, names: Sequence[str]) -> dict[str, InTraining]:
        """Gives each adapter a slot. They are theirs while nothing else is asked of the engine."""
        for name in names:
            if self._adapters[name].stale:
                self._publish(name, self._adapters[name])
        slots = self._engine.adapter_slots(names)
        found = {}
        for name, slot in zip(names, slots, strict=True):
            training = self._adapters[name]
            found[name] = InTraining(slot, training.masters, training.stacks.places)
        return found

    def _every_projection(self) -> dict[str, Projection]:
        """The base model's, also those without slots in the engine: a file's names mean them."""
        if self._projections is None:
            options = self._engine.options
            slots = SlotConfig(1, 1, options.dtype)
            model = abstract_model(self._engine.config, dtype=options.dtype, adapters=slots)
            self._projections = projections(model)
        return self._projections


def _state_of(training: Training) -> AdapterState:
    parts = {"masters": training.masters, "moments": training.moments}
    if training.gradients is not None:
        parts["gradients"] = training.gradients
    return AdapterState(training.stacks.shapes, training.steps, parts)


def _nbytes(arrays: object) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))
