"""A sequence of linear layers with ReLU between them: features [n, ...] -> logits [n, classes]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import functional

from netfold.train.model import Chain, Model, Style
from netfold.train.parallel.tensor import ColwiseLinear, RowwiseLinear


def linear_stack(widths: Sequence[int]) -> Model:
    """widths: of the features of a sample, of each hidden layer, and the number of classes.

    Targets are classes, int64 [n]; the loss is the cross entropy in nats.
    """
    names = [f"layer{number}" for number in range(len(widths) - 1)]
    last = len(names) - 1
    layers = [(name, Dense(*widths[i : i + 2], relu=i < last)) for i, name in enumerate(names)]

    def plan(style: Style, sequence: bool) -> Mapping[str, Any]:
        if sequence:
            raise ValueError("parallel.sequence: a stack of linear layers has no sequence; use sequence = false")
        return stack_plan([f"layers.{name}.linear" for name in names], style)

    return Model(Chain(layers), functional.cross_entropy, plan)


class Dense(nn.Module):
    """[n, ...] -> [n, outputs]; ReLU acts on each output alone, so also on a rank's part of the outputs."""

    def __init__(self, inputs: int, outputs: int, *, relu: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.flatten(1))
        return functional.relu(x) if self.relu else x


def stack_plan(
    paths: Sequence[str], style: Style, source: Placement | None = None, result: Placement | None = None
) -> dict[str, Any]:
    """The cuts of consecutive linear layers at `paths`.

    source: the placement of the first input. result: the placement of the last output. Both are `Replicate()`, the
    default, or `Shard(-1)`. Communication:
    colwise: in each layer an all_gather of its input forward, and a reduce_scatter of its gradient backward;
    rowwise: in each layer a reduce_scatter of its output forward, and an all_gather of its gradient backward;
    alternating: an all_reduce every two layers, forward and backward. A last layer without a partner is colwise.
    """
    whole, cut = Replicate(), Shard(-1)
    first, last = source or whole, result or whole
    plan: dict[str, Any] = {}
    for number, path in enumerate(paths):
        takes = first if number == 0 else cut
        gives = last if number == len(paths) - 1 else cut
        if style == "colwise":
            plan[path] = ColwiseLinear(takes, gives)
        elif style == "rowwise":
            plan[path] = RowwiseLinear(takes, gives)
        elif number % 2:
            plan[path] = RowwiseLinear(cut, last if number == len(paths) - 1 else whole)
        else:
            plan[path] = ColwiseLinear(first if number == 0 else whole, gives)
    return plan
