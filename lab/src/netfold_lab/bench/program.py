"""A training step of one rank as a list of acts: computing, and the start and end of transfers. Pure.

Work is counted in FLOPs. A layer's backward pass has twice the FLOPs of its forward pass; a frozen layer has none. A
step's published time is spread over all FLOPs, and includes the update of the parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from netfold_plan.model.catalogue import ITEM_BYTES, Layer, Model

# torch's DistributedDataParallel: the first bucket is a small one, so the first transfer starts early.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
_BACKWARD = 2


@dataclass(frozen=True)
class Compute:
    """The accelerator computes for this time."""

    duration_ns: int


@dataclass(frozen=True)
class Start:
    """A transfer starts when the accelerator has done all acts before."""

    transfer: int


@dataclass(frozen=True)
class Await:
    """The accelerator waits until the transfer is done."""

    transfer: int


Act: TypeAlias = Compute | Start | Await


@dataclass(frozen=True)
class Transfer:
    collective: str
    count: int  # f32 elements of one rank


@dataclass(frozen=True)
class Program:
    transfers: tuple[Transfer, ...]
    acts: tuple[Act, ...]

    @property
    def compute_ns(self) -> int:
        """The duration of the step where transfers take no time."""
        return sum(act.duration_ns for act in self.acts if isinstance(act, Compute))


def build_program(
    model: Model, *, bucket_bytes: int = BUCKET_BYTES, shrink: int = 1, compute_scale: float = 1.0
) -> Program:
    """Return a model's step.

    bucket_bytes: DDP's bucket_cap_mb.
    shrink: divides the elements of every transfer. Buckets are cut at the model's own sizes, so neither their number
    nor their moments change.
    compute_scale: the speed of the accelerator over the published one's.
    """
    step = _Step(model, model.compute_s / compute_scale * 1e9, shrink)
    exchange = model.exchange
    values = model.exchange_bytes // ITEM_BYTES
    if exchange is not None:
        looked_up = step.start("all_to_all", values)
    for layer in model.layers:
        if exchange is not None and layer.name == exchange.before:
            step.wait_for(looked_up)
        step.compute(layer.flops)
    buckets = [sum(bucket) for bucket in gradient_buckets(model, bucket_bytes)]
    ready = 0
    for layer in reversed(model.layers):
        step.compute(backward_flops(layer))
        if exchange is not None and layer.name == exchange.before:
            step.start("all_to_all", values)
        ready += sum(gradients(layer))
        while buckets and ready >= buckets[0]:
            ready -= buckets[0]
            step.start("all_reduce", buckets.pop(0))
    return step.program()


def backward_flops(layer: Layer) -> int:
    return 0 if layer.frozen else _BACKWARD * layer.flops


def gradients(layer: Layer) -> list[int]:
    """Return the elements of each gradient, in the order of their computation: a layer's last parameter first."""
    return [] if layer.frozen else layer.counts[::-1]


def gradient_buckets(model: Model, bucket_bytes: int = BUCKET_BYTES) -> list[list[int]]:
    """Return the elements of each gradient, a list a bucket, in the order in which DDP's reducer sends them.

    DDP does so from its second step on, when it has cut its buckets again by the order of the gradients.
    """
    return cut_buckets(
        (count for layer in reversed(model.layers) for count in gradients(layer)),
        min(FIRST_BUCKET_BYTES, bucket_bytes),
        bucket_bytes,
    )


def cut_buckets(counts: Iterable[int], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Cut buckets as torch's reducer: a bucket is full as soon as it reaches or passes its size."""
    buckets: list[list[int]] = [[]]
    for count in counts:
        cap_bytes = first_bytes if len(buckets) == 1 else bucket_bytes
        if sum(buckets[-1]) * ITEM_BYTES >= cap_bytes:
            buckets.append([])
        buckets[-1].append(count)
    return buckets


class _Step:
    """Collects acts. Work adds up until a transfer starts or is awaited."""

    def __init__(self, model: Model, compute_ns: float, shrink: int) -> None:
        self._ns_a_flop = compute_ns / sum(layer.flops + backward_flops(layer) for layer in model.layers)
        self._shrink = shrink
        self._flops = 0
        self._passed_ns = 0
        self._transfers: list[Transfer] = []
        self._acts: list[Act] = []

    def compute(self, flops: int) -> None:
        self._flops += flops

    def start(self, collective: str, count: int) -> int:
        self._settle()
        self._transfers.append(Transfer(collective, max(1, round(count / self._shrink))))
        self._acts.append(Start(len(self._transfers) - 1))
        return len(self._transfers) - 1

    def wait_for(self, transfer: int) -> None:
        self._settle()
        self._acts.append(Await(transfer))

    def program(self) -> Program:
        self._settle()
        awaited = {act.transfer for act in self._acts if isinstance(act, Await)}
        rest = [Await(index) for index in range(len(self._transfers)) if index not in awaited]
        return Program(tuple(self._transfers), (*self._acts, *rest))

    def _settle(self) -> None:
        # Each duration is a difference of rounded sums, so rounding errors do not add up.
        now_ns = round(self._flops * self._ns_a_flop)
        if now_ns > self._passed_ns:
            self._acts.append(Compute(now_ns - self._passed_ns))
        self._passed_ns = now_ns
