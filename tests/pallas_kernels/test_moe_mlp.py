"""`moe_mlp` against one token and one choice at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import Gate, Lora, moe_mlp

TOKENS, CHOICES, EXPERTS, HIDDEN, WIDTH, SLOTS, RANK = 13, 3, 5, 32, 24, 3, 4
GPT_OSS = Gate(limit=0.7, alpha=1.702, up_offset=1.0)


def arguments(shared=(), seed=0, dtype=np.float32):
    """Random arguments; `shared` names the factors that all experts share."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype) / shape[-1] ** 0.5

    def pair(name, n_in, n_out):
        groups = [1 if f"{name}.{factor}" in shared else EXPERTS for factor in "abs"]
        scaling = rng.uniform(0.5, 2, (SLOTS, groups[2])).astype(dtype)
        a, b = normal(SLOTS, groups[0], RANK, n_in), normal(SLOTS, groups[1], RANK, n_out)
        return Lora(a, b * RANK, scaling)

    experts = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
    return dict(
        x=normal(TOKENS, HIDDEN) * 4,
        experts=experts.astype(np.int32),
        weights=rng.uniform(0.1, 1, (TOKENS, CHOICES)).astype(dtype),
        token_slots=rng.integers(-1, SLOTS, TOKENS).astype(np.int32),
        gate_up=normal(EXPERTS, 2 * WIDTH, HIDDEN),
        down=normal(EXPERTS, HIDDEN, WIDTH),
        lora_gate=pair("gate", HIDDEN, WIDTH),
        lora_up=pair("up", HIDDEN, WIDTH),
        lora_down=pair("down", WIDTH, HIDDEN),
    )


def one_by_one(call, gate=None, first=0, valid=None):
    """The definition, in float64."""
    gate = gate or Gate()
    y = np.zeros((TOKENS, HIDDEN))
    for t in range(TOKENS):
        slot, x = int(call["token_slots"][t]), call["x"][t].astype(np.float64)
        for choice in range(CHOICES):
            expert = int(call["experts"][t, choice]) - first
            if not 0 <= expert < call["down"].shape[0] or (valid is not None and not valid[t]):
                continue
            both = call["gate_up"][expert] @ x
            left = both[:WIDTH] + delta(call["lora_gate"], slot, expert, x)
            right = both[WIDTH:] + delta(call["lora_up"], slot, expert, x)
            if gate.limit is not None:
                left, right = np.minimum(left, gate.limit), np.clip(right, -gate.limit, gate.limit)
            hidden = left / (1 + np.exp(-gate.alpha * left)) * (right + gate.up_offset)
            out = call["down"][expert] @ hidden + delta(call["lora_down"], slot, expert, hidden)
            y[t] += call["weights"][t, choice] * out
    return y


def delta(pair, slot, expert, x):
    if pair is None or slot < 0:
        return 0.0
    a, b, scaling = (f[slot, expert if f.shape[1] > 1 else 0].astype(np.float64) for f in pair)
    return scaling * (a @ x) @ b


@pytest.mark.parametrize(
    "shared",
    [(), ("gate.a", "up.a", "gate.s", "up.s", "down.b"), ("gate.b", "down.a", "down.s")],
    ids=["per_expert", "shared_outer", "shared_inner"],
)
@pytest.mark.parametrize("gate", [None, GPT_OSS], ids=["silu", "gpt_oss"])
def test_values(shared, gate):
    call = arguments(shared)
    found = jax.jit(lambda call: moe_mlp(**call, gate=gate))(call)
    np.testing.assert_allclose(found, one_by_one(call, gate), rtol=2e-5, atol=2e-5)


def test_without_adapters():
    call = arguments() | dict.fromkeys(("lora_gate", "lora_up", "lora_down"))
    np.testing.assert_allclose(moe_mlp(**call), one_by_one(call), rtol=2e-5, atol=2e-5)


def test_local_experts_and_padding_tokens():
    call = arguments()
    local = {"gate_up": call["gate_up"][1:4], "down": call["down"][1:4]}
    for name in ("lora_gate", "lora_up", "lora_down"):
        local[name] = Lora(*(factor[:, 1:4] for factor in call[name]))
    call |= local
    valid = np.arange(TOKENS) < 10
    call["x"][~valid] = np.nan
    found = np.asarray(jax.jit(lambda call: moe_mlp(**call, first_group=1, valid=valid))(call))
    np.testing.assert_allclose(found, one_by_one(call, first=1, valid=valid), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shared", [(), ("gate.a", "up.a", "gate.s", "up.s", "down.b")])
def test_a_token_alone_has_the_same_bits(shared):
    call = arguments(shared)
    everyone = np.asarray(jax.jit(lambda call: moe_mlp(**call))(call))
    names = ("x", "experts", "weights", "token_slots")
    for token in (0, 5, TOKENS - 1):
        alone = call | {name: call[name][token : token + 1] for name in names}
        found = np.asarray(jax.jit(lambda call: moe_mlp(**call))(alone))
        assert np.array_equal(found[0], everyone[token])


def test_a_broken_slot_stays_alone():
    call = arguments(("gate.a", "up.a", "gate.s", "up.s"))
    sound = np.asarray(moe_mlp(**call))
    broken = dict(call)
    for name in ("lora_gate", "lora_up", "lora_down"):
        broken[name] = Lora(*(factor.copy() for factor in call[name]))
        broken[name].a[1], broken[name].b[1] = np.nan, np.inf
    found = np.asarray(moe_mlp(**broken))
    others = call["token_slots"] != 1
    assert np.array_equal(found[others], sound[others])
    assert not np.isfinite(found[~others]).any()


@pytest.mark.parametrize(
    "shared", [(), ("gate.a", "up.a", "gate.s", "up.s", "down.b")], ids=["per_expert", "shared"]
)
def test_gradients(shared):
    with jax.enable_x64(True):
        call = arguments(shared, dtype=np.float64)
        names = ("x", "weights", "lora_gate", "lora_up", "lora_down")

        def layer(values):
            return moe_mlp(**(call | dict(zip(names, values, strict=True))))

        values = jax.tree.map(jnp.asarray, tuple(call[name] for name in names))
        check_grads(jax.jit(layer), (values,), order=1, modes=["rev"], rtol=1e-6, atol=1e-6)


def test_shapes_that_do_not_belong_together():
    call = arguments()
    with pytest.raises(ValueError, match="experts"):
        moe_mlp(**(call | {"weights": call["weights"][:, :2]}))
    with pytest.raises(ValueError, match="w must|x must"):
        moe_mlp(**(call | {"down": call["down"][:, :, :-1]}))
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        moe_mlp(**call, implementation="mosaic_gpu")
