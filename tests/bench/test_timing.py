"""Medians, and the order in which programs take turns."""

from __future__ import annotations

import itertools
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax.bench import timing
from lora_moe_jax.bench.launches import Launch
from lora_moe_jax.bench.timing import Program, Timing


def ready(compiled) -> Program:
    """A program without arguments that has compiled already."""
    compiling = Future()
    compiling.set_result(compiled)
    return Program(compiling, ())


def test_median_of_calls():
    calls = [
        [("a_mosaic_gpu_kernel", 1.0), ("copy", 5.0)],
        [("a_mosaic_gpu_kernel", 3.0), ("copy", 6.0)],
        [("a_mosaic_gpu_kernel", 2.0), ("copy", 9.0)],
    ]
    measured = timing.timing_of(calls)
    assert measured.kernels == {"a_mosaic_gpu_kernel": 2.0, "copy": 6.0}
    assert measured.call == 9.0
    assert measured.pallas == 2.0
    assert measured.implementation == "pallas"


def test_a_kernel_launched_twice_counts_twice():
    measured = timing.timing_of([[("a", 1.0), ("a", 2.0)]])
    assert measured == Timing(3.0, {"a": 3.0})


def test_without_pallas_kernels_everything_counts():
    measured = Timing(4.0, {"gemm": 4.0})
    assert (measured.pallas, measured.implementation) == (4.0, "xla")


def test_matching():
    measured = Timing(7.0, {"x_shrink": 1.0, "x_product": 2.0, "y": 4.0})
    assert measured.matching("x") == 3.0
    assert measured.matching("x", without="shrink") == 2.0


class Clock:
    """Time that passes only where a test says so: a busy machine changes nothing."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pass_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


class Gpu:
    """What a profiler sees of programs whose kernels take turns on a device that is never busy."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.launches: list[Launch] = []

    def program(self, name: str, *kernels: tuple[str, float, float]) -> Program:
        """Its kernels: how long after the call's begin each begins and ends, in ms."""

        def run():
            now = self.clock.now
            for kernel, *times in kernels:
                begin, end = (1e9 * now + 1e6 * time for time in times)
                self.launches.append(Launch(begin, end, f"{name}_{kernel}"))
                self.clock.pass_until(1e-9 * end)

        return ready(run)

    def traced_call(self, run) -> list[Launch]:
        self.launches.clear()  # the first calls are not traced
        run()
        return self.launches


@pytest.fixture
def gpu(clock, monkeypatch) -> Gpu:
    gpu = Gpu(clock)
    monkeypatch.setattr(timing, "traced_call", gpu.traced_call)
    return gpu


def test_kernel_times_take_turns(gpu):
    """And kernels that wait for each other count once."""
    programs = {
        "a": gpu.program("a", ("shrink", 0, 3), ("product", 1, 8), ("copy", 9, 10)),
        "b": gpu.program("b", ("product", 0, 5)),
    }
    times = timing.kernel_times(programs, rounds=3)
    assert times["a"].call == pytest.approx(9e-3)
    expected = {"a_shrink": 3e-3, "a_product": 5e-3, "a_copy": 1e-3}
    assert times["a"].kernels == pytest.approx(expected)
    assert times["b"].kernels == pytest.approx({"b_product": 5e-3})
    calls = [name for name, _ in itertools.groupby(its.kernel[0] for its in gpu.launches)]
    assert calls == list("ababab")
    assert len(gpu.launches) == 3 * 2 * (3 + 1)


@pytest.mark.parametrize("on_gpu, places", [(True, 5), (False, 1)])
def test_times_at_places(monkeypatch, on_gpu, places):
    """Each with the array somewhere else, and the median of all; of a kernel, where it ran."""
    monkeypatch.setattr(timing, "on_gpu", lambda: on_gpu)
    given, other, seen = jnp.arange(3.0), jnp.ones(2), []

    def timer(programs):
        (run,) = programs.values()
        seen.append(run.arguments)
        taken = [5.0, 1.0, 4.0, 2.0, 9.0][len(seen) - 1]
        rare = {"rare": 3.0} if len(seen) == places else {}
        return {"it": Timing(taken, {"kernel": 10 * taken} | rare)}

    run = ready(None)._replace(arguments=(other, given))
    times = timing.times_at_places(timer, {"it": run}, given)
    expected = 4.0 if on_gpu else 5.0
    assert times == {"it": Timing(expected, {"kernel": 10 * expected, "rare": 3.0})}
    assert len(seen) == places
    assert len({array.unsafe_buffer_pointer() for _, array in seen}) == places
    assert all(its is other and (array == given).all() for its, array in seen)


def test_a_program_without_kernels_is_an_error(gpu):
    programs = {"a": gpu.program("a", ("x", 0, 3), ("y", 3, 4)), "nothing": ready(lambda: None)}
    with pytest.raises(RuntimeError, match="not all of 8 calls had kernels, of which 8 ran"):
        timing.kernel_times(programs, rounds=2)


@pytest.mark.parametrize(
    "timer",
    [
        lambda programs: timing.wall_times(programs, rounds=3),
        lambda programs: timing.elapsed_times(programs, rounds=3, warm=0, busy=0),
    ],
)
def test_wall_clock_takes_turns(timer, clock):
    log = []

    def run(name, seconds):
        return ready(lambda: (log.append(name), clock.pass_until(clock.now + seconds)))

    times = timer({"a": run("a", 1e-3), "b": run("b", 2e-3)})
    assert [times[name].call for name in "ab"] == pytest.approx([1e-3, 2e-3])
    assert times["b"].kernels == {}
    assert log.count("a") == log.count("b") >= 3
    turns = [name for name, _ in itertools.groupby(log)]
    assert turns == ["a", "b"] * (len(turns) // 2) and len(turns) >= 6


def test_elapsed_time_leaves_the_start_out(clock):
    """Calls that take 1 ms after a start of 20 ms: the first of several launched together."""
    busy_until = 0.0

    class Result:
        def __init__(self, end):
            self.end = end

        def block_until_ready(self):
            clock.pass_until(self.end)

    def launch():
        nonlocal busy_until
        if clock.now >= busy_until:
            busy_until = clock.now + 20e-3
        busy_until += 1e-3
        return Result(busy_until)

    times = timing.elapsed_times({"a": ready(launch)}, rounds=3, warm=0)
    assert times["a"].call == pytest.approx(1e-3)


def test_a_program_that_does_not_compile_says_so():
    compiling = Future()
    compiling.set_exception(ValueError("too much shared memory"))
    with pytest.raises(ValueError, match="too much shared memory"):
        timing.wall_times({"a": Program(compiling, ())}, rounds=1)


def test_program_is_compiled():
    run = timing.program(lambda x: x + 1, 1.0)
    assert isinstance(run.compiled, jax.stages.Compiled)
    assert run() == 2.0


def test_results_in_place():
    run = timing.ProgramInPlace(lambda x: {"y": x + 1}, jnp.ones(3))
    first = run()["y"]
    place = first.unsafe_buffer_pointer()
    assert np.array_equal(first, [2, 2, 2])
    second = run()["y"]
    assert first.is_deleted() and second.unsafe_buffer_pointer() == place
    assert np.array_equal(second, [2, 2, 2])
