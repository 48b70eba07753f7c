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

from tests.pallas_kernels.tpu_compile import SETTINGS, chips, compiled_on

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


def model_arrays(config, mesh):
    """A model's arrays, zeros and all here; `mesh` is what they would be split over."""
    import jax.numpy as jnp

    from lora_moe_jax.layers.build import SlotConfig
    from lora_moe_jax.models.build import abstract_model
    from lora_moe_jax.models.layer_stacks import filled
    from lora_moe_jax.serving.model_arrays import ModelArrays

    def zeros(path, variable, number):
        return jnp.zeros(variable.shape, variable.dtype)

    abstract = abstract_model(config, adapters=SlotConfig(SLOTS, RANK), mesh=mesh)
    options = dict(stacked=True, progress=lambda done, total: None)
    return ModelArrays(filled(abstract, zeros, lambda axes: None, **options), config, mesh)


def functions(name: str, tokens: int, mesh):
    """Yields (name, jitted function, its arguments' shapes) of what an engine runs on chips."""
    import jax
    import jax.numpy as jnp

    from lora_moe_jax.models.layer_stacks import place
    from lora_moe_jax.serving import step_functions
    from lora_moe_jax.serving.step_layout import StepLayout
    from lora_moe_jax.serving.steps import page_shapes, page_specs

    config, split = small(name), mesh if mesh.size > 1 else None
    arrays = model_arrays(config, split)
    model = arrays.merge(arrays.base, arrays.bank.stacks)
    sizes = dict(pages=PAGES, page_size=PAGE, dtype="bfloat16")
    pages = page_shapes(model, config, split, **sizes)
    layout, whole = StepLayout(REQUESTS, PAGES_PER_REQUEST), jax.P()

    def numbers(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    def weights(array, spec):
        where = place(array.shape, jax.NamedSharding(mesh, spec))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    def others(array, spec):
        where = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    hidden = jax.ShapeDtypeStruct((tokens, config.hidden_size), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((REQUESTS, VOCABULARY), jnp.float32)
    last, packed = numbers(REQUESTS), numbers(layout.size(tokens))
    rows = numbers(layout.row_size)
    base_specs, bank_specs = arrays.specs()
    own = (
        jax.tree.map(weights, arrays.base, base_specs),
        jax.tree.map(others, arrays.bank.stacks, bank_specs),
    )
    # Of each: what is static, what it takes beside weights, and which of all it may eat.
    calls = (
        (step_functions.step, (layout,), (pages, last, (hidden, logits), packed), (2, 3, 4, 5)),
        (step_functions.decode, (STEPS, layout), (pages, last, packed), (2, 3)),
        (step_functions.score_rows, (), (hidden, numbers(tokens), numbers(tokens)), ()),
        (step_functions.filter_rows, (layout,), (logits, last, rows), (3,)),
        (step_functions.top_rows, (20,), (logits,), ()),
    )
    for function, static, inputs, donated in calls:
        specs, out = [jax.tree.map(lambda its: whole, its) for its in inputs], whole
        if inputs[0] is pages:
            specs[0] = page_specs(config, split)
            out = specs[0], *[whole] * len(donated)
        bound = functools.partial(function, *static, arrays)
        if split:
            in_specs = base_specs, bank_specs, *specs
            bound = jax.shard_map(
                bound, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False
            )
        jitted = jax.jit(bound, donate_argnums=donated, keep_unused=True)
        yield function.__name__, jitted, (*own, *jax.tree.map(others, list(inputs), specs))


def main(
    generations: list[str],
    model: str,
    tokens: int = REQUESTS,
    only: list[str] | None = None,
    mesh: tuple[int, int] = (1, 1),
):
    """Compiles the functions that `only` names, or all; prints one report for each.

    Args:
      mesh: sizes of its axes `expert` and `tensor`.
    """
    import jax

    with mock.patch.object(jax, "default_backend", lambda: "tpu"):
        for generation in generations:
            own = chips(generation, expert=mesh[0], tensor=mesh[1])
            for name, jitted, arguments in functions(model, tokens, own):
                if only is None or name in only:
                    report = compiled_on(own, jitted, arguments)
                    print(
                        json.dumps(dict(generation=generation, function=name) | report), flush=True
                    )


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(**json.loads(sys.argv[1]))
