"""Arrays that do not belong together are refused by name, before anything is computed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    ColumnsOf,
    KvB,
    Lora,
    PageView,
    Scoring,
    add_norm,
    combine,
    grouped_lora_matmul,
    latent_attention,
    log_sum_exp,
    moe_mlp,
    paged_attention,
    paged_latent_attention,
    rms_norm,
    rotate,
    rotate_and_cache,
    rotate_and_cache_latents,
    rotated_attention,
    routing_plan,
    row_dot,
    top_experts,
    write_pages,
)


def array(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


VIEW = PageView(np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.array([[1, 0]], np.int32))
GROUPED = dict(q=array(3, 4, 16), k_pages=array(2, 4, 2, 16), v_pages=array(2, 4, 2, 8), view=VIEW)
LATENT = dict(
    q_latent=array(3, 4, 16),
    q_rope=array(3, 4, 8),
    latent_pages=array(2, 4, 16),
    rope_pages=array(2, 4, 8),
    view=VIEW,
)
KEY_LORA = Lora(array(1, 4, 2, 8), array(1, 1, 2, 16), array(1, 1))
VALUE_LORA = Lora(array(1, 1, 2, 16), array(1, 4, 2, 8), array(1, 1))


def test_arrays_of_numpy_are_taken():
    y = paged_attention(**GROUPED, scale=0.25)
    of_jax = {name: jnp.asarray(its) for name, its in GROUPED.items() if name != "view"}
    view = PageView(*map(jnp.asarray, VIEW))
    assert np.array_equal(y, paged_attention(**of_jax, view=view, scale=0.25))
    assert paged_latent_attention(**LATENT, scale=0.25).shape == (3, 4, 16)


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(v_pages=array(1, 4, 2, 8)), "v_pages"),
        (dict(v_pages=array(2, 4, 1, 8)), "v_pages"),
        (dict(v_pages=array(2, 2, 2, 8)), "v_pages"),
        (dict(k_pages=array(2, 4, 2, 8)), "k_pages"),
        (dict(k_pages=array(2, 4, 16)), "k_pages"),
        (dict(q=array(3, 3, 16)), "kv_heads"),
        (dict(q=array(3, 4, 16, dtype=np.int32)), "q must be a floating-point"),
        (dict(view=VIEW._replace(request=np.zeros(4, np.int32))), "view.request"),
        (dict(view=VIEW._replace(positions=array(3))), "view.positions"),
        (dict(view=VIEW._replace(page_tables=np.zeros(2, np.int32))), "view.page_tables"),
        (dict(sliding_window=0), "sliding_window"),
        (dict(sliding_window=-3), "sliding_window"),
        (dict(sinks=array(3)), "sinks"),
    ],
)
def test_attention(changed, name):
    with pytest.raises(ValueError, match=name):
        paged_attention(**(GROUPED | changed), scale=0.25)


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(q_rope=array(3, 1, 8)), "q_rope"),
        (dict(q_rope=array(3, 4, 4)), "rope_pages"),
        (dict(rope_pages=array(1, 4, 8)), "rope_pages"),
        (dict(latent_pages=array(2, 4, 1, 16)), "latent_pages"),
        (dict(view=VIEW._replace(positions=np.arange(2))), "view.positions"),
        (dict(view=VIEW._replace(page_tables=np.zeros((0, 2), np.int32))), "with a page"),
        (dict(rope_pages=array(0, 4, 8), latent_pages=array(0, 4, 16)), "must not be empty"),
    ],
)
def test_latent_attention(changed, name):
    with pytest.raises(ValueError, match=name):
        paged_latent_attention(**(LATENT | changed), scale=0.25)


def test_sums_of_choices():
    position = np.arange(6).reshape(3, 2)
    for weights in array(3, 1), array(1, 2), array(6):
        with pytest.raises(ValueError, match="weights"):
            combine(array(6, 4), position, weights)
    for rows in (5, 7):
        with pytest.raises(ValueError, match="rows"):
            combine(array(rows, 4), position, array(3, 2))


@dataclasses.dataclass(frozen=True)
class Layer:
    """Arguments of `moe_mlp` for three tokens."""

    token_slots: np.ndarray | None = dataclasses.field(
        default_factory=lambda: np.zeros(3, np.int32)
    )
    valid: np.ndarray | None = None
    experts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((3, 2), np.int32))

    def run(self):
        weights, gate_up, down = array(*self.experts.shape), array(2, 16, 8), array(2, 8, 8)
        known = self.experts, weights, self.token_slots, gate_up, down
        return moe_mlp(array(3, 8), *known, valid=self.valid)


@pytest.mark.parametrize(
    "layer, name",
    [
        (Layer(token_slots=np.zeros(2, np.int32)), "token_slots"),
        (Layer(token_slots=None), "token_slots"),
        (Layer(token_slots=np.zeros(3, np.float32)), "token_slots must be of type integer"),
        (Layer(valid=np.full(3, 2)), "valid must be of type bool"),
        (Layer(valid=np.ones(1, bool)), "valid"),
        (Layer(experts=np.zeros(3, np.int32)), "experts"),
        (Layer(experts=np.zeros((3, 0), np.int32)), "experts"),
        (Layer(experts=np.zeros((3, 2), np.float32)), "experts must be integers"),
    ],
)
def test_layers(layer, name):
    Layer().run()
    with pytest.raises(ValueError, match=name):
        layer.run()


def test_plans_and_norms():
    with pytest.raises(ValueError, match="token_slots"):
        routing_plan(np.zeros((3, 2), np.int32), np.zeros(2, np.int32), 4)
    for experts in np.zeros(3, np.int32), np.zeros((3, 0), np.int32), np.zeros((3, 2), np.float32):
        with pytest.raises(ValueError, match="experts"):
            routing_plan(experts, np.zeros(3, np.int32), 4)
    with pytest.raises(ValueError, match="floating-point"):
        rms_norm(np.ones((2, 8), np.int32), array(8), 1e-6)
    for call, name in (
        (lambda: rms_norm(array(2, 8), array(1), 1e-6), "weight"),
        (lambda: add_norm(array(2, 8), array(8, 2), array(8), 1e-6), "more"),
        (lambda: add_norm(array(2, 8), array(2, 8), array(1), 1e-6), "weight"),
        (lambda: row_dot(array(2, 8), array(8, 2)), "y must"),
        (lambda: row_dot(array(2, 8), array(1, 8)), "y must"),
        (lambda: log_sum_exp(array(8)), "x must"),
        (lambda: log_sum_exp(np.ones((2, 8), np.int32)), "floating-point"),
        (lambda: write_pages(array(2, 4, 8), array(1, 8), VIEW), "values"),
        (lambda: write_pages(array(2, 4, 8), array(3, 1), VIEW), "values"),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_gates():
    with pytest.raises(ValueError, match="gate must be a Gate"):
        grouped_lora_matmul(array(3, 8), array(1, 8, 8), np.array([3]), gate="silu")


def test_adapters_come_in_a_tuple():
    lora = Lora(array(1, 1, 4, 8), array(1, 1, 4, 8), array(1, 1))
    x, w, sizes, slots = array(3, 8), array(1, 8, 8), np.array([3]), np.zeros(3, np.int32)
    grouped_lora_matmul(x, w, sizes, slots, (lora,))
    with pytest.raises(ValueError, match="tuple"):
        grouped_lora_matmul(x, w, sizes, slots, lora)


def test_groups_slots_and_wide_adapters():
    x, slots = array(3, 8), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="w must be"):
        grouped_lora_matmul(x, array(0, 8, 8), np.zeros(0, np.int32))
    none = Lora(array(0, 1, 4, 8), array(0, 1, 4, 8), array(0, 1))
    a, b = (array(1, 1, 4, 8, dtype=np.float64) for _ in range(2))
    wide = [Lora(a, b, array(1, 1)), none._replace(scaling=array(0, 1, dtype=np.float64))]
    for lora, message in (none, "a slot"), (wide[0], "lora.a is float64"), (wide[1], "scaling is"):
        with pytest.raises(ValueError, match=message):
            grouped_lora_matmul(x, array(1, 8, 8), np.array([3]), slots, (lora,))


ROTATED = dict(
    heads=array(3, 8, 16),
    q_weight=None,
    k_weight=None,
    cos=array(3, 8),
    sin=array(3, 8),
    k_pages=array(2, 4, 2, 16),
    v_pages=array(2, 4, 2, 16),
    view=VIEW,
    eps=1e-6,
)


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(cos=array(1, 8)), "cos must be"),
        (dict(cos=array(3, 16)), "cos must be"),
        (dict(sin=array(3, 1)), "sin must be"),
        (dict(heads=array(3, 4, 16)), "heads must be more"),
        (dict(heads=array(3, 8, 8)), "heads must be more"),
        (dict(heads=array(3, 128)), "heads must be"),
    ],
)
def test_rotated_heads(changed, name):
    with pytest.raises(ValueError, match=name):
        rotate_and_cache(**ROTATED | changed)
    with pytest.raises(ValueError, match=name):
        rotated_attention(**ROTATED | changed, scale=0.25)


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (3, 8)])
def test_angles(shape):
    with pytest.raises(ValueError, match="cos must be"):
        rotate(array(3, 2, 8), array(*shape), array(3, 4))
    with pytest.raises(ValueError, match="pairs"):
        rotate(array(3, 2, 7), array(3, 3), array(3, 3))


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(q=ColumnsOf(array(3, 31))), "q must have 32 columns"),
        (dict(kv=ColumnsOf(array(3, 24), 1)), "kv must have 24 columns"),
        (dict(kv=ColumnsOf(array(3, 24), -1)), "kv must have 24 columns"),
        (dict(cos=array(1, 4)), "cos must be"),
        (dict(rope_pages=array(2, 4, 4)), "rope_pages must have 8"),
        (dict(view=VIEW._replace(request=np.zeros(2, np.int32))), "view.request"),
    ],
)
def test_rotated_latents(changed, name):
    call = dict(
        q=ColumnsOf(array(3, 32)),
        kv=ColumnsOf(array(3, 24)),
        weight=array(16),
        cos=array(3, 4),
        sin=array(3, 4),
        latent_pages=array(2, 4, 16),
        rope_pages=array(2, 4, 8),
        view=VIEW,
    )
    static = dict(heads=2, nope=8, eps=1e-6, interleaved=False)
    rotate_and_cache_latents(**call, **static)
    with pytest.raises(ValueError, match=name):
        rotate_and_cache_latents(**call | changed, **static)


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(k_up=array(2, 16, 8)), "k_up must be"),
        (dict(k_up=array(8, 16, 8)), "k_up must be"),
        (dict(v_up=array(2, 8, 16)), "v_up must be"),
        (dict(v_up=array(4, 8, 8)), "v_up must be"),
        (dict(key_lora=KEY_LORA), "both"),
        (dict(key_lora=KEY_LORA, value_lora=VALUE_LORA._replace(b=array(1, 1, 2, 8))), "4 heads"),
        (dict(key_lora=KEY_LORA._replace(scaling=array(1, 4)), value_lora=VALUE_LORA), "4 heads"),
        (
            dict(
                key_lora=KEY_LORA,
                value_lora=Lora(*(np.ones((2, *its.shape[1:])) for its in VALUE_LORA)),
            ),
            "same slots",
        ),
    ],
)
def test_what_makes_heads_of_latents(changed, name):
    queries = array(3, 4, 8), array(3, 4, 8)
    pages, slots = (LATENT["latent_pages"], LATENT["rope_pages"]), np.full(3, -1)
    kv_b = KvB(array(4, 16, 8), array(4, 8, 16), None, None)
    latent_attention(*queries, *pages, VIEW, kv_b, slots, scale=0.25)
    with pytest.raises(ValueError, match="token_slots"):
        latent_attention(*queries, *pages, VIEW, kv_b, slots[:2], scale=0.25)
    with pytest.raises(ValueError, match=name):
        latent_attention(*queries, *pages, VIEW, kv_b._replace(**changed), slots, scale=0.25)


def test_gradients_of_numpy_arrays():
    def attended(q, k_pages, v_pages):
        return paged_attention(q, k_pages, v_pages, VIEW, scale=0.25).sum()

    arrays = GROUPED["q"], GROUPED["k_pages"], GROUPED["v_pages"]
    expected = jax.grad(attended, (0, 1, 2))(*map(jnp.asarray, arrays))
    for found in (
        jax.grad(attended, (0, 1, 2))(*arrays),
        jax.jit(jax.grad(attended, (0, 1, 2)))(*arrays),
    ):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
    weights, rows = array(3, 2), array(6, 4)
    jax.grad(lambda its: combine(rows, np.arange(6).reshape(3, 2), its).sum())(weights)
    half = array(3, 4)

    def rotated(heads):
        call = heads, None, None, half, half, array(2, 4, 2, 8), array(2, 4, 2, 8), VIEW
        return sum(its.sum() for its in rotate_and_cache(*call, eps=1e-6))

    assert jax.grad(rotated)(array(3, 8, 8)).shape == (3, 8, 8)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_views_of_any_integers(dtype):
    """Places in the cache are past what these hold."""
    pages, positions = np.zeros((80, 4, 1), np.float32), np.array([120], dtype)
    view = PageView(np.zeros(1, dtype), positions, np.arange(80, dtype=dtype)[None, :40])
    written = write_pages(pages, array(1, 1), view)
    assert np.argwhere(written).tolist() == [[30, 0, 0]]


def test_a_page_that_is_none_is_not_written():
    view = PageView(np.zeros(1, np.int32), np.full(1, 5, np.int32), np.array([[0, -1]], np.int32))
    assert not np.any(write_pages(array(6, 4, 1) * 0, array(1, 1), view))


def test_no_token_has_a_gradient_of_nothing():
    view = PageView(np.zeros(0, np.int32), np.zeros(0, np.int32), VIEW.page_tables)
    call = {**GROUPED, "view": view, "q": jnp.zeros((0, 4, 16))}
    dq, dk = jax.grad(
        lambda q, k: paged_attention(**{**call, "q": q, "k_pages": k}, scale=0.25).sum(), (0, 1)
    )(call["q"], jnp.asarray(call["k_pages"]))
    assert dq.shape == (0, 4, 16) and not dk.any()


def test_scales_of_64_bits_are_numbers():
    with jax.enable_x64(True):
        y = paged_attention(**GROUPED, scale=1 / np.sqrt(16))
        _, weights = top_experts(array(3, 4), None, 2, Scoring(scale=np.float64(2.5)))
        with pytest.raises(ValueError, match="k_pages are float64"):
            paged_attention(**GROUPED | dict(k_pages=np.ones((2, 4, 2, 16))), scale=0.25)
    assert y.dtype == weights.dtype == np.float32


def test_logits_that_are_none():
    for logits in array(3, 4, dtype=np.int32), array(4):
        with pytest.raises(ValueError, match="logits must be"):
            top_experts(logits, None, 2, Scoring())


def test_rotated_features_are_of_heads_of_tokens():
    for shape in (3, 8), (3, 3, 4, 8):
        with pytest.raises(ValueError, match="x must be"):
            rotate(array(*shape), array(3, 4), array(3, 4))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels refuse it by themselves")
def test_a_gradient_whose_u_is_data_is_differentiable_once():
    x, experts = (
        jnp.asarray(np.random.default_rng(0).standard_normal((3, 8))),
        np.eye(3, 2, dtype=int),
    )
    weights, gate_up, down = array(3, 2), array(2, 6, 8), array(2, 8, 3)
    lora = Lora(array(1, 1, 2, 8), array(1, 2, 2, 3), array(1, 1))

    def loss(x):
        return moe_mlp(x, experts, weights, np.zeros(3, int), gate_up, down, lora).sum()

    assert jax.grad(loss)(x).any()
    with pytest.raises(NotImplementedError, match="once"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
