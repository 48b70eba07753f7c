"""Four CPU devices for the mesh tests, all else runs on the first; which kernels to test; and
which tests one worker runs."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from xdist.scheduler import LoadScopeScheduling

jax.config.update("jax_num_cpu_devices", 4)

# What a shell runs in the background inherits that Ctrl-C is ignored, and tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What one process has compiled, the others (workers, and programs that tests run) find on disk.
COMPILED = {
    "jax_compilation_cache_dir": str(Path(__file__).parents[1] / ".jax_cache"),
    "jax_persistent_cache_min_compile_time_secs": 0.1,
}
for option, value in COMPILED.items():
    jax.config.update(option, value)
    os.environ[option.upper()] = str(value)


# These share engines and trainers, or take minutes: each runs on one worker, the longest first.
FIRST = (
    "training",
    "serving",
    "test_readme.py",
    "parallel",
    "server",
    "test_notebook.py",
    "pocket",
)

SAMPLED = 4


def group(nodeid: str) -> str:
    """What runs on one worker of `--dist loadscope`: all of an entry of FIRST, else a file."""
    path = nodeid.partition("::")[0]
    return next((name for name in FIRST if path.startswith(f"tests/{name}")), path)


def pytest_addoption(parser: pytest.Parser) -> None:
    said = f"{SAMPLED} of the chosen tests, which follow from the seed"
    parser.addoption("--sample", metavar="SEED", help=said)


def sample(nodeids: list[str], seed: str) -> list[str]:
    """Other ones with every seed, whatever the order of the tests."""
    return sorted(nodeids, key=lambda its: hashlib.sha256((seed + its).encode()).digest())[:SAMPLED]


@pytest.hookimpl(trylast=True)  # of what marks have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("sample")
    if seed is not None:
        chosen = set(sample([item.nodeid for item in items], seed))
        config.hook.pytest_deselected(items=[its for its in items if its.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(group(item.nodeid), len(FIRST)))


class Groups(LoadScopeScheduling):
    # xdist's own groups, which are marks, get lost with pytest 9.2.
    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Groups | None:
    return Groups(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(autouse=True, scope="module")
def forgotten(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file has compiled goes with it: Linux lets a process have 65,530 memory maps, of which
    each compiled function takes some, and LLVM crashes without. Those of FIRST share engines."""
    yield
    if group(request.node.nodeid) not in FIRST:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """On a GPU, what is free holds NaN, -1 as integers: kernels find that where nobody wrote."""
    if jax.default_backend() == "gpu":
        words = (2**power for power in range(6, 24) for _ in range(4))
        poison = [jax.device_put(np.full(count, -1, np.int32)) for count in words]
        jax.block_until_ready(poison)


@pytest.fixture(scope="session")
def implementation() -> str:
    """What the tests of correctness run: the platform's own kernels."""
    return {"cpu": "xla", "gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}[jax.default_backend()]
