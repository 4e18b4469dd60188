"""Ranks that hold every layer: forward and backward in one go, or in parts whose gradients add up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from netfold.train.examples import Batch
from netfold.train.mesh import Mesh
from netfold.train.model import Model
from netfold.train.parallel.buckets import Tuning
from netfold.train.parallel.data_parallel import broadcast_buffers, no_sync, wrap_data_parallel
from netfold.train.parallel.shards import Shards
from netfold.train.parallel.zero import reshard
from netfold.train.precision import Precision
from netfold.train.recipe import Recipe


class Unpipelined:
    """A `Replica` without stages."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, parts: Shards) -> None:
        self.modules: tuple[nn.Module, ...] = (model.module,)
        self.notes: list[str] = []
        self._parts = parts
        self._loss = model.loss
        self._accumulate = recipe.training.accumulate
        self._precision = Precision(recipe.training.precision)
        self._mesh = mesh
        self._shared = wrap_data_parallel(model.module, recipe, mesh)
        self._tuning: Tuning | None = None
        if recipe.parallel.bucket_mb == "auto" and isinstance(self._shared, DistributedDataParallel):
            self._tuning = Tuning(self._shared, mesh)
        self._buffers_differ = False

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor:
        if self._tuning is not None:
            self._tuning.begin()
            self._shared = self._tuning.ddp
            if self._tuning.done:
                self._tuning = None
        began_s = time.perf_counter()
        total = torch.zeros(())
        for number, part in enumerate(batch.parts(self._accumulate)):
            last = number + 1 == self._accumulate
            with contextlib.nullcontext() if last else no_sync(self._shared):
                output = self._precision.output(self._shared(*self._precision.inputs(part.inputs)))
                loss = self._loss(output, part.target) / self._accumulate
                (loss * scale).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        if self._tuning is not None:
            chosen = self._tuning.end(time.perf_counter() - began_s)
            if chosen is not None:
                self.notes.append(chosen)
        self._buffers_differ = True
        return total

    def outputs(self, batch: Batch) -> Tensor:
        module = self.modules[0]
        if self._buffers_differ:
            broadcast_buffers(module, self._mesh)
            self._buffers_differ = False
        module.eval()
        try:
            with torch.no_grad():
                output = self._precision.output(module(*self._precision.inputs(batch.inputs)))
        finally:
            module.train()
            reshard(module)
        return output

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.modules[0].named_parameters()

    def as_shard(self, name: str, tensor: Tensor) -> Tensor:
        return self._parts.of(name, tensor)
