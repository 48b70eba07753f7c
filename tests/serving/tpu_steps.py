"""Compiles an engine's functions for TPUs ahead of time, without a TPU: a line of JSON for each.

    python -m tests.serving.tpu_steps '{"generations": ["v6e"], "model": "qwen3-30b-a3b"}'

The argument holds those of `main`. Layers have the real sizes, but there are fewer of them, and
fewer experts. Runs in a process of its own, as `tpu_compile.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from unittest import mock

from tests.pallas_kernels.tpu_compile import SETTINGS, compiled

LAYERS, EXPERTS, VOCABULARY = 10, 16, 8192
SLOTS, RANK = 4, 16
REQUESTS, PAGES_PER_REQUEST, PAGES, PAGE = 64, 64, 4096, 16
STEPS = 4  # of `decode`


def small(name: str):
    """A named model of fewer layers and experts."""
    from lora_moe_jax.config.named import named_config

    config = named_config(name)
    moe = dataclasses.replace(
        config.moe, num_experts=EXPERTS, sparse_layers=config.moe.sparse_layers[:LAYERS]
    )
    return dataclasses.replace(config, num_layers=LAYERS, vocab_size=VOCABULARY, moe=moe)


def functions(name: str, tokens: int):
    """Yields (name, function, arguments, donated) of what an engine runs on the device."""
    import jax
    import jax.numpy as jnp

    from lora_moe_jax.layers.build import SlotConfig
    from lora_moe_jax.models.build import random_model
    from lora_moe_jax.serving import step_functions
    from lora_moe_jax.serving.model_arrays import ModelArrays
    from lora_moe_jax.serving.step_layout import StepLayout
    from lora_moe_jax.serving.steps import page_shapes

    config = small(name)
    arrays = ModelArrays(random_model(config, adapters=SlotConfig(SLOTS, RANK)), config, None)
    model = arrays.merge(arrays.base, arrays.bank.stacks)
    pages = page_shapes(model, config, None, pages=PAGES, page_size=PAGE, dtype="bfloat16")
    layout = StepLayout(REQUESTS, PAGES_PER_REQUEST)

    def numbers(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    hidden = jax.ShapeDtypeStruct((tokens, config.hidden_size), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((REQUESTS, VOCABULARY), jnp.float32)
    last, packed = numbers(REQUESTS), numbers(layout.size(tokens))
    rows = numbers(layout.row_size)
    calls = (
        (step_functions.step, (layout,), (pages, last, (hidden, logits), packed), (2, 3, 4, 5)),
        (step_functions.decode, (STEPS, layout), (pages, last, packed), (2, 3)),
        (step_functions.score_rows, (), (hidden, numbers(tokens), numbers(tokens)), ()),
        (step_functions.filter_rows, (layout,), (logits, last, rows), (3,)),
        (step_functions.top_rows, (20,), (logits,), ()),
    )
    for function, static, inputs, donated in calls:
        bound = functools.partial(function, *static, arrays)
        yield function.__name__, bound, (arrays.base, arrays.bank.stacks, *inputs), donated


def main(generations: list[str], model: str, tokens: int = REQUESTS, only: list[str] | None = None):
    """Compiles the functions that `only` names, or all; prints one report for each."""
    import jax

    with mock.patch.object(jax, "default_backend", lambda: "tpu"):
        for name, function, arguments, donated in functions(model, tokens):
            for generation in generations if only is None or name in only else ():
                report = compiled(generation, function, arguments, donated, row_major=False)
                print(json.dumps({"generation": generation, "function": name} | report), flush=True)


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(**json.loads(sys.argv[1]))
