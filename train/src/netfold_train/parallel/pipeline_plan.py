"""Measure the layers of a chain, and divide them over the ranks of a pipeline: stages, layers, microbatches."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from netfold_train.data.examples import Batch, Examples
from netfold_train.models.deferred import Deferred, materialised
from netfold_train.models.model import Chain, Model
from netfold_train.parallel.context import own_tokens
from netfold_train.parallel.device import synchronize
from netfold_train.parallel.mesh import Mesh, gather
from netfold_train.parallel.precision import Precision
from netfold_train.parallel.stages import Cut, cut
from netfold_train.recipe import Parallel, Recipe
from netfold_train.recipe.split import SPLIT_BACKWARD, split, stages_a_rank

REPEATS = 5
"""A layer's time is the median of this many passes, after one that is not counted."""
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerTimings:
    """Measurements of every layer of a chain, in order."""

    costs_ns: tuple[int, ...]
    """Time of a microbatch, forward and backward."""
    crossings: tuple[Tensors, ...]
    """[i]: the inputs of layer i for a microbatch, on the meta device. The last entry: the last layer's outputs."""
    own_outputs: tuple[bool, ...]
    """Whether the layer returns a tensor that depends on its weights, and on no input that has a gradient."""


def time_layers(
    model: Model,
    examples: Examples,
    samples: int,
    mesh: Mesh,
    precision: Precision,
    deferred: Deferred | None = None,
) -> LayerTimings:
    """Measure on the first `samples` examples; every rank returns rank 0's result. Collective over the world.

    All ranks of the first stage run all layers together, because layers may communicate along the data and tensor
    axes. Weights, buffers, gradients and the random generator do not change. deferred: of a model without values, whose
    layers get them one at a time. Raises RuntimeError on every rank if a layer failed on rank 0.
    """
    found: LayerTimings | str | None = None
    failed: Exception | None = None
    if mesh.pipeline.rank == 0:
        try:
            numbers = [number % len(examples) for number in range(samples)]
            sample = own_tokens(examples.batch(numbers, numbers), mesh).to(mesh.device)
            found = _measure(model, sample, precision, mesh.device, deferred)
        except Exception as error:
            failed, found = error, f"{type(error).__name__}: {error}"
    found = gather(found)[0]
    if not isinstance(found, LayerTimings):
        raise RuntimeError(f"the layers could not be measured on rank 0: {found}") from failed
    return found


def _measure(
    model: Model, sample: Batch, precision: Precision, device: torch.device, deferred: Deferred | None
) -> LayerTimings:
    chain = model.module
    assert isinstance(chain, Chain)
    costs: list[int] = []
    own_outputs: list[bool] = []
    values = sample.inputs
    crossings = [_on_meta(values)]
    buffers = [(buffer, buffer.clone()) for buffer in chain.buffers()]
    layers = list(chain.layers.values())
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        for name, layer in chain.layers.items():
            inputs = values
            seconds = []
            there: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if deferred is not None:
                there = materialised(layer, deferred, device, f"layers.{name}")
            with there:
                for _ in range(1 + REPEATS):
                    taken = tuple(value.detach().requires_grad_(value.requires_grad) for value in inputs)
                    began_ns = time.perf_counter_ns()
                    with precision.context(layer, device):
                        returned = layer(*taken)
                    values = returned if isinstance(returned, tuple) else (returned,)
                    # The loss counts as a part of the last layer.
                    ends = (model.losses(values[0], sample.target),) if layer is layers[-1] else values
                    _gradients(ends, (*taken, *layer.parameters()))
                    synchronize(device)
                    seconds.append(time.perf_counter_ns() - began_ns)
                own_outputs.append(
                    any(value.requires_grad and not any(_gradients((value,), taken)) for value in values)
                )
            costs.append(int(statistics.median(seconds[1:])))
            crossings.append(_on_meta(values))
            # Without the graph, which holds the layer's weights.
            values = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
    for buffer, kept in buffers:
        buffer.data = kept
    return LayerTimings(tuple(costs), tuple(crossings), tuple(own_outputs))


def _on_meta(values: Tensors) -> Tensors:
    return tuple(
        torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
        for value in values
    )


def _gradients(ends: Tensors, wanted: Tensors) -> list[bool]:
    """Run a backward pass that stores no gradient. Returns which of the wanted tensors got one."""
    wanted = tuple(tensor for tensor in wanted if tensor.requires_grad)
    given = [end for end in ends if end.requires_grad]
    if not wanted or not given:
        return []
    ones = [torch.ones_like(end) for end in given]
    return [each is not None for each in torch.autograd.grad(given, wanted, ones, retain_graph=True, allow_unused=True)]


class Plan:
    """The stages of a pipeline; made while every rank still holds every layer."""

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        mesh: Mesh,
        examples: Examples | None,
        deferred: Deferred | None = None,
    ) -> None:
        """Measures the layers on a microbatch of the first examples. Collective over the world.

        Raises ValueError, on every rank, if the model cannot be cut as the recipe asks.
        """
        parallel = recipe.parallel
        names = list(check_chain(model, parallel).layers)
        shares = split(recipe, parallel.pipeline * mesh.data.size * parallel.tensor)
        self.microbatches, self.samples = shares.microbatches, shares.samples
        if examples is None:
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, but parallelise was given no examples to measure layers on"
            )
        precision = Precision(recipe.training.precision)
        self.measured: LayerTimings = time_layers(model, examples, self.samples, mesh, precision, deferred)
        self.cut: Cut = cut(self.measured.costs_ns, shares.stages)
        self.reason = self.cut.described(names)
        if parallel.schedule in SPLIT_BACKWARD:
            # torch's split backward computes weights' gradients from the nodes that also lead to an input's gradient.
            # It silently leaves out a weight whose path to an output has no such node. The first stage is not split.
            for layer in range(self.cut.bounds[1], len(names)):
                if self.measured.own_outputs[layer]:
                    raise ValueError(
                        f"parallel.schedule is {parallel.schedule!r}, but a layer ({names[layer]}) returns a tensor "
                        "that depends on its weights only; torch would leave their gradients out: take 'interleaved'"
                    )


def check_chain(model: Model, parallel: Parallel) -> Chain:
    """The model's chain. Raises ValueError if it cannot be cut into the stages of the recipe."""
    chain = model.module
    if not isinstance(chain, Chain):
        raise ValueError(
            f"parallel.pipeline is {parallel.pipeline}, but the model is a {type(chain).__name__}, which cannot be "
            "cut: make it a netfold_train.Chain of layers"
        )
    each = stages_a_rank(parallel)
    if parallel.pipeline * each > len(chain):
        raise ValueError(
            f"parallel.pipeline is {parallel.pipeline}, which with parallel.schedule = {parallel.schedule!r} makes "
            f"{parallel.pipeline * each} stages, but the model has {len(chain)} layers: make it {len(chain) // each} "
            "or less"
        )
    return chain
