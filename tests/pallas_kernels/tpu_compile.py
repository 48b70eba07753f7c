"""Compiles the TPU kernels ahead of time, without a TPU, and reports each as a line of JSON.

    python -m tests.pallas_kernels.tpu_compile '{"generations": ["v6e"], "name": "qwen3-30b-a3b"}'

The argument holds those of `main`. Runs in a process of its own: libtpu reads its settings from the
environment when jax starts.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # the parent process may have loaded it too
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def reports_of(module: str, **arguments) -> list[dict]:
    """What a module such as this one prints, run in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", module, json.dumps(arguments)],
        cwd=Path(__file__).parents[2],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def calls(shape, tokens: int, dtype, classes):
    """Yields (name, function, argument shapes) of everything one layer runs.

    Args:
      classes: (rank, slots) of each rank class.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_lora_matmul import mosaic_tpu
    from tests.pallas_kernels.product_cases import has_bias, layer_products

    def array(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    rows, groups = tokens * shape.top_k, shape.experts
    hidden, wide = shape.hidden, shape.intermediate
    table = array(groups, dtype=jnp.int32), array(rows, dtype=jnp.int32)
    first_slots = tuple(itertools.accumulate((slots for _, slots in classes), initial=0))[:-1]

    def factors_of(widths):
        """Of all terms: class by class, part by part."""
        return tuple(array(s, groups, rank, width) for rank, s in classes for width in widths)

    def firsts_of(parts):
        return tuple(first for first in first_slots for _ in parts)

    def product(biased, k, n, starts, widths, contract, gate):
        w = array(groups, n, k) if contract == 2 else array(groups, k, n)
        factors, firsts = factors_of(widths), firsts_of(widths)
        u = tuple(array(rows, factor.shape[2]) for factor in factors)
        every = dict(starts=starts * len(classes), firsts=firsts)
        static = every | dict(contract=contract, gate=gate)

        def function(x, w, bias, sizes, row_slots, u, factors):
            tables = mosaic_tpu.tables(sizes, row_slots, groups)
            return mosaic_tpu.product(x, w, tables, u, factors, **static, bias=bias)

        bias = array(groups, n) if biased else None
        return function, (array(rows, k), w, bias, *table, u, factors)

    for name, *sizes in layer_products(shape):
        yield name, *product(has_bias(shape, name), *sizes)

    def shrink(x, sizes, row_slots, factors, scalings, starts):
        tables = mosaic_tpu.tables(sizes, row_slots, groups)
        starts, firsts = starts * len(classes), firsts_of(starts)
        return mosaic_tpu.shrink(x, tables, factors, starts, scalings, firsts)

    def outer(left, right, sizes, row_slots, shape):
        tables = mosaic_tpu.tables(sizes, row_slots, groups)
        lefts, spans = ((left, left.shape[1]),), ((0, right.shape[1]),)
        first = first_slots[-1]
        return mosaic_tpu.outer(lefts, right, spans, tables, first, shape, jnp.float32)

    for name, width, starts, part in (
        ("shrink", hidden, (0, 0), hidden),
        ("shrink backward", 2 * wide, (0, wide), wide),
    ):
        factors = factors_of((part, part))
        scalings = tuple(array(*f.shape[:2], dtype=jnp.float32) for f in factors)
        arguments = array(rows, width), *table, factors, scalings
        yield name, functools.partial(shrink, starts=starts), arguments
    rank, slots = classes[-1]
    for name, buckets in ("outer", (slots, groups)), ("outer shared", (slots, 1)):
        arguments = array(rows, rank), array(rows, hidden), *table
        yield name, functools.partial(outer, shape=buckets), arguments


def layers(shape, tokens: int, dtype, classes):
    """Yields (name, function, argument shapes) of a whole layer, forward and with gradients."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import Lora, moe_mlp

    def array(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    groups, hidden, wide = shape.experts, shape.hidden, shape.intermediate

    def pair(k, n, a_groups=groups, b_groups=groups):
        found = tuple(
            Lora(
                array(slots, a_groups, rank, k),
                array(slots, b_groups, rank, n),
                array(slots, 1, dtype=jnp.float32),
            )
            for rank, slots in classes
        )
        return found[0] if len(found) == 1 else found

    choices = tokens, shape.top_k
    x, weights = array(tokens, hidden), array(*choices, dtype=jnp.float32)
    frozen = (
        array(*choices, dtype=jnp.int32),
        array(tokens, dtype=jnp.int32),
        array(groups, 2 * wide, hidden),
        array(groups, hidden, wide),
        array(groups, 2 * wide) if shape.biased else None,
    )
    per_expert = pair(hidden, wide), pair(hidden, wide), pair(wide, hidden)
    outer = pair(hidden, wide, 1), pair(hidden, wide, 1), pair(wide, hidden, groups, 1)

    def layer(x, weights, lora, experts, token_slots, gate_up, down, bias):
        arrays = x, experts, weights, token_slots, gate_up, down, *lora
        static = dict(gate=shape.gate, implementation="mosaic_tpu")
        return moe_mlp(*arrays, gate_up_bias=bias, **static)

    def gradients(x, weights, lora, frozen, dy):
        return jax.vjp(lambda *learned: layer(*learned, *frozen), x, weights, lora)[1](dy)

    dy = array(tokens, hidden, dtype=jnp.float32)
    for name, lora in ("per expert", per_expert), ("shared outer", outer), ("no adapters", ()):
        yield f"layer, {name}", layer, (x, weights, lora, *frozen)
        yield f"gradients, {name}", gradients, (x, weights, lora, frozen, dy)


def main(
    generations: list[str],
    name: str,
    tokens: int = 64,
    dtype: str = "bfloat16",
    classes: tuple[tuple[int, int], ...] = ((16, 8),),
    only: list[str] | None = None,
):
    """Compiles each kernel of a named expert shape; or those kernels and layers that `only` names.

    Prints one report for each, as a line of JSON.
    """
    from pallas_kernels.shapes import EXPERT_SHAPES

    sizes = EXPERT_SHAPES[name], tokens, dtype, classes
    wanted = list(calls(*sizes))
    if only is not None:
        wanted = [call for call in (*wanted, *layers(*sizes)) if call[0] in only]
    for generation in generations:
        for call, function, arguments in wanted:
            report = compiled(generation, function, arguments)
            print(json.dumps({"generation": generation, "call": call} | report), flush=True)


def chips(generation: str, **axes: int):
    """A mesh of as many chips, with axes of these sizes."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    sizes = tuple(axes.values())
    devices = np.array(topology.devices[: np.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, tuple(axes))


def compiled(generation: str, function, arguments):
    """`compiled_on` one chip, of arguments that have the last axis minor.

    Left to itself XLA stores [.., 5760, 2880] the other way around, to save padding, and then
    copies it for every kernel.
    """
    import jax
    from jax.experimental.layout import Format, Layout

    mesh = chips(generation, chip=1)
    here = jax.NamedSharding(mesh, jax.P())

    def placed(array):
        row_major = Format(Layout(tuple(range(len(array.shape)))), here)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=row_major)

    jitted = jax.jit(function, out_shardings=here)
    return compiled_on(mesh, jitted, jax.tree.map(placed, arguments))


def compiled_on(mesh, jitted, arguments):
    """Compiles for a mesh; returns what there is to know about the result."""
    import jax

    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        result = jitted.trace(*arguments).lower().compile()
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "kernels": result.as_text().count('custom_call_target="tpu_custom_call"'),
        "temporary_bytes": result.memory_analysis().temp_size_in_bytes,
    }


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(**json.loads(sys.argv[1]))
