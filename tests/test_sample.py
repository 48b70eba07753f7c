"""Which of the slow tests a run takes."""

from __future__ import annotations

from tests.conftest import SAMPLED, sample

NAMES = [f"tests/test_{number}.py::test" for number in range(100)]


def test_follows_from_the_seed_alone():
    chosen = sample(NAMES, "a commit")
    assert len(set(chosen)) == SAMPLED and set(chosen) <= set(NAMES)
    assert sample(NAMES[::-1], "a commit") == chosen


def test_takes_all_in_turn():
    chosen = {name for seed in range(300) for name in sample(NAMES, str(seed))}
    assert chosen == set(NAMES)


def test_takes_what_there_is():
    assert set(sample(NAMES[:2], "a commit")) == set(NAMES[:2])
