"""`grouped_lora_matmul`: the one operation behind expert, dense and latent-attention LoRA.

    y[t] = x[t] · W[g(t)]ᵀ + s[a(t), g(t)] · (x[t] · A[a(t), g(t)]ᵀ) · B[a(t), g(t)] + bias[g(t)]

Letters: M rows, K input width, N output width, G groups (experts, heads, or 1), S adapter slots,
R the rank of its arrays, g(t) the group of row t, a(t) its adapter slot.

Slots of several ranks need not all pay for the largest: a part's adapters may be several pairs, its
rank classes, each with slots of its own rank. Slots are numbered through all of them.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.floats import check_floats
from pallas_kernels.grouped_lora_matmul import differentiable
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.lora import Lora, Slots, classes_of, slot_counts
from pallas_kernels.implementation import implementation_module, platform_implementation, serves
from pallas_kernels.layered import without_layers

IMPLEMENTATIONS = ("xla", "triton", "mosaic_gpu", "mosaic_tpu")


def grouped_lora_matmul(
    x: Float[Array, "rows k"],
    w: Float[Array, "groups n k"],
    group_sizes: Int[Array, " groups"] | None,
    row_slots: Int[Array, " rows"] | None = None,
    lora: tuple[Slots | None, ...] = (),
    *,
    parts: tuple[int, ...] | None = None,
    bias: Float[Array, "groups n"] | None = None,
    gate: Gate | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows n"]:
    """Multiplies each row by its group's weight and adds its adapter's low-rank product.

    Row order: rows of one group are contiguous and groups follow each other in order, so group 0
    owns the first `group_sizes[0]` rows, and so on. Groups may be empty and of any size. Inside a
    group any order of slots is correct; `routing_plan` sorts them by slot, which makes each
    (group, slot) bucket contiguous.

    Base-only rows have slot -1 and get the base product alone. Rows past the last group
    (`sum(group_sizes) <= row < M`) are written as zeros whatever `x` holds there.

    Exactness: a row's bits depend on that row, its group and its slot alone, not on M, the other
    rows, or its place among them; `jax.vmap` over slots or group sizes makes another program of
    it, and one over `x` of its gradient, whose bits may differ (`lax.map` does not). Isolation: a
    NaN or Inf in a slot reaches only that slot's rows and gradients. Both hold for the gradients
    with respect to `x` too.

    Differentiable, in reverse mode, with respect to `x` and `lora`. The base is frozen: the
    cotangents of `w` and `bias` are zero and are never computed. Gradients of `a` and `b` rows at
    and past an adapter's rank are what the formula gives (zero for `a` as `b` is zero there; mask
    them when training). With an `out_dtype` the cotangent of the result is rounded to x's dtype
    before anything is made of it.

    Args:
      x: rows, float32 or bfloat16 (float64 with x64 enabled). Where w has another type, "xla"
        multiplies in the wider one.
      w: base weights with the input width last, as checkpoints store them. They, and the arrays of
        `lora`, may be `Layered`; such adapters have no gradients.
      group_sizes: rows of each group; their sum is at most M. None: M / G rows in every group
        (heads, or a dense layer).
      row_slots: adapter slot of each row, -1 for none. Needed if `lora` is given.
      lora: one entry for each part of the output, `None` for a part without adapters. Fused
        projections (gate and up; q_a and kv_a) have one adapter pair for each part. A tuple of
        pairs has one for each rank class: they differ in slots and rank alone, and all parts have
        the same slots. The first class has slots 0 to S - 1, the next one those from S on.
      parts: widths of the parts, adding up to N. Default: one part.
      bias: of each group's columns, in x's dtype; it may be `Layered`. It is added to the sums
        after the low-rank product, before they are rounded. None: no bias.
      gate: N is `[gate | up]`, and the result is the gate's function of both, in the epilogue of
        the product.
      out_dtype: float32 keeps the float32 sums of narrower x and w as they are (a router's logits
        from bfloat16 operands), where there is no gate. None: x's dtype.
      implementation: one of `IMPLEMENTATIONS`. None: the platform's kernels where they serve these
        shapes and dtypes ("mosaic_gpu" on Hopper GPUs, then "triton" on any; "mosaic_tpu" on
        TPUs), else "xla".

    Returns:
      `[M, N]` in x's dtype or `out_dtype`, `[M, N / 2]` with a gate; products accumulate in
      float32 (float64 for float64).

    Raises:
      ValueError: shapes that do not belong together; an `out_dtype` that is not float32, or with a
        gate.
      NotImplementedError: an implementation that does not exist or cannot serve these shapes.
    """
    arguments = x, w, group_sizes, row_slots, lora, parts, bias, gate, out_dtype, implementation
    backend, parts, lora, out_dtype = checked(*arguments)
    if row_slots is None:
        row_slots = jnp.full(x.shape[0], -1, jnp.int32)
    w, bias, lora = in_backend_form(backend, (w, bias, lora))
    if group_sizes is not None:
        group_sizes = jnp.asarray(group_sizes, jnp.int32)  # sums of narrower types go round
    tables = backend.tables(group_sizes, jnp.asarray(row_slots, jnp.int32), w.shape[0])
    return differentiable.grouped_lora_matmul(
        backend, parts, gate, out_dtype, x, w, bias, tables, lora, None
    )


def checked(
    x, w, group_sizes, row_slots, lora, parts, bias, gate, out_dtype, implementation
) -> tuple[ModuleType, tuple[int, ...], tuple[Slots | None, ...], np.dtype | None]:
    """The backend of a call, and its parts, lora and out_dtype in full.

    Raises:
      See `grouped_lora_matmul`.
    """
    if gate is not None and not isinstance(gate, Gate):
        raise ValueError(f"gate must be a Gate, such as Gate(), or None, got {gate!r}")
    if isinstance(lora, Lora):
        raise ValueError("lora must be a tuple with an entry for each part: (Lora(...),) of one")
    parts = parts or (w.shape[1],)
    lora = tuple(lora) or (None,) * len(parts)
    check_call(x, w, group_sizes, row_slots, lora, parts)
    check_slots(lora)
    check_bias("bias", bias, x, w)
    if gate is not None and (w.shape[1] % 2 or len(parts) not in (1, 2)):
        raise ValueError(f"a gate needs N = [gate | up], got N {w.shape[1]} in {parts=}")
    if gate is not None and len(parts) == 2 and parts[0] != parts[1]:
        raise ValueError(f"gate and up must have equal widths, got {parts=}")
    out_dtype = _result_dtype(out_dtype, gate)
    return choose_backend(implementation, x, w, lora, parts, out_dtype), parts, lora, out_dtype


def _result_dtype(out_dtype, gate: Gate | None) -> np.dtype | None:
    if out_dtype is None:
        return None
    wide = np.dtype(np.float32)
    if wide != out_dtype or gate is not None:
        raise ValueError(f"out_dtype is None or float32, without a gate; got {out_dtype=}, {gate=}")
    return wide


def choose_backend(
    implementation: str | None, x, w, lora, parts, out_dtype: np.dtype | None = None
) -> ModuleType:
    """The module that serves the call.

    Raises:
      NotImplementedError: an implementation asked for by name that does not exist or cannot
        serve these shapes.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise NotImplementedError(
            f"{implementation=} is not one of {IMPLEMENTATIONS} ({x.shape=}, {w.shape=})"
        )
    names = [implementation]
    if implementation is None:
        general = ["triton", "xla"] if jax.default_backend() == "gpu" else ["xla"]
        best = platform_implementation()
        names = general if best == "xla" else [best, *general]
    *first, last = map(_module, names)
    call = x, w, lora, parts, out_dtype
    for backend in first:
        if serves(backend.check, *call):
            return backend
    last.check(*call)
    return last


def in_backend_form(backend: ModuleType, weights):
    """Base weights and adapters, with copies of layers' parts where it cannot read these."""
    return weights if backend.READS_LAYERS else without_layers(weights)


def _module(implementation: str) -> ModuleType:
    return implementation_module("pallas_kernels.grouped_lora_matmul", implementation)


def lora_matmul(
    x: Float[Array, "rows k"],
    w: Float[Array, "n k"],
    row_slots: Int[Array, " rows"] | None = None,
    lora: tuple[Slots | None, ...] = (),
    *,
    parts: tuple[int, ...] | None = None,
    bias: Float[Array, " n"] | None = None,
    gate: Gate | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows n"]:
    """`grouped_lora_matmul` for a dense layer: one group that owns every row."""
    return grouped_lora_matmul(
        x,
        w.reshape(1, *w.shape),
        None,
        row_slots,
        lora,
        parts=parts,
        bias=None if bias is None else bias.reshape(1, *bias.shape),
        gate=gate,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def check_call(x, w, group_sizes, row_slots, lora, parts):
    """Raises ValueError for shapes and dtypes that do not belong together."""
    if w.ndim != 3 or w.shape[0] == 0:
        raise ValueError(f"w must be [groups, n, k], with a group at least, got {w.shape}")
    groups, n, k = w.shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x must be [rows, {k}] for w {w.shape}, got {x.shape}")
    check_floats(dict(x=x, w=w))
    if group_sizes is None and x.shape[0] % groups:
        raise ValueError(f"{x.shape[0]} rows do not make {groups} equal groups; pass group_sizes")
    if group_sizes is not None:
        _check_indices("group_sizes", group_sizes, groups, "")
    if min(parts) < 1 or sum(parts) != n or len(parts) != len(lora):
        raise ValueError(f"parts {parts} must add up to {n} and match the {len(lora)} lora entries")
    if row_slots is not None or any(entry is not None for entry in lora):
        _check_indices("row_slots", row_slots, x.shape[0], " when lora is given")
    widest = max(4, x.dtype.itemsize, w.dtype.itemsize)
    for width, entry in zip(parts, lora, strict=True):
        _check_entry(entry, groups, width, k, widest)


def check_bias(name: str, bias, x, w):
    """Raises ValueError for a bias that does not belong to the product of x and w."""
    if bias is not None and (bias.shape != w.shape[:2] or bias.dtype != x.dtype):
        raise ValueError(
            f"{name} must be {x.dtype}{list(w.shape[:2])}, of x's dtype, for w {w.shape}, "
            f"got {bias.dtype}{list(bias.shape)}"
        )


def _check_indices(name: str, array, count: int, when: str):
    if array is None or array.shape != (count,):
        found = None if array is None else array.shape
        raise ValueError(f"{name} must be [{count}]{when}, got {found}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}")


def check_slots(entries: tuple[Slots | None, ...], names: str = "the parts of lora"):
    """Raises ValueError for parts that do not have the same slots."""
    counts = {slot_counts(entry) for entry in entries if entry is not None}
    if len(counts) > 1:
        raise ValueError(
            f"{names} must have the same number of slots in each of the same rank classes, got "
            + " and ".join(map(str, sorted(counts)))
        )


def _check_entry(entry: Slots | None, groups: int, n: int, k: int, widest: int):
    classes = classes_of(entry)
    for pair in classes:
        _check_pair(pair, groups, n, k, widest)
    if entry is not None and (not classes or 0 in slot_counts(entry)):
        raise ValueError(
            f"a rank class must have a slot, got classes of {slot_counts(entry)} slots; "
            "for a part without adapters pass None"
        )
    forms = [(p.a.shape[1], p.b.shape[1], p.scaling.shape[1], str(p.a.dtype)) for p in classes]
    if len(set(forms)) > 1:
        raise ValueError(
            "rank classes must differ in slots and rank alone, got (groups of a, of b, of scaling, "
            "dtype) " + " and ".join(map(str, forms))
        )


def _check_pair(pair: Lora, groups: int, n: int, k: int, widest: int):
    if pair.a.ndim != 4 or pair.a.shape[2] == 0:
        raise ValueError(
            f"lora.a must be [slots, {groups} or 1, rank of at least 1, {k}], got {pair.a.shape}"
        )
    slots, _, rank, _ = pair.a.shape
    for name, array, tail in (
        ("a", pair.a, (rank, k)),
        ("b", pair.b, (rank, n)),
        ("scaling", pair.scaling, ()),
    ):
        if array.shape not in ((slots, groups, *tail), (slots, 1, *tail)):
            expected = (slots, f"{groups} or 1", *tail)
            raise ValueError(f"lora.{name} must be {expected}, got {array.shape}")
        check_floats({f"lora.{name}": array})
        if array.dtype.itemsize > widest:
            raise ValueError(f"lora.{name} is {array.dtype}, and neither x nor w is: cast it")
    if pair.a.dtype != pair.b.dtype:
        raise ValueError(
            f"lora.a and lora.b must have one dtype, got {pair.a.dtype} and {pair.b.dtype}"
        )
