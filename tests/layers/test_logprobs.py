"""Logprobs against a float64 log-softmax."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from lora_moe_jax.layers.logprobs import token_logprobs
from pallas_kernels import log_sum_exp
from pallas_kernels.row_reduce.xla import CHUNK


@pytest.mark.parametrize("vocab", [7, CHUNK, 2 * CHUNK + 300])
@pytest.mark.parametrize("spread", [1, 60])
def test_equals_log_softmax(vocab, spread):
    rng = np.random.default_rng(0)
    logits = (spread * rng.standard_normal((5, vocab))).astype(np.float32)
    logits[3] += 500  # no overflow
    tokens = np.array([0, vocab - 1, 3, 5, 6], np.int32)
    found = jax.jit(token_logprobs)(logits, tokens)
    wide = logits.astype(np.float64)
    top = wide.max(1)
    total = top + np.log(np.exp(wide - top[:, None]).sum(1))
    expected = wide[np.arange(5), tokens] - total
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-4 if spread == 60 else 1e-5)
    np.testing.assert_allclose(jax.jit(log_sum_exp)(logits), total, rtol=1e-6)


def test_ruled_out_tokens_count_nothing():
    """-inf logits, a whole chunk of them and the first one too."""
    logits = np.random.default_rng(1).standard_normal((2, 3 * CHUNK)).astype(np.float32)
    logits[0, CHUNK : 2 * CHUNK] = -np.inf
    logits[1, : CHUNK + 5] = -np.inf
    finite = [row[np.isfinite(row)].astype(np.float64) for row in logits]
    expected = [np.log(np.exp(row).sum()) for row in finite]
    np.testing.assert_allclose(jax.jit(log_sum_exp)(logits), expected, rtol=1e-6)
