"""Much at once for an engine: requests that come and go, under adapters that do too.

What comes out is kept, with the folder of the adapter's version, to be compared with each request
alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from lora_moe_jax import Adapter, Completion, Engine, RequestStream, SamplingParams, write_adapter
from lora_moe_jax.adapters import AdapterConfig, LoraPair, Projection
from tests.serving.helpers import bits, greedy, sampled

LAYOUTS = ("peft", "per_expert", "shared_outer")
LONGEST_PROMPT, MOST_TOKENS = 48, 24
MOST_OPEN = 20  # requests: with 8 rows some always wait


def random_adapter(
    rng: np.random.Generator, projections: Mapping[str, Projection], layout: str
) -> Adapter:
    """Of rank 2 to 16, on one to five kinds of projection, in all layers that have them."""
    rank = int(rng.integers(2, 17))
    dtype = np.float32 if rng.random() < 0.5 else jax.numpy.bfloat16
    kinds = sorted({name.split(".", 3)[-1] for name in projections})
    chosen = set(rng.choice(kinds, rng.integers(1, 6), replace=False))
    pairs = {}
    for name, one in projections.items():
        if name.split(".", 3)[-1] not in chosen:
            continue
        a = rng.normal(0, 0.1, (one.groups, rank, one.in_features)).astype(dtype)
        b = rng.normal(0, 0.1, (one.groups, rank, one.out_features)).astype(dtype)
        if layout == "shared_outer" and one.kind == "expert":
            a, b = (a, b[:1]) if name.endswith("down_proj") else (a[:1], b)
        scaling, ranks = np.ones(one.groups, np.float32), np.full(one.groups, rank, np.int32)
        pairs[name] = LoraPair(a, b, scaling, ranks)
    return Adapter(pairs, "", AdapterConfig())


def write_adapters(
    root: Path, projections: Mapping[str, Projection], count: int, seed: int = 0
) -> list[Path]:
    """Folders of random adapters, the three layouts in turn."""
    rng = np.random.default_rng(seed)
    folders = [root / f"adapter-{i}" for i in range(count)]
    for i, folder in enumerate(folders):
        layout = LAYOUTS[i % len(LAYOUTS)]
        adapter = random_adapter(rng, projections, layout)
        write_adapter(folder, adapter, projections, layout=layout)
    return folders


@dataclass
class Asked:
    """A request, and what has come of it.

    Attributes:
      source: the folder of the version of its adapter; None for the base model.
      completion: None while it is unfinished, and of a stream that was closed.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    source: Path | None
    name: str | None
    version: int | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    completion: Completion | None = None
    closed: bool = False

    @property
    def whole(self) -> bool:
        """Whether it came to its own end."""
        return self.completion is not None and self.completion.finish_reason != "abort"


@dataclass(frozen=True)
class Memory:
    """What is held while no request is open: device arrays, and the process's resident bytes."""

    arrays: int
    array_bytes: int
    resident: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        arrays = jax.live_arrays()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(len(arrays), sum(array.nbytes for array in arrays), 4096 * pages)


class Load:
    """A run of random operations over an engine that has no adapters yet.

    Attributes:
      asked: all requests so far.
      done: how often each operation was done.
    """

    def __init__(self, engine: Engine, folders: Sequence[Path], seed: int = 0):
        self.asked: list[Asked] = []
        self.done = dict.fromkeys(("close", "replace", "unload", "score", "pin"), 0)
        self._engine = engine
        self._folders = folders
        self._rng = np.random.default_rng(seed)
        self._names = [f"a{i}" for i in range(len(folders))]
        self._scored: list[tuple[Asked, bytes]] = []
        self._open: list[tuple[RequestStream, list[Asked]]] = []
        self._loaded: dict[str, tuple[Path, int]] = {}  # what the name stands for: folder, version
        self._beginnings = [self._tokens(LONGEST_PROMPT) for _ in range(3)]
        for name, folder in zip(self._names, folders, strict=True):
            self._load(name, folder)

    def run(self, requests: int) -> None:
        """Asks for so many more, with all else meanwhile, and reads what is left at the end."""
        goal = len(self.asked) + requests
        others = (self.abort, self.close, self.replace, self.unload, self.score, self.pin)
        while len(self.asked) < goal:
            chance = self._rng.random()
            if chance < 0.25:
                self._pick(others)()
            elif chance < 0.5 and self._unfinished < MOST_OPEN:
                self.ask(min(int(self._rng.integers(1, 4)), goal - len(self.asked)))
            else:
                self.read(int(self._rng.integers(1, 20)))
        while self._open:
            self.read(1000)

    @property
    def _unfinished(self) -> int:
        return sum(one.completion is None for _, many in self._open for one in many)

    def _pick(self, sequence: Sequence):
        return sequence[self._rng.integers(len(sequence))]

    # Requests

    def ask(self, count: int) -> None:
        """Opens a stream of so many requests."""
        asked = [self._request() for _ in range(count)]
        stream = self._engine.stream(
            [list(one.prompt) for one in asked],
            [one.params for one in asked],
            [one.name for one in asked],
            priority=[int(p) for p in self._rng.integers(0, 2, count)],
        )
        self._open.append((stream, asked))
        self.asked += asked

    def _request(self) -> Asked:
        name = self._name()
        source, version = (None, None) if name is None else self._loaded[name]
        return Asked(self._prompt(), self._params(), source, name, version)

    def _name(self) -> str | None:
        """Few are asked for often, the others now and then."""
        chance, loaded = self._rng.random(), list(self._loaded)
        if chance < 0.1:
            return None
        return self._pick(loaded[:8] if chance < 0.5 else loaded)

    def _prompt(self) -> tuple[int, ...]:
        """Some begin alike."""
        length = int(self._rng.integers(1, LONGEST_PROMPT + 1))
        if self._rng.random() < 0.5:
            return self._tokens(length)
        last = self._tokens(1)
        return (self._pick(self._beginnings)[: length - 1] + last)[:length]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(2, self._engine.config.vocab_size, count).tolist())

    def _params(self) -> SamplingParams:
        length, seed = int(self._rng.integers(1, MOST_TOKENS + 1)), int(self._rng.integers(1000))
        ends = bool(self._rng.integers(2))
        return self._pick(
            [
                greedy(length, ignore_eos=ends),
                sampled(seed, length, ignore_eos=ends),
                sampled(seed, length, top_k=40, top_p=0.9),
            ]
        )

    def read(self, count: int) -> None:
        """Takes so many tokens from one stream; forgets it if it has ended."""
        if not self._open:
            return
        place = int(self._rng.integers(len(self._open)))
        stream, asked = self._open[place]
        for _ in range(count):
            delta = next(stream, None)
            if delta is None:
                del self._open[place]
                return
            one = asked[delta.index]
            assert one.completion is None, "something came after the last delta"
            one.completion = delta.completion
            if delta.token_id is not None:
                one.tokens.append(delta.token_id)
                one.logprobs.append(delta.logprob)

    def abort(self) -> None:
        """Ends a request, which may have ended; its last delta is read like any other."""
        if self._open:
            stream, asked = self._pick(self._open)
            left = [index for index, one in enumerate(asked) if one.completion is None]
            stream.abort(self._pick(left or [0]))

    def close(self) -> None:
        """Whoever reads a stream goes away."""
        if self._open and self._rng.random() < 0.5:
            stream, asked = self._open.pop(self._rng.integers(len(self._open)))
            stream.close()
            for one in asked:
                one.closed = one.completion is None
            self.done["close"] += 1

    def score(self) -> None:
        """Scores a prompt; the others go on meanwhile."""
        one = self._request()
        (score,) = self._engine.score([list(one.prompt)], [one.name])
        assert (score.adapter, score.adapter_version) == (one.name, one.version)
        self._scored.append((one, score.logprobs.tobytes()))
        self.done["score"] += 1

    # Adapters

    def _load(self, name: str, folder: Path) -> None:
        self._loaded[name] = folder, self._engine.load_adapter(name, folder).version

    def replace(self) -> None:
        """A new version under a name, whoever is using the old one."""
        self._load(self._pick(list(self._loaded)), self._pick(self._folders))
        self.done["replace"] += 1

    def unload(self) -> None:
        """Forgets a name, whoever is using it, or loads one that was forgotten."""
        missing = [name for name in self._names if name not in self._loaded]
        if len(missing) > len(self._names) // 4:
            self._load(self._pick(missing), self._pick(self._folders))
        else:
            name = self._pick(list(self._loaded))
            self._engine.unload_adapter(name, when_busy="finish")
            del self._loaded[name]
            self.done["unload"] += 1

    def pin(self) -> None:
        """Unpins what is pinned, or pins one that has a slot."""
        infos = self._engine.adapters()
        pinned = [info.name for info in infos if info.pinned]
        for name in pinned:
            self._engine.unpin_adapter(name)
        resident = [info.name for info in infos if info.slot is not None]
        if not pinned and resident:
            self._engine.pin_adapter(self._pick(resident))
            self.done["pin"] += 1

    # What must hold

    def check_idle(self) -> None:
        """Nobody has anything."""
        stats = self._engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_pages == stats.total_pages
        infos = self._engine.adapters()
        assert {info.name: info.version for info in infos} == {
            name: version for name, (_, version) in self._loaded.items()
        }
        assert stats.adapter_host_bytes == sum(info.nbytes for info in infos)
        slots = [info.slot for info in infos if info.slot is not None]
        assert len(slots) == len(set(slots)) == stats.resident_adapters

    def check_asked(self) -> None:
        """None is lost, and each completion is what came before it, of the version asked for."""
        for one in self.asked:
            assert one.closed != (one.completion is not None), one
            if one.completion is not None:
                out = one.completion
                assert (out.token_ids, out.logprobs) == (one.tokens, one.logprobs)
                assert (out.adapter, out.adapter_version) == (one.name, one.version)
                assert tuple(out.prompt_token_ids) == one.prompt

    def check_bits(self, engine: Engine) -> None:
        """Compares each request with the same one alone in `engine`, which has no adapters."""
        probe, seen = [list(self._beginnings[0])], set()
        for source in sorted({one.source for one in self.asked}, key=str):
            name = None if source is None else "alone"
            if source is not None:
                engine.load_adapter(name, source)
            for one in self.asked:
                if one.source == source:
                    (alone,) = engine.generate([list(one.prompt)], one.params, [name])
                    check_one(one, alone)
            for one, logprobs in self._scored:
                if one.source == source:
                    (score,) = engine.score([list(one.prompt)], [name])
                    assert score.logprobs.tobytes() == logprobs
            seen_before = len(seen)
            seen.add(engine.score(probe, [name])[0].logprobs.tobytes())
            assert len(seen) > seen_before, "a wrong adapter would be noticed"
            if source is not None:
                engine.unload_adapter(name)


def check_one(one: Asked, alone: Completion) -> None:
    """What came is what comes alone; of what was ended early, its beginning."""
    tokens, logprobs = bits(alone)
    if one.whole:
        assert bits(one.completion) == (tokens, logprobs)
        assert one.completion.finish_reason == alone.finish_reason
    found = np.float32(one.logprobs).tobytes()
    assert tuple(one.tokens) == tokens[: len(one.tokens)] and logprobs.startswith(found)


class Clock:
    """Counts the seconds of a block."""

    def __enter__(self) -> Clock:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error) -> None:
        self.seconds = time.perf_counter() - self._start
