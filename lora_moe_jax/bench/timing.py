"""Times of compiled programs: every variant in turn, round after round, and the median.

Taking turns makes the variants share whatever the clocks and the rest of the machine do. On a GPU
times are those of the kernels, by its profiler; elsewhere they are wall-clock times, good for
ratios.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lora_moe_jax.bench.launches import calls_of, traced_call, without_overlap

KERNEL_ROUNDS = 9
PLACES = 5
WALL_ROUNDS = 25
NEIGHBOUR_BYTES = 37 << 20
PAUSE = 2e-3  # seconds between two calls; kernels of a call follow each other sooner
PALLAS = "mosaic_gpu"  # in the name of every kernel that Pallas made
_COMPILERS = ThreadPoolExecutor(thread_name_prefix="compile")


class Program(NamedTuple):
    """A function that compiles, or has, and the arguments to time it on."""

    compiling: Future[jax.stages.Compiled]
    arguments: tuple[Any, ...]

    @property
    def compiled(self) -> jax.stages.Compiled:
        return self.compiling.result()

    def __call__(self):
        return self.compiled(*self.arguments)

    def with_other(self, argument: Any, other: Any) -> Program:
        """The same program with another argument in place of this one."""
        arguments = tuple(other if its is argument else its for its in self.arguments)
        return self._replace(arguments=arguments)


class ProgramInPlace:
    """A program whose results take the place of the last call's, as an engine's state does.

    Where they lie somewhere else each time, CUDA graphs are updated before they are launched: of 16
    layers of one token that took the host longer than the layers take.
    """

    def __init__(self, function: Callable, *arguments):
        def in_place(results, *arguments):
            del results
            return function(*arguments)

        shapes = jax.eval_shape(function, *arguments)
        self.results = jax.tree.map(lambda its: jnp.zeros(its.shape, its.dtype), shapes)
        donating = jax.jit(in_place, donate_argnums=0, keep_unused=True)
        self.compiling = _COMPILERS.submit(donating.lower(self.results, *arguments).compile)
        self.arguments = arguments

    def __call__(self):
        self.results = self.compiling.result()(self.results, *self.arguments)
        return self.results


def program(function: Callable, *arguments) -> Program:
    """Lowers the function; it compiles beside whatever is lowered next."""
    lowered = jax.jit(function).lower(*arguments)
    return Program(_COMPILERS.submit(lowered.compile), arguments)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median seconds of one program.

    Attributes:
      call: all kernels of the program; the wall-clock time where kernels cannot be timed.
      kernels: each kernel by name; empty where they cannot be timed.
    """

    call: float
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def pallas(self) -> float:
        """The Pallas kernels alone; everything if there are none."""
        return self.matching(PALLAS) or self.call

    @property
    def implementation(self) -> str:
        return "pallas" if self.matching(PALLAS) else "xla"

    def matching(self, *parts: str, without: str | None = None) -> float:
        """Kernels whose names hold all of the parts, and not `without`."""
        return sum(
            seconds
            for name, seconds in self.kernels.items()
            if all(part in name for part in parts) and not (without and without in name)
        )


Timer = Callable[[Mapping[str, Program | ProgramInPlace]], dict[str, Timing]]
Launches = Sequence[tuple[str, float]]  # the kernels of one call, by name, in seconds


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def wait_for(programs: Mapping[str, Program]) -> None:
    """Returns when all have compiled: compiling would share the host with what is timed."""
    wait([run.compiling for run in programs.values()])


def best_timer() -> Timer:
    """Kernels on a GPU, else the wall clock."""
    return kernel_times if on_gpu() else wall_times


def kernel_times(programs: Mapping[str, Program], rounds: int = KERNEL_ROUNDS) -> dict[str, Timing]:
    """Kernel times from the profiler; needs an NVIDIA GPU and nobody else who uses CUPTI.

    Raises:
      RequestError: it saw no kernel. RuntimeError: some program launched none.
    """
    wait_for(programs)
    for run in programs.values():
        jax.block_until_ready(run())
    turns = [name for _ in range(rounds) for name in programs]

    def take_turns():
        for name in turns:
            for _ in range(2):  # the second counts: what it finds in the caches is its own
                time.sleep(PAUSE)
                jax.block_until_ready(programs[name]())

    seconds = calls_of(traced_call(take_turns), 2 * len(turns), PAUSE)[1::2]
    samples: dict[str, list[Launches]] = {name: [] for name in programs}
    for name, launches in zip(turns, seconds, strict=True):
        samples[name].append(list(without_overlap(launches)))
    return {name: timing_of(calls) for name, calls in samples.items()}


def times_at_places(
    timer: Timer, programs: Mapping[str, Program], array: jax.Array
) -> dict[str, Timing]:
    """Medians over places in memory of an array that is among the programs' arguments.

    The same kernel on the same W somewhere else differs by up to 0.4 % on an H200. On a CPU, where
    times differ by more than that, one place has to do.
    """
    taken = [timer(programs)]
    neighbours = []  # else a copy would be where the one before the last was
    for place in range(1, PLACES if on_gpu() else 1):
        neighbours.append(jnp.zeros(place * NEIGHBOUR_BYTES, jnp.int8))
        copy = jnp.copy(array)
        programs = {name: run.with_other(array, copy) for name, run in programs.items()}
        array = copy
        taken.append(timer(programs))
    return {name: _median([times[name] for times in taken]) for name in programs}


def _median(timings: Sequence[Timing]) -> Timing:
    kernels: dict[str, list[float]] = {}
    for its in timings:
        for name, seconds in its.kernels.items():
            kernels.setdefault(name, []).append(seconds)
    call = statistics.median(its.call for its in timings)
    return Timing(call, {name: statistics.median(times) for name, times in kernels.items()})


def timing_of(calls: Sequence[Launches]) -> Timing:
    """Medians over calls; a kernel launched several times in a call counts with its sum."""
    totals: dict[str, list[float]] = {}
    for launches in calls:
        for name in {name for name, _ in launches}:
            in_call = sum(seconds for kernel, seconds in launches if kernel == name)
            totals.setdefault(name, []).append(in_call)
    call = statistics.median(sum(seconds for _, seconds in launches) for launches in calls)
    return Timing(call, {name: statistics.median(times) for name, times in totals.items()})


def wall_times(programs: Mapping[str, Program], rounds: int = WALL_ROUNDS) -> dict[str, Timing]:
    """Wall-clock times, one call at a time."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    wait_for(programs)
    for run in programs.values():
        jax.block_until_ready(run())
    for _ in range(rounds):
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return {name: Timing(statistics.median(seconds)) for name, seconds in times.items()}


def elapsed_times(
    programs: Mapping[str, Program], rounds: int = 15, warm: float = 0.4, busy: float = 0.05
) -> dict[str, Timing]:
    """Elapsed time of a call with many in flight: launch gaps count, the host's own start does not.

    Args:
      warm: seconds of load before the first round, so that clocks have settled.
      busy: about the seconds that one measurement keeps the device busy.
    """
    wait_for(programs)
    in_flight = {
        name: max(1, math.ceil(3 * busy / _together(run, 3))) for name, run in programs.items()
    }
    start = time.perf_counter()
    while time.perf_counter() - start < warm:
        for name, run in programs.items():
            _together(run, in_flight[name])
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            times[name].append(_elapsed(run, in_flight[name]))
    return {name: Timing(statistics.median(seconds)) for name, seconds in times.items()}


def _elapsed(run: Program, calls: int) -> float:
    """Seconds a call: what `calls` more of them take.

    The first of several that are launched together starts milliseconds late, which is the host's
    time. It is in both of the times whose difference this is.
    """
    few, many = (_together(run, count) for count in (calls, 2 * calls))
    return (many - few) / calls


def _together(run: Program, calls: int) -> float:
    """Seconds that `calls` calls in flight together take."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return time.perf_counter() - start
