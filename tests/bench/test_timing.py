"""Medians, and the order in which programs take turns."""

from __future__ import annotations

import itertools
from concurrent.futures import Future

import jax
import pytest
from jax.experimental.mosaic.gpu import profiler

from lora_moe_jax.bench import timing
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


class FakeCupti:
    """Every call launches one kernel, whose milliseconds are the number of calls so far."""

    log: list[tuple[str, bool]] = []

    def __init__(self, finalize):
        self.finalize = finalize

    def measure(self, compiled, aggregate):
        assert not aggregate

        def run(*arguments):
            FakeCupti.log.append((compiled, self.finalize))
            return None, [(compiled, float(len(FakeCupti.log)))] if compiled != "empty" else None

        return run


def test_kernel_times_take_turns(monkeypatch):
    monkeypatch.setattr(profiler, "Cupti", FakeCupti)
    monkeypatch.setattr(FakeCupti, "log", [])
    times = timing.kernel_times({"a": ready("a"), "b": ready("b")}, rounds=3)
    assert FakeCupti.log == [(name, False) for name in "ababa"] + [("b", True)]
    assert times["a"].call == pytest.approx(3e-3)  # of 1, 3 and 5 ms
    assert times["b"].call == pytest.approx(4e-3)


def test_no_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(profiler, "Cupti", FakeCupti)
    with pytest.raises(RuntimeError, match="no kernel in 'nothing'"):
        timing.kernel_times({"nothing": ready("empty")}, rounds=1)


class Clock:
    """Time that passes only where a test says so: a busy machine changes nothing."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def pass_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


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
