"""What a trainer's state means: the document beside the arrays, and whether it fits an engine."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from lora_moe_jax.adapters import check_name
from lora_moe_jax.adapters.bank import Bank
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import AdapterError, CheckpointError, RequestError
from lora_moe_jax.strict_json import read_json_object
from lora_moe_jax.training.pair_shape import PairShape
from lora_moe_jax.training.state_folder import DOCUMENT, newest_state, read_arrays

SCHEMA = 3
_NOT_OF_ITS_NUMBERS = ("dtype", "max_position", "bos_token_id", "eos_token_ids")

# An array as the document lists it: its path in a pytree, dtype, and shape.
Listed = list[str | list[int]]


def extra_of(extra: Mapping[str, object] | None) -> dict[str, object]:
    """A copy of what a user wants to find again.

    Raises:
      RequestError: JSON would not give back the same.
    """
    try:
        text = json.dumps({} if extra is None else extra, allow_nan=False, ensure_ascii=False)
        text.encode()  # half a character cannot be
        copy = json.loads(text)
        good = isinstance(copy, dict) and (extra is None or copy == extra)
        found = repr(extra)[:200]
    except (TypeError, ValueError, RecursionError) as error:
        good, found = False, str(error)[:200]
    if not good:
        raise RequestError(
            "this cannot be saved",
            key="extra",
            expected="a dict of finite numbers, strings, lists and dicts, whose keys are strings",
            found=found,
            hint="make lists of tuples and arrays: JSON has neither",
        )
    return copy


class AdapterState(NamedTuple):
    """One adapter in training.

    Attributes:
      shapes: of its pairs, by `Projection.name`.
      parts: "masters", "moments" and, if there are any, "gradients"; pytrees of arrays.
    """

    shapes: Mapping[str, PairShape]
    steps: int
    parts: dict[str, object]


def trainer_document(
    model: ModelConfig, adapters: Mapping[str, AdapterState], extra: Mapping[str, object]
) -> dict[str, object]:
    """What `trainer.json` says."""
    return {
        "schema": SCHEMA,
        "model": _facts(model),
        "adapters": {
            name: {
                "pairs": {
                    projection: {"ranks": shape.ranks.tolist(), "scaling": shape.scaling.tolist()}
                    for projection, shape in adapter.shapes.items()
                },
                "steps": adapter.steps,
                "arrays": {part: _listed(tree) for part, tree in adapter.parts.items()},
            }
            for name, adapter in adapters.items()
        },
        "extra": extra,
    }


def trainer_arrays(adapters: Mapping[str, AdapterState]) -> dict[str, np.ndarray]:
    """What `arrays` holds: copies on the host."""
    return {
        f"{name}/{part}/{dtype}": flat
        for name, adapter in adapters.items()
        for part, tree in adapter.parts.items()
        for dtype, flat in _packed(tree).items()
    }


def _facts(model: ModelConfig) -> dict[str, object]:
    """The sizes and options that a model's numbers depend on."""
    facts = json.loads(json.dumps(dataclasses.asdict(model)))
    return {key: value for key, value in facts.items() if key not in _NOT_OF_ITS_NUMBERS}


class SavedPair(NamedTuple):
    """Of each group of a projection, its rank and scaling; 0 if it is not trained."""

    ranks: list[int]
    scaling: list[float]


class SavedAdapter(NamedTuple):
    """What `trainer.json` says of an adapter.

    Attributes:
      pairs: by `Projection.name`.
    """

    pairs: dict[str, SavedPair]
    steps: int
    arrays: dict[str, list[Listed]]


class SavedState:
    """The newest whole state of a folder.

    Attributes:
      path: its own folder.
      adapters: by name.
      extra: as it was saved.

    Raises:
      CheckpointError: there is none, or it is none of this version of the library.
    """

    def __init__(self, folder: str | os.PathLike):
        self.path = newest_state(folder)
        self.file = self.path / DOCUMENT
        document = read_json_object(self.file, CheckpointError)
        schema = self._field(document, "schema", int)
        if schema != SCHEMA:
            raise self._wrong("schema", SCHEMA, schema, "use the version that has written it")
        self._model = self._field(document, "model", dict)
        self.extra: dict[str, object] = self._field(document, "extra", dict)
        adapters = self._field(document, "adapters", dict)
        self.adapters = {name: self._adapter(name, adapters) for name in adapters}

    def check_model(self, model: ModelConfig) -> None:
        """Raises CheckpointError if the state belongs to another base model."""
        saved, facts = _by_path(self._model), _by_path(_facts(model))
        for key in sorted(saved.keys() | facts.keys()):
            if saved.get(key) != facts.get(key):
                raise self._wrong(
                    f"model.{key}",
                    f"{facts.get(key)}, as the engine's model",
                    saved.get(key),
                    "build the engine with the base model that was trained on",
                )

    def shapes(self, name: str, bank: Bank) -> dict[str, PairShape]:
        """Of the adapter's pairs. Raises CheckpointError if the bank has no place for one."""
        pairs = self.adapters[name].pairs
        return {its: self._shape(f"adapters.{name}.pairs", its, pairs[its], bank) for its in pairs}

    def _shape(self, at: str, name: str, pair: SavedPair, bank: Bank) -> PairShape:
        if name not in bank.projections:
            hint = "build the engine with target_modules that include it"
            raise self._wrong(at, "projections that the engine has slots for", name, hint)
        groups = bank.projections[name].groups
        if len(pair.ranks) != groups:
            raise self._wrong(f"{at}.{name}", f"{groups} ranks and scalings", len(pair.ranks))
        try:
            return PairShape.of(name, *pair, bank)
        except AdapterError as error:
            raise self._wrong(
                f"{at}.{name}", error.expected, error.found, error.hint, error.message
            ) from None

    def arrays(self, likes: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
        """Reads all arrays.

        Args:
          likes: for every adapter and part of it, the pytree of shapes that the engine has room
            for.

        Returns:
          such pytrees of arrays.

        Raises:
          CheckpointError: it has others, or they cannot be read.
        """
        shapes = {}
        for name, parts in likes.items():
            for part, like in parts.items():
                self._check_listed(name, part, _listed(like))
                for dtype, shape in _flat_shapes(like).items():
                    shapes[f"{name}/{part}/{dtype}"] = shape
        flat = read_arrays(self.path, shapes) if shapes else {}
        return {
            name: {
                part: _unpacked(like, {d: flat[f"{name}/{part}/{d}"] for d in _flat_shapes(like)})
                for part, like in parts.items()
            }
            for name, parts in likes.items()
        }

    def _check_listed(self, name: str, part: str, expected: list[Listed]) -> None:
        saved = self.adapters[name].arrays[part]
        hint = "build the engine with the shared_outer that it had"
        if part == "moments":
            hint = "restore with the optimizer that it was trained with"
        for i in range(max(len(saved), len(expected))):
            found, wanted = (x[i] if i < len(x) else "no more arrays" for x in (saved, expected))
            if found != wanted:
                raise self._wrong(f"adapters.{name}.arrays.{part}[{i}]", wanted, found, hint)

    def _adapter(self, name: str, adapters: dict[str, object]) -> SavedAdapter:
        key = f"adapters.{name}"
        entry = self._field(adapters, name, dict, "adapters.")
        try:
            check_name(name)
        except AdapterError as error:
            raise self._wrong(key, error.expected, error.found) from None
        pairs = self._field(entry, "pairs", dict, f"{key}.")
        steps = self._field(entry, "steps", int, f"{key}.")
        arrays = self._field(entry, "arrays", dict, f"{key}.")
        for part in arrays:
            self._field(arrays, part, list, f"{key}.arrays.")
        if not {"masters", "moments"} <= arrays.keys() <= {"masters", "moments", "gradients"}:
            raise self._wrong(f"{key}.arrays", "masters, moments, perhaps gradients", [*arrays])
        pairs = {projection: self._pair(f"{key}.pairs.", projection, pairs) for projection in pairs}
        return SavedAdapter(pairs, steps, arrays)

    def _pair(self, at: str, name: str, pairs: dict[str, object]) -> SavedPair:
        entry = self._field(pairs, name, dict, at)
        ranks, scaling = (self._field(entry, k, list, f"{at}{name}.") for k in SavedPair._fields)
        if not all(type(rank) is int and rank >= 0 for rank in ranks) or not any(ranks):
            raise self._wrong(f"{at}{name}.ranks", "integers of at least 0, one above", ranks)
        if len(scaling) != len(ranks) or not all(map(_is_float32, scaling)):
            raise self._wrong(f"{at}{name}.scaling", f"{len(ranks)} numbers", scaling)
        return SavedPair(ranks, scaling)

    def _field(self, found: Mapping[str, object], key: str, kind: type, at: str = "") -> object:
        if type(found.get(key)) is not kind:
            raise self._wrong(at + key, f"a JSON value of type {kind.__name__}", found.get(key))
        return found[key]

    def _wrong(
        self,
        key: str,
        expected: object,
        found: object,
        hint: str | None = None,
        message: str = "the trainer's state does not fit",
    ) -> CheckpointError:
        found = str(found)[:300]
        return CheckpointError(
            message, file=self.file, key=key, expected=expected, found=found, hint=hint
        )


def _is_float32(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= float(np.finfo(np.float32).max)


def _by_path(facts: Mapping[str, object], at: str = "") -> dict[str, object]:
    """A nested object as one: {"moe": {"top_k": 2}} is {"moe.top_k": 2}."""
    found = {}
    for key, value in facts.items():
        inner = _by_path(value, f"{at}{key}.") if isinstance(value, dict) else {at + key: value}
        found |= inner
    return found


# Thousands of small arrays take Orbax minutes, so they are stored end to end.


def _listed(tree: object) -> list[Listed]:
    """The arrays of a pytree, which may be shapes only."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return [[jax.tree_util.keystr(path), str(x.dtype), list(x.shape)] for path, x in leaves]


def _flat_shapes(tree: object) -> dict[str, jax.ShapeDtypeStruct]:
    """By dtype, all arrays of that dtype end to end `[elements]`."""
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(tree):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return {dtype: jax.ShapeDtypeStruct((size,), dtype) for dtype, size in sizes.items()}


def _packed(tree: object) -> dict[str, np.ndarray]:
    """A copy on the host, as `_flat_shapes`."""
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()
    flat = {dtype: np.empty(x.shape, x.dtype) for dtype, x in _flat_shapes(tree).items()}
    ends = dict.fromkeys(flat, 0)
    for leaf in jax.tree.leaves(tree):
        dtype = str(leaf.dtype)
        start, ends[dtype] = ends[dtype], ends[dtype] + leaf.size
        flat[dtype][start : ends[dtype]] = np.asarray(leaf).ravel()
    return flat


def _unpacked(like: object, flat: Mapping[str, np.ndarray]) -> object:
    """The pytree again; views of `flat` in the shapes of `like`."""
    ends = dict.fromkeys(flat, 0)

    def taken(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        dtype = str(leaf.dtype)
        start, ends[dtype] = ends[dtype], ends[dtype] + leaf.size
        return flat[dtype][start : ends[dtype]].reshape(leaf.shape)

    return jax.tree.map(taken, like)
