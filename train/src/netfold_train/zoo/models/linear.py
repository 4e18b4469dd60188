"""A sequence of linear layers with ReLU between them: features [n, ...] -> logits [n, classes]."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from netfold_train.models.model import Chain, Model, Style, TensorPlan


def linear_stack(widths: Sequence[int]) -> Model:
    """widths: of the features of a sample, of each hidden layer, and the number of classes; targets int64 [n]."""
    pairs = list(itertools.pairwise(widths))
    layers = [(f"layer{number}", dense(*pair, relu=number < len(pairs) - 1)) for number, pair in enumerate(pairs)]
    return Model(Chain(layers), class_loss, tensor_plan=stacks_plan([f"layers.{name}.linear" for name, _ in layers]))


def class_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy [...] in nats, 0 where the class in `target` [...] is -100. Logits [..., classes]."""
    losses = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return losses.view_as(target)


def dense(inputs: int, outputs: int, *, relu: bool = True) -> nn.Sequential:
    """[n, ...] -> [n, outputs]. ReLU acts on each output alone, so also on a rank's part of the outputs."""
    steps = named(flatten=nn.Flatten(), linear=nn.Linear(inputs, outputs))
    if relu:
        steps.add_module("relu", nn.ReLU())
    return steps


def named(**layers: nn.Module) -> nn.Sequential:
    """These layers in sequence, under their names."""
    return nn.Sequential(OrderedDict(layers))


def stacks_plan(*stacks: Sequence[str]) -> TensorPlan:
    """The plan of a model whose cut layers are `stacks`, each of consecutive linear layers at these paths."""

    def plan(style: Style, sequence: bool) -> dict[str, Any]:
        if sequence:
            raise ValueError("parallel.sequence: a stack of linear layers has no sequence; use sequence = false")
        return {path: cut for paths in stacks for path, cut in stack_plan(paths, style).items()}

    return plan


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
    colwise = [style == "colwise" or (style == "alternating" and number % 2 == 0) for number in range(len(paths))]
    # Between two layers activations are cut, but whole before each pair of alternating layers.
    between = [Replicate() if style == "alternating" and first else Shard(-1) for first in colwise[1:]]
    places = itertools.pairwise([source or Replicate(), *between, result or Replicate()])
    return {
        path: (ColwiseParallel if first else RowwiseParallel)(input_layouts=start, output_layouts=end)
        for path, first, (start, end) in zip(paths, colwise, places, strict=True)
    }
