"""The native SwitchWatch and Python's: after the same events they decide the same."""

from __future__ import annotations

import random

import pytest

from netfold._native_dev import control
from netfold.communicator.switch_watch import Lost, Query, SwitchWatch

pytestmark = pytest.mark.native

RANK = 2
TICK = 1 / 64  # exact as a float, and as a whole number of nanoseconds


def ns(ticks: int) -> int:
    return ticks * 15_625_000


class Both:
    """The two machines, which get the same events."""

    def __init__(self) -> None:
        self.python = SwitchWatch(RANK, 0.0)
        self.native = control.SwitchWatch(RANK, 0)
        self.open = False

    def poll(self, ticks: int, chunk: int | None, urgent: bool) -> Query | Lost | None:
        wanted = self.python.poll(ticks * TICK, chunk, urgent=urgent)
        found = self.native.poll(ns(ticks), chunk, urgent)
        if isinstance(wanted, Query):
            assert found == ("query", wanted.chunk)
            self.open = True
        elif isinstance(wanted, Lost):
            assert found == ("lost", wanted.why)
        else:
            assert found is None
        assert list(self.python.stragglers) == self.native.stragglers
        return wanted

    def answer(self, missing: list[int] | None) -> None:
        self.open = False
        self.python.answer(missing)
        self.native.answer(missing)
        assert list(self.python.stragglers) == self.native.stragglers


@pytest.mark.parametrize("seed", range(300))
def test_both_decide_the_same(seed: int) -> None:
    draw = random.Random(seed)
    both, now, chunk = Both(), 0, draw.choice([None, 0, 5])
    answers = draw.choice([0.0, 0.1, 0.5, 1.0])
    changes, long_ticks = draw.choice([0.0, 0.01, 0.3]), draw.choice([0.0, 0.1])
    missing: list[list[int] | None] = draw.choice([[[]], [[RANK]], [[1]], [None], [[], [RANK], [1], [1, RANK], None]])
    for _ in range(400):
        now += draw.randrange(64, 400) if draw.random() < long_ticks else draw.randrange(1, 20)
        if draw.random() < changes:
            chunk = draw.choice([None, 0 if chunk is None else (chunk + 1) % (1 << 64), (1 << 64) - 1])
        if draw.random() < answers and (both.open or draw.random() < 0.05):
            both.answer(draw.choice(missing))
        if isinstance(both.poll(now, chunk, draw.random() < 0.02), Lost):
            return


def test_the_seeds_reach_every_decision() -> None:
    seen = set()
    for answer, chunk in ((None, None), ([], 3), ([RANK], 3), ([1], 3)):
        both, silent = Both(), answer is None
        for tick in range(1, 64 * 8):
            if both.open and not silent:
                both.answer(answer)
            decided = both.poll(tick, chunk, False)
            if isinstance(decided, Lost):
                seen.add(decided.why.split(" for ")[0])
                break
            seen.add(type(decided).__name__)
        else:
            seen.add(f"goes on after {answer}")
    assert seen == {
        "NoneType",
        "Query",
        "it has not answered",
        f"packets have not passed between it and rank {RANK}",
        "goes on after [1]",
    }
