"""A model whose computing is a timer: each layer sleeps for as long as the real one takes, and leaves gradients of the
real one's sizes. Ranks that share two cores then compute as if each had its own, and what they send is real."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netfold.train import Batch, Chain, Model

REPEATS = 5
# Told "slept" and for how long, after each timer.
Sleeps = Callable[[str, float], None]


class First:
    """The first few examples: what is measured here is steps."""

    def __init__(self, examples: Any, count: int) -> None:
        self._examples, self._count = examples, min(count, len(examples))

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Any, seeds: Any) -> Any:
        return self._examples.batch(indices, seeds)


@dataclass(frozen=True)
class LayerTime:
    forward_s: float
    backward_s: float
    outputs: tuple[tuple[int, ...], ...]
    """Shapes of what it returns."""


def layer_times(model: Model, batch: Batch) -> list[LayerTime]:
    """Medians of each layer of a chain; of the processor's time, so that what else runs on the machine does not show.

    Layers run on the calling thread alone: `torch.set_num_threads(1)`.
    """
    assert isinstance(model.module, Chain)
    found = []
    values: tuple[Tensor, ...] = batch.inputs
    for layer in model.module.layers.values():
        forward, backward = [], []
        for _ in range(REPEATS):
            inputs = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
            began = time.thread_time()
            result = layer(*inputs)
            outputs: tuple[Tensor, ...] = result if isinstance(result, tuple) else (result,)
            forward.append(time.thread_time() - began)
            ends = [output for output in outputs if output.requires_grad]
            began = time.thread_time()
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            backward.append(time.thread_time() - began)
        found.append(
            LayerTime(
                statistics.median(forward), statistics.median(backward), tuple(tuple(out.shape) for out in outputs)
            )
        )
        values = tuple(output.detach() for output in outputs)
    return found


def timed(model: Model, times: Sequence[LayerTime], told: Sleeps | None = None) -> Model:
    """The same parameters, layer by layer, and timers in place of their arithmetic."""
    assert isinstance(model.module, Chain)
    layers = [
        (name, _Timed(layer, took, told))
        for (name, layer), took in zip(model.module.layers.items(), times, strict=True)
    ]
    return Model(Chain(layers), lambda output, target: output.float().mean())


class _Timed(nn.Module):
    def __init__(self, layer: nn.Module, took: LayerTime, told: Sleeps | None) -> None:
        super().__init__()
        self.layer, self.took, self.told = layer, took, told

    def forward(self, *inputs: Tensor) -> Any:
        floats = [value for value in inputs if value.is_floating_point()]
        outputs = _Sleep.apply(self.took, self.told, len(floats), *floats, *self.layer.parameters())
        return outputs if len(outputs) > 1 else outputs[0]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, took: LayerTime, told: Sleeps | None, inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.took, ctx.told, ctx.shapes = took, told, [tensor.shape for tensor in tensors]
        _sleep(took.forward_s, told)
        return tuple(torch.zeros(shape) for shape in took.outputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        _sleep(ctx.took.backward_s, ctx.told)
        return None, None, None, *(torch.zeros(shape) for shape in ctx.shapes)


def _sleep(seconds: float, told: Sleeps | None) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    if told is not None:
        told("slept", time.perf_counter() - began)
