"""Stages on ranks: each holds a run of the chain's layers, and the parts of a batch follow each other through them.

Schedules are torch's (torch.distributed.pipelining). GPipe (Huang et al. 2019): all forwards, then all backwards. 1F1B
(Narayanan et al. 2019): a backward as soon as there is one, so a rank keeps no more microbatches than there are stages.
Interleaved (Narayanan et al. 2021): several stages a rank, shorter bubbles, more messages. Zero-bubble (Qi et al. 2023,
ZB-H1 over interleaved stages): gradients of weights wait, and fill what would be idle time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

from netfold.train.examples import Batch, Examples
from netfold.train.mesh import Mesh
from netfold.train.model import Chain, Model
from netfold.train.order import sample_seed
from netfold.train.parallel.costs import Crossing, Measured, measured
from netfold.train.parallel.stages import Cut, cut
from netfold.train.recipe import Recipe

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
SEVERAL_A_RANK = ("interleaved", "zero-bubble")


class Plan:
    """How a model is to be cut: made, with every layer still on every rank, before anything of it is given away."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, examples: Examples | None) -> None:
        """Measures the layers on a microbatch of the first examples. Collective over the world.

        Raises ValueError, on every rank, where the recipe asks for what cannot be.
        """
        parallel = recipe.parallel
        chain = model.module
        if not isinstance(chain, Chain):
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, but the model is a {type(chain).__name__}, which cannot be "
                "cut: make it a netfold.train.Chain of layers"
            )
        self.microbatches = parallel.microbatches or parallel.pipeline
        self.samples = _samples_a_part(recipe, mesh, self.microbatches)
        count = parallel.pipeline * (parallel.interleave if parallel.schedule in SEVERAL_A_RANK else 1)
        if count > len(chain):
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, which with parallel.schedule = {parallel.schedule!r} makes "
                f"{count} stages, but the model has {len(chain)} layers: make it {_most(recipe, len(chain))} or less"
            )
        if examples is None:
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, but no examples were given: parallelise must have some, to "
                "measure the layers on"
            )
        sample = examples.batch(*[[number % len(examples) for number in range(self.samples)]] * 2)
        self.measured: Measured = measured(model, sample, mesh)
        self.cut: Cut = cut(self.measured.costs_ns, count)
        self.reason = self.cut.described(list(chain.layers))
        if parallel.schedule == "zero-bubble":
            self._check_that_inputs_are_met(list(chain.layers))

    def _check_that_inputs_are_met(self, names: Sequence[str]) -> None:
        # torch computes the gradients of a stage's weights from where their paths meet those of its inputs' gradients,
        # and leaves out, silently, what meets none on its way to an output. The first stage's are computed in one go.
        for stage in range(1, len(self.cut)):
            layers = self.cut.layers(stage)
            met = [crossing.requires_grad for crossing in self.measured.crossings[layers[0]]]
            for layer in layers:
                met = [
                    any(one and before for one, before in zip(reach, met, strict=True))
                    for reach in self.measured.reaches[layer]
                ]
            for crossing, is_met in zip(self.measured.crossings[layers[-1] + 1], met, strict=True):
                if crossing.requires_grad and not is_met:
                    raise ValueError(
                        f"parallel.schedule is 'zero-bubble', but a stage ({names[layers[0]]} to {names[layers[-1]]}) "
                        "returns a tensor that depends on its weights alone, whose gradients torch would leave out: "
                        "take 'interleaved'"
                    )


class Piped:
    """A `Replica` of one stage or several."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, plan: Plan) -> None:
        """Takes the rank's run of layers out of the model; the others may be dropped."""
        assert isinstance(model.module, Chain)
        self.choices: tuple[str, ...] = (plan.reason,)
        self._plan = plan
        self._inputs = plan.measured.crossings[0]
        self._seed = mesh.pipeline.rank
        count, here = len(plan.cut), range(mesh.pipeline.rank, len(plan.cut), mesh.pipeline.size)
        self.modules: tuple[nn.Module, ...] = tuple(_Stage(model.module, plan.cut.layers(stage)) for stage in here)
        # Under zero-bubble torch adds up the gradients of weights by itself, and DDP never hears of them.
        self._averages = recipe.parallel.schedule == "zero-bubble" and mesh.data.size > 1 and recipe.outer is None
        self._data = mesh.data
        stages = [
            pipelining.PipelineStage(
                share(module, recipe, mesh),
                stage,
                count,
                torch.device("cpu"),
                # Given, so that torch need not find them out by running the stages on memory that nobody has written.
                input_args=_empty(plan.measured.crossings[plan.cut.bounds[stage]]),
                output_args=_empty(plan.measured.crossings[plan.cut.bounds[stage + 1]]),
                group=mesh.pipeline.group,
            )
            for stage, module in zip(here, self.modules, strict=True)
        ]
        self._first, self._last = stages[0].is_first, stages[-1].is_last
        self._loss = model.loss
        several = recipe.parallel.schedule in SEVERAL_A_RANK
        self._schedule = SCHEDULES[recipe.parallel.schedule](
            stages if several else stages[0],
            plan.microbatches,
            loss_fn=self._part_of_the_loss,
            # The loss is divided instead: torch would divide gradients after an evaluation, too.
            scale_grads=False,
        )

    def gradients(self, batch: Batch) -> Tensor | None:
        self._check(batch)
        # Stages draw (dropout) for themselves, and not the same: of the seed that this step has, and the stage.
        torch.manual_seed(sample_seed(torch.initial_seed(), self._seed))
        losses: list[Tensor] = []
        with _plain_errors():
            self._schedule.step(*self._taken(batch), target=self._wanted(batch), losses=losses, return_outputs=False)
        if self._averages:
            self._average()
        return torch.stack(losses).detach().sum() if self._last else None

    def outputs(self, batch: Batch) -> Tensor | None:
        self._check(batch)
        for module in self.modules:
            module.eval()
        try:
            with torch.no_grad(), _plain_errors():
                output: Tensor | None = self._schedule.eval(*self._taken(batch), target=self._wanted(batch))
        finally:
            for module in self.modules:
                module.train()
        return output

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self.modules:
            yield from module.named_parameters()

    def as_part(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def _part_of_the_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._loss(output, target) / self._plan.microbatches

    def _taken(self, batch: Batch) -> tuple[Tensor, ...]:
        return batch.inputs if self._first else ()

    def _wanted(self, batch: Batch) -> Tensor | None:
        return batch.target if self._last else None

    def _check(self, batch: Batch) -> None:
        # Every rank of a pipeline has the same batch, so all say this, and none waits for another.
        parts = self._plan.microbatches
        due = [((parts * wanted.shape[0], *wanted.shape[1:]), wanted.dtype) for wanted in self._inputs]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in batch.inputs]
        if found != due:
            raise ValueError(f"the stages were made for a batch with inputs {due}, not {found}: all must be alike")

    def _average(self) -> None:
        gradients = [weight.grad for _, weight in self.named_parameters() if weight.grad is not None]
        for dtype in {gradient.dtype: None for gradient in gradients}:
            same = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in same])
            dist.all_reduce(flat, group=self._data.group)
            flat /= self._data.size
            for gradient, mean in zip(same, torch.split(flat, [gradient.numel() for gradient in same]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def share(module: nn.Module, recipe: Recipe, mesh: Mesh) -> nn.Module:
    """A stage as it is shared among data-parallel ranks: what the schedule is to run."""
    alone = mesh.data.size == 1 or recipe.outer is not None or recipe.parallel.schedule == "zero-bubble"
    if alone or not any(weight.requires_grad for weight in module.parameters()):
        return module
    return DistributedDataParallel(module, process_group=mesh.data.group)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What a layer raised, instead of the page about tensors that torch makes of it: its kind says what can be done."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


class _Stage(Chain):
    """A run of layers whose outputs can be sent: contiguous, with memory of their own."""

    def __init__(self, chain: Chain, layers: range) -> None:
        super().__init__(chain.part(layers.start, layers.stop).layers.items())

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = super().forward(*inputs)
        return tuple(map(_own, values)) if isinstance(values, tuple) else _own(values)


def _own(value: Tensor) -> Tensor:
    # Of a view, torch's split backward could not let go.
    return value.clone(memory_format=torch.contiguous_format) if value._is_view() else value.contiguous()


def _empty(crossings: tuple[Crossing, ...]) -> tuple[Tensor, ...]:
    return tuple(crossing.empty() for crossing in crossings)


def _samples_a_part(recipe: Recipe, mesh: Mesh, microbatches: int) -> int:
    """Of a microbatch. ValueError where the recipe's numbers do not go together."""
    parallel, training = recipe.parallel, recipe.training
    if training.accumulate > 1:
        raise ValueError(
            f"training.accumulate is {training.accumulate}, but a pipeline goes through a batch in microbatches: "
            f"leave it out and set parallel.microbatches = {microbatches * training.accumulate}"
        )
    if parallel.schedule == "zero-bubble" and parallel.zero >= 2:
        raise ValueError(
            f"parallel.schedule is 'zero-bubble', which cannot go with parallel.zero = {parallel.zero}: torch's FSDP "
            "would miss gradients that are computed apart; make it 1, or take 'interleaved'"
        )
    stages = parallel.pipeline
    if parallel.schedule == "1f1b" and microbatches < stages:
        raise ValueError(
            f"parallel.microbatches is {microbatches}, which parallel.schedule = '1f1b' cannot do with {stages} "
            f"stages: make it {stages} or more, or take 'gpipe'"
        )
    rounds = max(1, microbatches // stages)
    if parallel.schedule in SEVERAL_A_RANK and microbatches % rounds:
        raise ValueError(
            f"parallel.microbatches is {microbatches}, which parallel.schedule = {parallel.schedule!r} cannot share "
            f"out over {stages} ranks: make it {stages * rounds} or {stages * (rounds + 1)}"
        )
    shares = 1 if training.scaling == "weak" else mesh.data.size
    held = training.batch // shares
    if held == 0 or held % microbatches:
        raise ValueError(
            f"parallel.microbatches is {microbatches}, which does not divide the {held} samples that a pipeline takes "
            f"a step: make training.batch a multiple of {shares * microbatches}"
        )
    return held // microbatches


def _most(recipe: Recipe, layers: int) -> int:
    each = recipe.parallel.interleave if recipe.parallel.schedule in SEVERAL_A_RANK else 1
    return layers // each
