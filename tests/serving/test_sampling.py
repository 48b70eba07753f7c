"""Sampled tokens: from the right distribution, repeatable, and inside what the filters allow."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from lora_moe_jax import SamplingParams
from lora_moe_jax.serving.sampler import SamplingRows, sample
from tests.serving.helpers import bits, greedy, load_golden, prompts, sampled

FAMILY = "qwen3_moe"
DRAWS = 20_000


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, step=0):
    """Samples DRAWS rows that have the same logits, by default with seeds 0, 1, 2, …"""
    seeds = np.arange(DRAWS) if seed is None else np.full(DRAWS, seed)
    steps = np.arange(DRAWS) if step is None else np.full(DRAWS, step)
    rows = SamplingRows(
        temperature=np.full(DRAWS, temperature, np.float32),
        top_k=np.full(DRAWS, top_k, np.int32),
        top_p=np.full(DRAWS, top_p, np.float32),
        min_p=np.full(DRAWS, min_p, np.float32),
        seed=seeds.astype(np.uint32),
        step=steps.astype(np.int32),
    )
    logits = np.tile(np.float32(logits), (DRAWS, 1))
    found = np.asarray(SAMPLE(logits, rows, filters=True))
    if not (top_k or top_p < 1 or min_p):
        assert np.array_equal(found, SAMPLE(logits, rows, filters=False))
    return found


SAMPLE = jax.jit(sample, static_argnames="filters")


@pytest.mark.parametrize("vocabulary", [151, 384, 1000])
def test_the_first_of_the_largest(vocabulary):
    """Looked for in parts of a row, whatever their number is; NaN is larger than any number."""
    logits = np.random.default_rng(0).integers(0, 4, (16, vocabulary)).astype(np.float32)
    logits[3], logits[4], logits[5, 79] = -np.inf, np.inf, np.nan
    rows = SamplingRows(*(np.zeros(16, np.int32) for _ in SamplingRows._fields))
    expected = np.argmax(logits, axis=1)
    for filters in (False, True):
        assert SAMPLE(logits, rows, filters=filters).tolist() == expected.tolist()


def allowed(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """float64 [V]: the probabilities that the filters leave, in order: top-k, top-p, min-p."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


# The largest is the last: what overflows or filters too much falls on the first.
LOGITS = np.linspace(-2, 2, 12)[np.random.default_rng(4).permutation(12)]
FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("varied", ["seed", "step"])
def test_distribution(filters, varied):
    """Pearson's chi-square over 20,000 draws stays below its 1 - 1e-6 quantile (12 cells: 56)."""
    fixed = {"seed": 11, "step": None} if varied == "step" else {"step": 3}
    counts = np.bincount(draw(LOGITS, **filters, **fixed), minlength=len(LOGITS))
    expected = allowed(LOGITS, **filters) * DRAWS
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    assert 1 < kept.sum() <= 12
    assert ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 56


def test_the_most_likely_token_always_stays():
    for extreme in ({"top_p": 1e-46}, {"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-7}):
        assert (draw(LOGITS, temperature=3.0, **extreme) == LOGITS.argmax()).all(), extreme


def test_extreme_temperatures():
    assert (draw(LOGITS * 1e5, temperature=1e-37) == LOGITS.argmax()).all()
    assert (draw(LOGITS, temperature=1e-46) == LOGITS.argmax()).all()
    counts = np.bincount(draw(LOGITS, temperature=1e30), minlength=12)
    assert counts.min() > DRAWS / 12 * 0.85


def test_ties_go_to_the_lower_token_when_greedy():
    assert (draw([0.0, 2.0, 1.0, 2.0], temperature=0.0) == 1).all()


def test_a_row_draws_for_itself_whatever_generator_a_program_has():
    """JAX's other ones draw for all rows at once."""
    logits, seeds = np.zeros((3, 151), np.float32), np.arange(3, dtype=np.uint32)
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.int32)

    def drawn(rows):
        its = SamplingRows(ones, zeros, ones, 0 * ones, seeds, zeros)
        its = SamplingRows(*(values[rows] for values in its))
        return np.asarray(jax.jit(functools.partial(sample, filters=False))(logits[rows], its))

    with jax.default_prng_impl("rbg"):
        together = drawn(slice(None))
        assert [drawn(slice(i, i + 1))[0] for i in range(3)] == list(together)
    assert np.array_equal(drawn(slice(None)), together)


def test_a_seed_repeats_alone_and_in_a_batch(engine):
    one = engine(FAMILY)
    load_golden(one, FAMILY)
    batch = prompts([4, 9, 2, 30, 5, 11, 7, 16])
    names = ["attn", None, "experts", None, "rslora", "attn", None, "experts"]
    settings = [
        sampled(7, 10), sampled(7, 10, top_k=5), greedy(10), sampled(2**32 - 1, 10, top_p=0.7),
        sampled(0, 10, min_p=0.1), greedy(10), sampled(3, 10), sampled(4, 10),
    ]  # fmt: skip
    together = list(map(bits, one.generate(batch, settings, names)))
    for i in range(8):
        assert bits(one.generate([batch[i]], [settings[i]], [names[i]])[0]) == together[i]
    again = one.generate(batch[::-1], settings[::-1], names[::-1])
    assert list(map(bits, again))[::-1] == together


def test_seeds_differ(engine):
    one = engine(FAMILY)
    prompt = prompts([6])[0]
    outs = one.generate([prompt] * 8, [sampled(seed, 12) for seed in range(8)])
    assert len({tuple(out.token_ids) for out in outs}) == 8
    unseeded = [one.generate([prompt], sampled(None, 12))[0] for _ in range(3)]
    assert len({tuple(out.token_ids) for out in unseeded}) == 3


def test_keeping_one_token_is_greedy(engine):
    one, batch = engine(FAMILY), prompts([6, 13])
    expected = list(map(bits, one.generate(batch, greedy(12))))
    for setting in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.5}):
        assert list(map(bits, one.generate(batch, sampled(5, 12, **setting)))) == expected


@pytest.mark.parametrize("filters", FILTERS[3:], ids=str)
def test_samples_stay_inside_the_allowed_set(filters, engine):
    """The set is computed by NumPy from the logits that `score` returns."""
    one = engine(FAMILY)
    settings = [sampled(seed, 20, **{"temperature": 1.5} | filters) for seed in range(8)]
    outs = one.generate(prompts([5] * 8), settings)
    sequences = [out.prompt_token_ids + out.token_ids for out in outs]
    surprising = 0
    for out, score in zip(outs, one.score(sequences, return_logits=True), strict=True):
        # The sequence begins with a prompt of five tokens.
        for token, logits in zip(out.token_ids, score.logits[4:], strict=False):
            # A hair wider, for a token on the border that rounding puts on the other side.
            wide = {"temperature": 1.5} | filters
            wide["top_p"] = min(wide.get("top_p", 1) + 1e-5, 1.0)
            wide["min_p"] = wide.get("min_p", 0) * (1 - 1e-5)
            assert allowed(logits, **wide)[token] > 0
            surprising += token != logits.argmax()
    assert surprising > 20, "hardly anything was sampled"


def test_greedy_rows_beside_sampled_ones(engine):
    one = engine(FAMILY)
    batch = prompts([5, 8, 3, 12])
    expected = list(map(bits, one.generate(batch, greedy(8))))
    mixed = one.generate(batch, [greedy(8), sampled(1), greedy(8), sampled(2, top_k=3)])
    assert [bits(mixed[i]) for i in (0, 2)] == [expected[i] for i in (0, 2)]
    assert [bits(mixed[i]) for i in (1, 3)] != [expected[i] for i in (1, 3)]


def test_settings_may_be_numpy_numbers():
    given = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        seed=np.uint32(7),
        stop_token_ids=np.array([4, 5]),
    )
    assert given == SamplingParams(max_tokens=3, temperature=0.5, seed=7, stop_token_ids=(4, 5))
    assert type(given.seed) is int and type(given.stop_token_ids[0]) is int
