"""A job of elastic members whose every step is checked, for tests: its state is the sum of the numbers of its steps.

    python members_job.py --folder F --number N --first FIRST [--interface I] [--timeout-s 60]

runs member N of the first FIRST ones, or a newcomer, until F/stop exists. In each step it prints a line: generation,
size, step; at last "end", its rank, size, the steps and the state. `command` and `Log` are the test's side of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
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


def command(folder: Path, number: int, first: int, **options: object) -> list[str]:
    """The command of a member's process. options: as of `main`, with underscores."""
    options = {"folder": folder, "number": number, "first": first, **options}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, __file__, *words]


@dataclass(frozen=True)
class Log:
    """A file with the output of a member's process."""

    path: Path

    def last(self) -> list[Any]:
        """The line that it printed last; [] where that is none of the job's. It prints only once it holds the state."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return json.loads(lines[-1]) if lines and lines[-1].startswith("[") and lines[-1].endswith("]") else []

    @staticmethod
    def text(logs: Iterable[Log]) -> str:
        """The ends of several files, for people."""
        return "\n".join(f"{log.path.name}: {log.path.read_text()[-3000:]}" for log in logs if log.path.exists())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--interface")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    asked = parser.parse_args()
    settings: dict[str, Any] = {
        "options": Options(probe="off", interface=asked.interface),
        "timeout_s": asked.timeout_s,
    }
    is_first = asked.number < asked.first

    def until(members: Members) -> bool:
        time.sleep(0.005)
        return os.path.exists(f"{asked.folder}/stop")

    def say(*words: object) -> None:
        print(json.dumps(words), flush=True)

    with (
        first_members(asked.folder, asked.number, asked.first, **settings)
        if is_first
        else newcomer(asked.folder, **settings)
    ) as members:
        job = Job(members, until)
        job.before_vote = lambda: say(members.generation, members.size, members.done)
        job.run()
        say("end", members.rank, members.size, members.done, float(job.state[0]))


if __name__ == "__main__":
    main()
