"""A switch's place in a job's tree: who contributes to it, and whether its sums go on to a parent.

Every worker's join says the whole tree in one form, the path of each worker: the ids of the switches from its own to
the root, which is the lowest one that all workers are below. So every switch of the tree finds the same one in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Levels of switches in one tree: far above any that helps.
MAX_DEPTH = 8


@dataclass(frozen=True)
class Child:
    """Who contributes here: a worker, or a switch with those below it. Workers by their numbers in the whole job."""

    workers: tuple[int, ...]
    switch: int | None = None

    @property
    def name(self) -> int:
        """What it is called in the whole tree: its own number, or the lowest below."""
        return self.workers[0]


@dataclass(frozen=True)
class TreePosition:
    """children: in the order in which their contributions are added. parent: its id, None at the root."""

    children: tuple[Child, ...]
    parent: int | None = None


def tree_position(me: int, paths: Sequence[Sequence[int]]) -> TreePosition:
    """The place of switch `me`; ValueError, in words for the worker, for paths that are no tree or not above it."""
    above: dict[int, int | None] = {}
    for worker, path in enumerate(paths):
        if not 0 < len(path) <= MAX_DEPTH:
            raise ValueError(f"worker {worker} is below {len(path)} switches; a tree has 1 to {MAX_DEPTH} levels")
        for switch, parent in zip(path, [*path[1:], None], strict=True):
            if above.setdefault(switch, parent) != parent:
                raise ValueError(f"switch {switch:08x} has two parents in what its workers say")
    # With one parent each and no end but None, paths cannot go in circles.
    if me not in above or len([parent for parent in above.values() if parent is None]) != 1:
        raise ValueError(f"switch {me:08x} is not in the tree of this job, or that is no tree")
    below: dict[int | None, list[int]] = {}  # by the child switch on the way; None: here
    direct = []
    for worker, path in enumerate(paths):
        if me not in path:
            continue
        level = list(path).index(me)
        if level == 0:
            direct.append(Child((worker,)))
        else:
            below.setdefault(path[level - 1], []).append(worker)
    children = [*direct, *(Child(tuple(workers), switch) for switch, workers in below.items())]
    return TreePosition(tuple(sorted(children, key=lambda child: child.name)), above[me])


def single_switch(workers: int) -> TreePosition:
    """Of a switch to which all workers contribute themselves."""
    return TreePosition(tuple(Child((worker,)) for worker in range(workers)))
