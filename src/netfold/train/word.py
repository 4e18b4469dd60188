"""The word of all ranks: one small all_reduce a step, from which they take every decision alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Word:
    """What the ranks said of a step, the same on each of them."""

    loss: float
    """The mean over those that have computed one."""
    not_finite: int
    """Ranks whose loss or gradients are not numbers."""
    stop: int
    """Ranks that were asked to stop."""
    checkpoint_failed: int
    """Ranks that know that the checkpoint under way has failed."""


def agree(loss: Tensor | None, *, not_finite: bool, stop: bool, checkpoint_failed: bool) -> Word:
    """Collective over the world, f64: [loss, losses, then a count each]."""
    said = torch.tensor(
        [0.0 if loss is None else float(loss), loss is not None, not_finite, stop, checkpoint_failed],
        dtype=torch.float64,
    )
    dist.all_reduce(said)
    total, losses, *counts = said.tolist()
    return Word(total / losses, *(round(count) for count in counts))
