"""Writes adapters into slots of the bank, and reads them back.

A write donates the old arrays, so nothing is reallocated, and runs compiled functions, so nothing
is recompiled. Steps that were begun before it and have not run yet read the arrays as they were:
the runtime writes into donated memory only after everything dispatched that reads it.

Adapters from host memory are padded there; each shape of projection has a function, compiled at the
start. Adapters from the device take one function for the whole bank, compiled when the first one of
these shapes comes. One more is for a trainer's next version in the slot of the last, which leaves
alone what is the same: the scaling, and the zeros of projections that it does not have.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.bank import Bank, KvBLora
from lora_moe_jax.adapters.config import AdapterConfig
from lora_moe_jax.adapters.device_params import DeviceParams, Factors, InSlot
from lora_moe_jax.errors import AdapterError
from pallas_kernels import Lora


class SlotWriter:
    """The one way into a bank's slots. Projections that an adapter does not have become zero."""

    def __init__(self, bank: Bank):
        self._bank = bank
        shardings = {
            name: type(lora)(*(array.sharding for array in lora))
            for name, lora in bank.arrays.items()
        }
        self._write_all = jax.jit(_write_all, donate_argnums=0, out_shardings=shardings)
        self._held: dict[int, InSlot] = {}  # by slot, what a trainer has written there
        self._finite = jax.jit(_finite)
        self._writers = self._compile(_compiled_writer)
        self._readers: dict[str, Any] = {}

    def write(self, slot: int, adapter: Adapter | DeviceParams) -> None:
        """Puts an adapter into a slot.

        Raises:
          AdapterError: it does not fit. Nothing is written then.
        """
        held, index = self._held.pop(slot, None), np.int32(slot)
        if not isinstance(adapter, DeviceParams):
            self._write_host(index, adapter)
        elif not adapter.places:
            arrays = self._bank.arrays
            arrays.update(self._write_all(arrays, index, adapter.values))
        else:
            write = self._write_factors if held is adapter.in_slot else self._write_stacks
            write(index, adapter)
            self._held[slot] = adapter.in_slot

    def _write_host(self, index: np.int32, adapter: Adapter) -> None:
        self._bank.check(adapter)
        arrays = self._bank.arrays
        for name, lora in arrays.items():
            values = _padded(lora, adapter.pairs.get(name))
            arrays[name] = self._writers[name](lora, index, values)

    def _write_stacks(self, index: np.int32, params: DeviceParams) -> None:
        arrays = self._bank.arrays
        arrays.update(_write_stacks(params.places, arrays, index, params.values))

    def _write_factors(self, index: np.int32, params: DeviceParams) -> None:
        """As `_write_stacks`, where scalings and zeros are there; flat lists are fastest."""
        arrays = self._bank.arrays
        kinds = tuple((type(arrays[name]), *place) for name, place in params.places)
        factors = [factor for name, _ in params.places for factor in arrays[name][:-1]]
        written = iter(_write_factors(kinds, factors, index, params.values))
        for name, _ in params.places:
            lora = arrays[name]
            arrays[name] = type(lora)(*itertools.islice(written, len(lora) - 1), lora.scaling)

    def check_finite(self, params: DeviceParams) -> None:
        """Raises AdapterError for a NaN or an infinity. Waits until the values are there."""
        finite = np.asarray(self._finite(params.values))  # in one copy
        if not finite.all():
            raise AdapterError(
                "the parameters are not finite",
                key=sorted(params.values)[int(finite.argmin())],
                expected="finite values",
                found="NaN or infinity",
            )
        # Compiled with the first parameters, so that no eviction compiles later.
        self._readers = self._readers or self._compile(_compiled_reader)

    def read(self, slot: int, held: InSlot) -> Adapter:
        """A host copy of parameters that were written; written again it gives the same bits."""
        arrays, index = self._bank.arrays, np.int32(slot)
        parts = {name: self._readers[name](arrays[name], index) for name in held.ranks}
        pairs = {name: _pair(part, held.ranks[name]) for name, part in parts.items()}
        return Adapter(pairs, held.layout, AdapterConfig(r=held.rank))

    def _compile(self, function: Callable[[Lora | KvBLora], Any]) -> dict[str, Any]:
        """A compiled function for each projection; projections of one shape share theirs."""
        compiled: dict[tuple, Any] = {}
        functions = {}
        for name, lora in self._bank.arrays.items():
            key = tuple((array.shape, array.dtype, array.sharding) for array in lora)
            if key not in compiled:
                compiled[key] = function(lora)
            functions[name] = compiled[key]
        return functions


def _compiled_writer(lora: Lora | KvBLora):
    shardings = type(lora)(*(array.sharding for array in lora))
    write = jax.jit(_write_slot, donate_argnums=0, out_shardings=shardings)
    return write.lower(lora, np.int32(0), _padded(lora, None)).compile()


def _compiled_reader(lora: Lora | KvBLora):
    return jax.jit(_read_slot).lower(lora, np.int32(0)).compile()


def _padded(lora: Lora | KvBLora, pair: LoraPair | None) -> Lora | KvBLora:
    """The slot's new values: ranks padded with zeros, shared factors repeated if need be."""
    values = type(lora)(*(np.zeros(array.shape[1:], array.dtype) for array in lora))
    if pair is None:
        return values
    for value, part in zip(values[:-1], _parts(lora, pair), strict=True):
        value[:, : pair.rank] = part
    values.scaling[:] = pair.scaling
    return values


def _padded_on_device(lora: Lora | KvBLora, pair: Factors) -> Lora | KvBLora:
    """`_padded` for arrays on the device."""
    factors = [
        _padded_rank(array, part) for array, part in zip(lora[:-1], _parts(lora, pair), strict=True)
    ]
    if lora.scaling is None:  # it stays
        return type(lora)(*factors, None)
    return type(lora)(*factors, jnp.broadcast_to(pair.scaling, lora.scaling.shape[1:]))


def _padded_rank(array: jax.Array, part: jax.Array) -> jax.Array:
    bits = _bits(part, array.dtype)
    zeros = jnp.zeros(array.shape[1:], bits.dtype)
    return zeros.at[:, : part.shape[1]].set(bits).view(array.dtype)


def _bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Finite numbers in `dtype`, as integers.

    XLA:CPU makes the smallest numbers zero when it rounds to bfloat16, or selects between such, in
    some of the ways in which it fuses; the host's code does not. So it is done by hand.
    """
    if dtype == jnp.bfloat16 and x.dtype != dtype:
        bits = x.astype(jnp.float32).view(jnp.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(jnp.uint16)
    return x.astype(dtype).view({2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize])


def _parts(lora: Lora | KvBLora, pair: LoraPair | Factors):
    """A pair's factors as the bank holds them: kv_b's B by head, in two parts."""
    if not isinstance(lora, KvBLora):
        return pair.a, pair.b
    (_, heads, _, nope), rank = lora.b_key.shape, pair.a.shape[1]
    by_head = pair.b[0].reshape(rank, heads, -1).swapaxes(0, 1)
    return pair.a, by_head[:, :, :nope], by_head[:, :, nope:]


def _pair(part: Lora | KvBLora, rank: int) -> LoraPair:
    """A slot's values as an adapter in memory has them."""
    a, b, *b_value = (np.array(array[:, :rank]) for array in map(np.asarray, part[:-1]))
    if b_value:
        b = np.concatenate([b, *b_value], axis=-1).swapaxes(0, 1).reshape(1, rank, -1)
    scaling = np.array(part.scaling)
    return LoraPair(a, b, scaling, np.full(len(scaling), rank, np.int32))


def _write_all(arrays, slot: jax.Array, params):
    """The whole bank with one slot replaced by the parameters, and zeros where they have none."""
    written = {}
    for name, lora in arrays.items():
        values = params.get(name)
        if values is None:
            values = _zeros(lora)
        elif isinstance(values, Factors):
            values = _padded_on_device(lora, values)
        written[name] = _write_slot(lora, slot, values)
    return written


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write_stacks(places, arrays, slot: jax.Array, stacks):
    """`_write_all` of stacks."""
    taken = {name: _taken(stacks, *place) for name, place in places}
    return _write_all(arrays, slot, taken)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write_factors(kinds, factors: list[jax.Array], slot: jax.Array, stacks):
    """One slot of these projections' factors."""
    left, written = iter(factors), []
    for kind, stack, index in kinds:
        lora = kind(*itertools.islice(left, len(kind._fields) - 1), None)
        values = _padded_on_device(lora, _taken(stacks, stack, index))
        written += _write_slot(lora, slot, values)[:-1]
    return written


def _taken(stacks, stack: str, index: int) -> Factors:
    return Factors(*(x[index] for x in stacks[stack]))


def _zeros(lora: Lora | KvBLora):
    return type(lora)(*(jnp.zeros(array.shape[1:], array.dtype) for array in lora))


def _write_slot(lora, slot: jax.Array, values):
    """The arrays of one projection with one slot replaced."""

    def write(array, value):
        value = _bits(value, array.dtype).view(array.dtype)
        return jax.lax.dynamic_update_index_in_dim(array, value, slot, 0)

    return jax.tree.map(write, lora, values)


def _read_slot(lora, slot: jax.Array):
    """One slot of the arrays of one projection."""
    return type(lora)(
        *(jax.lax.dynamic_index_in_dim(array, slot, 0, keepdims=False) for array in lora)
    )


def _finite(params):
    """bool [projections] in order of their names: whether all values are."""
    return jnp.stack(
        [
            jnp.stack([jnp.isfinite(array).all() for array in params[name]]).all()
            for name in sorted(params)
        ]
    )
