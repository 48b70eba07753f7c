"""Rows and tables from given timings, as on a GPU and as elsewhere."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from lora_moe_jax.bench import (
    arrays,
    attention,
    layer,
    lora,
    lowering,
    products,
    slots,
    timing,
    training,
)
from lora_moe_jax.bench.kernel_cases import AttentionCase, LoraCase, ProductCase, Target
from lora_moe_jax.bench.peers import PEERS, Peer
from tests.bench.fakes import TINY, fake_timer, pallas, xla


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(arrays, "normal", lambda seed, *shape, **_: np.zeros(shape))
    for module in (products, lora, training, attention):
        monkeypatch.setattr(module, "program", lambda *arguments: None)
    monkeypatch.setattr(layer, "ProgramInPlace", lambda *arguments: None)


@pytest.fixture
def gpu(monkeypatch):
    for module in (products, lora, training, layer, slots, attention):
        monkeypatch.setattr(module, "on_gpu", lambda: True)


def text_of(table) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return text.getvalue()


CASE = ProductCase("tiny product", TINY.gate_up, 24, Target(1.45, 1.15))
FLOOR = 1e6 * 2 * (4 * 32 * 32 + 24 * 32 + 24 * 32) / 4.3e12


def measure_product(over_roofline, kernel=pallas):
    times = {"kernel": kernel(over_roofline * FLOOR), "dense": xla(FLOOR), "ragged_dot": xla(1)}
    return products.measure(CASE, fake_timer(times))


@pytest.mark.parametrize(("over", "verdict"), [(1.1, "aim"), (1.3, "must"), (1.5, "MISS")])
def test_product_on_a_gpu(gpu, over, verdict):
    row = measure_product(over)
    assert row.roofline_us == pytest.approx(FLOOR)
    assert row.kernel_us == pytest.approx(over * FLOOR)
    assert row.over_roofline == pytest.approx(over)
    assert row.kernel_over_dense == pytest.approx(over)
    assert row.ragged_dot_over_kernel == pytest.approx(1 / (over * FLOOR))
    assert row.verdict == verdict
    text = text_of(products.table([row]))
    assert f"{over:.2f}" in text and verdict in text and "≤ 1.45" in text
    assert "(xla)" not in text


def test_product_that_pallas_did_not_serve(gpu):
    row = measure_product(3.0, kernel=xla)
    assert row.implementation == "xla"
    assert "tiny product (xla)" in text_of(products.table([row]))


def test_product_elsewhere_has_ratios_only():
    row = measure_product(1.1)
    assert row.kernel_us is row.over_roofline is row.ragged_dot_us is row.dense_us is None
    assert row.kernel_over_dense == pytest.approx(1.1)
    assert row.verdict == ""
    assert "–" in text_of(products.table([row]))


def test_ragged_dot_is_left_out_where_it_would_take_long(monkeypatch):
    monkeypatch.setattr(products, "RAGGED_DOT_SECONDS", 0.0)
    row = products.measure(CASE, fake_timer({"kernel": pallas(1), "dense": xla(1)}))
    assert row.ragged_dot_over_kernel is None


def measure_lora(case, on, off, phase="prefill"):
    times = {case.name: on, "off": off, "dense": xla(8), "ragged_dot": xla(80)}
    (row,) = lora.measure(TINY, "down", phase, 24, [case], fake_timer(times))
    return row


def test_lora_on_a_gpu(gpu):
    row = measure_lora(LoraCase(8), pallas(10.5, shrink=0.5, other=9), pallas(10, other=10))
    assert row.expand_over_off == pytest.approx(1.05)
    assert row.kernel_over_off == pytest.approx(1.1)
    assert row.call_over_off == pytest.approx(1.0)
    assert (row.dense_over_off, row.ragged_dot_over_off) == pytest.approx((0.8, 8))
    assert (row.expand_verdict, row.verdict, row.must) == ("must", "must", 1.15)
    text = text_of(lora.table([row]))
    assert "1.050" in text and "1.100" in text and "8 slots, r 16" in text


def test_lora_of_products_that_make_u(gpu):
    row = measure_lora(LoraCase(8), pallas(10.5, other=9), pallas(10, other=10))
    assert row.expand_over_off is None and row.expand_verdict == ""
    assert row.kernel_over_off == pytest.approx(1.05)


def test_lora_targets(gpu):
    none = LoraCase(8, live=False)
    assert measure_lora(none, pallas(10.04), pallas(10)).verdict == "aim"
    assert measure_lora(none, pallas(10.06), pallas(10)).verdict == "MISS"
    assert measure_lora(LoraCase(1), pallas(10, shrink=0.9), pallas(10)).verdict == "MISS"
    assert measure_lora(LoraCase(8, rank=64), pallas(20), pallas(10)).verdict == ""
    decode = measure_lora(LoraCase(8), pallas(10), pallas(10), "decode")
    assert decode.must == pytest.approx(1.05 * decode.roofline_over_off)
    assert decode.roofline_over_off > 1


def test_lora_rooflines_count_what_is_live(gpu):
    none = measure_lora(LoraCase(8, live=False), pallas(1), pallas(1))
    assert none.roofline_over_off == 1
    ranks = [
        measure_lora(LoraCase(8, rank=rank), pallas(1), pallas(1)).roofline_us for rank in (8, 16)
    ]
    shared = measure_lora(LoraCase(8, shared=True), pallas(1), pallas(1)).roofline_us
    assert none.roofline_us < ranks[0] < ranks[1]
    assert none.roofline_us < shared < ranks[1]


def test_lora_elsewhere_has_ratios_only():
    row = measure_lora(LoraCase(8), timing.Timing(2.0), timing.Timing(1.0))
    assert row.kernel_over_off == 2
    assert row.kernel_us is row.off_us is row.over_roofline is row.expand_over_off is None
    assert row.verdict == row.expand_verdict == ""


def test_layer_on_a_gpu(gpu, monkeypatch):
    monkeypatch.setitem(PEERS, ("tiny", 4), Peer(0.01, 40.0, 30.0, Target(39, 28)))
    monkeypatch.setattr(layer, "_layers", lambda shape: None)
    monkeypatch.setattr(layer, "comparable_routings", one_routing)
    seconds = {"lora": 16 * 35e-6, "idle": 16 * 25.1e-6, "base": 16 * 25e-6}
    times = {name: timing.Timing(its) for name, its in seconds.items()}
    (row,) = layer.measure(TINY, (4,), fake_timer(times), rank=4)
    assert (row.lora_us, row.base_us) == pytest.approx((35, 25))
    assert row.lora_over_base == pytest.approx(1.4)
    assert (row.idle_us, row.idle_over_base) == pytest.approx((25.1, 1.004))
    assert row.idle_verdict == "aim"
    assert row.over_roofline == pytest.approx(35 / row.roofline_us)
    assert row.base_roofline_us < row.roofline_us
    assert (row.peer_us, row.must_us, row.aim_us, row.verdict) == (40, 39, 28, "must")
    text = text_of(layer.table([row]))
    assert "40.0 (30.0)" in text and "must" in text


def one_routing(shape, tokens, rank, peer_us):
    return [layer.random_routing(shape, tokens, np.random.default_rng(0))]


def test_training_on_a_gpu(gpu):
    flops = training.roofline.training(TINY, 24, 4)
    times = {"step": xla(1e6 * flops / 460e12), "forward": xla(1e6 * flops / 460e12 / 3)}
    row = training.measure(TINY, 24, 2, 4, fake_timer(times), elapsed=fake_timer(times))
    assert row.tflops == pytest.approx(460)
    assert row.over_forward == pytest.approx(3)
    assert (row.verdict, row.elapsed_us) == ("must", row.kernels_us)
    assert "≥ 450" in text_of(training.table([row]))
    faster = {name: timing.Timing(time.call / 2) for name, time in times.items()}
    row = training.measure(TINY, 24, 2, 4, fake_timer(faster), elapsed=fake_timer(faster))
    assert row.verdict == "aim"


def test_slots_table():
    rows = [slots.SlotsRow(count, None, over) for count, over in ((0, 2), (2, 2), (8, 3), (32, 3))]
    assert "from 2 to 32 slots: 1.50" in text_of(slots.table(rows))


@pytest.mark.parametrize(("share", "verdict"), [(0.9, "aim"), (0.8, "must"), (0.7, "MISS")])
def test_attention_on_a_gpu(gpu, share, verdict):
    bound = dict(bound="bandwidth", must=0.75, aim=0.88)
    case = AttentionCase("decode", TINY, 8, 2, 64, 64, requests=3, context=100, **bound)
    moved = 2 * 3 * (100 * 2 * 128 + 8 * 128)
    floor = 1e6 * moved / 4.3e12
    row = attention.measure(case, fake_timer({"kernel": pallas(floor / share)}))
    assert row.roofline_us == pytest.approx(floor)
    assert row.share == pytest.approx(share) and row.verdict == verdict
    assert row.terabytes_per_second == pytest.approx(4.3 * share)
    assert row.tflops == pytest.approx(2 * 3 * 8 * 128 * 100 / (floor / share) / 1e6)
    text = text_of(attention.table([row]))
    assert "3 × 100" in text and verdict in text and "≥ 0.75" in text


def test_lowering_table():
    row = lowering.LoweringRow("tiny", 24, "product", 2, 1.0, 6.0, 3.5, "MISS")
    assert "3.50" in text_of(lowering.table([row]))
    assert "MISS" in text_of(lowering.table([dataclasses.replace(row, rows=25)]))
