"""Dense layers with adapter slots."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.layers.adapter_slots import adapter_slots, lora_of
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.checkpoint_layout import Concatenated
from pallas_kernels import lora_matmul


class Linear(nnx.Module):
    """y = x Wᵀ + LoRA (+ bias), W `[out, in]`.

    Split on `out_axis` it is column-parallel: each device makes its own features. Split on
    `in_axis` it is row-parallel: base and LoRA are summed over devices together.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        build: Build,
        *,
        in_axis: str | None = None,
        out_axis: str | None = None,
        bias: bool = False,
        kind: str = "linear",
    ):
        self.axes = build.axes
        self.sum_over = build.mesh_axis(in_axis)
        self.weight = build.weight(
            (out_features, in_features), (out_axis, in_axis), (f"{name}.weight",)
        )
        self.bias = build.bias(out_features, out_axis, f"{name}.bias") if bias else None
        projection = Projection(name, in_features, out_features, kind=kind)
        self.slots = adapter_slots(projection, build, in_axis=in_axis, out_axis=out_axis)

    def __call__(
        self, x: Float[Array, "tokens in"], token_slots: Int[Array, " tokens"]
    ) -> Float[Array, "tokens out"]:
        y = lora_matmul(x, self.weight[...], token_slots, (lora_of(self.slots),))
        y = self.axes.psum(y, self.sum_over)
        return y if self.bias is None else y + self.bias[...]


class FusedLinear(nnx.Module):
    """Several replicated projections of one input as one product, each with its own adapters.

    Returns one array for each part, of unequal widths if need be (MLA's q_a and kv_a).
    """

    def __init__(
        self,
        names: tuple[str, ...],
        in_features: int,
        widths: tuple[int, ...],
        build: Build,
        *,
        bias: bool = False,
    ):
        self.widths = widths
        total = sum(widths)
        self.weight = build.weight(
            (total, in_features),
            (None, None),
            tuple(f"{name}.weight" for name in names),
            Concatenated(widths),
        )
        self.biases = nnx.List(
            [build.bias(width, None, f"{n}.bias") for n, width in zip(names, widths, strict=True)]
            if bias
            else []
        )
        self.slots = nnx.List(
            [
                adapter_slots(Projection(name, in_features, width), build)
                for name, width in zip(names, widths, strict=True)
            ]
        )

    def __call__(
        self, x: Float[Array, "tokens in"], token_slots: Int[Array, " tokens"]
    ) -> list[jax.Array]:
        lora = tuple(lora_of(slots) for slots in self.slots)
        y = lora_matmul(x, self.weight[...], token_slots, lora, parts=self.widths)
        parts, start = [], 0
        for i, width in enumerate(self.widths):
            part = y[:, start : start + width]
            parts.append(part + self.biases[i][...] if self.biases else part)
            start += width
        return parts
