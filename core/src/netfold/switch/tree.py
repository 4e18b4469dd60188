"""A switch's position in a job's tree: its contributors, and its parent.

A join describes the switches from the joined one to the root (switch_protocol/job_tree.py). A switch that joins its
parent passes on what its own workers said of the levels above it. So a switch knows its own contributors, and of the
workers below another switch their number and the lowest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netfold.switch_protocol.job_tree import Contributor, Level


@dataclass(frozen=True)
class TreePosition:
    """contributors: in the order in which their values are reduced.
    workers: of the whole job.
    parent: its id; None at the root.
    """

    contributors: tuple[Contributor, ...]
    workers: int
    parent: int | None = None


def tree_position(me: int, levels: Sequence[Level]) -> TreePosition:
    """Return the position of switch `me` in the tree of `levels`. Raises ValueError where it is not the first level."""
    if levels[0].switch != me:
        raise ValueError(
            f"switch {me:08x} is not where the tree of this job puts it; the tree has {levels[0].switch:08x}"
        )
    return TreePosition(levels[0].contributors, levels[-1].workers, levels[1].switch if len(levels) > 1 else None)


def position_without_tree(ranks: Sequence[int]) -> TreePosition:
    """Return the position of the only switch of a job. ranks: of its workers, in their order."""
    return TreePosition(tuple(Contributor(worker, rank) for worker, rank in enumerate(ranks)), len(ranks))
