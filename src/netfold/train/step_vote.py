"""The word of all ranks: one small all_reduce a step, from which they take every decision alike.

Under [diloco] the ranks of one copy of the model agree in every step, and all ranks at the end of a round
(`merge_votes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class StepVote:
    """What the ranks said of a step, the same on each of them."""

    loss: float
    """The mean over those that have computed one."""
    not_finite: int
    """Ranks whose loss or gradients are not numbers."""
    stop: int
    """Ranks that were asked to stop."""
    checkpoint_failed: int
    """Ranks that know that the checkpoint under way has failed."""


def vote(
    loss: Tensor | None,
    *,
    not_finite: bool,
    stop: bool,
    checkpoint_failed: bool,
    group: dist.ProcessGroup | None = None,
) -> StepVote:
    """Collective over the group, by default the world; f64: [loss, losses, then a count each]."""
    said = torch.tensor(
        [0.0 if loss is None else float(loss), loss is not None, not_finite, stop, checkpoint_failed],
        dtype=torch.float64,
    )
    if dist.get_world_size(group) > 1:
        dist.all_reduce(said, group=group)
    total, losses, *counts = said.tolist()
    return StepVote(total / losses, *(round(count) for count in counts))


def merge_votes(steps: Sequence[StepVote]) -> list[StepVote]:
    """The words of a round's steps, each told by some ranks to themselves, as those of all ranks. All groups of ranks
    that told them have the same size. Collective over the world, f64: [a loss a step, then a count each].

    A loss becomes the mean; the counts are the last step's, but for `not_finite`, which is the whole round's.
    """
    last = steps[-1]
    counts = [sum(step.not_finite for step in steps), last.stop, last.checkpoint_failed]
    said = torch.tensor([*(step.loss for step in steps), *counts], dtype=torch.float64)
    dist.all_reduce(said)
    losses, (bad, stop, failed) = said[: len(steps)] / dist.get_world_size(), said[len(steps) :].tolist()
    return [StepVote(loss, round(bad), round(stop), round(failed)) for loss in losses.tolist()]
