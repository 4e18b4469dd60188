"""What the layer knows of a model: a chain of layers, and a loss.

A `Chain` can be cut between any two of its layers, so it can be a pipeline; a model that is one module and no chain can
do everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

Style = Literal["alternating", "colwise", "rowwise"]
# style, sequence -> module path -> torch.distributed.tensor.parallel.ParallelStyle
TensorPlan = Callable[[Style, bool], Mapping[str, Any]]


class Chain(nn.Module):
    """Layers in a row: what one returns, a tensor or a tuple of them, is what the next one takes.

    What skips layers travels through them: a layer returns it beside its own result. So a chain cut anywhere is two
    chains, and what crosses the cut is all that the second one needs. Tensors begin with the sample.
    A layer has the same name in a part as in the whole, and so have its parameters.
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
    """A module to train, and by which loss."""

    module: nn.Module
    """A `Chain` where it is to be cut into stages. Takes a batch's inputs, returns one tensor."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(output, target) -> the mean over the samples, f32, no dimensions. The mean over a batch must be the mean of the
    means over its equal parts: what is averaged must not depend on the sample. The trainer looks (`equal_weights`)."""
    tensor_plan: TensorPlan | None = None
    """How its layers are cut for `parallel.tensor`; without, they cannot be."""
