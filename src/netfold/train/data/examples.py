"""The interface of data: examples by number, and a metric with the value of a trivial predictor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples; the first dimension of every tensor is the sample."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def to(self, device: torch.device) -> Batch:
        """The batch on the device; the batch itself if it is there already."""
        moved = [tensor.to(device, non_blocking=True) for tensor in (*self.inputs, self.target)]
        return Batch(tuple(moved[:-1]), moved[-1])

    def parts(self, count: int) -> list[Batch]:
        """Cut into `count` equal batches, in order. `count` must divide the number of samples."""
        columns = [tensor.chunk(count) for tensor in (*self.inputs, self.target)]
        return [Batch(tuple(row[:-1]), row[-1]) for row in zip(*columns, strict=True)]


class BadExampleError(Exception):
    """An example that cannot be read, such as a missing or damaged file. The message has its name and the reason."""


class Examples(Protocol):
    """A set of examples with numbers from 0."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        """The examples with these numbers, in this order, all of one shape.

        An example's random choices (a crop, a flip, a mask) must depend on its seed only, so that a batch is the same
        on any rank at any time. Called on a separate thread. Raises BadExampleError.
        """
        ...


class InMemory:
    """`Examples` of tensors in memory, without random choices."""

    def __init__(self, *inputs: Tensor, target: Tensor) -> None:
        self.inputs, self.target = inputs, target

    def __len__(self) -> int:
        return len(self.target)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        chosen = torch.tensor(list(indices))
        return Batch(tuple(each[chosen] for each in self.inputs), self.target[chosen])


@dataclass(frozen=True)
class OneByOne:
    """`Examples` that a function makes one at a time."""

    count: int
    make: Callable[[int, int], Sequence[Tensor]]
    """(number, seed) -> the inputs and the target of an example. May raise BadExampleError."""

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        samples = map(self.make, indices, seeds)
        *inputs, target = (torch.stack(column) for column in zip(*samples, strict=True))
        return Batch(tuple(inputs), target)


@dataclass(frozen=True)
class Metric:
    """The measure of a model's success."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    score: Callable[[Tensor, Tensor], Tensor]
    """(output, target) -> [n], one number per sample; the metric is their mean over all held-out samples."""
    baseline: float
    """The metric of a trivial predictor on the same held-out samples."""
    baseline_is: str
    """The predictor's name: "bicubic", "the most frequent class"."""


@dataclass(frozen=True)
class Panel:
    """One picture of a row of pictures."""

    title: str
    """ "bicubic", "the network" """
    said: str
    """Its metric: "27.91 dB"."""
    pixels: Tensor
    """[3, h, w], u8."""


@dataclass(frozen=True)
class Pictures:
    """Held-out examples that make a row of pictures."""

    examples: Examples
    """Shaped like training examples. The model's output has the shape of the target."""
    panels: Callable[[Tensor], Sequence[Panel]]
    """The outputs of all examples in order, [n, ...] f32 -> the pictures."""


@dataclass(frozen=True)
class Data:
    train: Examples
    held_out: Examples
    """Not trained on; shaped like training examples."""
    metric: Metric
    pictures: Pictures | None = None
    """Pictures for the run's page."""
