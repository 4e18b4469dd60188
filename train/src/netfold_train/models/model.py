"""The interfaces of a model: a chain of layers, the losses of items, and this rank's part of the model.

A `Chain` can be cut between any two of its layers, so it can be a pipeline. Any other module supports everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from netfold_train.data.examples import Batch

Style = Literal["alternating", "colwise", "rowwise"]
# style, sequence -> module path -> torch.distributed.tensor.parallel.ParallelStyle
TensorPlan = Callable[[Style, bool], Mapping[str, Any]]


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
class Weights:
    """Safetensors with the first values of a module's parameters and buffers."""

    folder: Path
    names: Mapping[str, str]
    """The module's name of a tensor -> its name in the files. Other tensors keep the values that they were made with;
    several may have one name in the files."""


@dataclass(frozen=True)
class Model:
    """A module to train, and its loss."""

    module: nn.Module
    """Takes a batch's inputs, returns one tensor. Pipelines need a `Chain`."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(output f32, target) -> [n, ...], a loss for each item of the samples (a token, a pixel); 0 for items that do not
    count. In torch's losses this is reduction="none". Training minimises the mean over the items of a global batch."""
    items: Callable[[Tensor], Tensor] | None = None
    """target -> the number of its items that count, no dimensions (`real_items`). Without it all count."""
    tensor_plan: TensorPlan | None = None
    """The cut of each layer for `parallel.tensor`; without a plan they cannot be cut."""
    weights: Weights | None = None
    """A run begins with these; each rank reads its own part."""
    cuts_sequences: bool = False
    """Whether `parallel.context` may cut sequences [n, s, ...]: all layers act on single tokens, or are a
    `netfold_train.parallel.context.ContextModule`, and the loss has one item for each token."""
    needs_sequences: str = "the model's layers need whole sequences (Model.cuts_sequences)"
    """The reason without `cuts_sequences`, for an error."""
    blocks: tuple[str, ...] = ()
    """Class names of the modules that ZeRO gathers, `training.recompute` repeats, and `training.compile` compiles, each
    by itself. A `Chain` needs none: its layers are such blocks. Any other module without names is one block."""

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The losses, f32. Raises ValueError if they are not one or more for each sample."""
        found = self.loss(at_least_f32(output), target)
        if found.ndim == 0 or len(found) != len(target):
            raise ValueError(
                f"the model's loss of {len(target)} samples has the shape {list(found.shape)}; it must have one or "
                'more numbers for each sample, [n, ...], so that any split of a batch has one mean: reduction="none"'
            )
        return at_least_f32(found)

    def count(self, losses: Tensor, target: Tensor) -> Tensor:
        """The number of items that count among the losses of these samples; no dimensions."""
        return losses.new_tensor(losses.numel()) if self.items is None else self.items(target)


def at_least_f32(tensor: Tensor) -> Tensor:
    """Sums of losses and scores need f32 or more."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


IGNORED = -100
"""In a target: an item that does not count (torch's cross entropy)."""


def real_items(target: Tensor) -> Tensor:
    """The number of items of a target that count."""
    return (target != IGNORED).sum()


def blocks_of(model: Model) -> dict[str, nn.Module]:
    """The model's blocks by path: a chain's layers, or the modules of the classes that the model names; or none."""
    if isinstance(model.module, Chain):
        return {f"layers.{name}": layer for name, layer in model.module.layers.items()}
    return {path: part for path, part in model.module.named_modules() if type(part).__name__ in model.blocks}


class Replica(Protocol):
    """The layers that a rank holds, however the model was cut."""

    modules: tuple[nn.Module, ...]
    """One for each stage on this rank. Together, all ranks' modules have the parameter names of the whole model."""

    notes: list[str]
    """Choices and their reasons, for people."""

    def gradients(self, batch: Batch, scale: float = 1.0) -> Tensor | None:
        """Compute forward and backward of this rank's share of a batch.

        Leaves the gradient of the mean loss over the items of the global batch (under `diloco`: of this rank's share)
        times `scale` in every parameter's `grad`. Returns this rank's part of the loss, f32, detached, not scaled: the
        mean over the data-parallel ranks is the loss. None on ranks that do not compute it (all stages but the last).
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
