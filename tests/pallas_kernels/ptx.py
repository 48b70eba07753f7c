"""In which order a kernel adds up a row, from its PTX."""

from __future__ import annotations

import re

MODULE = re.compile(r"(?=\.visible \.entry )")
INSTRUCTION = re.compile(r"^\s*(?:@\S+\s+)?([a-z][\w.:]*)\s+({[^}]*}|[^,{]+),(.+);$", re.MULTILINE)
REGISTER = re.compile(r"%\w+")


def orders_of_norms(text: str) -> list:
    """What each `rsqrt` of a text adds up: nested pairs of numbers, the smaller first.

    A number is where in the row it is: which of the row's loads brings it, in which register of
    theirs, and in which half of that. A sum of another lane, which adds up its own, is -1.
    """
    found = []
    for module in MODULE.split(text):
        row = _Registers(module)
        found += [row.order(its) for its in row.of_instructions("rsqrt")]
    return found


class _Registers:
    """What each register of a module is made of."""

    def __init__(self, module: str):
        self.made = {}
        for number, (name, to, of) in enumerate(INSTRUCTION.findall(module)):
            for place, register in enumerate(REGISTER.findall(to)):
                self.made[register] = number, name, place, REGISTER.findall(of)

    def of_instructions(self, prefix: str) -> list[str]:
        """The operands of all such instructions."""
        return [its[-1][0] for its in self.made.values() if its[1].startswith(prefix)]

    def order(self, register: str):
        order = self._added(register)
        loads = sorted({its[0] for its in _numbers(order)})
        return _pairs(order, loads)

    def _added(self, register: str):
        _, name, _, operands = self.made[register]
        if name.startswith("shfl"):
            return None
        if name.startswith("fma"):  # both squares of a place, of which one is behind a barrier
            return self._place(operands[0])
        assert name.startswith(("add", "mul")), name  # to a constant, by one, or two sums
        terms = [self._added(its) for its in operands]
        return terms if len(terms) > 1 else terms[0]

    def _place(self, register: str) -> tuple[int, ...]:
        """The load that brings a number, and where it is in what that brings."""
        number, name, place, operands = self.made[register]
        if name.startswith("ld"):
            return number, place
        return *self._place(operands[0]), place


def _numbers(order) -> list[tuple[int, ...]]:
    if isinstance(order, list):
        return [number for its in order for number in _numbers(its)]
    return [] if order is None else [order]


def _pairs(order, loads: list[int]):
    if order is None:
        return -1
    if isinstance(order, list):
        return tuple(sorted((_pairs(its, loads) for its in order), key=repr))
    load, register, half, *_ = order
    return 8 * loads.index(load) + 2 * register + half
