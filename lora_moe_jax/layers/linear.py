"""Dense layers with adapter slots."""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from lora_moe_jax.adapters.projection import Projection
from lora_moe_jax.layers.adapter_slots import adapter_slots, lora_of
from lora_moe_jax.layers.build import Build
from lora_moe_jax.layers.checkpoint_layout import Concatenated, ZerosElsewhere
from lora_moe_jax.layers.norm import Unnormed
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
        self.bias = build.bias((out_features,), (out_axis,), f"{name}.bias") if bias else None
        projection = Projection(name, in_features, out_features, kind=kind)
        self.slots = adapter_slots(projection, build, in_axis=in_axis, out_axis=out_axis)

    def __call__(
        self,
        x: Float[Array, "tokens in"],
        token_slots: Int[Array, " tokens"],
        out_dtype: jax.typing.DTypeLike | None = None,
    ) -> Float[Array, "tokens out"]:
        """`out_dtype`: see `lora_matmul`."""
        y = lora_matmul(x, *self._weights(token_slots), **self._options(out_dtype))
        if not self.sum_over:
            return y
        y = self.axes.sum(y, self.sum_over)
        return y if self.bias is None else y + self.bias[...]

    def of_unnormed(
        self,
        rows: Unnormed,
        token_slots: Int[Array, " tokens"],
        out_dtype: jax.typing.DTypeLike | None = None,
    ) -> tuple[jax.Array, jax.Array, Float[Array, "tokens out"]]:
        """The rows' sum, that normed, and y of it, on a device that has all of their columns."""
        return rows.product(*self._weights(token_slots), **self._options(out_dtype))

    def _weights(self, token_slots) -> tuple:
        return self.weight[...], token_slots, (lora_of(self.slots),)

    def _options(self, out_dtype) -> dict:
        # Of a sum over devices the bias is a part once.
        apart = self.bias is None or self.sum_over
        return dict(bias=None if apart else self.bias[...], out_dtype=out_dtype)


class Part(NamedTuple):
    """One projection of a `FusedLinear`.

    Attributes:
      out_axis: the logical axis of its features; where that is split over devices, each makes its
        own features.
    """

    name: str
    width: int
    out_axis: str | None = None
    bias: bool = False


class FusedLinear(nnx.Module):
    """Several projections of one input as one product, each with its own adapters.

    Parts may have unequal widths (MLA's q_a and kv_a).
    """

    def __init__(self, parts: tuple[Part, ...], in_features: int, build: Build):
        split = tuple(build.mesh_axis(part.out_axis) is not None for part in parts)
        layout = Concatenated(
            tuple(part.width for part in parts), split, build.tensor_devices if any(split) else 1
        )
        self.widths = layout.local_heights
        axis = parts[split.index(True)].out_axis if any(split) else None
        self.weight = build.weight(
            (sum(self.widths) * layout.devices, in_features),
            (axis, None),
            tuple(f"{part.name}.weight" for part in parts),
            layout,
        )
        biases = tuple(f"{part.name}.bias" for part in parts if part.bias)
        self.bias = (
            build.bias(
                self.weight.shape[:1],
                (axis,),
                *biases,
                layout=ZerosElsewhere(layout, tuple(part.bias for part in parts)),
            )
            if biases
            else None
        )
        self.slots = nnx.List(
            [
                adapter_slots(
                    Projection(part.name, in_features, part.width), build, out_axis=part.out_axis
                )
                for part in parts
            ]
        )

    def __call__(
        self, x: Float[Array, "tokens in"] | Unnormed, token_slots: Int[Array, " tokens"]
    ) -> Float[Array, "tokens out"]:
        """All parts in one array, one after the other."""
        lora = tuple(lora_of(slots) for slots in self.slots)
        weights = self.weight[...], token_slots, lora
        options = dict(parts=self.widths, bias=None if self.bias is None else self.bias[...])
        if isinstance(x, Unnormed):
            return x.product(*weights, **options)[-1]
        return lora_matmul(x, *weights, **options)
