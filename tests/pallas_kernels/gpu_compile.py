"""Compiles the Hopper kernels for an H200 ahead of time, without a GPU; each ends with a report.

    python -m tests.pallas_kernels.gpu_compile qwen3-30b-a3b 64 16 "gate_up gated,shrink"

Arguments: a named expert shape, tokens, a rank, and which calls (all if left out). A report is a
line of JSON after what ptxas said about the call. Runs in a process of its own: plug-ins read the
settings from the environment when jax starts.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there are no CUDA libraries
    "JAX_ENABLE_COMPILATION_CACHE": "0",  # ptxas says nothing of what is found there
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# The description of a real H200, as XLA dumped it there.
TARGET = Path(__file__).parents[1] / "golden" / "h200.txtpb"
REPORT = "REPORT "  # starts a line
CLASSES = (6, 16), (2, 64)  # slots and rank of each
FEW = 64  # tokens
# Of these each comes twice: consumers load as well where they cannot have the others' registers.
LOADED_BY_CONSUMERS = (
    "attention",
    "attention with sinks",
    "latent attention",
    "latent attention of few",
    "attention gradients of queries",
    "attention gradients of queries with sinks",
    "attention gradients of keys",
    "latent attention gradients of queries",
    "latent attention gradients of keys",
)
STAY = " where registers stay"


def calls(shape, tokens: int, rank: int, slots: int = 8):
    """Yields (name, function, argument shapes) of everything one layer runs."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import (
        PageView,
        Scoring,
        add_norm,
        lora_matmul,
        normed_lora_matmul,
        paged_attention,
        paged_latent_attention,
        rms_norm,
        rotate_and_cache,
        rotated_attention,
        routed_mlp,
        top_experts,
    )
    from pallas_kernels.grouped_lora_matmul import mosaic_gpu
    from pallas_kernels.grouped_lora_matmul.gpu_outer import outer_kernel
    from pallas_kernels.grouped_lora_matmul.gpu_rows import FEW_ROWS, Runs
    from pallas_kernels.grouped_lora_matmul.gpu_shrink import Columns
    from pallas_kernels.grouped_lora_matmul.gpu_shrink_outer import STAGES, shrink_outer_kernel
    from pallas_kernels.grouped_lora_matmul.gpu_shrink_schedule import packed_columns, rank_tile
    from pallas_kernels.grouped_lora_matmul.gpu_spread import spread_rows
    from pallas_kernels.grouped_lora_matmul.lora import Lora, terms_of_part, terms_of_parts
    from pallas_kernels.layered import Layered
    from pallas_kernels.paged_attention.gpu_gradient_units import (
        TILE,
        WORDS,
        GradientSizes,
        TileTable,
    )
    from pallas_kernels.paged_attention.gpu_gradients_kv import key_gradients
    from pallas_kernels.paged_attention.gpu_gradients_q import query_gradients
    from pallas_kernels.routing_plan.gpu_combine import COLUMNS
    from tests.pallas_kernels.product_cases import has_bias, layer_products

    def array(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    rows, groups = tokens * shape.top_k, shape.experts
    hidden, wide = shape.hidden, shape.intermediate
    number = functools.partial(array, dtype=jnp.int32)
    tables = jax.eval_shape(
        functools.partial(mosaic_gpu.tables, groups=groups), number(groups), number(rows)
    )

    def factor(width):
        return array(slots, groups, rank, width)

    def with_bias(name, call):
        """The call of a product, with a bias if it has one."""
        function, arguments = call
        if not has_bias(shape, name):
            return function, arguments

        def biased(bias, *arguments):
            return function(*arguments, bias=bias)

        return biased, (array(*arguments[1].shape[:2]), *arguments)

    def product(k, n, starts, widths, contract, gate, out_dtype=None):
        first, owned = packed_columns((rank,) * max(1, len(starts)), rank_tile(rank))
        low = array(rows, -(-(first[-1] + owned[-1]) // 64) * 64)
        u = tuple(Columns(low, begin, rank) for begin in first[: len(starts)])
        w = array(groups, n, k) if contract == 2 else array(groups, k, n)
        firsts = (0,) * len(starts)
        static = dict(
            starts=starts, firsts=firsts, contract=contract, gate=gate, out_dtype=out_dtype
        )
        function = functools.partial(mosaic_gpu.product, **static)
        return function, (array(rows, k), w, tables, u, tuple(map(factor, widths)))

    for name, *sizes in layer_products(shape):
        yield name, *with_bias(name, product(*sizes))
    sizes = hidden, 2 * wide, (0, wide), (wide, wide), 2, None
    call = product(*sizes, jnp.dtype(jnp.float32))
    yield "gate_up float32", *with_bias("gate_up float32", call)

    ranks = tuple(most for _, most in CLASSES)

    def of_classes(widths):
        """The factors of each part in rank classes, and the first slot of each."""
        factors = tuple(array(s, groups, r, width) for s, r in CLASSES for width in widths)
        return factors, (0,) * len(widths) + (CLASSES[0][0],) * len(widths)

    def product_of_classes(k, n, starts, widths, contract, gate):
        first, owned = packed_columns((max(ranks),) * len(starts), rank_tile(max(ranks)))
        low = array(rows, -(-(first[-1] + owned[-1]) // 64) * 64)
        factors, firsts = of_classes(widths)
        u = tuple(Columns(low, begin, r) for r in ranks for begin in first)
        w = array(groups, n, k) if contract == 2 else array(groups, k, n)
        static = dict(starts=starts * 2, firsts=firsts, contract=contract, gate=gate)
        function = functools.partial(mosaic_gpu.product, **static)
        return function, (array(rows, k), w, tables, u, factors)

    for name, *sizes in layer_products(shape):
        if name in ("gate_up gated", "gate_up", "gate_up backward"):
            yield f"{name} of classes", *with_bias(name, product_of_classes(*sizes))

    # One token's rows are a tile each, and their products make u themselves.
    def tables_of(tokens):
        return jax.eval_shape(
            lambda x, *routing: mosaic_gpu.dispatch(x, groups, slots, *routing, None)[0].tables,
            array(tokens, hidden),
            number(tokens, shape.top_k),
            number(tokens),
        )

    few_rows = tables_of(1)

    def product_of_few(its, count, of, k, widths, **static):
        starts = tuple(sum(widths[:part]) for part in range(len(widths)))

        def function(x, w, tables, a, b, scalings, bias=None):
            firsts = (0,) * len(widths)
            u = mosaic_gpu.shrink_for_product(x, tables, a, firsts, scalings, firsts)
            of_terms = u, b, starts, firsts
            return mosaic_gpu.product(x, w, tables, *of_terms, contract=2, bias=bias, **static)

        a = tuple(array(slots, of, rank, k) for _ in widths)
        b = tuple(array(slots, of, rank, width) for width in widths)
        scalings = tuple(array(slots, of, dtype=jnp.float32) for _ in widths)
        return function, (array(count, k), array(of, sum(widths), k), its, a, b, scalings)

    def dense(count, widths, **static):
        its = jax.eval_shape(functools.partial(mosaic_gpu.tables, None, groups=1), number(count))
        return product_of_few(its, count, 1, hidden, widths, **static)

    def layered_dense(*sizes):
        """Whose W is loaded before x is there."""
        function, (x, w, its, *others) = dense(*sizes)
        if shape.biased:
            others.append(array(*w.shape[:2]))
        w, *others = jax.tree.map(
            lambda its: Layered(array(4, *its.shape, dtype=its.dtype), number(), number()),
            (w, *others),
        )
        return function, (x, w, its, *others)

    def normed_dense(widths, count, out_dtype, slots):
        def function(x, more, weight, w, a, b, scalings):
            lora = tuple(map(Lora, a, b, scalings)) if a else ()
            options = dict(parts=widths, out_dtype=out_dtype, implementation="mosaic_gpu")
            where = jnp.zeros(1, jnp.int32), lora
            return normed_lora_matmul(x, more, weight, 1e-6, w, *where, **options)

        # Of whole 1024 columns, and not so many that they have no room.
        columns = min(hidden // 1024 * 1024, 4096)
        a = tuple(array(slots, 1, rank, columns) for _ in widths if slots)
        b = tuple(array(slots, 1, rank, width) for width in widths if slots)
        scalings = tuple(array(slots, 1, dtype=jnp.float32) for _ in widths if slots)
        arrays = jax.tree.map(
            lambda its: Layered(array(4, *its.shape, dtype=its.dtype), number(), number()),
            (array(columns), array(sum(widths), columns), a, b, scalings),
        )
        rows = array(1, columns), array(1, columns) if count == 2 else None
        return function, (*rows, *arrays)

    of_token = few_rows, shape.top_k, groups
    both = product_of_few(*of_token, hidden, (wide, wide), gate=shape.gate)
    yield "gate_up gated of one token", *with_bias("gate_up", both)
    yield "down of one token", *product_of_few(*of_token, wide, (hidden,))

    few = tables_of(min(tokens, FEW)), min(tokens, FEW) * shape.top_k, groups
    ahead = product_of_few(*few, hidden, (wide, wide), gate=shape.gate)
    yield "gate_up gated after its shrink", *ahead
    yield "down after its shrink", *product_of_few(*few, wide, (hidden,))

    def experts(x, gate_up, bias, down, its, *pairs):
        gate, up, down_pair = (Lora(*pair) for pair in pairs) if pairs else [None] * 3
        into, out = terms_of_parts((wide, wide), (gate, up)), terms_of_part(0, down_pair)
        return mosaic_gpu.experts(x, gate_up, bias, down, its, into, out, shape.gate)

    def pair(k, width):
        scalings = array(slots, groups, dtype=jnp.float32)
        return array(slots, groups, rank, k), array(slots, groups, rank, width), scalings

    bias = array(groups, 2 * wide) if shape.biased else None
    weights = array(groups, 2 * wide, hidden), bias, array(groups, hidden, wide)
    pairs = pair(hidden, wide), pair(hidden, wide), pair(wide, hidden)
    arguments = array(shape.top_k, hidden), *weights, few_rows, *pairs
    yield "experts of one token", experts, arguments

    def routed(x, logits, gate_up, bias, down, *pairs):
        lora = [Lora(*pair) for pair in pairs]
        choice = dict(top_k=shape.top_k, scoring=Scoring())
        where = dict(gate=shape.gate, implementation="mosaic_gpu", gate_up_bias=bias)
        token_slots = jnp.zeros(x.shape[0], jnp.int32)
        return routed_mlp(x, logits, token_slots, gate_up, down, *lora, **choice, **where)

    token = array(1, hidden), array(1, groups, dtype=jnp.float32)
    yield "routed experts of one token", routed, (*token, *weights, *pairs)
    token = array(1, hidden), array(1, groups)
    yield "routed experts without adapters", routed, (*token, *weights)
    some = array(min(tokens, FEW), hidden), array(min(tokens, FEW), groups)
    yield "routed experts of few tokens", routed, (*some, *weights)
    columns = hidden // COLUMNS * COLUMNS  # others have no kernel
    chosen = array(1, columns), array(shape.top_k, columns)
    add = functools.partial(mosaic_gpu.add_choices, dtype=jnp.bfloat16)
    yield "sum of choices", add, (*chosen, array(1, shape.top_k, dtype=jnp.float32))
    few = min(tokens, FEW)
    arguments = array(few * shape.top_k, hidden), *weights, tables_of(few)
    yield "experts of few tokens without adapters", experts, arguments
    yield "experts of few tokens", experts, (*arguments, *pairs)
    # Whose shrink is in their product's kernel.
    yield "dense of few tokens", *dense(min(tokens, FEW), (4096, 512, 512))
    yield "narrow of few tokens", *dense(min(tokens, FEW), (2048,))
    yield "dense of one token", *dense(1, (4096, 512, 512))
    yield "dense of many tokens", *dense(256, (4096, 512, 512))
    yield "narrow of one token", *dense(1, (2048,))
    for name, *its in (
        ("qkv", (4096, 512, 512), 1, None),
        ("router", (128,), 2, jnp.dtype(jnp.float32)),
    ):
        yield f"normed {name} of one token", *normed_dense(*its, slots)
        yield f"normed {name} without adapters", *normed_dense(*its, 0)
    yield "layered dense of one token", *layered_dense(1, (4096, 512, 512))
    yield "layered narrow of few tokens", *layered_dense(min(tokens, FEW), (2048,))
    yield "narrow float32 of few", *dense(32, (128,), out_dtype=jnp.dtype(jnp.float32))
    yield "narrow float32 of rows alone", *dense(4, (128,), out_dtype=jnp.dtype(jnp.float32))

    yield "spread", spread_rows, (array(tokens, hidden), number(tokens, shape.top_k))

    def spread_and_shrink(x, group, token_slots, *pairs):
        lora = tuple(Lora(*pair) for pair in pairs)
        terms = terms_of_parts((0,) * len(lora), lora)
        return mosaic_gpu.dispatch(x, groups, slots, group, token_slots, None, terms)[1:]

    def routing(tokens):
        return array(tokens, hidden), number(tokens, shape.top_k), number(tokens)

    many = max(tokens, FEW_ROWS + 1)
    yield "spread and shrink", spread_and_shrink, (*routing(many), *[pair(hidden, wide)] * 2)

    def route(x, group, token_slots):
        return mosaic_gpu.dispatch(x, groups, slots, group, token_slots, None)[0]

    yield "route", route, routing(tokens)

    def general(x, w):
        """Of an odd number of features, whose result is widened."""
        y = lora_matmul(x, w, jnp.full(x.shape[0], -1), (None,), implementation="triton")
        return y.astype(jnp.float32)

    yield "general product", general, (array(130, 48), array(2500, 48))

    def shrink(x, tables, factors, scalings):
        return mosaic_gpu.shrink(x, tables, factors, (0,) * len(factors), scalings, (0,))

    def shrink_of_classes(x, tables, factors, scalings):
        firsts = of_classes((hidden,) * 2)[1]
        return mosaic_gpu.shrink(x, tables, factors, (0,) * len(factors), scalings, firsts)

    factors, _ = of_classes((hidden,) * 2)
    scalings = tuple(array(its.shape[0], groups, dtype=jnp.float32) for its in factors)
    yield "shrink of classes", shrink_of_classes, (array(rows, hidden), tables, factors, scalings)

    scaling = array(slots, groups, dtype=jnp.float32)
    yield "shrink", shrink, (array(rows, hidden), tables, (factor(hidden),) * 2, (scaling,) * 2)

    def shrink_of_parts(x, tables, factors, scalings):
        return mosaic_gpu.shrink(x, tables, factors, (0, wide), scalings, (0,))

    arguments = (array(rows, 2 * wide), tables, (factor(wide),) * 2, (scaling,) * 2)
    yield "shrink of parts", shrink_of_parts, arguments
    yield "shrink down", shrink, (array(rows, wide), tables, (factor(wide),), (scaling,))

    def outer(right, terms, dtype, parts=1):
        """Of terms that have the same columns of right, or a part each."""
        first, owned = packed_columns((rank,) * terms, rank_tile(rank))
        columns = tuple((begin, rank) for begin in first)
        width = right.shape[1] // parts
        spans = tuple((term % parts * width, width) for term in range(terms))
        low = array(rows, -(-(first[-1] + owned[-1]) // 64) * 64)

        def function(low, right, *runs):
            return outer_kernel(low, columns, right, spans, Runs(*runs), dtype)

        return function, (low, right, *(number(slots * groups),) * 4)

    # Of Qwen3-30B-A3B and of DeepSeek-V3, whatever the experts' shape.
    view = number(tokens), number(tokens), number(64, 256)

    def attention(q, k, v, *view):
        return paged_attention(q, k, v, PageView(*view), scale=0.1, implementation="mosaic_gpu")

    def latent_attention(q, q_rope, latent, rope, *view):
        return paged_latent_attention(
            q, q_rope, latent, rope, PageView(*view), scale=0.1, implementation="mosaic_gpu"
        )

    def attention_with_sinks(window, q, k, v, sinks, *view):
        """Of gpt-oss, whose layers have a window in turns."""
        return paged_attention(
            q, k, v, PageView(*view),
            scale=0.1, sliding_window=window, sinks=sinks, implementation="mosaic_gpu",
        )  # fmt: skip

    few = number(8), number(8), number(8, 256)
    cache, sinks = array(1024, 16, 8, 64), array(64)
    function = functools.partial(attention_with_sinks, 128)
    yield "attention with sinks", function, (array(tokens, 64, 64), cache, cache, sinks, *view)
    function = functools.partial(attention_with_sinks, None)
    yield "attention of few with sinks", function, (array(8, 64, 64), cache, cache, sinks, *few)
    cache = array(1024, 16, 4, 128)
    yield "attention", attention, (array(tokens, 32, 128), cache, cache, *view)
    yield "attention of few", attention, (array(8, 32, 128), cache, cache, *few)

    def rotation(heads, stack, layer, cos, sin, k_pages, v_pages, *view):
        weight, view = Layered(stack, layer), PageView(*view)
        return rotate_and_cache(
            heads, weight, weight, cos, sin, k_pages, v_pages, view,
            eps=1e-6, implementation="mosaic_gpu",
        )  # fmt: skip

    angles = array(tokens, 64, dtype=jnp.float32)
    arguments = array(tokens, 40, 128), array(48, 128), number(), angles, angles
    yield "rotation", rotation, (*arguments, cache, cache, *view)

    def rotated(heads, stack, layer, cos, sin, k_pages, v_pages, *view):
        weight, view = Layered(stack, layer), PageView(*view)
        return rotated_attention(
            heads, weight, weight, cos, sin, k_pages, v_pages, view,
            eps=1e-6, scale=0.1, implementation="mosaic_gpu",
        )  # fmt: skip

    for name, count in (("one token", 1), ("few tokens", 8)):
        its_view = number(count), number(count), number(8, 256)
        of_layer, angle = (array(48, 128), number()), array(count, 64, dtype=jnp.float32)
        call = array(count, 40, 128), *of_layer, angle, angle, cache, cache, *its_view
        yield f"attention of {name}", rotated, call

    def rotation_without_norms(heads, cos, sin, k_pages, v_pages, *view):
        return rotate_and_cache(
            heads, None, None, cos, sin, k_pages, v_pages, PageView(*view),
            eps=1e-6, implementation="mosaic_gpu",
        )  # fmt: skip

    arguments = array(tokens, 40, 128), angles, angles, cache, cache
    yield "rotation without norms", rotation_without_norms, (*arguments, *view)

    cache = array(1024, 16, 2, 128)
    yield "attention of groups of three", attention, (array(tokens, 6, 128), cache, cache, *view)
    queries = [array(tokens, 128, width) for width in (512, 64)]
    pages = [array(1024, 64, width) for width in (512, 64)]
    yield "latent attention", latent_attention, (*queries, *pages, *view)
    queries = [array(8, 16, width) for width in (512, 64)]
    yield "latent attention of few", latent_attention, (*queries, *pages, *few)

    places = -(-tokens // TILE) * TILE
    queries, keys = array(places, 32, 128), array(places, 4, 128)
    table = TileTable(number(1), number(places // TILE * WORDS))
    of_row = array(32, places, dtype=jnp.float32)
    sizes = GradientSizes(places, 32, 4, 128, 128, None, False, 0.1, False)
    arrays = table, queries, keys, keys, queries, of_row
    function = functools.partial(query_gradients, sizes)
    yield "attention gradients of queries", function, arrays
    function = functools.partial(key_gradients, sizes)
    yield "attention gradients of keys", function, (*arrays, of_row)
    # Of gpt-oss.
    queries, keys = array(places, 64, 64), array(places, 8, 64)
    of_row, sinks = (array(*its, dtype=jnp.float32) for its in ((64, places), (64,)))
    function = functools.partial(
        query_gradients, GradientSizes(places, 64, 8, 64, 64, 128, True, 0.1, False)
    )
    arrays = table, queries, keys, keys, queries, of_row, sinks
    yield "attention gradients of queries with sinks", function, arrays
    # Of DeepSeek's heads.
    q, values = array(places, 16, 192), array(places, 16, 128)
    sizes = GradientSizes(places, 16, 16, 192, 128, None, False, 0.1, False)
    arrays = table, q, q, values, values, array(16, places, dtype=jnp.float32)
    function = functools.partial(query_gradients, sizes)
    yield "latent attention gradients of queries", function, arrays
    function = functools.partial(key_gradients, sizes)
    yield "latent attention gradients of keys", function, (*arrays, arrays[-1])

    # Norms are of whole 128 features; hidden ones that are not are normed by other kernels.
    features = hidden // 128 * 128
    named = dict(eps=1e-6, implementation="mosaic_gpu")
    x, weight = array(tokens, features), Layered(array(4, features), number(), number())
    yield "rms_norm", functools.partial(rms_norm, **named), (x, weight)
    yield "add_norm", functools.partial(add_norm, **named), (x, x, weight)

    def choice(logits):
        return top_experts(logits, None, shape.top_k, Scoring(), implementation="mosaic_gpu")

    yield "choice", choice, (array(tokens, groups, dtype=jnp.float32),)
    yield "choice of bfloat16", choice, (array(tokens, groups),)

    yield "outer", *outer(array(rows, hidden), 2, jnp.bfloat16)
    yield "outer of parts", *outer(array(rows, 2 * wide), 2, jnp.bfloat16, 2)
    yield "outer of scalings", *outer(array(rows, rank), 1, jnp.float32)

    def shrink_and_outer(*widths):
        """Of as many ranks as there is such a kernel for."""
        its_rank, starts = min(rank, max(STAGES)), [sum(widths[:i]) for i in range(len(widths))]
        tile, spans = rank_tile(its_rank), tuple(zip(starts, widths, strict=True))
        columns = tuple((tile * term, its_rank) for term in range(len(widths)))

        def function(left, right, runs, factors, scalings):
            arrays = runs, factors, scalings
            return shrink_outer_kernel(left, columns, right, spans, *arrays, tile)

        factors = tuple(array(slots, groups, its_rank, width) for width in widths)
        rows_of_both = array(rows, 64), array(rows, sum(widths))
        runs = Runs(*(number(slots * groups),) * 4)
        return function, (*rows_of_both, runs, factors, (scaling,) * len(widths))

    yield "shrink and outer", *shrink_and_outer(hidden)
    yield "shrink and outer of parts", *shrink_and_outer(wide, wide)


def h200():
    """An H200 to compile for: a mesh of it, the place on it, and what puts shapes there."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="1x1x1",
        topology="1x1x1",
        target_config=TARGET.read_text(),
    )
    mesh = Mesh(np.array(topology.devices), ("gpu",))
    here = NamedSharding(mesh, PartitionSpec())

    def placed(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=here)

    return mesh, here, placed


def all_calls(*arguments):
    from pallas_kernels import implementation

    def registers_stay(function, *arguments):
        with mock.patch.object(implementation, "REGISTERS_MOVE", False):
            return function(*arguments)

    for name, function, operands in calls(*arguments):
        yield name, function, operands
        if name in LOADED_BY_CONSUMERS:
            yield name + STAY, functools.partial(registers_stay, function), operands


def main(name: str, tokens: str, rank: str, only: str = ""):
    import jax

    from pallas_kernels import implementation
    from pallas_kernels.hopper.kept_kernel import nothing_kept
    from pallas_kernels.shapes import EXPERT_SHAPES

    mesh, here, placed = h200()
    # Kernels for Triton are interpreted on a CPU.
    jax.default_backend = lambda: "gpu"
    # What JAX 0.12 runs compiles with 0.11 too.
    implementation.DEPENDENT_LAUNCH = True

    for call, function, arguments in all_calls(EXPERT_SHAPES[name], int(tokens), int(rank)):
        if only and call not in only.split(","):
            continue
        start = time.perf_counter()
        # ptxas says nothing of a kernel that a call before has brought.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nothing_kept():
            compiled = (
                jax.jit(function, out_shardings=here)
                .trace(*jax.tree.map(placed, arguments))
                .lower()
                .compile()
            )
        text = compiled.as_text()
        report = {
            "call": call,
            "seconds": round(time.perf_counter() - start, 2),
            "kernels": text.count('custom_call_target="mosaic_gpu'),
            "triton": text.count('custom_call_target="__gpu$xla.gpu.triton'),
            "roundings": text.count(" reduce-precision("),
        }
        print("\n" + REPORT + json.dumps(report), flush=True)


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(*sys.argv[1:])
