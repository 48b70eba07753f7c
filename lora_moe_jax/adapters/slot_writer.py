"""Writes adapters into slots of the bank, and reads them back.

A write donates the old arrays, so nothing is reallocated, and runs compiled functions, so nothing
is recompiled. Steps that were begun before it and have not run yet read the arrays as they were:
the runtime writes into donated memory only after everything dispatched that reads it.

Adapters from host memory are written a projection at a time, so that steps may come between. They
are padded there, rounded, and sent, by threads; each shape of projection has a function, compiled
at the start, that puts what has come into its place. Adapters from the device take one function for
the whole bank, compiled when the first one of these shapes comes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lora_moe_jax.adapters.adapter import Adapter, LoraPair
from lora_moe_jax.adapters.bank import Bank, KvBLora, Place, RankClass
from lora_moe_jax.adapters.config import AdapterConfig
from lora_moe_jax.adapters.device_params import DeviceParams, Factors, InSlot
from lora_moe_jax.errors import AdapterError
from pallas_kernels import Lora

AHEAD = 16  # projections that are sent before they are written: each is a copy on the device


class SlotWriter:
    """The one way into a bank's slots. Projections that an adapter does not have become zero."""

    def __init__(self, bank: Bank):
        self._bank = bank
        threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="sending")
        self._classes = {rank: _ClassWriter(its, threads) for rank, its in bank.classes.items()}
        self._finite = jax.jit(_finite)

    def write(self, slot: int, adapter: Adapter | DeviceParams) -> Iterator[None]:
        """Puts an adapter into a slot, a part with each step of the iterator.

        Raises:
          AdapterError: in the first step: it does not fit. Nothing is written then.
        """
        rank, place = self._bank.locate(slot)
        if isinstance(adapter, DeviceParams):
            self._classes[rank].write_params(place, adapter)
            return
        self._bank.check(adapter)
        yield from self._classes[rank].write(place, adapter)

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
        for writer in self._classes.values():
            writer.compile_readers()

    def read(self, slot: int, held: InSlot) -> Adapter:
        """A host copy of parameters that were written; written again it gives the same bits."""
        rank, place = self._bank.locate(slot)
        pairs = self._classes[rank].read(place, held.ranks)
        return Adapter(pairs, held.layout, AdapterConfig(r=held.rank))


class _ClassWriter:
    """`SlotWriter` of the slots of one rank."""

    def __init__(self, slots: RankClass, threads: ThreadPoolExecutor):
        self._slots, self._threads = slots, threads
        shardings = {stack: _shardings(lora) for stack, lora in slots.stacks.items()}
        self._places = {stack: _value_shardings(lora) for stack, lora in slots.stacks.items()}
        members: dict[str, list[str]] = {}
        for name, place in slots.places.items():
            members.setdefault(place.stack, []).append(name)
        write = functools.partial(_write_all, members)
        self._write_all = jax.jit(
            write, static_argnums=0, donate_argnums=1, out_shardings=shardings
        )
        self._writers = self._compile(_compiled_writer)
        self._readers: dict[str, Any] = {}

    def write(self, slot: int, adapter: Adapter) -> Iterator[None]:
        slots, slot = self._slots, np.int32(slot)
        for name, values in self._all_sent(adapter):
            stack, index = slots.places[name]
            slots.stacks[stack] = self._writers[stack](
                slots.stacks[stack], np.int32(index), slot, values
            )
            yield

    def _all_sent(self, adapter: Adapter) -> Iterator[tuple[str, Lora | KvBLora]]:
        """The new values of each projection on the device, some of them sent ahead."""
        begun = deque()
        for name, place in self._slots.places.items():
            values = self._slots.like(name), adapter.pairs.get(name), self._places[place.stack]
            begun.append((name, self._threads.submit(_sent, *values)))
            if len(begun) == AHEAD:
                name, values = begun.popleft()
                yield name, values.result()
        for name, values in begun:
            yield name, values.result()

    def write_params(self, slot: int, params: DeviceParams) -> None:
        slots = self._slots
        slots.stacks = self._write_all(params.places, slots.stacks, np.int32(slot), params.values)

    def compile_readers(self) -> None:
        self._readers = self._readers or self._compile(_compiled_reader)

    def read(self, slot: int, ranks: Mapping[str, int]) -> dict[str, LoraPair]:
        pairs, slot = {}, np.int32(slot)
        for name, rank in ranks.items():
            stack, index = self._slots.places[name]
            part = self._readers[stack](self._slots.stacks[stack], np.int32(index), slot)
            pairs[name] = _pair(part, rank)
        return pairs

    def _compile(self, function: Callable[[Lora | KvBLora], Any]) -> dict[str, Any]:
        """A compiled function for each stack; stacks of one shape share theirs."""
        compiled: dict[tuple, Any] = {}
        functions = {}
        for stack, lora in self._slots.stacks.items():
            key = tuple((array.shape, array.dtype, array.sharding) for array in lora)
            if key not in compiled:
                compiled[key] = function(lora)
            functions[stack] = compiled[key]
        return functions


def _shardings(lora: Lora | KvBLora):
    return type(lora)(*(array.sharding for array in lora))


def _value_shardings(lora: Lora | KvBLora):
    """Of one slot of one projection."""

    def without_slots(sharding):
        if not isinstance(sharding, NamedSharding):
            return sharding
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[2:]))

    return type(lora)(*map(without_slots, _shardings(lora)))


def _compiled_writer(lora: Lora | KvBLora):
    values = type(lora)(
        *(
            jax.ShapeDtypeStruct(array.shape[2:], array.dtype, sharding=where)
            for array, where in zip(lora, _value_shardings(lora), strict=True)
        )
    )
    write = jax.jit(_write_one, donate_argnums=0, out_shardings=_shardings(lora))
    return write.lower(lora, np.int32(0), np.int32(0), values).compile()


def _compiled_reader(lora: Lora | KvBLora):
    return jax.jit(_read_one).lower(lora, np.int32(0), np.int32(0)).compile()


def _sent(slot: Lora | KvBLora, pair: LoraPair | None, where: Lora | KvBLora) -> Lora | KvBLora:
    """`_padded` on its way to the device."""
    return jax.device_put(_padded(slot, pair), where)


def _padded(slot: Lora | KvBLora, pair: LoraPair | None) -> Lora | KvBLora:
    """A slot's new values: ranks padded with zeros, shared factors repeated if need be."""
    parts = () if pair is None else tuple(_parts(slot, pair))
    if parts and all(map(_fits, parts, slot)):  # a copy takes as long as it does to send it
        return type(slot)(*parts, np.broadcast_to(pair.scaling, slot.scaling.shape))
    values = type(slot)(*(np.zeros(array.shape, array.dtype) for array in slot))
    if pair is None:
        return values
    for value, part in zip(values[:-1], parts, strict=True):
        value[:, : pair.rank] = part
    values.scaling[:] = pair.scaling
    return values


def _fits(part: np.ndarray, like: jax.ShapeDtypeStruct) -> bool:
    return (part.shape, part.dtype) == (like.shape, like.dtype)


def _padded_on_device(slot: Lora | KvBLora, pair: Factors) -> Lora | KvBLora:
    """`_padded` for arrays on the device, as `_bits`."""
    factors = []
    for like, part in zip(slot[:-1], _parts(slot, pair), strict=True):
        factors.append(_filled(_bits(part, like.dtype), like.shape))
    scaling = jnp.broadcast_to(pair.scaling, slot.scaling.shape)
    return type(slot)(*factors, _bits(scaling, slot.scaling.dtype))


def _bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Finite numbers in `dtype`; for a CPU as integers.

    XLA:CPU makes the smallest numbers zero when it rounds to bfloat16, or selects between such, in
    some of the ways in which it fuses; the host's code does not. So it is done by hand.
    """
    if jax.default_backend() != "cpu":
        return x.astype(dtype)
    if dtype == jnp.bfloat16 and x.dtype != dtype:
        bits = x.astype(jnp.float32).view(jnp.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(jnp.uint16)
    return x.astype(dtype).view({2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize])


def _parts(slot: Lora | KvBLora, pair: LoraPair | Factors):
    """A pair's factors as the bank holds them: kv_b's B by head, in two parts."""
    if not isinstance(slot, KvBLora):
        return pair.a, pair.b
    (heads, _, nope), rank = slot.b_key.shape, pair.a.shape[1]
    by_head = pair.b[0].reshape(rank, heads, -1).swapaxes(0, 1)
    return pair.a, by_head[:, :, :nope], by_head[:, :, nope:]


def _pair(part: Lora | KvBLora, rank: int) -> LoraPair:
    """A slot's values as an adapter in memory has them."""
    a, b, *b_value = (np.array(array[:, :rank]) for array in map(np.asarray, part[:-1]))
    if b_value:
        b = np.concatenate([b, *b_value], axis=-1).swapaxes(0, 1).reshape(1, rank, -1)
    scaling = np.array(part.scaling)
    return LoraPair(a, b, scaling, np.full(len(scaling), rank, np.int32))


def _write_all(members: Mapping[str, Sequence[str]], places, stacks, slot: jax.Array, params):
    """The whole bank with one slot replaced by the parameters, and zeros where they have none."""
    places, written = dict(places), {}
    for stack, lora in stacks.items():
        like = type(lora)(*(jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in lora))
        values = _values(like, members[stack], places, params)
        if jax.default_backend() == "cpu":  # or LLVM selects between bfloat16 after all
            values = lax.optimization_barrier(values)
        written[stack] = jax.tree.map(
            lambda array, value: lax.dynamic_update_index_in_dim(
                array, value.view(array.dtype), slot, 1
            ),
            lora,
            values,
        )
    return written


def _values(slot: Lora | KvBLora, names: Sequence[str], places: Mapping[str, Place], params):
    """One slot's new values for all projections of a stack, as `_bits`."""
    found = [places.get(name) for name in names]
    sources = {place and place.stack for place in found}
    if None not in sources and len(sources) == 1:
        taken = np.array([place.index for place in found])
        pairs = Factors(*(x[taken] for x in params[sources.pop()]))
        return jax.vmap(functools.partial(_padded_on_device, slot))(pairs)
    values = [_value(slot, name, places, params) for name in names]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *values)


def _value(slot: Lora | KvBLora, name: str, places: Mapping[str, Place], params):
    """Of one projection."""
    value = params.get(name)
    if name in places:
        stack, index = places[name]
        value = Factors(*(x[index] for x in params[stack]))
    if isinstance(value, Factors):
        return _padded_on_device(slot, value)
    if value is None:
        value = type(slot)(*(jnp.zeros(like.shape, like.dtype) for like in slot))
    return jax.tree.map(_fitted, value, slot)


def _fitted(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of a slot, perhaps of one of a smaller rank, as `_bits` of this shape."""
    return _filled(_bits(x, like.dtype), like.shape)


def _filled(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A factor with zeros for the ranks that it has not."""
    if x.shape == shape:
        return x
    return jnp.zeros(shape, x.dtype).at[:, : x.shape[1]].set(x)


def _write_one(lora, index: jax.Array, slot: jax.Array, values):
    """The arrays of a stack with one slot of one projection replaced."""

    def write(array, value):
        start = index, slot, *[jnp.int32(0)] * value.ndim
        return lax.dynamic_update_slice(array, value[None, None], start)

    return jax.tree.map(write, lora, values)


def _read_one(lora, index: jax.Array, slot: jax.Array):
    """One slot of one projection of a stack."""
    return jax.tree.map(lambda array: array[index, slot], lora)


def _finite(params):
    """bool [projections] in order of their names: whether all values are."""
    return jnp.array(
        [
            jnp.stack([jnp.isfinite(array).all() for array in params[name]]).all()
            for name in sorted(params)
        ]
    )
