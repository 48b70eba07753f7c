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
import numpy as np
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

    Hidden states take the memory of earlier ones, which are given for that alone; of the logits,
    those of rows that sample. What it gives as `packed` is for the same rows a token later, if each
    token of this step is of a row that is given its next one.
    """
    earlier, all_logits = results
    pages, last_tokens, (hidden, logits), order, *rest, _ = _step(
        layout, arrays, base, bank, pages, last_tokens, packed, routed=False
    )
    # All of them: what nothing reads is not donated.
    hidden = lax.dynamic_update_slice(earlier, hidden, (0, 0))
    all_logits = all_logits.at[order].set(logits, unique_indices=True)
    return pages, last_tokens, (hidden, all_logits), *rest


def routed_step(layout: StepLayout, arrays: ModelArrays, base, bank, pages, last_tokens, packed):
    """(pages, last_tokens, packed, chosen) of `step`, and the experts [T, choices] of its tokens in
    each layer that has a router."""
    pages, last_tokens, _, _, *rest = _step(
        layout, arrays, base, bank, pages, last_tokens, packed, routed=True
    )
    return pages, last_tokens, *rest


def _step(layout, arrays, base, bank, pages, last_tokens, packed, routed: bool):
    inputs = layout.unpack(packed)
    model = arrays.merge(base, bank)
    pages, hidden, choices = _forward(model, pages, last_tokens, inputs, routed)
    order, logits = _logits(model, hidden, inputs)
    last_tokens, chosen = _choose(logits, inputs.rows, order, last_tokens, filters=False)
    packed = layout.repack(advanced(inputs))
    return pages, last_tokens, (hidden, logits), order, packed, chosen[None], choices


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
    """Several steps of a batch of one token for each row, whose tokens nothing filters.

    Returns:
      pages, last_tokens, chosen.
    """
    model = arrays.merge(base, bank)
    chosen = jnp.zeros((steps, 2, last_tokens.shape[0]), jnp.int32)

    def body(i, carry):
        pages, last_tokens, inputs, chosen = carry
        pages, hidden, _ = _forward(model, pages, last_tokens, inputs)
        order, logits = _logits(model, hidden, inputs)
        last_tokens, one = _choose(logits, inputs.rows, order, last_tokens, filters=False)
        return pages, last_tokens, advanced(inputs), chosen.at[i].set(one)

    carry = pages, last_tokens, layout.unpack(packed), chosen
    pages, last_tokens, _, chosen = lax.fori_loop(0, steps, body, carry)
    return pages, last_tokens, chosen


def filter_rows(layout: StepLayout, arrays: ModelArrays, base, bank, logits, last_tokens, part):
    """Chooses once more, with filters, from the logits of a step: (last_tokens, chosen)."""
    rows, order = layout.row_values(part), jnp.arange(layout.rows)
    last_tokens, chosen = _choose(logits, rows, order, last_tokens, filters=True)
    return last_tokens, chosen[None]


def _forward(model: Decoder, pages: Pages, last_tokens, inputs: StepInputs, routed: bool = False):
    """The pages with the batch's tokens written, hidden [T, H], and the tokens' experts."""
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
    return (cache.first, cache.second), lax.optimization_barrier(hidden), choices


def _logits(model: Decoder, hidden, inputs: StepInputs):
    """n = min(T, B) rows, int32 [n], and their logits, float32 [n, V].

    First the rows that sample, those of one adapter together, then others, with the logits of any
    place. No more rows sample than there are tokens: where one request runs in an engine of 64, the
    logits of all rows would take a twentieth of its step.
    """
    rows, tokens = inputs.rows, inputs.tokens.shape[0]
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(rows.sample_at >= 0, rows.slots, last))[:tokens]
    places = rows.sample_at[order]
    slots = jnp.where(places >= 0, rows.slots[order], -1)
    return order, model.logits(hidden.at[places].get(mode="clip"), slots)


def _choose(logits, rows: RowInputs, order, last_tokens, filters: bool):
    """The rows' last tokens [B], and the tokens and the bits of their logprobs [2, B].

    Args:
      logits: float32 [n, V] of the rows in `order`, int32 [n], among which are all that sample.
    """
    samples = rows.sample_at[order] >= 0
    settings = SamplingRows(*(getattr(rows, name)[order] for name in SamplingRows._fields))
    # Rows of requests that are gone, or not so far, keep theirs: they must cost nothing.
    settings = settings._replace(temperature=jnp.where(samples, settings.temperature, 0))
    sampled = sample(logits, settings, filters)
    logprobs = token_logprobs(logits, sampled)
    chosen = jnp.stack([sampled, logprobs.view(jnp.int32)])
    chosen = jnp.zeros((2, len(last_tokens)), jnp.int32).at[:, order].set(chosen)
    place = jnp.where(samples, order, len(last_tokens))
    return last_tokens.at[place].set(sampled, mode="drop"), chosen


def top_rows(count: int, arrays: ModelArrays, base, bank, logits) -> TopK:
    """The most likely tokens of each row of what was sampled from or scored."""
    return top_logprobs(logits, count)


def score_rows(arrays: ModelArrays, base, bank, hidden, packed):
    """Logprobs [n] of given next tokens, and the logits [n, V], of some rows of a step.

    Args:
      hidden: [T, H]. packed: int32 [1 + 2 n], see `pack_scored`.
    """
    first, (slots, targets) = packed[0], packed[1:].reshape(2, -1)
    rows = first + jnp.arange(len(targets))
    logits = arrays.merge(base, bank).logits(hidden.at[rows].get(mode="clip"), slots)
    return token_logprobs(logits, targets), logits


def pack_scored(first: int, slots: np.ndarray, targets: np.ndarray, count: int) -> np.ndarray:
    """What `score_rows` takes for `count` rows from the first on, or fewer: the rest is padding."""
    packed = np.zeros(1 + 2 * count, np.int32)
    packed[0] = first
    packed[1 : 1 + len(slots)] = slots
    packed[1 + count : 1 + count + len(targets)] = targets
    return packed
