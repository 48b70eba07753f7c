"""Small modules with random weights and adapters, and what their NumPy models are made of."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_moe_jax.config.model import MlaConfig, ModelConfig, MoeConfig, RopeConfig
from lora_moe_jax.layers.adapter_slots import LoraParam
from lora_moe_jax.layers.build import Build, SlotConfig

SLOTS, RANK = 3, 3
ROPE = RopeConfig(dim=8, theta=10000.0)
MLA = MlaConfig(
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
MOE = MoeConfig(
    num_experts=8,
    top_k=3,
    expert_size=16,
    shared_size=48,
    sparse_layers=(True,),
    scoring="softmax",
    correction_bias=False,
    n_group=1,
    topk_group=1,
    group_score="none",
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    router_float32=True,
)
CONFIG = ModelConfig(
    family="deepseek_v3",
    vocab_size=50,
    hidden_size=32,
    num_layers=1,
    num_heads=3,
    num_kv_heads=3,
    head_dim=24,
    intermediate_size=40,
    rms_norm_eps=1e-5,
    max_position=256,
    rope=ROPE,
    tie_word_embeddings=False,
    attention_bias=False,
    dtype="float32",
    mla=MLA,
    moe=MOE,
)


def build(dtype="float32", **slot_options) -> Build:
    slots = SlotConfig(slots=SLOTS, rank=RANK, dtype=dtype, **slot_options)
    return Build(rngs=nnx.Rngs(0), dtype=dtype, adapters=slots)


def randomise(module: nnx.Module, seed: int = 1) -> nnx.Module:
    """Fills adapters, norms and biases with random values; slot i has rank i + 1, zeros past it."""
    rng = np.random.default_rng(seed)
    state = nnx.state(module)
    for _, variable in nnx.to_flat_state(state):
        value = np.asarray(variable[...], np.float32)
        if isinstance(variable, LoraParam):
            value = 0.3 * rng.standard_normal(value.shape)
            if value.ndim == 4:
                for slot in range(SLOTS):
                    value[slot, :, slot + 1 :] = 0
        elif value.ndim == 1:
            value = value + 0.3 * rng.standard_normal(value.shape)
        variable[...] = jnp.asarray(value, variable.dtype)
    nnx.update(module, state)
    return module


@functools.partial(jax.jit, static_argnums=0)
def _compiled(graph, state, *args):
    return nnx.merge(graph, state)(*args)


def run(module: nnx.Module, *args):
    """The module's result, compiled once for all modules of one form."""
    return _compiled(*nnx.split(module), *args)


def wide(variable) -> np.ndarray:
    return np.asarray(variable[...], np.float64)


def merged(weight, slots, slot: int, group: int = 0) -> np.ndarray:
    """W + s · Bᵀ A for one slot (W without slots): what PEFT would merge to, in float64."""
    weight = np.asarray(weight, np.float64)
    if slot < 0 or slots is None:
        return weight
    a, b, scaling = (wide(v)[slot] for v in (slots.a, slots.b, slots.scaling))
    a, b, scaling = (v[group if len(v) > 1 else 0] for v in (a, b, scaling))
    return weight + scaling * b.T @ a


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def normal(*shape: int, seed: int = 2, dtype="float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def slots_of(tokens: int) -> np.ndarray:
    """-1, 0, 1, 2 in turn."""
    return (np.arange(tokens) % (SLOTS + 1) - 1).astype(np.int32)
