"""The switches of one job as `join` describes them: the levels from a switch to the root, and what contributes to each.

A switch adds for its contributors: the workers that join it, and the switches below it. A join lists the contributors
of the joined switch and of each switch above it, and no other worker. So messages, and the memory of a switch, grow
with the contributors of a switch and not with the workers of the job.

A level in a message: [id, contributors]. A contributor: [worker, rank] for a worker, and [worker, rank, id, workers]
for a switch. worker: the number in the whole job, of a switch the lowest below it. rank: of that worker. workers: how
many are below the switch. Contributors stand in the order of workers, in which their values are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

# Levels of switches in one tree; no useful tree is this deep.
MAX_DEPTH = 8
# Workers of one job, over all switches of its tree. Replies that list ranks fit into a control message.
MAX_JOB_WORKERS = 4096


class Contributor(NamedTuple):
    """A worker or a switch that contributes to a switch."""

    worker: int
    """Its number in the whole job; of a switch: the lowest below it."""
    rank: int
    """Of that worker."""
    switch: int | None = None
    """Its id; None for a worker."""
    workers: int = 1
    """Workers that it contributes for."""


class Level(NamedTuple):
    """A switch of the job, and its contributors in the order of workers."""

    switch: int
    contributors: tuple[Contributor, ...]

    @property
    def workers(self) -> int:
        """Workers below the switch."""
        return sum(each.workers for each in self.contributors)


def levels_by_worker(paths: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[list[Any]]:
    """By worker, the levels from its own switch to the root, as they stand in its join.

    paths: by worker, the ids of its switches from its own to the root, which is the same in all of them.
    ranks: by worker, its rank.
    Raises ValueError for paths that form no tree. Cost: once over all paths; workers of one switch share their levels.
    """
    above: dict[int, int | None] = {}
    contributors: dict[int, list[list[int]]] = {}
    as_contributor: dict[int, list[int]] = {}  # switches below the root
    for worker, (path, rank) in enumerate(zip(paths, ranks, strict=True)):
        if not 0 < len(path) <= MAX_DEPTH:
            raise ValueError(f"worker {worker} is below {len(path)} switches; a tree has 1 to {MAX_DEPTH} levels")
        for switch, parent in zip(path, [*path[1:], None], strict=True):
            if above.setdefault(switch, parent) != parent:
                raise ValueError(f"switch {switch:08x} has two parents in the paths of its workers")
        contributors.setdefault(path[0], []).append([worker, rank])
        for below, switch in pairwise(path):
            if below not in as_contributor:
                as_contributor[below] = [worker, rank, below, 0]
                contributors.setdefault(switch, []).append(as_contributor[below])
            as_contributor[below][3] += 1
    # Each switch has one parent and every path ends at None, so no path is a circle.
    if sum(parent is None for parent in above.values()) != 1:
        raise ValueError("the paths of the workers end at more than one switch")
    levels = {switch: [switch, below] for switch, below in contributors.items()}
    return [[levels[switch] for switch in path] for path in paths]


def parse_levels(value: object) -> tuple[Level, ...]:
    """The levels of a join, from the joined switch to the root.

    Raises TypeError or ValueError for a malformed value, ValueError with a clause about it where they form no tree.
    """
    if not isinstance(value, list) or not 0 < len(value) <= MAX_DEPTH:
        raise ValueError(f"a tree has 1 to {MAX_DEPTH} levels")
    levels = tuple(_level(*each) for each in value)
    for below, level in pairwise(levels):
        first = below.contributors[0]
        expected = Contributor(first.worker, first.rank, below.switch, below.workers)
        if expected not in level.contributors:
            raise ValueError(f"switch {below.switch:08x} does not contribute to switch {level.switch:08x} as it should")
    if len({level.switch for level in levels}) != len(levels):
        raise ValueError("a switch is above itself")
    if levels[-1].workers > MAX_JOB_WORKERS:
        raise ValueError(f"a job has at most {MAX_JOB_WORKERS} workers, not {levels[-1].workers}")
    return levels


def _level(switch: int, contributors: list[list[int]]) -> Level:
    level = Level(switch, tuple(Contributor(*each) for each in contributors))
    numbers = [switch, *(number for each in contributors for number in each)]
    if not level.contributors or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a level is a switch's id and its contributors, in numbers")
    if not all(one.worker < other.worker for one, other in pairwise(level.contributors)):
        raise ValueError("contributors stand in the order of workers")
    switches = [each.switch for each in level.contributors if each.switch is not None]
    if len(set(switches)) != len(switches) or not all(each.workers > 0 for each in level.contributors):
        raise ValueError("a switch contributes once, for at least one worker")
    if len({each.rank for each in level.contributors}) != len(level.contributors):
        raise ValueError("two contributors have the same rank")
    return level
