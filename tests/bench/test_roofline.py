"""Roofline times against numbers worked out by hand, and against the ones others published."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from lora_moe_jax.bench import arrays, layer, roofline
from lora_moe_jax.bench.kernel_cases import LAYER_TOKENS, PRODUCT_CASES, AttentionCase
from lora_moe_jax.bench.peers import PEERS
from lora_moe_jax.bench.report import this_environment
from lora_moe_jax.bench.roofline import H200, Active, Ceilings, Work
from pallas_kernels.shapes import DEEPSEEK_V3_EP8, EXPERT_SHAPES, QWEN3_30B_A3B, ProductShape
from tests.bench.fakes import TINY

PRODUCT_US = (261, 137, 184, 92, 458, 2436, 438)
LAYER_US = {
    QWEN3_30B_A3B: (18.6, 118.7, 280, 326, 394, 415, 429),
    DEEPSEEK_V3_EP8: (20.9, 152, 435, 597, 725, 767, 792),
}
SMALL = ProductShape("small", 4, 8, 6, (2, 4))


@pytest.mark.parametrize(("case", "expected"), list(zip(PRODUCT_CASES, PRODUCT_US, strict=True)))
def test_products(case, expected):
    active = arrays.random_rows(case.shape.groups, case.rows, 0).active
    work = roofline.product(case.shape, case.rows, active)
    assert round(1e6 * work.seconds_of(H200)) == expected


def test_a_card_has_ceilings_of_its_own(monkeypatch):
    work = Work(2e12, 3e9)
    assert work.seconds == 2e12 / 790e12  # of a CPU there are none: an H200's
    device = jax.devices()[0]
    card = types.SimpleNamespace(device_kind="a card", platform=device.platform)
    monkeypatch.setattr(jax, "devices", lambda: [card])
    monkeypatch.setitem(roofline.OTHERS, "a card", Ceilings(1e15, 1e12))
    assert work.seconds == 3e9 / 1e12
    assert this_environment().roofline_bytes_per_second == 1e12


def test_product_by_hand():
    work = roofline.product(SMALL, 10, Active(groups=3))
    assert work == Work(2 * 10 * 8 * 6, 2 * (3 * 8 * 6 + 10 * 8 + 10 * 6))
    gated = roofline.product(SMALL, 10, Active(groups=3), out_width=3)
    assert gated == Work(work.flops, work.bytes - 2 * 10 * 3)


def test_attention_by_hand():
    case = AttentionCase("a", TINY, 8, 2, 4, 6, 3, 10, "bandwidth", 1, 1, tokens=4, window=3)
    # Positions 6 to 9 see 3 each; the first of them sees from 4 on.
    assert case.work == Work(2 * 3 * 8 * 10 * 12, 2 * 3 * (6 * 2 * 10 + 4 * 8 * 10))
    gradients = dataclasses.replace(case, gradients=True)
    assert gradients.work == Work(2 * 3 * 8 * (3 * 4 + 2 * 6) * 12, 2 * case.work.bytes)
    latent = AttentionCase("a", TINY, 8, 0, 6, 4, 3, 10, "bandwidth", 1, 1)
    assert latent.work == Work(2 * 3 * 8 * 10 * 10, 2 * 3 * (10 * 6 + 8 * 10))


def test_adapters_by_hand():
    active = Active(groups=3, buckets=5, slots=2, adapted_rows=7)
    flops = 2 * 7 * 4 * (2 * 8 + 6)
    a, b = 4 * 8 * 2, 4 * 6
    assert roofline.lora(SMALL, 4, active) == Work(flops, 2 * 5 * (a + b))
    assert roofline.lora(SMALL, 4, active, shared_a=True) == Work(flops, 2 * (2 * a + 5 * b))
    assert roofline.lora(SMALL, 4, active, shared_b=True) == Work(flops, 2 * (5 * a + 2 * b))


def test_no_adapter_in_the_batch_adds_nothing():
    rows = arrays.random_rows(4, 32, 0)
    assert roofline.lora(SMALL, 16, rows.active) == Work(0, 0)


def test_layer_by_hand():
    """One token: 8 experts of 9.4 MB, and 8 buckets of 3 x 32 x (2048 + 768)."""
    active = Active(groups=8, buckets=8, slots=1, adapted_rows=8)
    work = roofline.layer(QWEN3_30B_A3B, 1, 8, active, 32)
    weights, factors = 3 * 2048 * 768, 3 * 32 * (2048 + 768)
    assert work.bytes == 2 * (8 * (weights + factors) + 2 * 2048 + 8 * 768)
    assert work.flops == 2 * 8 * (weights + factors)
    assert round(1e6 * work.seconds_of(H200), 1) == 18.6


@pytest.mark.parametrize("shape", list(LAYER_US), ids=lambda shape: shape.name)
def test_layer_routings_are_the_work_of_the_peers(shape):
    for tokens, expected in zip(LAYER_TOKENS, LAYER_US[shape], strict=True):
        peer = PEERS[shape.name, tokens]
        assert peer.roofline == pytest.approx(expected, abs=0.51)
        layers = layer.comparable_routings(shape, tokens, layer.RANK, peer.roofline)
        floor = 1e6 * layer.mean_roofline(shape, layers, layer.RANK, H200)
        assert floor == pytest.approx(expected, rel=0.02)
        assert len({routing.experts.tobytes() for routing in layers}) > 1


def test_routing():
    routing = layer.random_routing(QWEN3_30B_A3B, 32, np.random.default_rng(0))
    assert all(len(set(experts)) == 8 for experts in routing.experts.tolist())
    np.testing.assert_allclose(routing.weights.sum(1), 1, rtol=1e-5)
    prefill = layer.random_routing(QWEN3_30B_A3B, 1024, np.random.default_rng(0)).slots
    requests = prefill.reshape(16, 64)
    assert (requests == requests[:, :1]).all()
    assert (np.bincount(requests[:, 0]) == 2).all()


def test_training_flops():
    """Twice the base (y and dx), three times the adapters; 645 GFLOP for the issue's case."""
    flops = roofline.training(QWEN3_30B_A3B, 32768, 16)
    base, adapters = 6 * 32768 * 2048 * 768, 6 * 32768 * 16 * (2048 + 768)
    assert flops == 2 * base + 3 * adapters
    assert round(flops / 1e9) == 645


def test_active():
    group, slots = np.array([0, 0, 0, 2, 2]), np.array([-1, 1, 1, 0, 1])
    assert arrays.active_of(group, slots, 4) == Active(2, 3, 2, 4)


def test_random_rows_are_sorted_by_group_and_slot():
    rows = arrays.random_rows(8, 200, 5)
    assert rows.group_sizes.sum() == 200
    group = np.repeat(np.arange(8), rows.group_sizes)
    assert (np.diff(group * 5 + rows.row_slots) >= 0).all()


@pytest.mark.parametrize("shape", list(EXPERT_SHAPES.values()), ids=lambda shape: shape.name)
def test_products_of_named_shapes(shape):
    for product in shape.products:
        assert sum(product.parts) == product.n
    assert shape.gate_up.k == shape.down.n == shape.hidden
    assert shape.gate_up.n == 2 * shape.down.k == 2 * shape.intermediate
