"""Which adapter a model name means, and the list of models."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lora_moe_jax.adapters.entry import AdapterInfo
from lora_moe_jax.errors import AdapterError
from lora_moe_jax.server.errors import ApiError


class ModelNames:
    """BASE is the base model; BASE:ADAPTER or ADAPTER alone is an adapter."""

    def __init__(self, base: str):
        self.base = base
        self._created = int(time.time())

    def check(self, adapter: str) -> None:
        """Raises AdapterError if the base model has this name."""
        if adapter == self.base:
            raise AdapterError(
                "an adapter may not have the base model's name",
                key=adapter,
                expected="another name",
                found=adapter,
                hint="choose another name for either; --served-name names the base model",
            )

    def adapter(self, model: str, loaded: Sequence[AdapterInfo]) -> str | None:
        """The adapter that `model` means, None for the base model.

        Raises:
          ApiError: 404, there is no such model.
        """
        if model == self.base:
            return None
        name = model.removeprefix(f"{self.base}:")
        if name not in {info.name for info in loaded}:
            message = f"the model {model[:200]!r} does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def entries(self, loaded: Sequence[AdapterInfo]) -> list[dict]:
        """The base model and the adapters as OpenAI describes models."""
        return [self.entry(None), *(self.entry(info.name) for info in loaded)]

    def entry(self, adapter: str | None) -> dict:
        return {
            "id": self.base if adapter is None else adapter,
            "object": "model",
            "created": self._created,
            "owned_by": "lora-moe-jax",
            "parent": None if adapter is None else self.base,
        }
