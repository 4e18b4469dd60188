"""The interface of data: examples by number, and a metric with the value of a trivial predictor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples; the first dimension of every tensor is the sample."""

    inputs: tuple[Tensor, ...]
    """The model's positional arguments."""
    target: Tensor
    named: Mapping[str, Tensor] = field(default_factory=dict)
    """The model's keyword arguments, such as attention_mask."""

    def __len__(self) -> int:
        return len(self.target)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors: the inputs, the named ones, the target."""
        return (*self.inputs, *self.named.values(), self.target)

    def like(self, tensors: Sequence[Tensor]) -> Batch:
        """A batch of these tensors, which are in the order of `tensors`."""
        count = len(self.inputs)
        return Batch(tuple(tensors[:count]), tensors[-1], dict(zip(self.named, tensors[count:-1], strict=True)))

    def to(self, device: torch.device) -> Batch:
        """The batch on the device; the same tensors if they are there already."""
        return self.like([tensor.to(device, non_blocking=True) for tensor in self.tensors])

    def pinned(self) -> Batch:
        """A copy in memory that a GPU reads by itself, so that `to` returns before it has arrived."""
        return self.like([tensor.pin_memory() for tensor in self.tensors])

    def parts(self, count: int) -> list[Batch]:
        """Cut into `count` batches, in order: equal ones if `count` divides the number of samples."""
        return [self.like(row) for row in zip(*(tensor.tensor_split(count) for tensor in self.tensors), strict=True)]


def joined(batches: Sequence[Batch]) -> Batch:
    """The samples of all batches, in order."""
    columns = zip(*(each.tensors for each in batches), strict=True)
    return batches[0].like([torch.cat(column) for column in columns])


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

    def __init__(self, *inputs: Tensor, target: Tensor, **named: Tensor) -> None:
        self._all = Batch(inputs, target, named)

    def __len__(self) -> int:
        return len(self._all)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        chosen = torch.tensor(list(indices))
        return self._all.like([each[chosen] for each in self._all.tensors])


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


class Pooled:
    """`Examples` whose batches several threads make, each a part: for pictures that take long to decode."""

    def __init__(self, examples: Examples, threads: int) -> None:
        self._examples, self._count = examples, threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="netfold-loader")

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        share = -(-len(indices) // self._count)
        firsts = range(0, len(indices), share)
        parts = ([numbers[first : first + share] for first in firsts] for numbers in (indices, seeds))
        return joined(list(self._threads.map(self._examples.batch, *parts)))


@dataclass(frozen=True)
class Metric:
    """The measure of a model's success."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    score: Callable[[Tensor, Tensor], Tensor]
    """(output, target) -> [n, ...], one number for each item of the samples; 0 for items that do not count."""
    baseline: float
    """The metric of a trivial predictor on the same held-out samples."""
    baseline_is: str
    """The predictor's name: "bicubic", "the most frequent class"."""
    items: Callable[[Tensor], Tensor] | None = None
    """target -> how many items count, as `Model.items`. The metric is the mean over all held-out items that count."""


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
