"""Ranks that hold every layer: forward and backward in one go, or in parts whose gradients add up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from netfold.train.examples import Batch
from netfold.train.mesh import Mesh
from netfold.train.model import Model
from netfold.train.recipe import Recipe


class Whole:
    """A `Replica` without stages."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh) -> None:
        self.modules: tuple[nn.Module, ...] = (model.module,)
        self._loss = model.loss
        self._accumulate = recipe.training.accumulate
        self._ddp: DistributedDataParallel | None = None
        # Ranks that train apart take nobody's gradients.
        if mesh.data.size > 1 and recipe.outer is None:
            self._ddp = DistributedDataParallel(model.module, process_group=mesh.data.group)

    def gradients(self, batch: Batch) -> Tensor:
        module = self._ddp or self.modules[0]
        total = torch.zeros(())
        for number, part in enumerate(batch.parts(self._accumulate)):
            with contextlib.ExitStack() as stack:
                if self._ddp is not None and number + 1 < self._accumulate:
                    stack.enter_context(self._ddp.no_sync())
                loss = self._loss(module(*part.inputs), part.target) / self._accumulate
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total

    def outputs(self, batch: Batch) -> Tensor:
        module = self.modules[0]
        module.eval()
        try:
            with torch.no_grad():
                output: Tensor = module(*batch.inputs)
        finally:
            module.train()
        return output

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.modules[0].named_parameters()

    def as_part(self, name: str, tensor: Tensor) -> Tensor:
        return tensor
