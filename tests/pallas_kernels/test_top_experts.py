"""`top_experts` against a NumPy model, in every implementation; ties, NaN, bits and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Scoring, top_experts

TOKENS = 23
SCORINGS = {
    "Qwen3": Scoring(),
    "DeepSeek-V2": Scoring(normalise=False, scale=16.0),
    "DeepSeek-V3": Scoring(sigmoid=True, scale=2.5),
}
each = pytest.mark.parametrize("implementation", ["xla", "triton"])


@functools.cache
def chooser(implementation, top_k, scoring):
    def choose(logits, bias):
        return top_experts(logits, bias, top_k, scoring, implementation=implementation)

    return jax.jit(choose)


def logits_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return 2 * rng.standard_normal((TOKENS, count)).astype(np.float32)


def bias_of(count):
    return np.random.default_rng(9).standard_normal(count).astype(np.float32)


def expected(logits, bias, top_k, scoring):
    wide = logits.astype(np.float64)
    if scoring.sigmoid:
        scores = 1 / (1 + np.exp(-wide))
    else:
        exponentials = np.exp(wide - wide.max(1, keepdims=True))
        scores = exponentials / exponentials.sum(1, keepdims=True)
    order = np.argsort(-(scores if bias is None else scores + bias), axis=1, kind="stable")
    experts = order[:, :top_k]
    weights = np.take_along_axis(scores, experts, 1)
    if scoring.normalise:
        weights /= weights.sum(1, keepdims=True)
    return experts, weights * scoring.scale


# Of experts, of those chosen, and whether they are biased. CI samples sizes and biases.
SIZES = [(128, 8, False), (60, 6, True), (5, 5, True), (300, 1, False)]
SLOW_SIZES = [(128, 8, True), (60, 6, False), (5, 5, False), (300, 1, True)]


@each
@pytest.mark.parametrize(
    "count, top_k, biased",
    [*SIZES, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SLOW_SIZES)],
)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_equals_the_definition(implementation, scoring, count, top_k, biased):
    logits, bias = logits_of(count), bias_of(count) if biased else None
    experts, weights = chooser(implementation, top_k, scoring)(logits, bias)
    wanted, wanted_weights = expected(logits, bias, top_k, scoring)
    assert experts.dtype == jnp.int32 and weights.dtype == jnp.float32
    np.testing.assert_array_equal(experts, wanted)
    np.testing.assert_allclose(weights, wanted_weights, rtol=2e-6)


@each
def test_of_equal_scores_the_first_wins(implementation):
    logits = np.zeros((TOKENS, 12), np.float32)
    logits[:, 7] = 1
    experts, _ = chooser(implementation, 4, Scoring())(logits, None)
    np.testing.assert_array_equal(experts, np.tile([7, 0, 1, 2], (TOKENS, 1)))


@each
def test_bits_depend_on_the_token_alone(implementation):
    choose, logits = chooser(implementation, 8, Scoring()), logits_of(128)
    experts, weights = choose(logits, None)
    for rows in (np.arange(4, 5), np.array([9, 2, 2, 22])):
        some_experts, some_weights = choose(logits[rows], None)
        np.testing.assert_array_equal(some_experts, experts[rows])
        np.testing.assert_array_equal(some_weights, weights[rows])


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_bits_depend_on_the_token_alone_among_few_experts(scoring):
    choose, logits = chooser("xla", 4, scoring), logits_of(8)
    whole = choose(logits, bias_of(8))
    for count in (1, 7, 15):
        for its, expected in zip(choose(logits[:count], bias_of(8)), whole, strict=True):
            np.testing.assert_array_equal(its, expected[:count])


@each
def test_nan_stays_with_its_token(implementation):
    choose, logits = chooser(implementation, 8, Scoring()), logits_of(128)
    experts, weights = map(np.asarray, choose(logits, None))
    logits[3] = np.nan
    found, found_weights = map(np.asarray, choose(logits, None))
    others = np.arange(TOKENS) != 3
    assert ((found >= 0) & (found < 128)).all() and np.isnan(found_weights[3]).all()
    np.testing.assert_array_equal(found[others], experts[others])
    np.testing.assert_array_equal(found_weights[others], weights[others])


@each
def test_no_expert_is_chosen_twice(implementation):
    """Where most have a bias of -inf, or one has a score that is no number."""
    choose, logits = chooser(implementation, 3, Scoring(sigmoid=True)), logits_of(128)
    bias = np.full(128, -np.inf, np.float32)
    bias[5] = 0
    np.testing.assert_array_equal(choose(logits, bias)[0], np.tile([5, 0, 1], (TOKENS, 1)))
    logits[:, 3] = np.nan
    found = np.asarray(choose(logits, np.zeros(128, np.float32))[0])
    assert all(len(set(row)) == 3 for row in found.tolist())


def test_shapes_that_do_not_belong_together():
    with pytest.raises(ValueError, match="top_k=9"):
        top_experts(logits_of(8), None, 9, Scoring())
    with pytest.raises(ValueError, match="bias"):
        top_experts(logits_of(8), bias_of(7), 2, Scoring())


@each
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_the_gradient_is_that_of_the_weights(implementation, scoring):
    count, top_k = 16, 4
    logits, bias = logits_of(count), bias_of(count)
    dweights = np.random.default_rng(3).standard_normal((TOKENS, top_k)).astype(np.float32)

    def weights(logits):
        return top_experts(logits, bias, top_k, scoring, implementation=implementation)[1]

    (found,) = jax.vjp(weights, jnp.asarray(logits))[1](jnp.asarray(dweights))
    step = 1e-5
    for token, expert in [(0, 3), (5, 11), (22, 0), *((1, its) for its in range(count))]:
        moved = [logits.astype(np.float64) for _ in range(2)]
        moved[0][token, expert] += step
        moved[1][token, expert] -= step
        up, down = (expected(its, bias, top_k, scoring)[1][token] for its in moved)
        slope = ((up - down) * dweights[token]).sum() / (2 * step)
        np.testing.assert_allclose(found[token, expert], slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_bits_of_a_gradient_depend_on_the_token_alone(scoring):
    """With XLA's optimizations (in CI; JAX 0.11 or newer): loops over other numbers of tokens."""
    rng = np.random.default_rng(0)
    logits, dweights = (rng.standard_normal((256, n)).astype(np.float32) for n in (64, 6))

    @jax.jit
    def gradient(logits, dweights):
        return jax.vjp(lambda its: top_experts(its, None, 6, scoring)[1], logits)[1](dweights)[0]

    together = np.asarray(gradient(logits, dweights))
    assert np.count_nonzero(together) > 256 * 5
    for count in (1, 4, 64):
        alone = gradient(logits[:count], dweights[:count])
        np.testing.assert_array_equal(alone, together[:count])


def test_an_unknown_implementation_is_refused():
    with pytest.raises(NotImplementedError, match="cuda"):
        top_experts(logits_of(8), None, 2, Scoring(), implementation="cuda")
