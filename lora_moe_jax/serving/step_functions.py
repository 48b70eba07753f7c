"""What the engine's compiled steps do on the device.

`step` runs the model over a flat batch of T tokens and samples a token for each row that is to have
one; `decode` takes several such steps in a loop. Both take one array, `StepLayout`'s, and keep each
row's last token on the device, so that the next step can be begun before this one's tokens are
read. The array comes from the host, or from the step before: each gives the one that follows if the
same rows go on with a token each, and then the host sends nothing. `score_rows` turns the hidden
states of a step into logprobs of given tokens.

Nothing in `step` may depend on the device's own values for which code runs: a GPU's host waits for
each such decision (measured, JAX 0.11.2: a conditional or a loop of unknown length holds the call
until the device is there). So top-k, top-p and min-p, which sort the vocabulary, are no conditional
in `step` but a function of their own, `filter_rows`, that is run after it where a row has them. So
is `top_rows`, which finds each row's most likely tokens in the logits of a step or of `score_rows`.
A batch with such a wish is not for `decode`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from lora_moe_jax.layers.cache import LayerCache
from lora_moe_jax.layers.logprobs import token_logprobs, top_logprobs
from lora_moe_jax.models.decoder import Decoder
from lora_moe_jax.serving.model_arrays import ModelArrays
from lora_moe_jax.serving.sampler import SamplingRows, sample
from lora_moe_jax.serving.step_layout import (
    FED_BACK,
    RowInputs,
    StepInputs,
    StepLayout,
    advanced,
)
from pallas_kernels import PageView

TopK = tuple[jax.Array, jax.Array]  # int32 ids [rows, K] and their logprobs, most likely first


def step(layout: StepLayout, arrays: ModelArrays, base, bank, pages, last_tokens, results, packed):
    """One step: (pages, last_tokens, (hidden, logits), packed, chosen), see `Results`.

    Hidden states and logits take the memory of earlier ones, which are given for that alone. What
    it gives as `packed` is for the same rows a token later, if each token of this step is of a row
    that is given its next one.
    """
    del results
    return _step(layout, arrays, base, bank, pages, last_tokens, packed, routed=False)[:5]


def routed_step(layout: StepLayout, arrays: ModelArrays, base, bank, pages, last_tokens, packed):
    """What `step` gives, and the experts [T, choices] in each layer that has a router."""
    return _step(layout, arrays, base, bank, pages, last_tokens, packed, routed=True)


def _step(layout, arrays, base, bank, pages, last_tokens, packed, routed: bool):
    inputs = layout.unpack(packed)
    model = arrays.merge(base, bank)
    pages, hidden, logits, choices = _forward(model, pages, last_tokens, inputs, routed)
    last_tokens, chosen = _choose(logits, inputs.rows, last_tokens, filters=False)
    packed = layout.repack(advanced(inputs))
    return pages, last_tokens, (hidden, logits), packed, chosen[None], choices


def decode(
    steps: int,
    layout: StepLayout,
    arrays: ModelArrays,
    base,
    bank,
    pages,
    last_tokens,
    packed,
):
    """Several steps of a batch of one token for each row: (pages, last_tokens, chosen)."""
    model = arrays.merge(base, bank)
    chosen = jnp.zeros((steps, 2, last_tokens.shape[0]), jnp.int32)

    def body(i, carry):
        pages, last_tokens, inputs, chosen = carry
        pages, _, logits, _ = _forward(model, pages, last_tokens, inputs)
        last_tokens, one = _choose(logits, inputs.rows, last_tokens, filters=None)
        return pages, last_tokens, advanced(inputs), chosen.at[i].set(one)

    carry = pages, last_tokens, layout.unpack(packed), chosen
    pages, last_tokens, _, chosen = lax.fori_loop(0, steps, body, carry)
    return pages, last_tokens, chosen


def filter_rows(layout: StepLayout, arrays: ModelArrays, base, bank, logits, last_tokens, part):
    """Chooses once more, with filters, from the logits of a step: (last_tokens, chosen)."""
    last_tokens, chosen = _choose(logits, layout.row_values(part), last_tokens, filters=True)
    return last_tokens, chosen[None]


def _forward(model: Decoder, pages: Pages, last_tokens, inputs: StepInputs, routed: bool = False):
    """The pages with the batch's tokens written, hidden [T, H], the rows' logits [B, V], and the
    tokens' experts."""
    request, rows = inputs.request, inputs.rows
    fed_back = last_tokens.at[request].get(mode="clip")
    tokens = jnp.where(inputs.tokens == FED_BACK, fed_back, inputs.tokens)
    token_slots = jnp.where(request >= 0, rows.slots.at[request].get(mode="clip"), -1)
    # As a slice of the host's array, which lies somewhere else at every step, the tables would be
    # an operand that moves, of every layer's attention (see above).
    tables = jnp.maximum(rows.page_tables, 0)
    view = PageView(request, inputs.positions, tables)
    cache = LayerCache(*pages, view)
    hidden, cache, choices = model(tokens, token_slots, cache, routed=routed)
    # What is sampled and what is scored must begin from the same bits: nothing crosses this line.
    hidden = lax.optimization_barrier(hidden)
    slots = jnp.where(rows.sample_at >= 0, rows.slots, -1)
    # Those of one adapter together, as the batch has its tokens.
    order = jnp.argsort(slots)
    logits = model.logits(hidden.at[rows.sample_at[order]].get(mode="clip"), slots[order])
    logits = logits[jnp.argsort(order)]
    return (cache.first, cache.second), hidden, logits, choices


def _choose(logits, rows: RowInputs, last_tokens, filters: bool | None):
    """The rows' last tokens [B], and the tokens and the bits of their logprobs [2, B]."""
    samples = rows.sample_at >= 0
    settings = SamplingRows(
        # Rows of requests that are gone, or not so far, keep theirs: they must cost nothing.
        temperature=jnp.where(samples, rows.temperature, 0),
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        seed=rows.seed,
        step=rows.step,
    )
    sampled = sample(logits, settings, filters)
    logprobs = token_logprobs(logits, sampled)
    last_tokens = jnp.where(samples, sampled, last_tokens)
    return last_tokens, jnp.stack([sampled, logprobs.view(jnp.int32)])


def top_rows(count: int, arrays: ModelArrays, base, bank, logits) -> TopK:
    """The most likely tokens of each row of what was sampled from or scored."""
    return top_logprobs(logits, count)


def score_rows(arrays: ModelArrays, base, bank, hidden, token_slots, targets):
    """Logprobs [T] of each row's target, and the logits [T, V]."""
    logits = arrays.merge(base, bank).logits(hidden, token_slots)
    return token_logprobs(logits, targets), logits
