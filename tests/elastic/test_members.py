"""Members of an elastic job as processes: lost ranks, newcomers, members that leave, and the sums of every step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, values

from netfold import Communicator, FileStore, Options
from netfold.communicator import NetfoldError
from netfold.elastic import Change, Members

QUIET = Options(probe="off")
OVER_TCP = Options(probe="off", transport="tcp")


def first_members(folder: str, rank: int, size: int, options: Options = QUIET, **limits: Any) -> Members:
    store = FileStore(folder)
    communicator = Communicator(store, rank, size, options=options, timeout_s=20, join_timeout_s=20)
    return Members.of(communicator, store=store, join_timeout_s=20, **limits)


class Job:
    """A member with a state: the sum of the numbers of all steps, added up by all members' sums.

    Each step's sum is checked: distinct values in every element, and every member's part counts once.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self.state = np.zeros(1)
        self.changes: list[Change] = []

    def run(self, steps: int, before_vote: Callable[[int], None] = lambda step: None) -> None:
        members = self.members
        if members.first is not None:
            self.changes.append(members.first)
            self._attempt(lambda: self._send_state(members.first))
        while members.done < steps:
            self._attempt(lambda: self._step(before_vote))

    def _attempt(self, body: Callable[[], Change | None]) -> None:
        """Run the body; at a loss change, until the state is whole everywhere."""
        members = self.members
        change: Change | None = None
        try:
            change = body()
        except NetfoldError as error:
            if not members.failed:
                raise
            change = members.change(error)
        while change is not None:
            self.changes.append(change)
            if change.apply:
                self._apply(change.done)
            try:
                self._send_state(change)
                return
            except NetfoldError as error:
                if not members.failed:
                    raise
                change = members.change(error)

    def _step(self, before_vote: Callable[[int], None]) -> Change | None:
        members = self.members
        group, step = members.communicator, members.done
        own = np.arange(500, dtype=np.float64) * (step + 1) + group.rank
        group.all_reduce(own)
        ranks = sum(range(group.size))
        assert np.array_equal(own, np.arange(500, dtype=np.float64) * (step + 1) * group.size + ranks)
        before_vote(step)
        vote = members.vote()
        self._apply(vote.done)
        return members.change() if vote.changes else None

    def _apply(self, done: int) -> None:
        self.state += done

    def _send_state(self, change: Change | None) -> None:
        assert change is not None
        group = self.members.communicator
        for to, source in change.lacking.items():
            if group.rank == source:
                group.send(self.state, to)
            elif group.rank == to:
                group.receive(self.state, source)
        if group.rank in change.lacking:
            self.members.received()


def sum_of(steps: int) -> float:
    return steps * (steps + 1) / 2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_is_killed(rank: int, size: int, folder: str, victim: int, options: Options) -> tuple[float, int, float, Any]:
    def kill(step: int) -> None:
        if (rank, step) == (victim, 3):
            Path(folder, "died").write_text(str(time.monotonic()))
            die()

    with first_members(folder, rank, size, options) as members:
        job = Job(members)
        job.run(8, kill)
        took_s = 0.0
        members.communicator.barrier()
        (change,) = job.changes
        return float(job.state[0]), members.generation, took_s, change


@pytest.mark.parametrize("options", [QUIET, OVER_TCP], ids=["memory", "tcp"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_two_of_three_go_on_when_one_is_killed(victim: int, options: Options) -> None:
    outcomes = run_ranks(one_is_killed, 3, victim, options, dies=[victim])
    left = [rank for rank in range(3) if rank != victim]
    for place, (state, generation, _, change) in enumerate(values([outcomes[rank] for rank in left])):
        assert (state, generation) == (sum_of(8), 2)
        assert (change.rank, change.size, change.former) == (place, 2, tuple(left))
        assert [lost.rank for lost in change.lost] == [victim] and not change.new and not change.lacking
