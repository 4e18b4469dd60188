"""A model whose computing is a timer: each layer sleeps for as long as the real layer takes, and leaves gradients of
the real sizes. Ranks that share two cores then compute as if each had its own core, and what they send is real."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import tomllib
import torch
from driver import Rank
from torch import Tensor, nn

from netfold_train import Chain, Model, Recipe, Trainer
from netfold_train.callbacks.events import Callback
from netfold_train.data import make_data
from netfold_train.models import make_model

REPEATS = 5
# Called with "slept" and the seconds, after each timer.
OnSleep = Callable[[str, float], None]


class First:
    """The first few examples of a data set."""

    def __init__(self, examples: Any, count: int) -> None:
        self._examples, self._count = examples, min(count, len(examples))

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Any, seeds: Any) -> Any:
        return self._examples.batch(indices, seeds)


def few_held_out(data: Any, count: int) -> Any:
    """`data` with few held-out examples, so that what comes after the last step is short."""
    return replace(data, held_out=First(data.held_out, count))


def recipe_of(path: str | Path, ranks: int, steps: int, bucket_mb: float = 25.0) -> Recipe:
    """The recipe for so many ranks and steps: each rank has half of its batch, however many ranks there are."""
    table = tomllib.loads(Path(path).read_text())
    batch = max(1, table["training"].get("batch", 32) // 2)
    table["training"] = {"steps": steps, "batch": batch, "scaling": "weak"}
    table["parallel"] = {"data": ranks, "bucket_mb": bucket_mb}
    table["checkpoint"] = {"every": "end"}
    return Recipe.model_validate(table)


class StepTimes(Callback):
    """The seconds of each step, and the moments of their ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ends_s: list[float] = []

    def on_step(self, event: Any) -> None:
        self.seconds.append(event.seconds)
        self.ends_s.append(time.perf_counter())


def train(me: Rank, backend: str, recipe: Recipe, make: Callable[[], Model], data: Any = None) -> StepTimes:
    """Train as a rank of a new group of torch. make: the model, from the same seed every time."""
    few = few_held_out(make_data(recipe.data) if data is None else data, recipe.training.batch * me.size)
    with me.torch_group(backend, timeout=timedelta(seconds=240)):
        torch.manual_seed(0)
        times = StepTimes()
        Trainer(recipe, model=make(), data=few, callbacks=[times]).fit()
    return times


@dataclass(frozen=True)
class LayerTime:
    forward_s: float
    backward_s: float
    outputs: tuple[tuple[int, ...], ...]
    """Shapes of what the layer returns."""


def layer_times(recipe: Recipe) -> list[LayerTime]:
    """Medians of each layer of the recipe's model, with one rank's share of samples.

    They are of processor time, so that what else runs on the machine does not show. Layers run on this thread alone.
    """
    torch.set_num_threads(1)
    model, share = make_model(recipe.model), range(recipe.training.batch)
    batch = make_data(recipe.data).train.batch(share, share)
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
        shapes = tuple(tuple(output.shape) for output in outputs)
        found.append(LayerTime(statistics.median(forward), statistics.median(backward), shapes))
        values = tuple(output.detach() for output in outputs)
    return found


def timed(model: Model, times: Sequence[LayerTime], on_sleep: OnSleep | None = None) -> Model:
    """The same parameters, layer by layer, and timers in place of their arithmetic."""
    assert isinstance(model.module, Chain)
    layers = zip(model.module.layers.items(), times, strict=True)
    chain = Chain([(name, _Timed(layer, took, on_sleep)) for (name, layer), took in layers])
    return Model(chain, lambda output, target: output)


class _Timed(nn.Module):
    def __init__(self, layer: nn.Module, took: LayerTime, on_sleep: OnSleep | None) -> None:
        super().__init__()
        self.layer, self.took, self.on_sleep = layer, took, on_sleep

    def forward(self, *inputs: Tensor) -> Any:
        floats = [value for value in inputs if value.is_floating_point()]
        outputs = _Sleep.apply(self.took, self.on_sleep, *floats, *self.layer.parameters())
        return outputs if len(outputs) > 1 else outputs[0]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, took: LayerTime, on_sleep: OnSleep | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.took, ctx.on_sleep, ctx.shapes = took, on_sleep, [tensor.shape for tensor in tensors]
        _sleep(took.forward_s, on_sleep)
        return tuple(torch.zeros(shape) for shape in took.outputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        _sleep(ctx.took.backward_s, ctx.on_sleep)
        return None, None, *(torch.zeros(shape) for shape in ctx.shapes)


def _sleep(seconds: float, on_sleep: OnSleep | None) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    if on_sleep is not None:
        on_sleep("slept", time.perf_counter() - began)
