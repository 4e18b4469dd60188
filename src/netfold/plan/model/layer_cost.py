"""What a layer asks of one rank for one microbatch: arithmetic, memory traffic, parameters, activations, messages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Matmul:
    """`count` products of [m, k] by [k, n], batched: by one kernel.

    fused: 0, or how many products of this size one kernel works on whose [m, n] side never leaves it.
    """

    m: int
    n: int
    k: int
    count: int = 1
    fused: float = 0.0

    @property
    def flops(self) -> float:
        """A multiply-add as two."""
        return 2.0 * self.m * self.n * self.k * self.count * (self.fused or 1.0)


@dataclass(frozen=True)
class Collective:
    """An operation among the ranks that share a layer. size_bytes: of the whole tensor, as netfold.tuning.cost has it.

    group: `tensor`, or `tables` for embeddings that are spread over all ranks.
    """

    operation: str
    size_bytes: float
    group: str = "tensor"


@dataclass(frozen=True)
class Pass:
    """Forward or backward, of one rank and microbatch.

    moved_bytes: read and written by kernels that memory bounds. kernels: launched, matmuls among them. measured_s: what
    all of it takes where that is known, by a profile or a published speed; else 0.
    """

    matmuls: tuple[Matmul, ...] = ()
    moved_bytes: float = 0.0
    kernels: int = 0
    collectives: tuple[Collective, ...] = ()
    measured_s: float = 0.0

    @property
    def flops(self) -> float:
        return sum(each.flops for each in self.matmuls)


@dataclass(frozen=True)
class Layer:
    """`count` equal layers, one after the other; every figure is of one of them, on one rank, for one microbatch.

    again: what recomputation repeats before the backward pass. parameters: held by the rank. kept_bytes: activations
    that stay until the backward pass. input_bytes: what a stage that begins here receives. live_bytes: activations that
    `again` makes, held beside kept_bytes while this layer's backward pass goes on.
    """

    name: str
    forward: Pass
    backward: Pass
    again: Pass
    parameters: float
    kept_bytes: float
    input_bytes: float
    count: int = 1
    live_bytes: float = 0.0


@dataclass(frozen=True)
class Bucket:
    """Gradients that data-parallel ranks reduce together: of so many elements, ready when the backward pass of the
    layer with this index ends."""

    elements: float
    layer: int


@dataclass(frozen=True)
class ShardSpec:
    """What part of a model, and how, one rank works on.

    micro_batch: samples. tensor: ranks that split each layer. sequence: they split what is between the matmuls too.
    recomputation: none, selective or full. item_bytes: of an activation.
    """

    micro_batch: int
    tensor: int = 1
    sequence: bool = False
    recomputation: str = "none"
    item_bytes: int = 2


class Model(Hashable, Protocol):
    """Anything that can say what its layers ask of a rank."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> float:
        """Of all of it."""
        ...

    @property
    def flops(self) -> float:
        """Of one sample, forward and backward, without recomputation: what utilisation is counted by."""
        ...

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """In order. Stages of a pipeline are cut between layers. Raises ValueError where `share` cannot be."""
        ...


class Measured(ABC):
    """A model that is a step as it was measured: of ranks that hold all of it, on the device that it ran on.

    samples: of a rank in a step.
    """

    name: str
    samples: int

    def as_it_ran(self, share: ShardSpec) -> None:
        """Raises ValueError for any share but the one that was measured."""
        if share.tensor > 1 or share.recomputation != "none":
            raise ValueError(f"{self.name}: was measured in whole layers, as they ran; take tensor 1, recompute none")
        if share.micro_batch != self.samples:
            raise ValueError(
                f"{self.name}: was measured with one pass of {self.samples} samples a rank and step; the batch must be "
                "as many for each device"
            )

    @property
    @abstractmethod
    def after_gradients_s(self) -> float:
        """From the last gradients to the next step."""

    @property
    def flops(self) -> float:
        """A clock does not count them, so utilisation is not known; nor is what stays in memory."""
        return math.nan


@runtime_checkable
class Bucketed(Protocol):
    """A model that knows which gradients travel together, and when; others are taken to be cut evenly."""

    def buckets(self, bucket_bytes: float, gradient_bytes: int) -> tuple[Bucket, ...]:
        """In the order in which they travel."""
        ...
