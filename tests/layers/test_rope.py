"""Rotary embeddings against their formulas."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from lora_moe_jax.config.model import RopeConfig
from lora_moe_jax.layers.rope import (
    attention_factor,
    cos_sin,
    inverse_frequencies,
    mla_softmax_scale,
)
from pallas_kernels import rotate

PLAIN = RopeConfig(dim=64, theta=10000.0)
# DeepSeek-V3's own numbers.
YARN = RopeConfig(
    dim=64,
    theta=10000.0,
    kind="yarn",
    factor=40.0,
    original_max_position=4096,
    mscale=1.0,
    mscale_all_dim=1.0,
    interleaved=True,
)


def test_plain_frequencies():
    expected = [10000.0 ** (-2 * j / 64) for j in range(32)]
    assert inverse_frequencies(PLAIN).dtype == np.float32
    np.testing.assert_allclose(inverse_frequencies(PLAIN), expected, rtol=1e-6)
    assert attention_factor(PLAIN) == 1.0


def test_linear_frequencies_are_divided():
    linear = dataclasses.replace(PLAIN, kind="linear", factor=4.0)
    np.testing.assert_allclose(
        inverse_frequencies(linear), inverse_frequencies(PLAIN) / 4, rtol=1e-6
    )
    assert attention_factor(linear) == 1.0


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        dataclasses.replace(YARN, truncate=False),
        dataclasses.replace(YARN, theta=150000.0, factor=32.0, truncate=False),
        dataclasses.replace(YARN, dim=8, original_max_position=64, factor=4.0),
        dataclasses.replace(YARN, beta_fast=8.0, beta_slow=8.0, truncate=False),
    ],
    ids=["deepseek-v3", "not truncated", "gpt-oss", "small", "a step"],
)
def test_yarn_frequencies(rope):
    """Pair by pair, as the YaRN paper and transformers write it."""

    def dimension(rotations):
        length = rope.original_max_position
        return rope.dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high += 0.001 if low == high else 0
    expected = []
    for j in range(rope.dim // 2):
        extrapolated = rope.theta ** (-2 * j / rope.dim)
        ramp = min(max((j - low) / (high - low), 0), 1)
        expected.append(extrapolated / rope.factor * ramp + extrapolated * (1 - ramp))
    np.testing.assert_allclose(inverse_frequencies(rope), expected, rtol=1e-6)


def test_yarn_keeps_the_fast_pairs_and_interpolates_the_slow_ones():
    ratio = inverse_frequencies(PLAIN) / inverse_frequencies(YARN)
    np.testing.assert_allclose(ratio[:10], 1, rtol=1e-6)  # bound(32) = 10.47
    np.testing.assert_allclose(ratio[23:], 40, rtol=1e-5)  # bound(1) = 22.5
    assert (np.diff(ratio[10:24]) > 0).all()


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(), 1.0),
        (dict(mscale=0.5), (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        (dict(mscale=0.0), 0.1 * math.log(40) + 1),
        (dict(mscale_all_dim=0.0), 0.1 * math.log(40) + 1),
        (dict(attention_factor=1.25), 1.25),
        (dict(mscale=0.0, factor=0.5), 1.0),
        (dict(mscale=0.0, mscale_all_dim=0.0, factor=32.0), 1.3465735902799727),
    ],
)
def test_yarn_attention_factor(changes, expected):
    assert attention_factor(dataclasses.replace(YARN, **changes)) == pytest.approx(expected)


def test_mla_softmax_scale():
    assert mla_softmax_scale(PLAIN, 192) == pytest.approx(192**-0.5)
    assert mla_softmax_scale(YARN, 192) == pytest.approx(192**-0.5 * 1.8739, rel=1e-4)
    without = dataclasses.replace(YARN, mscale_all_dim=0.0)
    assert mla_softmax_scale(without, 192) == pytest.approx(192**-0.5)


def rotated(x, positions, rope):
    """Each pair as a complex number, in float64, de-interleaved."""
    x = np.asarray(x, np.float64)
    turn = np.exp(1j * positions[:, None, None] * inverse_frequencies(rope).astype(np.float64))
    if rope.interleaved:
        pairs = x[..., 0::2] + 1j * x[..., 1::2]
    else:
        one, other = np.split(x, 2, axis=-1)
        pairs = one + 1j * other
    turned = pairs * turn * attention_factor(rope)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def apply_rope(x, positions, rope):
    return rotate(x, *cos_sin(positions, rope), interleaved=rope.interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(interleaved):
    rope = dataclasses.replace(YARN, dim=12, interleaved=interleaved, mscale=0.3)
    x = np.random.default_rng(0).standard_normal((7, 3, 12)).astype(np.float32)
    positions = np.array([0, 1, 2, 17, 100, 1000, 3], np.int32)
    found = np.asarray(jax.jit(lambda x, p: apply_rope(x, p, rope))(x, positions))
    np.testing.assert_allclose(found, rotated(x, positions, rope), rtol=1e-4, atol=1e-4)


def test_known_values():
    """Position 1 turns the first pair by one radian; the pairs are what the two forms differ in."""
    rope = RopeConfig(dim=4, theta=10000.0)
    x, position = np.array([[[1.0, 2.0, 3.0, 4.0]]], np.float32), np.array([1], np.int32)
    c, s, c2, s2 = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    np.testing.assert_allclose(
        apply_rope(x, position, rope)[0, 0],
        [c - 3 * s, 2 * c2 - 4 * s2, 3 * c + s, 4 * c2 + 2 * s2],
        rtol=1e-5,
    )
    interleaved = dataclasses.replace(rope, interleaved=True)
    np.testing.assert_allclose(
        apply_rope(x, position, interleaved)[0, 0],
        [c - 2 * s, 3 * c2 - 4 * s2, 2 * c + s, 4 * c2 + 3 * s2],
        rtol=1e-5,
    )
