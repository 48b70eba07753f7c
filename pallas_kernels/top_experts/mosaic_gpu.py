"""The kernel for Hopper: every warp has all experts of a token, and none waits for another.

A warp reduces integers in one instruction, so scores are compared as integers of the same order.
Of float32 the value of the next place follows from that of the place before and from how many
experts have that or more. Which of several equal experts has a place is found beside that: nothing
waits for it but the next place with the same value. In an integer of bfloat16 there is room for the
expert, too, and no two are equal.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.top_experts.xla import SIGMOID_EPSILON, Scoring

LANES, WARPS = 32, 4
OF_LANE = 4, 2, 1  # experts that follow each other, which a lane loads together
MOST_EXPERTS = 512
MOST_CHOICES = 32  # each is code of its own
DTYPES = "float32", "bfloat16"
LOWEST, HIGHEST = -(2**31), 2**31 - 1
UPPER_HALF = -(2**16)


def layout_of(count: int):
    """Of experts [E]: the same in all warps."""
    of_lane = next(its for its in OF_LANE if count % (LANES * its) == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((LANES * of_lane,), (of_lane,))),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def check(logits, top_k: int):
    """Raises NotImplementedError if the kernel cannot serve logits [T, E] and so many choices."""
    tokens, count = logits.shape
    served = count % LANES == 0 and 0 < count <= MOST_EXPERTS and tokens > 0
    if not served or top_k > MOST_CHOICES or str(logits.dtype) not in DTYPES:
        raise NotImplementedError(
            f"implementation='mosaic_gpu' chooses at most {MOST_CHOICES} of whole {LANES} experts, "
            f"at most {MOST_EXPERTS}, from logits that are {' or '.join(DTYPES)}; "
            f"got {top_k=} and logits {logits.dtype}{list(logits.shape)}"
        )


def top_experts(logits, bias, top_k: int, scoring: Scoring):
    """See `api.top_experts`."""
    check(logits, top_k)
    tokens = logits.shape[0]
    kernel = kept_kernel(
        functools.partial(_body, top_k, scoring),
        out_type=[jax.ShapeDtypeStruct((tokens, top_k), t) for t in (jnp.int32, jnp.float32)],
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="top_experts",
    )
    return tuple(kernel(logits, *([] if bias is None else [bias])))


def _body(top_k: int, scoring: Scoring, logits, *refs):
    *biases, experts_out, weights_out = refs
    token = lax.axis_index("token")
    biases = [_load(its) for its in biases]
    wait_for_kernels_before(logits.shape[0])
    of_token = _load(logits.at[token])
    if biases:
        highest = None if scoring.sigmoid else _number(jnp.max(_ordered(of_token)))
        score = _score_of(of_token, highest, scoring, whole=True)
        experts, _ = _choose(_ordered(score(of_token) + biases[0]), top_k)
        chosen = [_at(of_token, expert) for expert in experts]
    else:
        # Scores are in the order of their logits.
        choose = _choose_of_halves if logits.dtype == jnp.bfloat16 else _choose
        experts, chosen = choose(_ordered(of_token), top_k)
        score = _score_of(of_token, chosen[0], scoring, whole=not scoring.normalise)
    weights = [score(logit) for logit in chosen]
    if scoring.normalise:
        total = functools.reduce(jnp.add, weights)
        weights = [its / (total + (SIGMOID_EPSILON if scoring.sigmoid else 0.0)) for its in weights]
    for place in range(top_k):
        experts_out[token, place] = experts[place]
        weights_out[token, place] = weights[place] * scoring.scale


def _load(ref):
    """Numbers [E] in float32."""
    layout = layout_of(ref.shape[0])
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _score_of(logits, highest, scoring: Scoring, whole: bool):
    """What makes scores of some of a token's logits [E], of which the softmax takes the highest.

    Args:
      whole: softmax is divided by its total; else that is left to whoever normalises.
    """
    if scoring.sigmoid:
        return lambda its: 1.0 / (1.0 + jnp.exp(-its))
    if not whole:
        return lambda its: jnp.exp(its - highest)
    total = jnp.sum(jnp.exp(logits - highest))
    return lambda its: jnp.exp(its - highest) / total


def _ordered(numbers):
    """int32 in the order of float32 numbers [E]; NaN are the highest, and both zeros are equal."""
    bits = _flipped(lax.bitcast_convert_type(numbers + 0.0, jnp.int32))
    return jnp.where(numbers == numbers, bits, HIGHEST)


def _number(key):
    """What `_ordered` made a key of, a scalar."""
    return _as_float(_flipped(key))


def _as_float(bits):
    """The float32 of a scalar's bits, by way of a vector: scalars have no such operation."""
    return jnp.max(lax.bitcast_convert_type(jnp.full(1, bits), jnp.float32))


def _flipped(bits):
    """Orders the bits of negative numbers as integers, and back."""
    return bits ^ ((bits >> 31) & HIGHEST)


def _choose(keys, top_k: int):
    """The experts of the highest keys [E], of equal ones the first, and their numbers: scalars."""
    from_last = _from_last(keys)
    places, values = [], [jnp.max(keys)]
    for number in range(top_k):
        value, here = values[-1], keys == values[-1]
        if number:
            fresh = value != values[-2]
            here = here & (fresh | (from_last < places[-1]))
        places.append(jnp.max(jnp.where(here, from_last, -1)))
        if number + 1 < top_k:
            as_high = jnp.sum(jnp.where(keys >= value, 1, 0))
            below = jnp.max(jnp.where(keys < value, keys, LOWEST))
            values.append(jnp.where(as_high > number + 1, value, below))
    last = keys.shape[0] - 1
    return [last - place for place in places], [_number(value) for value in values]


def _choose_of_halves(keys, top_k: int):
    """`_choose` where the lower half of a key says nothing: there it says which expert's it is."""
    keys = (keys & UPPER_HALF) | _from_last(keys)
    chosen = [jnp.max(keys)]
    for _ in range(1, top_k):
        chosen.append(jnp.max(jnp.where(keys < chosen[-1], keys, LOWEST)))
    last = keys.shape[0] - 1
    experts = [last - (key & ~UPPER_HALF) for key in chosen]
    return experts, [_as_float(_flipped(key) & UPPER_HALF) for key in chosen]


def _from_last(keys):
    """How many experts follow each. The first has the highest: no instruction finds the lowest."""
    return keys.shape[0] - 1 - _index(keys)


def _index(numbers):
    """Which expert each of the numbers [E] is of."""
    layout = layout_of(numbers.shape[0])
    return plgpu.broadcasted_iota(jnp.int32, numbers.shape, 0, layout=layout)


def _at(numbers, expert):
    """One of the numbers [E]."""
    bits = lax.bitcast_convert_type(numbers, jnp.int32)
    return _as_float(jnp.max(jnp.where(_index(numbers) == expert, bits, LOWEST)))
