"""A job of elastic members whose every step is checked, for tests: its state is the sum of the numbers of its steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold.communicator import NetfoldError
from netfold.elastic import Change, Members

QUIET = Options(probe="off")
# No member knows that the others are on its host: they count as a majority only.
APART = Options(probe="off", transport="tcp")


def first_members(
    folder: str, rank: int, size: int, options: Options = QUIET, timeout_s: float = 60.0, **settings: Any
) -> Members:
    store = FileStore(folder)
    communicator = Communicator(store, rank, size, options=options, timeout_s=timeout_s, join_timeout_s=60)
    settings = {"join_timeout_s": 60, **settings}
    return Members.of(communicator, store=store, **settings)


def newcomer(folder: str, **settings: Any) -> Members:
    settings = {"options": QUIET, "timeout_s": 60, "join_timeout_s": 60, **settings}
    return Members.newcomer(FileStore(folder), **settings)


class Job:
    """A member with a state: the sum of the numbers of all steps that passed.

    Each step's sum is checked. Every element, and every member's part, counts once.
    """

    def __init__(self, members: Members, until: Callable[[Members], bool]) -> None:
        """until: says on any member, in a step, whether that step is the last one of all."""
        self.members, self.until = members, until
        self.before_vote: Callable[[], None] = lambda: None
        self.state = np.zeros(1)
        self.changes: list[Change] = []
        self.is_last = False

    def run(self) -> Job:
        """Until the last step, or until this member has left."""
        if self.members.first is not None:
            self._settle(self.members.first)
        while not self.is_last and not (self.changes and self.changes[-1].left):
            try:
                change = self._step()
            except NetfoldError as error:
                change = self._change(error)
            if change is not None:
                self._settle(change)
        if not self.members.failed:
            self.members.communicator.barrier()
        return self

    def _change(self, error: NetfoldError) -> Change:
        if not self.members.failed:
            raise error
        return self.members.change(error)

    def _step(self) -> Change | None:
        group, step = self.members.communicator, self.members.done
        own = np.append(np.arange(500, dtype=np.float64) * (step + 1) + group.rank, float(self.until(self.members)))
        group.all_reduce(own)
        expected = np.arange(500, dtype=np.float64) * (step + 1) * group.size + sum(range(group.size))
        assert np.array_equal(own[:-1], expected)
        self._ends = own[-1] > 0
        self.before_vote()
        vote = self.members.vote()
        self._apply(vote.done)
        return self.members.change() if vote.changes else None

    def _apply(self, done: int) -> None:
        self.state += done
        self.is_last = self._ends

    def _settle(self, change: Change | None) -> None:
        """Apply what is to be applied, and send the state to the members that lack it, until that succeeds."""
        while change is not None:
            self.changes.append(change)
            if change.left:
                return
            if change.apply:
                self._apply(change.done)
            try:
                self._send_state(change)
                return
            except NetfoldError as error:
                change = self._change(error)

    def _send_state(self, change: Change) -> None:
        group = self.members.communicator
        for to, source in change.lacking.items():
            if group.rank == source:
                group.send(np.append(self.state, self.is_last), to)
            elif group.rank == to:
                received = np.zeros(2)
                group.receive(received, source)
                self.state, self.is_last = received[:1], bool(received[1])
                self.members.received()


def steps(count: int) -> Callable[[Members], bool]:
    return lambda members: members.done + 1 >= count


def size_is(size: int, generation: int = 1) -> Callable[[Members], bool]:
    """The job runs until it has that size, in that generation or a later one. A step then takes some milliseconds."""

    def until(members: Members) -> bool:
        time.sleep(0.01)
        return members.size == size and members.generation >= generation

    return until


def sum_of(count: int) -> float:
    return count * (count + 1) / 2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mark(folder: str, name: str, text: str = "") -> None:
    FileStore(folder).set(name, text.encode())


def wait_for(folder: str, name: str) -> str:
    return FileStore(folder).get(name, 60).decode()


def in_background(body: Callable[[], None]) -> None:
    threading.Thread(target=body, daemon=True).start()
