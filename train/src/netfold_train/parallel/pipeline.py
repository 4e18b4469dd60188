"""Pipeline parallelism: each rank holds runs of the chain's layers, and microbatches pass through them in order.

The schedules are torch's (torch.distributed.pipelining):
gpipe (Huang et al. 2019): all forward passes, then all backward passes.
1f1b (Narayanan et al. 2019): each backward pass as early as possible, so a rank keeps at most one microbatch per stage.
interleaved (Narayanan et al. 2021): several stages per rank; a shorter bubble, and more messages.
zero-bubble, zero-bubble-v (Qi et al. 2023, ZB-H1, ZB-V): gradients of weights are computed in otherwise idle time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from netfold_train.data.examples import Batch
from netfold_train.data.sampler import sample_seed
from netfold_train.models.deferred import Deferred
from netfold_train.models.model import Chain, Model, at_least_f32, tied_names
from netfold_train.parallel.data_parallel import average_gradients, averages_by_hand, evaluating, wrap_data_parallel
from netfold_train.parallel.device import seed
from netfold_train.parallel.mean_loss import MeanLoss
from netfold_train.parallel.mesh import Mesh, all_reduce_together, own_group
from netfold_train.parallel.pipeline_plan import Plan
from netfold_train.parallel.precision import Precision
from netfold_train.parallel.shards import local, settle
from netfold_train.recipe import Recipe
from netfold_train.recipe.split import SEVERAL_A_RANK, SPLIT_BACKWARD, stages_of

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zero-bubble-v": pipelining.ScheduleZBVZeroBubble,
}


class Pipelined:
    """A `Replica` of one stage or several."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, plan: Plan, deferred: Deferred | None = None) -> None:
        """Takes the model over, and drops the layers of other ranks from it. deferred: as in `parallelise`."""
        chain = model.module
        assert isinstance(chain, Chain)
        self.notes: list[str] = [plan.reason]
        self._precision = Precision(recipe.training.precision)
        self._scale = 1.0
        self._loss = MeanLoss(model, plan.microbatches, mesh.site)
        self._plan, self._mesh, self._buffers_differ = plan, mesh, False
        schedule, count, ranks = recipe.parallel.schedule, len(plan.cut), mesh.pipeline.size
        places = [stages_of(rank, ranks, count // ranks, schedule) for rank in range(ranks)]
        here = places[mesh.pipeline.rank]
        names = list(chain.layers)
        stage_of = {names[layer]: stage for stage in range(count) for layer in plan.cut.layers(stage)}
        rank_of = {stage: rank for rank, stages in enumerate(places) for stage in stages}
        self._tied = Tied(chain, stage_of, rank_of, mesh)
        averages = mesh.site.size > 1
        if self._tied.on_one_rank and averages and schedule not in SPLIT_BACKWARD:
            raise ValueError(
                f"parallel.schedule is {schedule!r}, which places {' and '.join(self._tied.on_one_rank[0])}, one "
                "weight, in two stages of one rank: data-parallel ranks would average its gradient twice; take '1f1b' "
                "or 'zero-bubble-v'"
            )
        crossings = plan.measured.crossings
        modules = [
            _Layers(chain, plan.cut.layers(stage), crossings[plan.cut.bounds[stage + 1]], self._precision, mesh.device)
            for stage in here
        ]
        self.modules: tuple[nn.Module, ...] = tuple(modules)
        held = {name for module in modules for name in module.layers}
        for name in set(names).difference(held):
            del chain.layers[name]
        self._by_hand = averages_by_hand(recipe, mesh)
        stages = []
        for stage, module in zip(here, modules, strict=True):
            # DDP refuses a module without weights to train.
            by_hand = schedule in SPLIT_BACKWARD or not any(each.requires_grad for each in module.parameters())
            blocks = module.layers.values()
            wrapped = wrap_data_parallel(module, blocks, recipe, mesh, averages=not by_hand, deferred=deferred)
            # Without these torch would find the shapes by running the stages on uninitialised memory.
            taken, made = (crossings[bound] for bound in plan.cut.bounds[stage : stage + 2])
            group = mesh.pipeline.group
            stages.append(_Stage(wrapped, stage, count, mesh.device, input_args=taken, output_args=made, group=group))
        self._first, self._last = 0 in here, count - 1 in here
        self._schedule = SCHEDULES[schedule](
            stages if schedule in SEVERAL_A_RANK else stages[0],
            plan.microbatches,
            loss_fn=self._microbatch_loss,
            # The loss is divided instead: torch would also divide gradients after an evaluation.
            scale_grads=False,
        )

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor | None:
        self._scale = scale
        self._check(batch)
        self._buffers_differ = True
        # Stages draw random numbers (dropout) independently: from this step's seed and the rank's place.
        seed(self._mesh.device, sample_seed(torch.initial_seed(), self._mesh.pipeline.rank))
        losses: list[Tensor] = []
        if self._last:
            self._loss.begin(batch.target)
        with _plain_errors():
            inputs, target = self._inputs_of(batch), self._target(batch)
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if self._mesh.tensor.size > 1:
            settle(weight for _, weight in self.named_parameters())
        if self._by_hand:
            average_gradients((weight for _, weight in self.named_parameters()), self._mesh)
        self._tied.all_reduce_gradients(dict(self.named_parameters()))
        return torch.stack(losses).detach().sum() / scale if self._last else None

    def outputs(self, batch: Batch) -> Tensor | None:
        self._check(batch)
        with evaluating(self.modules, self._mesh, buffers_differ=self._buffers_differ), _plain_errors():
            self._buffers_differ = False
            output: Tensor | None = self._schedule.eval(*self._inputs_of(batch), target=self._target(batch))
        return at_least_f32(output) if output is not None else None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        found: dict[str, nn.Parameter] = {}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                found.setdefault(self._tied.names.get(name, name), parameter)
        yield from found.items()

    def _microbatch_loss(self, output: Tensor, target: Tensor) -> Tensor:
        # torch computes losses in an evaluation too, where no batch has begun, and uses none.
        return self._loss(output, target) * self._scale if torch.is_grad_enabled() else output.new_zeros(())

    def _inputs_of(self, batch: Batch) -> tuple[Tensor, ...]:
        return batch.inputs if self._first else ()

    def _target(self, batch: Batch) -> Tensor | None:
        return batch.target if self._last else None

    def _check(self, batch: Batch) -> None:
        # Every rank of a pipeline has the same batch, so all of them raise, and none waits for another.
        parts = self._plan.microbatches
        due = [
            ((parts * wanted.shape[0], *wanted.shape[1:]), wanted.dtype) for wanted in self._plan.measured.crossings[0]
        ]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in batch.inputs]
        if found != due:
            raise ValueError(f"the stages were made for a batch with inputs {due}, not {found}: all must be alike")


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise a layer's own error instead of torch's: callers decide by its type, and torch's text is a page long."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


class _Stage(pipelining.PipelineStage):
    """torch 2.13's stage, which in an evaluation too asks its neighbour on the same rank (ZB-V) for gradients."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor | None, ...] = ()
        if self.has_backward:
            gradients = super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]
        return gradients

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class _Layers(Chain):
    """A run of layers with outputs that can be sent: of the measured dtypes, contiguous, in their own memory.

    The cast is needed because FSDP2 also lowers tensors that only pass through a layer.
    """

    def __init__(
        self, chain: Chain, layers: range, results: tuple[Tensor, ...], precision: Precision, device: torch.device
    ) -> None:
        super().__init__(chain.part(layers.start, layers.stop).layers.items())
        self._results = tuple(result.dtype for result in results)
        self._precision, self._device = precision, device

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        with self._precision.context(self, self._device):
            values = super().forward(*inputs)
        if isinstance(values, tuple):
            return tuple(_own(value.to(dtype)) for value, dtype in zip(values, self._results, strict=True))
        return _own(values.to(self._results[0]))


def _own(value: Tensor) -> Tensor:
    # torch's split backward cannot free a view. A layer cut by `tensor` may return an unfinished collective's result,
    # which has no memory to send from.
    if value._is_view() or isinstance(value, AsyncCollectiveTensor):
        return value.clone(memory_format=torch.contiguous_format)
    return value.contiguous()


class Tied:
    """Weights that layers of several stages share, such as the embedding and the head of GPT-2.

    Each rank that needs such a weight has a copy under the first layer's name. Every step adds up the gradients of the
    copies (Megatron-LM: Shoeybi et al. 2019).
    """

    def __init__(self, chain: Chain, stage_of: Mapping[str, int], rank_of: Mapping[int, int], mesh: Mesh) -> None:
        """chain: whole, on every rank. stage_of: a layer's stage. rank_of: a stage's rank on the pipeline axis.

        Makes groups: collective over the world.
        """
        self.names: dict[str, str] = {}
        """Every other name of a shared weight -> the first."""
        self._groups: list[tuple[dist.ProcessGroup, list[str]]] = []
        self.on_one_rank: list[list[str]] = []
        """Names of a weight that are in different stages of one rank."""
        between: dict[tuple[int, ...], list[str]] = {}
        for names in tied_names(chain):
            # The first name in each stage, by rank.
            by_rank: dict[int, dict[int, str]] = {}
            for name in names:
                stage = stage_of[name.split(".")[1]]
                by_rank.setdefault(rank_of[stage], {}).setdefault(stage, name)
            if sum(map(len, by_rank.values())) > 1:
                self.names |= dict.fromkeys(names[1:], names[0])
            self.on_one_rank += [list(held.values()) for held in by_rank.values() if len(held) > 1]
            if len(by_rank) > 1:
                between.setdefault(tuple(sorted(by_rank)), []).append(names[0])
        for ranks, weights in between.items():
            group = own_group(mesh.ranks[list(ranks)].flatten(1).T.tolist())
            if mesh.pipeline.rank in ranks:
                self._groups.append((group, weights))

    def all_reduce_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace each copy's gradient by the sum over all copies. parameters: this rank's, under their first names.

        Collective over the ranks that have copies: one all_reduce for each set of ranks.
        """
        for group, names in self._groups:
            held = [parameters[name] for name in names]
            for each in held:
                if each.grad is None:
                    each.grad = torch.zeros_like(each)
            all_reduce_together([local(cast(Tensor, each.grad)) for each in held], group)
