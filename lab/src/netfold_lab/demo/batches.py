"""The patches of a step, and each rank's share of them.

A patch depends only on the seed and on the number of patches before it, not on the backend or the rank. So two runs
have the same global batches in any order of ranks. They differ only in the order in which gradients are added.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from netfold_lab.demo.settings import SCALE, Training
from netfold_train.data.sampler import Sampler
from netfold_train.zoo.data.super_resolution import Pair, crops


def share(training: Training, order: Sequence[int], rank: int) -> range:
    """The indices in the global batch that `rank` trains on if rank r takes share order[r]."""
    first = order[rank] * training.patches_per_worker
    return range(first, first + training.patches_per_worker)


def batch(training: Training, photographs: Sequence[Pair], step: int, indices: range) -> tuple[Tensor, Tensor]:
    """Low resolution [n, 3, p, p] and truth [n, 3, 2p, 2p] of the patches `indices` of a step."""
    count = len(photographs)
    examples = crops(photographs.__getitem__, count, SCALE, training.patch_pixels, count)
    order, first = Sampler(count, training.seed), step * training.patches + indices.start
    made = examples.batch(order.indices(first, len(indices)), order.seeds(first, len(indices)))
    return made.inputs[0], made.target
