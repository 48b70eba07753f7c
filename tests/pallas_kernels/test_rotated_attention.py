"""`rotated_attention` against its parts: the same bits, whichever kernels there are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PageView, paged_attention, rotate_and_cache, rotated_attention
from pallas_kernels.implementation import platform_implementation
from tests.pallas_kernels.cases import assert_same, in_layers

WIDTH, EPS, SCALE = 128, 1e-6, 0.1


def arguments(positions, heads=8, kv_heads=2, page=64, columns=16, normed=True):
    """Tokens of requests of their own; what is not in their caches is NaN."""
    rng = np.random.default_rng(0)
    tokens = len(positions)
    dtype = np.dtype("float32" if platform_implementation() == "xla" else jnp.bfloat16)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    angles = np.float32(positions)[:, None] * 1e4 ** -np.linspace(0, 1, WIDTH // 2, dtype="float32")
    pages = [np.full((tokens * columns, page, kv_heads, WIDTH), np.nan, dtype) for _ in range(2)]
    tables = rng.permutation(tokens * columns).astype(np.int32).reshape(tokens, columns)
    for request, position in enumerate(positions):
        seen = np.arange(position)
        for its in pages:
            its[tables[request, seen // page], seen % page] = normal(position, kv_heads, WIDTH)
    weights = in_layers((1 + normal(WIDTH) / 8, 1 + normal(WIDTH) / 8)) if normed else (None, None)
    view = PageView(np.arange(tokens, dtype=np.int32), np.int32(positions), tables)
    return (
        normal(tokens, heads + 2 * kv_heads, WIDTH),
        *weights,
        np.cos(angles),
        np.sin(angles),
        *pages,
        view,
    )


def parts_of_it(heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, **options):
    """The definition."""
    q, *pages = rotate_and_cache(
        heads, q_weight, k_weight, cos, sin, k_pages, v_pages, view, eps=EPS
    )
    return paged_attention(q, *pages, view, scale=SCALE, **options), *pages


together = functools.partial(rotated_attention, eps=EPS, scale=SCALE)


def check(call, **options):
    found, expected = (
        jax.tree.map(np.asarray, jax.jit(functools.partial(function, **options))(*call))
        for function in (together, parts_of_it)
    )
    assert_same(found, expected)
    return found[0]


@pytest.mark.parametrize("position", [0, 300])
def test_equals_its_parts(position):
    assert np.float32(check(arguments([position]))).any()


@pytest.mark.slow
@pytest.mark.parametrize("position", [1, 63, 64, 255, 256, 511, 512, 1000])
def test_positions(position):
    check(arguments([position]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "position, sizes",
    [
        (540, dict(heads=32, kv_heads=4)),
        (540, dict(heads=28, kv_heads=2, page=16, columns=64)),  # groups of 14
        (540, dict(heads=6, kv_heads=2, page=128)),
        (540, dict(heads=4, kv_heads=4)),
        (540, dict(normed=False)),
        (9000, dict(columns=160)),  # two splits in a program
        (100, dict(columns=3)),  # one split
        (540, dict(heads=34, kv_heads=2)),  # groups of 17: apart
    ],
)
def test_sizes(position, sizes):
    check(arguments([position], **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("positions", [[540, 70, 300], [100]])
def test_a_token_has_its_bits_among_others(positions):
    """Of several tokens the kernels are apart."""
    *arrays, k_pages, v_pages, view = arguments(positions)
    among = np.asarray(jax.jit(together)(*arrays, k_pages, v_pages, view)[0])
    heads, q_weight, k_weight, cos, sin = arrays
    for token in range(len(positions)):
        one = slice(token, token + 1)
        its = view._replace(request=view.request[one], positions=view.positions[one])
        of_token = heads[one], q_weight, k_weight, cos[one], sin[one], k_pages, v_pages, its
        alone = np.asarray(jax.jit(together)(*of_token)[0])
        assert alone.tobytes() == among[one].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(sliding_window=100), dict(sinks=np.ones(8, "float32"))])
def test_windows_and_sinks(options):
    check(arguments([540]), **options)


def test_gradients_are_those_of_its_parts():
    heads, _, _, *rest = jax.tree.map(jnp.asarray, arguments([0], normed=False))
    weights = [np.linspace(0.5, 2, WIDTH).astype(heads.dtype)] * 2

    def loss(function, heads, *weights):
        out, k_pages, _ = function(heads, *weights, *rest)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.nansum(k_pages.astype(jnp.float32))

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, function), argnums=(0, 1, 2)))(heads, *weights)
        for function in (together, parts_of_it)
    )
    for its, other in zip(found, expected, strict=True):
        assert np.asarray(other).any()
        np.testing.assert_array_equal(np.asarray(its), np.asarray(other))


def test_one_weight_without_the_other():
    heads, q_weight, _, *rest = arguments([5])
    with pytest.raises(ValueError, match="q_weight and k_weight"):
        together(heads, q_weight, None, *rest)


@pytest.mark.gpu
def test_on_hopper_it_is_one_kernel_and_its_join():
    if platform_implementation() != "mosaic_gpu":
        pytest.skip("not a Hopper GPU")
    text = jax.jit(together).lower(*arguments([540])).as_text()
    assert text.count("@mosaic_gpu_v2") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_no_bit_of_many_tokens_differs(tokens):
    """A sum in another order shows in one head of 20,000: some tokens do not tell."""
    if platform_implementation() != "mosaic_gpu":
        pytest.skip("not a Hopper GPU")
    *_, view = arguments([5] * tokens, columns=2)

    def count(seed, differing):
        keys = iter(jax.random.split(jax.random.key(seed), 8))

        def normal(*shape):
            return jax.random.normal(next(keys), shape).astype(jnp.bfloat16)

        positions = jax.random.randint(next(keys), (tokens,), 0, 128)
        angles = positions[:, None] * 1e6 ** -jnp.linspace(0, 1, WIDTH // 2)
        call = (
            normal(tokens, 40, WIDTH),
            *(1 + normal(WIDTH) / 8 for _ in range(2)),
            jnp.cos(angles),
            jnp.sin(angles),
            *(normal(2 * tokens, 64, 4, WIDTH) for _ in range(2)),
            view._replace(positions=positions),
        )
        pairs = zip(
            jax.tree.leaves(together(*call)), jax.tree.leaves(parts_of_it(*call)), strict=True
        )
        bits = (jax.lax.bitcast_convert_type(jnp.stack(pair), jnp.uint16) for pair in pairs)
        return differing + sum(jnp.sum(one != other) for one, other in bits)

    seeds = 3000 if tokens > 1 else 8000
    assert jax.jit(lambda: jax.lax.fori_loop(0, seeds, count, jnp.int32(0)))() == 0
