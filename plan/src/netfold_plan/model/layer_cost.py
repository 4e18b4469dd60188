"""The work of a layer on one rank for one microbatch: arithmetic, memory traffic, parameters, activations, messages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Matmul:
    """`count` products of [m, k] by [k, n], batched in one kernel.

    fused: 0, or the number of products of this size in one kernel that keeps their [m, n] side to itself.
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


def backward_matmuls(matmuls: tuple[Matmul, ...]) -> tuple[Matmul, ...]:
    """The gradients of both factors of each product."""
    return tuple(
        each
        for matmul in matmuls
        for each in (
            Matmul(matmul.m, matmul.k, matmul.n, matmul.count),
            Matmul(matmul.k, matmul.n, matmul.m, matmul.count),
        )
    )


@dataclass(frozen=True)
class Collective:
    """An operation among the ranks that share a layer. size_bytes: of the whole tensor, as in netfold.tuning.cost.

    group: `tensor`, or `tables` for embeddings that are spread over all ranks.
    """

    operation: str
    size_bytes: float
    group: str = "tensor"


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one rank and microbatch.

    moved_bytes: read and written by memory-bound kernels.
    kernels: all that are launched, including matmuls.
    measured_s: the time of the whole pass by a profile or a published speed; 0 where unknown.
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
    """`count` equal layers in a row; every figure is for one of them, on one rank, for one microbatch.

    again: what recomputation repeats before the backward pass.
    parameters: held by the rank.
    kept_bytes: activations that stay until the backward pass.
    input_bytes: what a stage that begins with this layer receives.
    live_bytes: activations that `again` makes, held in addition to kept_bytes during this layer's backward pass.
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
    """Gradients that data-parallel ranks reduce together. layer: the index of the layer whose backward pass completes
    the bucket."""

    elements: float
    layer: int


@dataclass(frozen=True)
class ShardSpec:
    """The part of a model that one rank computes.

    micro_batch: samples. tensor: ranks that split each layer. sequence: they also split the layers between matmuls.
    recomputation: none, selective or full. item_bytes: of an activation.
    """

    micro_batch: int
    tensor: int = 1
    sequence: bool = False
    recomputation: str = "none"
    item_bytes: int = 2


def check_unsplit(name: str, share: ShardSpec) -> None:
    """Raises ValueError for tensor ranks, which cannot split such a model, and for the recomputation of attention."""
    if share.tensor > 1:
        raise ValueError(f"{name}: {share.tensor} tensor ranks cannot split it; use tensor 1")
    if share.recomputation == "selective":
        raise ValueError(f"{name}: selective recomputation is for transformers; use none or full")


class Model(Hashable, Protocol):
    """A model that gives the work of its layers on one rank."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> float:
        """Of the whole model."""
        ...

    @property
    def flops(self) -> float:
        """Of one sample, forward and backward, without recomputation, for the utilisation."""
        ...

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """In order; pipeline stages are cut between layers. Raises ValueError for a share that is not possible."""
        ...


class Measured(ABC):
    """A measured step of ranks that hold the whole model, on the device of the measurement.

    samples: of a rank in a step.
    """

    name: str
    samples: int

    def as_it_ran(self, share: ShardSpec) -> None:
        """Raises ValueError for any share but the measured one."""
        if share.tensor > 1 or share.recomputation != "none":
            raise ValueError(f"{self.name}: was measured with whole layers; use tensor 1, recompute none")
        if share.micro_batch != self.samples:
            raise ValueError(
                f"{self.name}: was measured with one pass of {self.samples} samples per rank and step; the batch must "
                "have as many for each device"
            )

    @property
    @abstractmethod
    def after_gradients_s(self) -> float:
        """Seconds from the last gradients to the next step."""

    @property
    def flops(self) -> float:
        """Unknown: a clock does not count operations. So utilisation and memory are unknown, too."""
        return math.nan


@runtime_checkable
class Bucketed(Protocol):
    """A model that knows its buckets of gradients. The gradients of any other model are cut evenly."""

    def buckets(self, bucket_bytes: float, gradient_bytes: int) -> tuple[Bucket, ...]:
        """In the order in which they are sent."""
        ...
