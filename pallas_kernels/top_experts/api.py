"""The experts that a token goes to, and what each of them counts, from the router's logits.

Letters: T tokens, E experts, k choices.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.floats import check_floats
from pallas_kernels.implementation import check_known, implementation_module, mosaic_gpu_module
from pallas_kernels.top_experts import differentiable, xla
from pallas_kernels.top_experts.xla import Scoring

IMPLEMENTATIONS = ("xla", "triton", "mosaic_gpu")


def top_experts(
    logits: Float[Array, "tokens experts"],
    bias: Float[Array, " experts"] | None,
    top_k: int,
    scoring: Scoring,
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
    """The `top_k` experts of the highest scores, the highest first, and their weights.

    Of equal scores the lower expert's is higher. Differentiable with respect to logits, by way of
    the weights. A token's bits depend on that token alone.

    Args:
      logits: of any floating type; what is made of them is float32.
      bias: float32, added to the scores that are compared, not to those that count.
      implementation: "xla", "triton" (GPUs) or "mosaic_gpu" (Hopper GPUs, some numbers of experts);
        None takes what serves the platform best. Their bits differ.

    Returns:
      int32 [T, k] and float32 [T, k].

    Raises:
      NotImplementedError: there is no such implementation, or it cannot serve these shapes.
      ValueError: there are not so many experts, or not as many biases, or logits are not
        floating-point [tokens, experts].
    """
    bias = None if bias is None else jnp.asarray(bias)
    check_floats(dict(logits=logits))
    if logits.ndim != 2:
        raise ValueError(f"logits must be [tokens, experts], got {logits.shape}")
    experts = logits.shape[1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"{top_k=} must be from 1 to the number of experts, {experts}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias has the shape {bias.shape}, expected ({experts},)")
    backend = _backend(implementation, logits, top_k)
    scoring = scoring._replace(scale=float(scoring.scale))
    return differentiable.top_experts(backend, top_k, scoring, logits, bias)


def _backend(implementation: str | None, logits, top_k: int) -> ModuleType:
    check_known(implementation, IMPLEMENTATIONS)
    module = mosaic_gpu_module("pallas_kernels.top_experts", implementation, logits, top_k)
    if module is not None:
        return module
    platform = "triton" if jax.default_backend() == "gpu" else "xla"
    name = implementation or platform
    return xla if name == "xla" else implementation_module("pallas_kernels.top_experts", name)
