"""What goes wrong for one request or one adapter: a clear error there, and no others notice."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_moe_jax import AdapterError, Engine, read_adapter, write_adapter
from lora_moe_jax.adapters import reader
from lora_moe_jax.serving import runner, scheduler
from lora_moe_jax.serving.interrupts import uninterrupted
from tests.adapters.tables import GOLDEN
from tests.serving.helpers import bits, constant_adapter, greedy, load_golden, prompts, sampled

FAMILY = "deepseek_v3"
FOLDERS = GOLDEN / FAMILY / "adapters"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def one(engine) -> Engine:
    loaded = engine(FAMILY)
    load_golden(loaded, FAMILY)
    loaded._runner.scheduler.prefix_cache = True
    return loaded


@contextmanager
def others(engine: Engine) -> Iterator[None]:
    """Requests run while the block does: they must end as they do without it."""
    batch, params = prompts([5, 20, 9]), [greedy(12), sampled(3, 12), greedy(12)]
    names = ["attn", None, "experts"]
    expected = list(map(bits, engine.generate(batch, params, names)))
    with engine.stream(batch, params, names) as stream:
        seen = [next(stream) for _ in range(4)]
        yield
        seen += stream
    for index, (wanted, _) in enumerate(expected):
        assert tuple(d.token_id for d in seen if d.index == index) == wanted
    ends = sorted((d for d in seen if d.completion), key=lambda d: d.index)
    assert [bits(d.completion) for d in ends] == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(FOLDERS / "rslora", tmp_path / "rslora")


# ---- files ---------------------------------------------------------------------------------------
def cut(folder: Path) -> None:
    os.truncate(folder / TENSORS, (folder / TENSORS).stat().st_size - 100)


def spoil_header(folder: Path) -> None:
    with open(folder / TENSORS, "r+b") as file:
        file.seek(20)
        file.write(b"\xff" * 8)


def put_nan(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    last = next(reversed(tensors))
    tensors[last].flat[-1] = np.nan
    save_file(tensors, folder / TENSORS)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no folder": shutil.rmtree,
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "no tensors": lambda folder: (folder / TENSORS).unlink(),
    "cut": cut,
    "empty": lambda folder: os.truncate(folder / TENSORS, 0),
    "damaged header": spoil_header,
    "half a config": lambda folder: os.truncate(folder / CONFIG, 40),
    "NaN": put_nan,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_folder_that_was_good_when_it_was_listed(one, folder, damage):
    one.load_adapter("old", folder)
    before = one.adapters(), one.stats().adapter_host_bytes
    with others(one):
        damage(folder)
        for name in ("new", "old"):
            with pytest.raises(AdapterError) as caught:
                one.load_adapter(name, folder)
            assert str(folder) in caught.value.file
        assert (one.adapters(), one.stats().adapter_host_bytes) == before
        assert len(one.generate([[5, 6]], greedy(2), "old")) == 1


def cut_short(file: Path) -> None:
    os.truncate(file, 4096)


def written_over(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1000] + bytes(1000))


@pytest.mark.parametrize("change", [cut_short, written_over])
def test_a_file_that_changes_while_it_is_read(one, folder, monkeypatch, change):
    """Its header was good. A mapped file that becomes shorter would end the process."""
    check = reader.check_coverage

    def change_then_check(*arguments):
        change(folder / TENSORS)
        return check(*arguments)

    before = one.adapters()
    with others(one), monkeypatch.context() as patch:
        patch.setattr(reader, "check_coverage", change_then_check)
        with pytest.raises(AdapterError, match="changed while it was read") as caught:
            one.load_adapter("new", folder)
        assert caught.value.file == str(folder / TENSORS)
        assert one.adapters() == before


def test_a_file_that_goes_or_is_replaced_while_it_is_read(one, folder, monkeypatch):
    """Whoever opened it reads to its end what it was."""
    check, file = reader.check_coverage, folder / TENSORS

    def replace_then_check(*arguments):
        shutil.copy(FOLDERS / "attn" / TENSORS, folder / "new")
        os.replace(folder / "new", file)
        file.unlink()
        return check(*arguments)

    batch = prompts([9])
    expected = bits(one.generate(batch, greedy(5), "rslora")[0])
    monkeypatch.setattr(reader, "check_coverage", replace_then_check)
    one.load_adapter("new", folder)
    assert bits(one.generate(batch, greedy(5), "new")[0]) == expected


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """No file of this process may become longer than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("free", [0, 300, 5000])
@pytest.mark.parametrize("layout", ["peft", "per_expert"])
def test_a_full_disk_leaves_no_part_of_an_adapter(one, tmp_path, free, layout):
    """Nor of its config; and an adapter that was there stays."""
    adapter = read_adapter(FOLDERS / "per_expert", one.bank.projections)
    write_adapter(tmp_path / "old", adapter, one.bank.projections, layout="per_expert")
    kept = {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()}
    other = constant_adapter(one, 0.5, rank=3)
    with others(one), full_disk(free):
        for name in ("old", "new"):
            with pytest.raises(AdapterError, match="cannot be written") as caught:
                write_adapter(tmp_path / name, other, one.bank.projections, layout=layout)
            assert caught.value.file == str(tmp_path / name)
    assert os.listdir(tmp_path) == ["old"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()} == kept


@pytest.mark.parametrize("free", [0, 5000])
def test_no_room_for_the_copy_of_an_adapter(one, tmp_path, monkeypatch, free):
    options = dataclasses.replace(one.options, adapter_disk=tmp_path)
    monkeypatch.setattr(one, "options", options)
    before = one.adapters()
    with others(one), full_disk(free):
        for name in ("attn", "new"):
            with pytest.raises(
                AdapterError, match="copy of an adapter cannot be written"
            ) as caught:
                one.load_adapter(name, FOLDERS / "rslora")
            assert caught.value.file == str(tmp_path)
    assert one.adapters() == before and os.listdir(tmp_path) == []


def test_no_room_for_the_config(one, tmp_path, monkeypatch):
    """The tensors are there already."""
    adapter = read_adapter(FOLDERS / "attn", one.bank.projections)

    def no_room(path: Path, text: str, **settings):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(AdapterError, match="No space left"):
        write_adapter(tmp_path / "new", adapter, one.bank.projections)
    assert os.listdir(tmp_path) == []


# ---- values --------------------------------------------------------------------------------------
def test_finite_values_that_overflow(one):
    """What they give is not a number; it ends by its length, and nothing of it is found later."""
    one.load_adapter("huge", constant_adapter(one, 1e30))
    batch = prompts([40, 3, 18, 25])
    params = [greedy(9), sampled(1, 9), sampled(2, 9, top_k=5, top_p=0.5), sampled(3, 9, min_p=0.2)]
    clean = list(map(bits, one.generate(batch, params)))
    for _ in range(2):
        with others(one):
            outs = one.generate(batch, params, "huge")
        for out in outs:
            assert out.finish_reason == "length" and not np.isfinite(out.logprobs).any()
            assert all(0 <= token < one.config.vocab_size for token in out.token_ids)
        assert list(map(bits, one.generate(batch, params))) == clean


# ---- interrupts ----------------------------------------------------------------------------------
def after(function: Callable, count: int) -> Callable:
    """The same function; in its `count`th call Ctrl-C comes when it has done its work."""
    calls = []

    def wrapped(*arguments, **settings):
        result = function(*arguments, **settings)
        calls.append(None)
        if len(calls) == count:
            signal.raise_signal(signal.SIGINT)
        return result

    return wrapped


def before(function: Callable, count: int) -> Callable:
    """The same, when it begins; what it raises is no signal, but the error itself."""
    calls = []

    def wrapped(*arguments, **settings):
        calls.append(None)
        if len(calls) == count:
            raise KeyboardInterrupt
        return function(*arguments, **settings)

    return wrapped


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("method", ["run", "fetch", "_call"])
@pytest.mark.parametrize("when", [before, after])
def test_an_interrupted_step(one, monkeypatch, when, method, count):
    """Before the device begins, when it has, and when it has given the cache back."""
    steps = one._runner.steps
    with others(one):
        with monkeypatch.context() as patch:
            patch.setattr(steps, method, when(getattr(steps, method), count))
            with pytest.raises(KeyboardInterrupt):
                one.generate(prompts([30, 4, 7]), greedy(9), ["rslora", None, "attn"])
        stats = one.stats()
        assert stats.running + stats.waiting == 3, "only the others are left"
        assert [one._adapters.get(n).requests for n in ("attn", "rslora", "experts")] == [1, 0, 1]


@pytest.mark.parametrize("kind", ["load", "update"])
def test_an_interrupt_while_a_slot_is_written(one, monkeypatch, kind):
    """The write takes the old arrays; Ctrl-C comes before the new ones are in their place."""
    adapter = read_adapter(FOLDERS / "rslora", one.bank.projections)
    batch, (writer,) = prompts([12]), one._writer._classes.values()
    expected = bits(one.generate(batch, greedy(5), "rslora")[0])
    with others(one):
        with monkeypatch.context() as patch:
            if kind == "load":
                name = next(iter(writer._writers))
                patch.setitem(writer._writers, name, after(writer._writers[name], 1))
            else:
                patch.setattr(writer, "_write_all", after(writer._write_all, 1))
            with pytest.raises(KeyboardInterrupt):
                {"load": one.load_adapter, "update": one.update_adapter}[kind]("new", adapter)
                one.generate(batch, greedy(5), "new")  # what was loaded is written meanwhile
    assert bits(one.generate(batch, greedy(5), "new")[0]) == expected


TRACED = {module.__file__ for module in (runner, scheduler)}


def interrupted_at(line: int, function: Callable) -> bool:
    """Calls it, with Ctrl-C at the `line`th line that it executes of runner and scheduler."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if event == "call":
            return trace if frame.f_code.co_filename in TRACED else None
        if event == "line":
            lines += 1
            if lines == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
    assert lines < line, "it was not interrupted"
    return False


def free_for_others(lock: threading.RLock) -> bool:
    """Whether another thread can have it: this one can in any case."""

    def take() -> bool:
        taken = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return taken

    with ThreadPoolExecutor(1) as other:
        return other.submit(take).result()


def test_an_interrupt_at_any_line(one):
    """Nothing is left of who was interrupted, wherever it was."""
    batch, rng = prompts([30, 4]), np.random.default_rng(0)
    before = one.stats()

    def generate() -> None:
        one.generate(batch, greedy(3), ["rslora", None])

    line, count, interrupted = 1, 0, True
    while interrupted:
        with others(one):
            interrupted = interrupted_at(line, generate)
            stats = one.stats()
            assert (stats.running, stats.waiting) == (3, 0), line
            assert one._adapters.get("rslora").requests == 0
        line += int(rng.integers(1, 60))
        count += 1
    assert count > 20
    after = one.stats()
    assert (after.running, after.free_pages) == (0, before.total_pages)


def test_an_interrupt_at_every_line_leaves_steps_to_other_threads(one):
    def generate() -> None:
        one.generate(prompts([4]), greedy(2))

    line = 1
    while interrupted_at(line, generate):
        assert free_for_others(one._runner.lock), line
        line += 1
    assert line > 200


def test_an_interrupt_is_held_back_and_comes_after():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_threads_and_ignored_interrupts_are_left_alone():
    found = []

    def elsewhere() -> None:
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        elsewhere()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert found == [handler, signal.SIG_IGN]
