"""What each layer of a chain costs, measured, and which tensors pass between layers."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.train.examples import Batch, Examples
from netfold.train.mesh import Mesh
from netfold.train.model import Chain, Model
from netfold.train.precision import Precision

REPEATS = 5
"""A layer's cost is the median of so many, after one that is not counted."""


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor that a layer takes or returns, of a microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self) -> Tensor:
        """A tensor like it, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


@dataclass(frozen=True)
class LayerTimings:
    """Of every layer of a chain, in order."""

    costs_ns: tuple[int, ...]
    """Forward and backward of a microbatch."""
    crossings: tuple[tuple[BoundaryTensor, ...], ...]
    """What layer i takes; behind the last layer's, what it returns. Like `Chain`, a tuple even of one."""
    reaches: tuple[tuple[tuple[bool, ...], ...], ...]
    """[layer][output][input]: whether a gradient goes from the one to the other."""


def time_layers(model: Model, examples: Examples, samples: int, mesh: Mesh, precision: Precision) -> LayerTimings:
    """On the first `samples` examples, as rank 0 found it; told to every rank. Collective over the world. `model`
    computes in `precision` already.

    The ranks of the first stage, which are the whole world of the data and tensor axes to each other, go through all
    layers together, since layers may talk along those axes. Weights, buffers, gradients and the random generator are as
    before. Raises RuntimeError on every rank where a layer failed on rank 0.
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
            crossings.append(_described(values))
            inputs = values
            target = sample.target if number + 1 == len(chain) else None
            seconds = []
            for _ in range(1 + REPEATS):
                taken = tuple(value.detach().requires_grad_(value.requires_grad) for value in inputs)
                began_ns = time.perf_counter_ns()
                returned = layer(*taken)
                values = returned if isinstance(returned, tuple) else (returned,)
                # The loss is part of the last layer's work.
                ends = values if target is None else (model.loss(precision.output(values[0]), target),)
                _gradients(ends, layer, taken)
                seconds.append(time.perf_counter_ns() - began_ns)
            costs.append(int(statistics.median(seconds[1:])))
            reaches.append(_reached(values, taken))
        crossings.append(_described(values))
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return LayerTimings(tuple(costs), tuple(crossings), tuple(reaches))


def _described(values: tuple[Tensor, ...]) -> tuple[BoundaryTensor, ...]:
    return tuple(BoundaryTensor(tuple(value.shape), value.dtype, value.requires_grad) for value in values)


def _gradients(ends: tuple[Tensor, ...], layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A backward pass that leaves nothing behind."""
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
