"""The step vote: one small all_reduce a step, from which all ranks make every decision alike.

Under [diloco] the ranks of one site vote in every step, and all ranks at the end of a round (`merge_votes`).
"""

from __future__ import annotations

from collections.abc import Sequence
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


def vote(
    loss: Tensor | None,
    *,
    not_finite: bool,
    stop: bool,
    checkpoint_failed: bool,
    group: dist.ProcessGroup | None = None,
) -> StepVote:
    """Collective over the group, by default the world; f64: [loss, losses, one count for each flag]."""
    sums = torch.tensor(
        [0.0 if loss is None else float(loss), loss is not None, not_finite, stop, checkpoint_failed],
        dtype=torch.float64,
    )
    if dist.get_world_size(group) > 1:
        dist.all_reduce(sums, group=group)
    total, losses, *counts = sums.tolist()
    return StepVote(total / losses, *(round(count) for count in counts))


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
