"""Turn a whole model into this rank's part of it. One file a kind of parallelism; this module fixes their order.

`tensor` and `owned` (embedding tables, experts) cut layers. `pipeline` then takes runs of layers. `data_parallel` then
decides how the ranks that hold the same layers divide the work.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from netfold_train.data.examples import Batch, Examples
from netfold_train.models.deferred import Deferred
from netfold_train.models.model import Model, Replica, at_least_f32, blocks_of
from netfold_train.parallel import tensor
from netfold_train.parallel.batch_norm import convert_batch_norm
from netfold_train.parallel.blocks import compile_blocks, recompute
from netfold_train.parallel.context import cut_sequences
from netfold_train.parallel.data_parallel import (
    average_gradients,
    averages_by_hand,
    evaluating,
    send_gradients,
    wrap_data_parallel,
)
from netfold_train.parallel.mean_loss import MeanLoss
from netfold_train.parallel.mesh import Mesh
from netfold_train.parallel.owned import divide_owned
from netfold_train.parallel.pipeline import Pipelined
from netfold_train.parallel.pipeline_plan import Plan
from netfold_train.parallel.precision import Precision
from netfold_train.parallel.shards import settle
from netfold_train.recipe import Recipe


def parallelise(
    model: Model, recipe: Recipe, mesh: Mesh, examples: Examples | None = None, deferred: Deferred | None = None
) -> Replica:
    """This rank's part of `model`, which every rank has made whole and alike. Collective over the world.

    Takes the model over: its modules are cut in place. A pipeline measures its layers on the first of `examples`.
    deferred: of a model without values (`record`); only this rank's part gets them.
    """
    if recipe.parallel.batch_norm > 1:
        convert_batch_norm(model.module, recipe.parallel.batch_norm, mesh)
    tensor.cut(model, recipe.parallel, mesh)
    divide_owned(model, recipe, mesh)
    cut_sequences(model, recipe, mesh)
    plan = Plan(model, recipe, mesh, examples, deferred) if mesh.pipeline.size > 1 else None
    blocks = list(blocks_of(model).values()) or [model.module]
    if recipe.training.recompute != "none":
        recompute(blocks, "nothing" if recipe.training.recompute == "all" else "products")
    if recipe.training.compile:
        compile_blocks(blocks)
    if plan is not None:
        return Pipelined(model, recipe, mesh, plan, deferred)
    return Unpipelined(model, recipe, mesh, deferred)


class Unpipelined:
    """A `Replica` that holds every layer: it computes a batch at once, or in parts whose gradients add up."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, deferred: Deferred | None = None) -> None:
        self.modules: tuple[nn.Module, ...] = (model.module,)
        self.notes: list[str] = []
        self._accumulate = recipe.training.accumulate
        elastic = recipe.fault_tolerance.elastic and recipe.training.scaling == "strong"
        self._loss = MeanLoss(model, self._accumulate, mesh.site, recipe.training.batch if elastic else None)
        self._precision = Precision(recipe.training.precision)
        self._mesh = mesh
        blocks = blocks_of(model).values()
        self._wrapped = wrap_data_parallel(model.module, blocks, recipe, mesh, deferred=deferred)
        self._by_hand = averages_by_hand(recipe, mesh)
        self._buffers_differ = False

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor:
        self._loss.begin(batch.target)
        total = torch.zeros((), device=self._mesh.device)
        for number, part in enumerate(batch.parts(self._accumulate)):
            send_gradients(self._wrapped, number + 1 == self._accumulate)
            with self._precision.context(self.modules[0], self._mesh.device):
                output = self._wrapped(*part.inputs, **part.named)
            loss = self._loss(output, part.target)
            # A language model's logits may be its largest tensor, and the backward pass does not need them.
            del output
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self._mesh.tensor.size > 1:
            settle(self.modules[0].parameters())
        if self._by_hand:
            average_gradients(self.modules[0].parameters(), self._mesh)
        self._buffers_differ = True
        return total

    def outputs(self, batch: Batch) -> Tensor:
        module = self.modules[0]
        with (
            evaluating(self.modules, self._mesh, buffers_differ=self._buffers_differ),
            self._precision.context(module, self._mesh.device),
        ):
            self._buffers_differ = False
            output: Tensor = module(*batch.inputs, **batch.named)
        return at_least_f32(output)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.modules[0].named_parameters()
