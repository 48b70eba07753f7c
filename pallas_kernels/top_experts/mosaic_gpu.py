"""The kernel for Hopper: every warp has all experts of a token, and none waits for another.

A warp reduces integers in one instruction, so scores are compared as integers of the same order.
Of several equal experts the first has the next place. In an integer of bfloat16 there is room for
the expert, too, and no two are equal.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.dependent_launch import wait_for_kernels_before
from pallas_kernels.hopper.kept_kernel import kept_kernel
from pallas_kernels.hopper.rehearsal import if_real
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
        scratch_types=[plgpu.SMEM((top_k,), jnp.float32)],
        kernel_name="top_experts",
    )
    return tuple(kernel(logits, *([] if bias is None else [bias])))


def _body(top_k: int, scoring: Scoring, logits, *refs):
    *biases, experts_out, weights_out, scores = refs
    token = lax.axis_index("token")
    bias = load_numbers(biases[0]) if biases else None
    wait_for_kernels_before(logits.shape[0])
    choose = Choice(logits.at[token], bias, top_k, scoring)

    def remember(place, expert, score):
        experts_out[token, place] = expert
        scores[place] = score

    choose(remember)

    def weigh(place, _):
        weights_out[token, place] = choose.weight(scores[place])

    lax.fori_loop(0, top_k, weigh, None)


class Choice:
    """The experts of one token, in the registers of a warpgroup.

    What happens for each place is a loop: code that is not there yet takes longer than its turns.

    Args:
      logits: reference [E]. bias: float32 numbers [E] in `layout_of`, or None.
      is_real: whether there are logits; see `hopper.rehearsal`.
    """

    def __init__(self, logits, bias, top_k: int, scoring: Scoring, *, is_real=True):
        self.top_k, self.scoring, self.biased = top_k, scoring, bias is not None
        nothing = plgpu.layout_cast(jnp.zeros(logits.shape, jnp.float32), layout_of(*logits.shape))
        self.logits = if_real(is_real, lambda: load_numbers(logits), nothing)
        ordered = _ordered(self.logits)
        # What softmax takes of each: the highest, whose score is 1 before anything is divided.
        self.highest = None if scoring.sigmoid else _number(jnp.max(ordered))
        self.total = None
        if not scoring.sigmoid and (self.biased or not scoring.normalise):
            self.total = jnp.sum(jnp.exp(self.logits - self.highest))
        # In an integer of bfloat16 there is room for the expert.
        self.has_room = logits.dtype == jnp.bfloat16 and not self.biased
        if self.biased:
            ordered = _ordered(self._scores(self.logits) + bias)
        self.from_last = _from_last(ordered)
        self.keys = (ordered & UPPER_HALF) | self.from_last if self.has_room else ordered

    def __call__(self, action):
        """action(place, expert, score) of the highest, and so on; then there are weights."""
        last = self.keys.shape[0] - 1
        find = self._next_with_room if self.has_room else self._next

        def one(place, state):
            before, total = state
            found, from_last, logit = find(before)
            expert = last - from_last
            score = self._scores(_at(self.logits, expert) if self.biased else logit)
            action(place, expert, score)
            return found, total + score

        none = jnp.int32(HIGHEST), jnp.int32(last + 1)
        _, self.total_of_chosen = lax.fori_loop(0, self.top_k, one, (none, jnp.float32(0)))

    def weight(self, score):
        """What an expert of a score counts."""
        if self.scoring.normalise:
            epsilon = SIGMOID_EPSILON if self.scoring.sigmoid else 0.0
            score = score / (self.total_of_chosen + epsilon)
        return score * self.scoring.scale

    def _scores(self, logits):
        """Of some logits; of softmax not divided by what cancels out."""
        if self.scoring.sigmoid:
            return 1.0 / (1.0 + jnp.exp(-logits))
        exponentials = jnp.exp(logits - self.highest)
        return exponentials if self.total is None else exponentials / self.total

    def _next(self, before):
        """The highest key after one of a place, of equal ones the first; (key, place), and more."""
        key, from_last = before
        follows = (self.keys < key) | ((self.keys == key) & (self.from_last < from_last))
        key = jnp.max(jnp.where(follows, self.keys, LOWEST))
        from_last = jnp.max(jnp.where(follows & (self.keys == key), self.from_last, -1))
        return (key, from_last), from_last, _number(key)

    def _next_with_room(self, before):
        """The same where no two keys are equal."""
        key, _ = before
        key = jnp.max(jnp.where(self.keys < key, self.keys, LOWEST))
        from_last = key & ~UPPER_HALF
        return (key, from_last), from_last, _as_float(_flipped(key) & UPPER_HALF)


def load_numbers(ref):
    """Numbers [E] in float32."""
    layout = layout_of(ref.shape[0])
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


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
