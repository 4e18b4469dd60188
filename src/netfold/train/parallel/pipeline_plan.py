"""Measure the layers of a chain, and divide them over the ranks of a pipeline: stages, layers, microbatches."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.train.examples import Batch, Examples
from netfold.train.mesh import Mesh
from netfold.train.model import Chain, Model
from netfold.train.parallel.stages import Cut, cut
from netfold.train.precision import Precision
from netfold.train.recipe import Parallel, Recipe
from netfold.train.recipe.split import SPLIT_BACKWARD, split, stages_a_rank

REPEATS = 5
"""A layer's time is the median of this many passes, after one that is not counted."""


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that a layer takes or returns, for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self) -> Tensor:
        """The same kind of tensor on the meta device, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


@dataclass(frozen=True)
class LayerTimings:
    """Measurements of every layer of a chain, in order."""

    costs_ns: tuple[int, ...]
    """Time of a microbatch, forward and backward."""
    crossings: tuple[tuple[BoundaryTensor, ...], ...]
    """[i]: the inputs of layer i; the last entry: the outputs of the last layer."""
    reaches: tuple[tuple[tuple[bool, ...], ...], ...]
    """[layer][output][input]: whether the input gets a gradient from the output."""


def time_layers(model: Model, examples: Examples, samples: int, mesh: Mesh, precision: Precision) -> LayerTimings:
    """Measure on the first `samples` examples; every rank returns rank 0's result. Collective over the world.

    `model` already computes in `precision`. All ranks of the first stage run all layers together, because layers may
    communicate along the data and tensor axes. Weights, buffers, gradients and the random generator do not change.
    Raises RuntimeError on every rank if a layer failed on rank 0.
    """
    chain = model.module
    assert isinstance(chain, Chain)
    found: list[LayerTimings | str | None] = [None]
    failed: Exception | None = None
    if mesh.pipeline.rank == 0:
        try:
            numbers = [number % len(examples) for number in range(samples)]
            found = [_measure(chain, model, examples.batch(numbers, numbers), precision)]
        except Exception as error:
            failed, found = error, [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(found, src=0)
    if not isinstance(found[0], LayerTimings):
        raise RuntimeError(f"the layers could not be measured on rank 0: {found[0]}") from failed
    return found[0]


def _measure(chain: Chain, model: Model, sample: Batch, precision: Precision) -> LayerTimings:
    costs: list[int] = []
    crossings: list[tuple[BoundaryTensor, ...]] = []
    reaches: list[tuple[tuple[bool, ...], ...]] = []
    values: tuple[Tensor, ...] = precision.inputs(sample.inputs)
    buffers = [(buffer, buffer.clone()) for buffer in chain.buffers()]
    with torch.random.fork_rng(devices=[]):
        for number, layer in enumerate(chain.layers.values()):
            crossings.append(_boundary(values))
            inputs = values
            target = sample.target if number + 1 == len(chain) else None
            seconds = []
            for _ in range(1 + REPEATS):
                taken = tuple(value.detach().requires_grad_(value.requires_grad) for value in inputs)
                began_ns = time.perf_counter_ns()
                returned = layer(*taken)
                values = returned if isinstance(returned, tuple) else (returned,)
                # The loss counts as a part of the last layer.
                ends = values if target is None else (model.loss(precision.output(values[0]), target),)
                _backward(ends, layer, taken)
                seconds.append(time.perf_counter_ns() - began_ns)
            costs.append(int(statistics.median(seconds[1:])))
            reaches.append(_reached(values, taken))
        crossings.append(_boundary(values))
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return LayerTimings(tuple(costs), tuple(crossings), tuple(reaches))


def _boundary(values: tuple[Tensor, ...]) -> tuple[BoundaryTensor, ...]:
    return tuple(BoundaryTensor(tuple(value.shape), value.dtype, value.requires_grad) for value in values)


def _backward(ends: tuple[Tensor, ...], layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Run a backward pass that stores no gradient."""
    wanted = [tensor for tensor in (*inputs, *layer.parameters()) if tensor.requires_grad]
    given = [end for end in ends if end.requires_grad]
    if wanted and given:
        torch.autograd.grad(
            given, wanted, [torch.ones_like(end) for end in given], retain_graph=True, allow_unused=True
        )


def _reached(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[tuple[bool, ...], ...]:
    def one(output: Tensor) -> tuple[bool, ...]:
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if not output.requires_grad or not wanted:
            return (False,) * len(inputs)
        found = iter(torch.autograd.grad(output, wanted, torch.ones_like(output), retain_graph=True, allow_unused=True))
        return tuple(tensor.requires_grad and next(found) is not None for tensor in inputs)

    return tuple(one(output) for output in outputs)


class Plan:
    """The stages of a pipeline; made while every rank still holds every layer."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, examples: Examples | None) -> None:
        """Measures the layers on a microbatch of the first examples. Collective over the world.

        Raises ValueError, on every rank, if the model cannot be cut as the recipe asks.
        """
        parallel = recipe.parallel
        check_chain(model, parallel)
        chain = model.module
        assert isinstance(chain, Chain)
        shares = split(recipe, parallel.pipeline * mesh.data.size * parallel.tensor)
        self.microbatches, self.samples = shares.microbatches, shares.samples
        if examples is None:
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, but parallelise was given no examples to measure layers on"
            )
        precision = Precision(recipe.training.precision)
        self.measured: LayerTimings = time_layers(_lowered(model, precision), examples, self.samples, mesh, precision)
        self.cut: Cut = cut(self.measured.costs_ns, shares.stages)
        self.reason = self.cut.described(list(chain.layers))
        if parallel.schedule in SPLIT_BACKWARD:
            self._check_outputs(list(chain.layers), parallel.schedule)

    def _check_outputs(self, names: Sequence[str], schedule: str) -> None:
        # torch's split backward computes weights' gradients from the nodes that also lead to an input's gradient. It
        # silently leaves out a weight whose path to an output has no such node. The first stage is not split.
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
                        f"parallel.schedule is {schedule!r}, but a stage ({names[layers[0]]} to {names[layers[-1]]}) "
                        "returns a tensor that depends on its weights only; torch would leave their gradients out: "
                        "take 'interleaved'"
                    )


def _lowered(model: Model, precision: Precision) -> Model:
    """A copy of the model in the precision of training, to be measured; the stages lower the model itself."""
    if precision.name == "f32":
        return model
    module = copy.deepcopy(model.module)
    precision.lower(module)
    return replace(model, module=module)


def check_chain(model: Model, parallel: Parallel) -> None:
    """Raise ValueError if `model` cannot be cut into the stages of the recipe."""
    chain = model.module
    if not isinstance(chain, Chain):
        raise ValueError(
            f"parallel.pipeline is {parallel.pipeline}, but the model is a {type(chain).__name__}, which cannot be "
            "cut: make it a netfold.train.Chain of layers"
        )
    each = stages_a_rank(parallel)
    if parallel.pipeline * each > len(chain):
        raise ValueError(
            f"parallel.pipeline is {parallel.pipeline}, which with parallel.schedule = {parallel.schedule!r} makes "
            f"{parallel.pipeline * each} stages, but the model has {len(chain)} layers: make it {len(chain) // each} "
            "or less"
        )
