"""The interfaces of a model: a chain of layers and a loss, and this rank's part of the model.

A `Chain` can be cut between any two of its layers, so it can be a pipeline. Any other module supports everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from netfold.train.data.examples import Batch

Style = Literal["alternating", "colwise", "rowwise"]
# style, sequence -> module path -> torch.distributed.tensor.parallel.ParallelStyle
TensorPlan = Callable[[Style, bool], Mapping[str, Any]]
Loss = Callable[[Tensor, Tensor], Tensor]
SAMPLES_TRIED = 8
# The first CALLS_TRIED calls are all checked, then one in EVERY.
CALLS_TRIED, EVERY = 16, 100
# f32 sums in another order differ by far less; smaller differences of weights do no harm.
TOLERANCE = 1e-3


class Chain(nn.Module):
    """Layers in sequence: each takes the tensor, or the tuple of tensors, that the one before returns.

    A tensor that skips layers passes through them: a layer returns it beside its own result. So a chain can be cut
    anywhere, and the second part needs only the tensors at the cut. The first dimension is the sample. Layers and
    parameters have the same names in a part as in the whole.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(dict(layers))

    def __len__(self) -> int:
        return len(self.layers)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values: Tensor | tuple[Tensor, ...] = inputs
        for layer in self.layers.values():
            values = layer(*values) if isinstance(values, tuple) else layer(values)
        return values

    def part(self, first: int, end: int) -> Chain:
        """Layers first..end-1, the same modules under the same names."""
        return Chain(list(self.layers.items())[first:end])


@dataclass(frozen=True)
class Model:
    """A module to train, and its loss."""

    module: nn.Module
    """Takes a batch's inputs, returns one tensor. Pipelines need a `Chain`."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(output, target) -> the mean over the samples, f32, no dimensions. The mean over a batch must be the mean of the
    means over its equal parts: every sample has the same weight. The trainer checks this (`EqualWeights`)."""
    tensor_plan: TensorPlan | None = None
    """The cut of each layer for `parallel.tensor`; without a plan they cannot be cut."""


class EqualWeights:
    """A loss that checks that it weights all samples equally, so that training may divide a batch.

    Ranks, microbatches and parts of a batch are averaged with equal weights. A mean over unequal numbers of items per
    sample (such as tokens that are not padding) would silently weight a token by the other samples of its part.
    Compares some results with the mean of the losses of single samples, and raises ValueError if they differ. Cost:
    one more call of the loss, without gradients, per tried sample.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._calls = 0
        self._one: tuple[Tensor, Tensor] | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._calls += 1
        if self._calls <= CALLS_TRIED or self._calls % EVERY == 0:
            self._check(output.detach(), target)
        return self._loss(output, target)

    def _check(self, output: Tensor, target: Tensor) -> None:
        if len(target) == 1:
            # Two calls with one sample each serve as one call with two samples.
            before, self._one = self._one, (output, target)
            if before is None or before[0].shape != output.shape:
                return
            output, target = torch.cat([before[0], output]), torch.cat([before[1], target])
            self._one = None
        check_equal_weights(self._loss, output[:SAMPLES_TRIED], target[:SAMPLES_TRIED])


@torch.no_grad()
def check_equal_weights(loss: Loss, output: Tensor, target: Tensor) -> None:
    """Raise ValueError unless the loss of these samples, [n, ...] each, is the mean of their single losses."""
    together = float(loss(output, target))
    single = [float(loss(output[i : i + 1], target[i : i + 1])) for i in range(len(target))]
    mean, size = sum(single) / len(single), sum(map(abs, single)) / len(single)
    # The step vote handles NaN.
    if together != together or abs(together - mean) <= TOLERANCE * size + 1e-6:
        return
    raise ValueError(
        f"the model's loss of {len(single)} samples is {together:.6g}, but the mean of their single losses is "
        f"{mean:.6g}: samples have unequal weights, so the result depends on how a batch is divided; take the mean "
        "over each sample first (of its tokens that count), then over samples, or train on one rank with accumulate = 1"
    )


class Replica(Protocol):
    """The layers that a rank holds, however the model was cut."""

    modules: tuple[nn.Module, ...]
    """One for each stage on this rank. Together, all ranks' modules have the parameter names of the whole model."""

    notes: list[str]
    """Choices and their reasons, for people."""

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor | None:
        """Compute forward and backward of this rank's share of a batch.

        Leaves the mean gradient over the global batch (under `diloco`: over this rank's share) times `scale` in every
        parameter's `grad`. Returns the share's mean loss, f32, detached, not scaled; None on ranks that do not compute
        it (all stages but the last).
        """
        ...

    def outputs(self, batch: Batch) -> Tensor | None:
        """The model's outputs, without gradients, for a batch as large as a training batch; None before the last stage.

        The modules are in evaluation mode during the call, and in training mode before and after it.
        """
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of this rank, under its name in the whole model."""
        ...


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, in the order of the module."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]
