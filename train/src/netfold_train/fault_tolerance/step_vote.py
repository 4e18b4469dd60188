"""The step vote: one small all_reduce a step, from which all ranks make every decision alike.

Under [diloco] the ranks of one site vote in every step, and all ranks at the end of a round (`merge_votes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class StepVote:
    """The result of a vote, the same on each rank."""

    loss: float
    """The mean over the ranks that have computed one."""
    not_finite: int
    """Ranks with a loss or gradients that are not finite."""
    stop: int
    """Ranks that were asked to stop."""
    checkpoint_failed: int
    """Ranks on which the checkpoint being written has failed."""


# [loss, losses, one count for each flag]
VOTE_NUMBERS = 5


def vote(
    loss: Tensor | None,
    *,
    not_finite: bool,
    stop: bool,
    checkpoint_failed: bool,
    group: dist.ProcessGroup | None = None,
    add: Callable[[list[float]], Sequence[float]] | None = None,
) -> StepVote:
    """Collective over the group, by default the world: an all_reduce of VOTE_NUMBERS f64.

    add: takes the place of the all_reduce.
    """
    own = [0.0 if loss is None else float(loss), float(loss is not None)]
    own += [float(flag) for flag in (not_finite, stop, checkpoint_failed)]
    total, losses, *counts = (add or functools.partial(_add, group=group))(own)
    return StepVote(total / losses, *(round(count) for count in counts))


def _add(own: list[float], group: dist.ProcessGroup | None) -> list[float]:
    if dist.get_world_size(group) == 1:
        return own
    sums = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(sums, group=group)
    found: list[float] = sums.tolist()
    return found


def merge_votes(steps: Sequence[StepVote]) -> list[StepVote]:
    """Merge the votes that groups of equal size took in a round's steps. Collective over the world.

    Sends f64: [one loss for each step, one count for each flag]. Losses become their mean. The counts are the last
    step's; `not_finite` is the whole round's.
    """
    last = steps[-1]
    counts = [sum(step.not_finite for step in steps), last.stop, last.checkpoint_failed]
    sums = torch.tensor([*(step.loss for step in steps), *counts], dtype=torch.float64)
    dist.all_reduce(sums)
    losses, (bad, stop, failed) = sums[: len(steps)] / dist.get_world_size(), sums[len(steps) :].tolist()
    return [StepVote(loss, round(bad), round(stop), round(failed)) for loss in losses.tolist()]
