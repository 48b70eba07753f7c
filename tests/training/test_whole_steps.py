"""Ctrl-C ends a run between its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lora_moe_jax.training.whole_steps import WholeSteps


def run(ctrl_c: Callable[[], None], at: int, ended: list[int]) -> Iterator[int]:
    """Five steps; Ctrl-C comes twice within one of them."""
    for step in range(1, 6):
        if step == at:
            ctrl_c()
            ctrl_c()
        ended.append(step)
        yield step


def test_the_step_under_way_is_the_last(ctrl_c):
    for at in (2, 5):
        ended, seen = [], []
        with WholeSteps(run(ctrl_c, at, ended)) as steps:
            seen.extend(steps)
        assert steps.interrupted and steps.reports == ended == list(range(1, at + 1))


def test_between_steps(ctrl_c):
    ended = []
    with WholeSteps(run(ctrl_c, 0, ended)) as steps:
        for step in steps:
            if step == 3:
                ctrl_c()
    assert steps.interrupted and steps.reports == ended == [1, 2, 3]


def test_the_first_step_is_given_up(ctrl_c):
    ended = []
    with pytest.raises(KeyboardInterrupt), WholeSteps(run(ctrl_c, 1, ended)) as steps:
        list(steps)
    assert steps.interrupted and steps.reports == ended == []


def test_all_steps(ctrl_c):
    with WholeSteps(run(ctrl_c, 0, [])) as steps:
        assert list(steps) == [1, 2, 3, 4, 5]
    assert not steps.interrupted and steps.reports == [1, 2, 3, 4, 5]
    with pytest.raises(ZeroDivisionError), WholeSteps(1 // (2 - x) for x in range(5)) as steps:
        list(steps)
    assert not steps.interrupted and steps.reports == [0, 1]
