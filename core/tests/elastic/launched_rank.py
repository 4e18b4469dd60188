"""One rank as a launcher starts it: FOLDER. It trains the loop of loops.py; `Watched` is its test's side.

    at step 20 of the first generation    all ranks wait until the test has killed one
    at step 60, with fewer ranks          they wait for the new rank

Each rank writes its place at every change to FOLDER/place-PID, and its result to FOLDER/result-PID.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from load import settles

SIZE, STEPS, KILLED_AT, COMES_AT = 3, 100, 20, 60


def trained(folder: str) -> dict[str, Any]:
    """Join the launcher's job, train, and write the result."""
    from loops import marked, train, until

    before: Any = None

    def write(kind: str, found: object) -> None:
        path = Path(folder, f"{kind}-{os.getpid()}")
        path.with_suffix(".part").write_text(json.dumps(found))
        path.with_suffix(".part").rename(path)

    def hook(world: Any, moment: str) -> None:
        nonlocal before
        now = world.generation, world.rank, world.size
        if now != before:
            before = now
            write("place", {"generation": now[0], "rank": now[1], "size": now[2]})
        if (moment, world.step, world.generation) == ("forward", KILLED_AT, 1):
            write("waits", world.rank)
            until(lambda: marked(folder, "killed")() or world.members.failed, "a rank was killed")
        if (moment, world.step) == ("forward", COMES_AT) and world.size < SIZE and world.rank == 0:
            write("needs", world.size)
            until(lambda: world.members._standing._waiting, "the new rank has asked", 120)

    found = train(None, STEPS, hook)
    write("result", found)
    return found


class Watched:
    """A job of `SIZE` such ranks, from the outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, kind: str) -> dict[int, Any]:
        """By process."""
        return {
            int(path.name.partition("-")[2]): json.loads(path.read_text())
            for path in self.folder.glob(f"{kind}-*")
            if not path.suffix
        }

    def rank_to_kill(self, rank: int) -> int:
        """The process of a rank, when all wait to see it killed."""
        assert settles(lambda: len(self.read("waits")) == SIZE, 40), f"ranks that wait: {self.read('waits')}"
        return next(process for process, each in self.read("waits").items() if each == rank)

    def has_killed(self) -> None:
        (self.folder / "mark-killed").touch()

    def needs_a_rank(self) -> bool:
        """Whether the ranks that are left have gone on, and wait for a new one."""
        return settles(lambda: bool(self.read("needs")), 60)

    def check(self, killed: int) -> None:
        """All of the last generation have the weights of an undisturbed job, and one of them was no first rank."""
        from loops import serial, whole_steps

        assert settles(lambda: len(self.read("result")) == SIZE, 40), f"places: {self.read('place')}"
        found = self.read("result")
        expected, losses = serial(whole_steps(STEPS))
        first = set(self.read("waits"))
        assert killed in first and killed not in found and len(set(found) - first) == 1, (killed, first, set(found))
        for process, each in found.items():
            assert each["weights"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert each["weights"] == next(iter(found.values()))["weights"]
            own = {int(step): loss for step, loss in each["losses"].items()}
            assert own == pytest.approx({step: losses[step] for step in own}, rel=1e-9)
            sizes = {int(step): size for step, size in each["sizes"].items()}
            assert sizes[STEPS - 1] == SIZE and (process not in first or len(sizes) == STEPS)


if __name__ == "__main__":
    trained(sys.argv[1])
