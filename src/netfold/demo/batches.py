"""Which patches a step trains on, and which of them a rank takes.

A patch is a function of the seed and of how many patches were before it, and of nothing else: not of the backend
or the rank that takes it. So two runs see the same global batches whatever their order of ranks, and differ only
in the order in which the gradients are added.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from netfold.demo.settings import SCALE, Training
from netfold.train.datasets.pairs import Crops, Pair
from netfold.train.sampler import Sampler


def share(training: Training, order: Sequence[int], rank: int) -> range:
    """The indices in the global batch that `rank` trains on, when rank r takes share order[r]."""
    first = order[rank] * training.patches_per_worker
    return range(first, first + training.patches_per_worker)


def batch(training: Training, photographs: Sequence[Pair], step: int, indices: range) -> tuple[Tensor, Tensor]:
    """Low resolution [n, 3, p, p] and truth [n, 3, 2p, 2p] of those patches of a step."""
    count = len(photographs)
    crops = Crops(photographs.__getitem__, count, SCALE, training.patch_pixels, count)
    order, first = Sampler(count, training.seed), step * training.patches + indices.start
    made = crops.batch(order.indices(first, len(indices)), order.seeds(first, len(indices)))
    return made.inputs[0], made.target
