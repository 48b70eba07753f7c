"""The Hopper kernel of `top_experts`: in Pallas's interpreter, which also looks for races."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Scoring, implementation, top_experts
from pallas_kernels.top_experts import api, triton, xla
from tests.pallas_kernels.test_top_experts import SCORINGS, bias_of, expected, logits_of

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need jax >= 0.11", allow_module_level=True)

FEW = 3  # tokens: each takes the interpreter a while
interpreted = pytest.mark.interpreter


@functools.cache
def chooser(top_k, scoring):
    return jax.jit(
        lambda logits, bias: top_experts(logits, bias, top_k, scoring, implementation="mosaic_gpu")
    )


def choose(logits, bias=None, top_k=8, scoring=SCORINGS["Qwen3"]):
    """What the kernel chooses; it is interpreted where it cannot run."""
    from tests.pallas_kernels.gpu_interpreter import interpret

    kernel = chooser(top_k, scoring)
    if jax.default_backend() == "gpu":
        return jax.tree.map(np.asarray, kernel(logits, bias))
    return interpret(kernel, logits, bias)


def check(logits, bias=None, top_k=8, scoring=SCORINGS["Qwen3"]):
    experts, weights = choose(logits, bias, top_k, scoring)
    wanted, wanted_weights = expected(np.float32(logits), bias, top_k, scoring)
    assert experts.dtype == np.int32 and weights.dtype == np.float32
    np.testing.assert_array_equal(experts, wanted)
    np.testing.assert_allclose(weights, wanted_weights, rtol=2e-6)


@interpreted
@pytest.mark.parametrize(
    "count, top_k, biased, dtype",
    [
        (128, 8, False, "float32"),
        (256, 6, True, "float32"),
        (512, 10, False, "bfloat16"),
        (128, 1, True, "bfloat16"),
        (64, 6, False, "float32"),
        (32, 4, False, "bfloat16"),
        (96, 3, True, "float32"),
    ],
)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_equals_the_definition(scoring, count, top_k, biased, dtype):
    logits, bias = logits_of(count)[:FEW].astype(dtype), bias_of(count) if biased else None
    check(logits, bias, top_k, scoring)


@interpreted
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize(
    "dtype, biased", [("float32", False), ("float32", True), ("bfloat16", False)]
)
def test_of_equal_scores_the_first_wins(scoring, dtype, biased):
    """Few values, so that some of the chosen are equal, and some equal ones are left out."""
    logits = np.random.default_rng(1).integers(-3, 3, (FEW, 128)).astype(dtype)
    logits[1] = 0
    logits[2, ::2] *= -0.0  # both zeros are equal
    check(logits, np.zeros(128, np.float32) if biased else None, 20, scoring)


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chosen_are_equal_and_then_not(dtype):
    logits = np.full((1, 128), -np.inf, dtype)
    logits[0, [9, 4, 100, 77, 3, 127]] = 2, 1, 2, 2, -3, 1
    experts, weights = choose(logits)
    np.testing.assert_array_equal(experts, [[9, 77, 100, 4, 127, 3, 0, 1]])
    assert (weights[0, -2:] == 0).all()


@interpreted
@pytest.mark.parametrize("biased", [False, True])
def test_bits_depend_on_the_token_alone(biased):
    logits, bias = logits_of(128)[:FEW], bias_of(128) if biased else None
    experts, weights = choose(logits, bias)
    rows = np.array([2, 0])
    some_experts, some_weights = choose(logits[rows], bias)
    np.testing.assert_array_equal(some_experts, experts[rows])
    np.testing.assert_array_equal(some_weights, weights[rows])


@interpreted
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize(
    "dtype, biased", [("float32", False), ("float32", True), ("bfloat16", False)]
)
@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_nan_stays_with_its_token(scoring, dtype, biased, nan):
    logits, bias = logits_of(128)[:FEW].astype(dtype), bias_of(128) if biased else None
    experts, weights = choose(logits, bias, scoring=scoring)
    logits[0], logits[1, 70] = nan, nan
    found, found_weights = choose(logits, bias, scoring=scoring)
    assert ((found >= 0) & (found < 128)).all()
    assert all(len(set(row)) == len(row) for row in found)
    assert np.isnan(found_weights[0]).all() and np.isnan(found_weights[1]).any()
    np.testing.assert_array_equal(found[2], experts[2])
    np.testing.assert_array_equal(found_weights[2], weights[2])


@pytest.mark.parametrize(
    "shape, top_k, dtype",
    [
        ((2, 60), 8, "float32"),
        ((2, 640), 8, "float32"),
        ((2, 128), 33, "float32"),
        ((2, 128), 8, "float16"),
        ((0, 128), 8, "float32"),
    ],
)
@pytest.mark.parametrize("platform, general", [("gpu", triton), ("cpu", xla)])
def test_what_the_kernel_refuses(monkeypatch, platform, general, shape, top_k, dtype):
    """Asked for by name it says so; without a name another implementation serves them."""
    logits = jnp.zeros(shape, dtype)
    with pytest.raises(NotImplementedError, match=rf"logits .*\[{shape[0]}, {shape[1]}\]"):
        top_experts(logits, None, top_k, Scoring(), implementation="mosaic_gpu")
    monkeypatch.setattr(implementation, "platform_implementation", lambda: "mosaic_gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert api._backend(None, logits, top_k) is general


def test_on_hopper_it_is_the_kernel(monkeypatch):
    from pallas_kernels.top_experts import mosaic_gpu

    logits = jnp.zeros((2, 128))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(implementation, "platform_implementation", lambda: "xla")
    assert api._backend(None, logits, 8) is triton
    monkeypatch.setattr(implementation, "platform_implementation", lambda: "mosaic_gpu")
    assert api._backend(None, logits, 8) is mosaic_gpu
    assert api._backend("triton", logits, 8) is triton
    assert api._backend("xla", logits, 8) is xla
