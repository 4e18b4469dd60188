"""Stages on ranks: each holds a run of the chain's layers, and the parts of a batch follow each other through them.

Schedules are torch's (torch.distributed.pipelining).
gpipe (Huang et al. 2019): all forwards, then all backwards.
1f1b (Narayanan et al. 2019): a backward as soon as there is one: no rank keeps more microbatches than there are stages.
interleaved (Narayanan et al. 2021): several stages a rank; a shorter bubble, more messages.
zero-bubble, zero-bubble-v (Qi et al. 2023, ZB-H1, ZB-V): gradients of weights wait, and fill what would be idle time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from netfold.train.examples import Batch
from netfold.train.mesh import Mesh
from netfold.train.model import Chain, Model
from netfold.train.parallel.data_parallel import broadcast_buffers, wrap_data_parallel
from netfold.train.parallel.layer_timing import BoundaryTensor
from netfold.train.parallel.pipeline_plan import Plan
from netfold.train.parallel.shards import Shards
from netfold.train.parallel.tied import Tied
from netfold.train.parallel.zero import reshard
from netfold.train.precision import Precision
from netfold.train.recipe import Recipe
from netfold.train.recipe.schedules import SEVERAL_A_RANK, SPLIT_BACKWARD, stages_of
from netfold.train.sampler import sample_seed

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zero-bubble-v": pipelining.ScheduleZBVZeroBubble,
}


class Pipelined:
    """A `Replica` of one stage or several."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, parts: Shards, plan: Plan) -> None:
        """Takes the model over; the layers that other ranks hold are dropped from it."""
        assert isinstance(model.module, Chain)
        self.notes: list[str] = [plan.reason]
        self._parts = parts
        self._precision = Precision(recipe.training.precision)
        self._scale = 1.0
        self._plan = plan
        self._inputs = plan.measured.crossings[0]
        self._seed = mesh.pipeline.rank
        schedule, count, ranks = recipe.parallel.schedule, len(plan.cut), mesh.pipeline.size
        here = stages_of(mesh.pipeline.rank, ranks, count // ranks, schedule)
        names = list(model.module.layers)
        stages_by_layer = {names[layer]: stage for stage in range(count) for layer in plan.cut.layers(stage)}
        ranks_by_stage = {
            stage: rank for rank in range(ranks) for stage in stages_of(rank, ranks, count // ranks, schedule)
        }
        self._tied = Tied(model.module, stages_by_layer.__getitem__, ranks_by_stage.__getitem__, mesh)
        _check_tied(self._tied, recipe, mesh)
        modules = tuple(
            _Layers(model.module, plan.cut.layers(stage), plan.measured.crossings[plan.cut.bounds[stage + 1]])
            for stage in here
        )
        self.modules: tuple[nn.Module, ...] = modules
        held = {name for module in modules for name in module.layers}
        for name in set(model.module.layers).difference(held):
            del model.module.layers[name]
        # Under zero-bubble torch adds up the gradients of weights by itself, and DDP never hears of them.
        self._averages = schedule in SPLIT_BACKWARD and mesh.data.size > 1 and recipe.diloco is None
        self._mesh, self._buffers_differ = mesh, False
        stages = [
            _Stage(
                _shared(module, recipe, mesh),
                stage,
                count,
                torch.device("cpu"),
                # Given, so that torch need not find them out by running the stages on memory that nobody has written.
                input_args=_empty(plan.measured.crossings[plan.cut.bounds[stage]]),
                output_args=_empty(plan.measured.crossings[plan.cut.bounds[stage + 1]]),
                group=mesh.pipeline.group,
            )
            for stage, module in zip(here, modules, strict=True)
        ]
        self._first, self._last = 0 in here, count - 1 in here
        self._loss = model.loss
        self._schedule = SCHEDULES[schedule](
            stages if schedule in SEVERAL_A_RANK else stages[0],
            plan.microbatches,
            loss_fn=self._part_of_the_loss,
            # The loss is divided instead: torch would divide gradients after an evaluation, too.
            scale_grads=False,
        )

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor | None:
        self._scale = scale
        self._check(batch)
        self._buffers_differ = True
        # Stages draw (dropout) for themselves, and not the same: of the seed that this step has, and the stage.
        torch.manual_seed(sample_seed(torch.initial_seed(), self._seed))
        losses: list[Tensor] = []
        with _plain_errors():
            self._schedule.step(*self._taken(batch), target=self._wanted(batch), losses=losses, return_outputs=False)
        if self._averages:
            self._average()
        self._tied.all_reduce_gradients(dict(self.named_parameters()))
        return torch.stack(losses).detach().sum() / scale if self._last else None

    def outputs(self, batch: Batch) -> Tensor | None:
        self._check(batch)
        for module in self.modules:
            if self._buffers_differ:
                broadcast_buffers(module, self._mesh)
            module.eval()
        self._buffers_differ = False
        try:
            with torch.no_grad(), _plain_errors():
                output: Tensor | None = self._schedule.eval(*self._taken(batch), target=self._wanted(batch))
        finally:
            for module in self.modules:
                module.train()
                reshard(module)
        return self._precision.output(output) if output is not None else None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        found: dict[str, nn.Parameter] = {}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                found.setdefault(self._tied.names.get(name, name), parameter)
        yield from found.items()

    def as_shard(self, name: str, tensor: Tensor) -> Tensor:
        return self._parts.of(name, tensor)

    def _part_of_the_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._loss(self._precision.output(output), target) * (self._scale / self._plan.microbatches)

    def _taken(self, batch: Batch) -> tuple[Tensor, ...]:
        return self._precision.inputs(batch.inputs) if self._first else ()

    def _wanted(self, batch: Batch) -> Tensor | None:
        return batch.target if self._last else None

    def _check(self, batch: Batch) -> None:
        # Every rank of a pipeline has the same batch, so all say this, and none waits for another.
        parts = self._plan.microbatches
        due = [((parts * wanted.shape[0], *wanted.shape[1:]), wanted.dtype) for wanted in self._inputs]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in self._precision.inputs(batch.inputs)]
        if found != due:
            raise ValueError(f"the stages were made for a batch with inputs {due}, not {found}: all must be alike")

    def _average(self) -> None:
        gradients = [_local(weight.grad) for _, weight in self.named_parameters() if weight.grad is not None]
        for dtype in {gradient.dtype: None for gradient in gradients}:
            same = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in same])
            dist.all_reduce(flat, group=self._mesh.data.group)
            flat /= self._mesh.data.size
            for gradient, mean in zip(same, torch.split(flat, [gradient.numel() for gradient in same]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def _check_tied(tied: Tied, recipe: Recipe, mesh: Mesh) -> None:
    """Raises ValueError where one rank has a weight in two stages, each of which would average its gradient."""
    if not tied.on_one_rank or mesh.data.size == 1 or recipe.diloco is not None:
        return
    schedule = recipe.parallel.schedule
    if schedule in SPLIT_BACKWARD:
        return
    first, second = tied.on_one_rank[0]
    raise ValueError(
        f"parallel.schedule is {schedule!r}, under which {first} and {second}, which are one weight, lie in two stages "
        "of one rank: data-parallel ranks would average its gradient twice; take '1f1b' or 'zero-bubble-v'"
    )


def _shared(module: nn.Module, recipe: Recipe, mesh: Mesh) -> nn.Module:
    """A stage as it is shared among data-parallel ranks: what the schedule is to run."""
    apart = recipe.parallel.schedule in SPLIT_BACKWARD or not any(each.requires_grad for each in module.parameters())
    return wrap_data_parallel(module, recipe, mesh, averages=not apart)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What a layer raised, instead of the page about tensors that torch makes of it: its kind says what can be done."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


class _Stage(pipelining.PipelineStage):
    """torch 2.13's asks neighbours on one rank (the turn of the "v") for gradients in an evaluation, too."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor | None, ...] = ()
        if self.has_backward:
            gradients = super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]
        return gradients

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class _Layers(Chain):
    """A run of layers whose outputs can be sent: of the kinds that were measured, contiguous, with memory of their own.

    FSDP2 computes a tensor that only passes by in the lower precision, too.
    """

    def __init__(self, chain: Chain, layers: range, results: tuple[BoundaryTensor, ...]) -> None:
        super().__init__(chain.part(layers.start, layers.stop).layers.items())
        self._results = tuple(result.dtype for result in results)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = super().forward(*inputs)
        if isinstance(values, tuple):
            return tuple(_own(value.to(dtype)) for value, dtype in zip(values, self._results, strict=True))
        return _own(values.to(self._results[0]))


def _own(value: Tensor) -> Tensor:
    # torch's split backward cannot let go of a view; what a layer cut by `tensor` returns may still be on its way, and
    # has no memory to send from.
    if value._is_view() or isinstance(value, AsyncCollectiveTensor):
        return value.clone(memory_format=torch.contiguous_format)
    return value.contiguous()


def _local(tensor: Tensor) -> Tensor:
    """What of it lies here, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _empty(crossings: tuple[BoundaryTensor, ...]) -> tuple[Tensor, ...]:
    return tuple(crossing.empty() for crossing in crossings)
