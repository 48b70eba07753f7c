"""What the host packs is what the step takes out, bit for bit."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_jax import SamplingParams
from lora_moe_jax.serving.request import GenerateRequest
from lora_moe_jax.serving.step_batch import RowTable
from lora_moe_jax.serving.step_layout import (
    FED_BACK,
    RowInputs,
    StepLayout,
    advanced,
    split_chosen,
)

sizes = st.integers(1, 9)


@settings(max_examples=15, deadline=None)
@given(sizes, sizes, sizes, st.randoms(use_true_random=False))
def test_round_trip(tokens, rows, pages, random):
    layout = StepLayout(rows, pages)
    some = np.random.default_rng(random.randrange(2**32))
    flat = [some.integers(-1, 2**31, tokens).astype(np.int32) for _ in range(3)]
    # Any bits: floats that are not numbers, denormal ones and negative zeros too.
    part = some.integers(0, 2**32, layout.row_size, np.uint32).view(np.int32)
    packed = layout.pack(*flat, part)
    assert packed.dtype == np.int32 and packed.shape == (layout.size(tokens),)
    here = layout.unpack(packed)
    there, again = jax.jit(lambda x: (it := layout.unpack(x), layout.repack(it)))(packed)
    for name, expected in zip(("tokens", "positions", "request"), flat, strict=True):
        assert np.array_equal(getattr(here, name), expected)
    for left, right in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert left.dtype == right.dtype and left.tobytes() == np.asarray(right).tobytes()
    assert b"".join(value.tobytes() for value in here.rows) == part.tobytes()
    assert here.rows.page_tables.shape == (rows, pages)
    assert np.asarray(again).tobytes() == packed.tobytes()


def test_the_fields_are_views():
    layout = StepLayout(3, 4)
    part = np.zeros(layout.row_size, np.int32)
    values = layout.row_values(part)
    for number, value in enumerate(values):
        value[...] = number + 1
    again = layout.unpack(layout.pack(*[np.int32([])] * 3, part)).rows
    for number, name in enumerate(RowInputs._fields):
        assert (getattr(again, name) == number + 1).all(), name


def test_what_is_laid_out():
    """One that generates and whose token is on its way, one whose token is known, and a prompt."""
    layout = StepLayout(4, 2)
    table = RowTable(layout)
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.25, max_tokens=9)
    made = [
        GenerateRequest(0, [5, 6], 2, None, row=2, computed=2, pending=1, params=params, seed=7),
        GenerateRequest(0, [5, 6, 8], 1, None, row=0, computed=2, seed=2**32 - 1),
        GenerateRequest(0, [1, 2, 3, 4], 4, None, row=3, computed=1),
    ]
    for request in made:
        table.start(request)
    batch = table.lay_out(made[:2], [(made[2], 2)], size=8, steps=1)
    inputs = layout.unpack(batch.packed)
    assert inputs.tokens.tolist() == [FED_BACK, 8, 2, 3, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [2, 2, 1, 2, 0, 0, 0, 0]
    assert inputs.request.tolist() == [2, 0, 3, 3, -1, -1, -1, -1]
    assert inputs.rows.sample_at.tolist() == [1, -1, 0, -1], "the prompt is not at its end"
    assert inputs.rows.step[[2, 0]].tolist() == [1, 2]
    assert inputs.rows.seed[[2, 0]].tolist() == [7, 2**32 - 1]
    settings_of_2 = [getattr(inputs.rows, name)[2] for name in ("temperature", "top_p", "min_p")]
    assert settings_of_2 == [np.float32(0.5), np.float32(0.9), np.float32(0.25)]
    assert batch.filters and [chunk.samples for chunk in batch.chunks] == [True, True, False]
    made[2].computed = 3
    last = table.lay_out([], [(made[2], 1)], size=8, steps=1)
    assert layout.unpack(last.packed).rows.sample_at.tolist() == [-1, -1, -1, 0]
    assert not last.filters, "only rows that are sampled count"


def test_the_device_lays_out_what_the_host_would():
    """The step after one of rows that all generate, some rows being nobody's."""
    layout = StepLayout(4, 2)
    table = RowTable(layout)
    made = [
        GenerateRequest(0, [5, 6], 2, None, row=2, computed=2, pending=1, seed=7),
        GenerateRequest(0, [5, 6, 8], 1, None, row=0, computed=2, seed=2**32 - 1),
    ]
    for request in made:
        table.start(request)
    batch = table.lay_out(made, [], size=8, steps=1)
    for request in made:
        request.computed += 1
        request.pending += 1
    given = jax.jit(lambda packed: layout.repack(advanced(layout.unpack(packed))))(batch.packed)
    following = table.lay_out(made, [], size=8, steps=1)
    assert np.array_equal(given, following.packed)
    assert batch.advanced().chunks_now() == following.chunks != batch.chunks


def test_results_are_carried_bit_by_bit():
    logprobs = np.float32([[-0.0, -1e-45], [-np.inf, -3.25]])
    tokens = np.int32([[4, 5], [6, 7]])
    chosen = np.stack([tokens, logprobs.view(np.int32)], axis=1)
    got_tokens, got_logprobs = split_chosen(chosen)
    assert got_tokens == tokens.tolist()
    assert np.float32(got_logprobs).tobytes() == logprobs.tobytes()
