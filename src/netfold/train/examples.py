"""What the layer knows of data: examples by number, and a metric with the value that a trivial predictor reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Some samples: the first dimension of every tensor is the sample."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def parts(self, count: int) -> list[Batch]:
        """Cut into `count` equal ones, in order. The samples must divide."""
        columns = [tensor.chunk(count) for tensor in (*self.inputs, self.target)]
        return [Batch(tuple(row[:-1]), row[-1]) for row in zip(*columns, strict=True)]


class BadExampleError(Exception):
    """An example that cannot be read: a file that is gone or garbage. The message names it and says why."""


class Examples(Protocol):
    """A set of examples, known by number."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        """The examples with these numbers, in this order, all of one shape.

        What is drawn for an example (a crop, a flip, a mask) must come from its seed alone: so a batch is the same
        wherever and whenever it is made. Called from a thread of its own. Raises BadExampleError.
        """
        ...


@dataclass(frozen=True)
class Metric:
    """What says whether a model has learnt."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    score: Callable[[Tensor, Tensor], Tensor]
    """(output, target) -> [n], one number a sample; the metric is their mean over all held-out samples."""
    baseline: float
    """What a trivial predictor reaches on the same held-out samples."""
    baseline_is: str
    """That predictor, in words: "bicubic", "the most frequent class"."""


@dataclass(frozen=True)
class Panel:
    """One picture of a row that is looked at side by side."""

    title: str
    """ "bicubic", "the network" """
    said: str
    """What it reaches, in words: "27.91 dB"."""
    pixels: Tensor
    """[3, h, w], u8."""


class Pictures(Protocol):
    """Held-out examples that make pictures."""

    def __len__(self) -> int:
        """How many examples they take."""
        ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """These of them, as those trained on. The model's output has the shape of the target."""
        ...

    def panels(self, outputs: Tensor) -> Sequence[Panel]:
        """outputs: [len, ...] f32, of all examples in their order."""
        ...


@dataclass(frozen=True)
class Data:
    train: Examples
    held_out: Examples
    """Never trained on. Of the same shapes as the training examples."""
    metric: Metric
    pictures: Pictures | None = None
    """What a run's page shows of the model, where there is something to see."""
