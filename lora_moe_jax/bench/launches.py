"""The kernels that ran on a GPU, as its profiler saw them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from lora_moe_jax.errors import RequestError


class Launch(NamedTuple):
    """A kernel that ran, in nanoseconds of the device's clock."""

    start: float
    end: float
    kernel: str


def traced_call(run: Callable[[], None]) -> list[Launch]:
    """The kernels that ran in a call, in the order in which they began.

    Raises:
      RequestError: there were none.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # what it does costs time
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return launches_in(Path(folder))


def launches_in(folder: Path) -> list[Launch]:
    """The kernels of a profiler's trace, in the order in which they began.

    Raises:
      RequestError: it has none.
    """
    found = []
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if "GPU" in plane.name:
                found += launches_of(plane)
    if not found:
        raise RequestError(
            "the profiler saw no kernel", hint="it needs CUPTI, and no other profiler beside it"
        )
    return sorted(found)


def launches_of(plane) -> list[Launch]:
    """Those of a GPU's plane of `jax.profiler.ProfileData`."""
    return [
        Launch(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def without_overlap(launches: Iterable[Launch]) -> Iterator[tuple[str, float]]:
    """Each kernel, and its seconds after the end of those that began earlier.

    From JAX 0.12 on a kernel may begin while the one before it runs, and wait: that counts once.
    """
    last = float("-inf")
    for launch in launches:
        yield launch.kernel, max(0.0, launch.end - max(last, launch.start)) / 1e9
        last = max(last, launch.end)


def calls_of(launches: Sequence[Launch], count: int, pause: float) -> list[list[Launch]]:
    """The launches of each of so many calls, between which the device had pauses.

    Args:
      pause: seconds that each of them took at least.

    Raises:
      RuntimeError: there are not as many pauses: a call had no kernels.
    """
    pauses, last = [], launches[0].end
    for place, launch in enumerate(launches[1:], 1):
        pauses.append((launch.start - last, place))
        last = max(last, launch.end)
    longest = sorted(pauses, reverse=True)[: count - 1]
    if len(longest) < count - 1 or any(length < 0.99e9 * pause for length, _ in longest):
        raise RuntimeError(f"not all of {count} calls had kernels, of which {len(launches)} ran")
    cuts = [0, *sorted(place for _, place in longest), len(launches)]
    return [list(launches[begin:end]) for begin, end in itertools.pairwise(cuts)]
