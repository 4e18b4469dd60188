"""The mean loss over the items of a global batch, from the parts of it that ranks compute."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from netfold_train.models.model import Model
from netfold_train.parallel.mesh import Axis


class MeanLoss:
    """Turns the losses of one part of a batch into its share of the mean over the whole batch.

    Shares add up over the parts of a rank's samples, and are averaged over the data-parallel ranks (DDP and FSDP
    average gradients). A model whose items all count has equally many in all equal parts. Otherwise the ranks add up
    their numbers of items first, so that each item has one weight, whatever other items share its part.
    """

    def __init__(self, model: Model, parts: int, data: Axis | None, batch: int | None = None) -> None:
        """parts: of a rank's samples. data: the ranks whose gradients are averaged; None for one rank.

        batch: the samples of all ranks, where these may have unequal shares.
        """
        self._batch = batch
        self._model, self._parts = model, parts
        self._data = data if data is not None and data.size > 1 else None
        self._total: Tensor | None = None
        self._adding: dist.Work | None = None

    def begin(self, target: Tensor) -> None:
        """Begin a batch with this rank's targets. If items count apart: an all_reduce of 4 bytes over `data`."""
        if self._model.items is None:
            return
        self._total = self._model.items(target).to(torch.float32)
        if self._data is not None:
            self._adding = dist.all_reduce(self._total, group=self._data.group, async_op=True)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The share of one part; f32, no dimensions. 0 if no item of the whole batch counts."""
        losses = self._model.losses(output, target)
        if self._model.items is None and self._batch is not None:
            return losses.mean() * (len(target) * (1 if self._data is None else self._data.size) / self._batch)
        if self._model.items is None:
            return losses.mean() / self._parts
        if self._adding is not None:
            self._adding.wait()
            self._adding = None
        assert self._total is not None, "begin comes first"
        ranks = 1 if self._data is None else self._data.size
        return losses.sum() * (ranks / self._total.clamp_min(1.0))
