"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

import itertools

from torch import Tensor

from netfold.batch_norm import SharedBatchNorm
from netfold.horovod.torch.operations import Sum, allgather, allreduce_
from netfold.horovod.torch.world import size

# Ranks make their layers in the same order. The names of a layer's operations contain its number.
_numbers = itertools.count()


class SyncBatchNorm(SharedBatchNorm):
    """`torch.nn.BatchNorm*d` that computes its statistics in training over the batches of all ranks, of any sizes.

    Without running statistics it does so in evaluations too. Horovod's own layer takes GPU tensors only; this layer
    takes any.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._name = f"sync_batch_norm.{next(_numbers)}"

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`, [N, C, ...]. Returns the same shape."""
        if size() > 1 and (self.training or not self.track_running_stats):
            return self.normalise(input)
        self._check_input_dim(input)
        return super(SharedBatchNorm, self).forward(input)

    def gather(self, own: Tensor) -> Tensor:
        return allgather(own[None], name=f"{self._name}.forward")

    def add(self, own: Tensor) -> None:
        allreduce_(own, op=Sum, name=f"{self._name}.backward")
