"""Which patches a step trains on, and which of them a rank takes.

A patch is a function of (seed, step, index in the global batch) and of nothing else: not of the backend, the
rank that takes it, or what was drawn before. So two runs see the same global batches whatever their order of
ranks, and differ only in the order in which the gradients are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from netfold.demo.resolution import low_resolution
from netfold.demo.settings import SCALE, Training


@dataclass(frozen=True)
class Pair:
    """A photograph in both resolutions, [3, h, w] and [3, 2h, 2w]."""

    low: Tensor
    truth: Tensor

    @classmethod
    def of(cls, truth: Tensor) -> Pair:
        return cls(low_resolution(truth), truth)


def share(training: Training, order: Sequence[int], rank: int) -> range:
    """The indices in the global batch that `rank` trains on, when rank r takes share order[r]."""
    first = order[rank] * training.patches_per_worker
    return range(first, first + training.patches_per_worker)


def batch(training: Training, photographs: Sequence[Pair], step: int, indices: range) -> tuple[Tensor, Tensor]:
    """Low resolution [n, 3, p, p] and truth [n, 3, 2p, 2p] of those patches of a step."""
    patches = [_patch(training, photographs, step, index) for index in indices]
    return torch.stack([low for low, _ in patches]), torch.stack([truth for _, truth in patches])


def _patch(training: Training, photographs: Sequence[Pair], step: int, index: int) -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng((training.seed, step, index))
    pair, side = photographs[int(draw.integers(len(photographs)))], training.patch_pixels
    top, left = (int(draw.integers(extent - side + 1)) for extent in pair.low.shape[-2:])
    low = pair.low[:, top : top + side, left : left + side]
    top, left, side = top * SCALE, left * SCALE, side * SCALE
    truth = pair.truth[:, top : top + side, left : left + side]
    mirrored, turned = draw.integers(2), draw.integers(2)
    if mirrored:
        low, truth = low.flip(2), truth.flip(2)
    if turned:
        low, truth = low.transpose(1, 2), truth.transpose(1, 2)
    return low, truth
