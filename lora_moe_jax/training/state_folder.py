"""A trainer's state on disk: numbered folders, each of them whole or not there.

    FOLDER/00000007/arrays/       Orbax: what each adapter has, end to end in one array by dtype
    FOLDER/00000007/trainer.json  what they belong to, and what the user's loop has to know
    FOLDER/00000007/SHA256SUMS    of every other file, as `sha256sum -c` reads it

A state is written beside the others under a hidden name and renamed when all of it is on the disk.
So a process may be killed at any moment; what a disk has damaged since is found by the checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import jax
import numpy as np

from lora_moe_jax.checkpoint.to_disk import sync, to_disk
from lora_moe_jax.errors import CheckpointError
from lora_moe_jax.strict_json import MAX_FILE_BYTES

DOCUMENT, SUMS, ARRAYS = "trainer.json", "SHA256SUMS", "arrays"
_NUMBERED = re.compile(r"[0-9]{8}")
_CHUNK_BYTES = 64 << 20


class StateWriter:
    """Writes states one after the other, in a thread."""

    def __init__(self):
        self._threads = ThreadPoolExecutor(1, "trainer-state")
        self._writing: Future | None = None

    def write(
        self,
        folder: str | os.PathLike,
        document: Mapping[str, object],
        arrays: Mapping[str, np.ndarray],
        keep: int,
    ) -> None:
        """Begins to write a state, when the one before is done.

        Args:
          document: goes to `trainer.json`.
          arrays: nobody may write to them any more.
          keep: how many states remain, the newest ones.

        Raises:
          CheckpointError: the one before could not be written, and this one was not begun; or
            the folder cannot be had, or `document` is too large.
        """
        self.wait()
        text = json.dumps(document, allow_nan=False).encode()
        if len(text) > MAX_FILE_BYTES:
            raise CheckpointError(
                "the state's JSON is too large to be read again",
                file=folder,
                key=max(document, key=lambda key: len(json.dumps(document[key]))),
                expected=f"at most {MAX_FILE_BYTES} bytes",
                found=f"{len(text)} bytes",
            )
        try:
            folder = Path(folder).absolute()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError, ValueError) as cause:  # ValueError: a NUL in the path
            raise _not_written(folder, cause) from cause
        self._writing = self._threads.submit(_write, folder, text, arrays, keep)

    def wait(self) -> None:
        """Returns when everything is on the disk.

        Raises:
          CheckpointError: it could not be written. It is said once.
        """
        if self._writing is not None:
            wait([self._writing])  # an interrupt comes here, and it goes on
            writing, self._writing = self._writing, None
            writing.result()


def _write(folder: Path, text: bytes, arrays: Mapping[str, np.ndarray], keep: int) -> None:
    try:
        for rest in folder.glob(".state-*"):  # of a process that was killed
            shutil.rmtree(rest)
        scratch = Path(tempfile.mkdtemp(prefix=".state-", dir=folder))
        try:
            scratch.chmod(0o755)  # mkdtemp keeps others out
            _save_arrays(scratch / ARRAYS, arrays)
            (scratch / DOCUMENT).write_bytes(text)
            (scratch / SUMS).write_bytes(_checksums(scratch))
            to_disk(scratch)
            number = 1 + max((int(state.name) for state in _states(folder)), default=0)
            scratch.rename(folder / f"{number:08}")
            sync(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for state in _states(folder)[keep:]:
            # What is half deleted must not look like a damaged state.
            old = state.rename(folder / f".state-{state.name}")
            shutil.rmtree(old)
    except (OSError, ValueError) as cause:  # Orbax's are ValueErrors
        raise _not_written(folder, cause) from cause


def _not_written(folder: object, cause: Exception) -> CheckpointError:
    return CheckpointError(
        "the trainer's state could not be written; states that are there already are untouched",
        file=str(folder),
        expected="a folder with room for it",
        found=str(cause)[:1000],
        hint="make room on the disk or choose another folder, and save again",
    )


def _states(folder: Path) -> list[Path]:
    """What has a state's name, the newest first."""
    return sorted((x for x in folder.iterdir() if _NUMBERED.fullmatch(x.name)), reverse=True)


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp  # takes a second, which who only serves need not wait

    if not arrays:  # of no adapters: Orbax refuses an empty tree
        path.mkdir()
        return
    save_args = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
    # The mantissas of trained numbers do not compress.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(dict(arrays), save_args=save_args))


def _checksums(state: Path) -> bytes:
    """SHA256SUMS of what is in a state's folder. Raises OSError."""
    lines = []
    for root, folders, names in os.walk(state, onerror=_raise):
        folders.sort()
        for file in sorted(Path(root, name) for name in names):
            name = file.relative_to(state).as_posix()
            if name == SUMS:
                continue
            if file.is_symlink() or not file.is_file():  # a pipe would block
                raise OSError(f"{name} is not a file")
            with file.open("rb") as opened:
                lines.append(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines).encode()


def _raise(error: OSError) -> None:
    raise error


def newest_state(folder: str | os.PathLike) -> Path:
    """The newest state that is whole. Those that are not are skipped, with a warning.

    Raises:
      CheckpointError: there is none.
    """
    damaged = []
    try:
        for state in _states(Path(folder).absolute()):
            damage = _damage(state)
            if damage is None:
                return state
            damaged.append(f"{state}: {damage}")
            warnings.warn(f"a trainer's state is damaged and skipped: {damaged[-1]}", stacklevel=3)
    except (OSError, TypeError, ValueError) as cause:
        raise CheckpointError(
            "the folder of a trainer's states cannot be read",
            file=str(folder),
            found=str(cause),
            hint="give the folder that Trainer.save was given",
        ) from cause
    raise CheckpointError(
        "there is no whole state of a trainer here",
        file=str(folder),
        expected=f"a folder 00000001 or later with {DOCUMENT}, {SUMS} and {ARRAYS}/",
        found="damaged: " + "; ".join(damaged[:4]) if damaged else "none",
        hint="give the folder that Trainer.save was given",
    )


def _damage(state: Path) -> str | None:
    """What is wrong with the files of a state."""
    try:
        expected, found = (state / SUMS).read_bytes(), _checksums(state)
    except OSError as error:
        return str(error)
    if expected == found:
        return None
    lines = set(expected.splitlines()) ^ set(found.splitlines())
    names = {line.partition(b"  ")[2].decode(errors="replace")[:100] for line in lines}
    return f"{SUMS} does not agree with {', '.join(sorted(names)[:4]) or 'itself'}"


def read_arrays(state: Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """The arrays of a state.

    Raises:
      CheckpointError: Orbax cannot read them in these shapes.
    """
    import orbax.checkpoint as ocp

    restore_args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype) for name, x in shapes.items()
    }
    try:
        args = ocp.args.PyTreeRestore(dict(shapes), restore_args=restore_args)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(state / ARRAYS, args=args)
    except (OSError, ValueError, KeyError) as cause:
        raise CheckpointError(
            "the arrays of a trainer's state cannot be read",
            file=state / ARRAYS,
            expected="those that trainer.json lists",
            found=str(cause)[:1000],
            hint="read it with the version of orbax-checkpoint that wrote it",
        ) from cause
    for name, shape in shapes.items():
        if found[name].shape != shape.shape or found[name].dtype != shape.dtype:
            raise CheckpointError(
                "an array of a trainer's state has another size than trainer.json says",
                file=state / ARRAYS,
                key=name,
                expected=f"{shape.dtype}{list(shape.shape)}",
                found=f"{found[name].dtype}{list(found[name].shape)}",
            )
    return found
