"""Arrays that do not belong together are refused by name, before anything is computed."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    ColumnsOf,
    KvB,
    Lora,
    PageView,
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
    with pytest.raises(ValueError, match="rows"):
        combine(array(5, 4), position, array(3, 2))


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
        (dict(key_lora=Lora(array(1, 4, 2, 8), array(1, 1, 2, 16), array(1, 1))), "both"),
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
