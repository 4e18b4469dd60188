"""A switch's position in a job's tree: its children, and its parent.

Every worker's join carries the whole tree, as one path for each worker: the ids of the switches from the worker's own
to the root, which is the lowest switch that all workers are below. So every switch of the tree derives the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Levels of switches in one tree; no useful tree is this deep.
MAX_DEPTH = 8


@dataclass(frozen=True)
class Child:
    """A worker or a switch that contributes to this switch.

    workers: numbers in the whole job; of a switch: the workers below it.
    switch: its id; None for a worker.
    """

    workers: tuple[int, ...]
    switch: int | None = None

    @property
    def name(self) -> int:
        """Its name in the whole tree: its own worker number, or the lowest below it."""
        return self.workers[0]


@dataclass(frozen=True)
class TreePosition:
    """children: in the order in which their contributions are reduced.
    parent: its id; None at the root.
    """

    children: tuple[Child, ...]
    parent: int | None = None


def tree_position(me: int, paths: Sequence[Sequence[int]]) -> TreePosition:
    """Return the position of switch `me` in the tree of `paths`.

    Raises ValueError, with a text for the worker, where the paths form no tree or `me` is not in it.
    """
    above: dict[int, int | None] = {}
    for worker, path in enumerate(paths):
        if not 0 < len(path) <= MAX_DEPTH:
            raise ValueError(f"worker {worker} is below {len(path)} switches; a tree has 1 to {MAX_DEPTH} levels")
        for switch, parent in zip(path, [*path[1:], None], strict=True):
            if above.setdefault(switch, parent) != parent:
                raise ValueError(f"switch {switch:08x} has two parents in the paths of its workers")
    # Each switch has one parent and every path ends at None, so no path is a cycle.
    if me not in above or len([parent for parent in above.values() if parent is None]) != 1:
        raise ValueError(f"switch {me:08x} is not in the tree of this job, or that is no tree")
    below: dict[int, list[int]] = {}  # workers by the child switch that they are below
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
