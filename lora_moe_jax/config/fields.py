"""Typed access to the fields of a `config.json`, with refusals that name the field."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lora_moe_jax.errors import ConfigError

MAX_SIZE = 2**31 - 1  # a larger size is damage, and could not index an array anyway


class Fields:
    """One JSON object of a configuration.

    Every getter raises `ConfigError` if the field is absent and has no default, or has a wrong
    type or value.

    Args:
      values: the object.
      file: where it was read from, for errors.
      defaults: the values of absent fields.
      prefix: the path of the object inside the file, e.g. "rope_scaling.", for errors.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        file: str | os.PathLike,
        defaults: Mapping[str, object],
        prefix: str = "",
    ):
        self.values = values
        self.file = file
        self.defaults = defaults
        self.prefix = prefix

    def error(self, message: str, key: str, expected: object, hint: str | None = None):
        """An error about the field `key`."""
        found = self.values.get(key, self.defaults.get(key))
        return ConfigError(
            message,
            file=self.file,
            key=self.prefix + key,
            expected=expected,
            found=repr(found) if key in self.values or key in self.defaults else "nothing",
            hint=hint,
        )

    def get(self, key: str, expected: str) -> object:
        """The field as it is; `expected` says in errors what it should be."""
        if key not in self.values and key not in self.defaults:
            raise self.error("a required field is missing", key, expected)
        return self.values.get(key, self.defaults.get(key))

    def wrong(self, key: str, expected: object) -> ConfigError:
        return self.error("a field has a wrong value", key, expected)

    def has(self, key: str) -> bool:
        """Whether the file gives the field, and not as null."""
        return self.values.get(key) is not None

    def spelled(self, *keys: str) -> str:
        """The one of several spellings of a field that is present; the first if none is."""
        present = [key for key in keys if self.has(key)]
        for other in present[1:]:
            if self.values[other] != self.values[present[0]]:
                expected = f"the value of {other!r}, {self.values[other]!r}"
                raise self.error("two spellings of one field disagree", present[0], expected)
        return present[0] if present else keys[0]

    def integer(self, key: str, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        expected = f"an integer from {minimum} to {maximum}"
        value = self.get(key, expected)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.wrong(key, expected)
        return value

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        if self.get(key, "an integer or null") is None:
            return None
        return self.integer(key, minimum)

    def number(self, key: str, minimum: float = 0.0, *, inclusive: bool = False) -> float:
        """A finite number above `minimum`, or at least `minimum` if `inclusive`."""
        expected = f"a number {'of at least' if inclusive else 'above'} {minimum:g}"
        value = self.get(key, expected)
        # Larger numbers are infinite in float32, and integers can be too large for any float.
        if type(value) not in (int, float) or not minimum <= value <= 1e38:
            raise self.wrong(key, expected)
        if value == minimum and not inclusive:
            raise self.wrong(key, expected)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, "true or false")
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def only(self, key: str, *supported: object, hint: str | None = None) -> object:
        """A field with few supported values; absent or null means the first of them."""
        if not self.has(key):
            return supported[0]
        value = self.values[key]
        for choice in supported:
            if type(value) is type(choice) and value == choice:
                return value
        expected = " or ".join("nothing" if item is None else repr(item) for item in supported)
        raise self.error("a value is not supported", key, expected, hint)

    def items(self, key: str, kind: type, length: int | None = None) -> list:
        """A list of `kind`, of the given length."""
        size = "" if length is None else f"{length} "
        expected = f"a list of {size}{kind.__name__}"
        value = self.get(key, expected)
        if (
            not isinstance(value, list)
            or any(type(item) is not kind for item in value)
            or (length is not None and len(value) != length)
        ):
            raise self.wrong(key, expected)
        return value

    def section(self, key: str, defaults: Mapping[str, object]) -> Fields:
        """A nested object without its null entries; empty if it is absent or null."""
        value = self.values[key] if self.has(key) else {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object or null")
        present = {name: item for name, item in value.items() if item is not None}
        return Fields(present, self.file, defaults, f"{self.prefix}{key}.")
