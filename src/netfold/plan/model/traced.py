"""A model by what its parts were seen to do: a module that was traced, part by part in order of execution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from netfold.plan.model.layer_cost import Bucket, Layer, Matmul, Pass, ShardSpec


@dataclass(frozen=True)
class TensorSize:
    """Numbers of a tensor, or of several: floating-point ones, as many bytes each as the job's precision has, and the
    bytes of all others (indices, masks)."""

    elements: float = 0.0
    other_bytes: float = 0.0

    def __add__(self, more: TensorSize) -> TensorSize:
        return TensorSize(self.elements + more.elements, self.other_bytes + more.other_bytes)

    def bytes(self, item_bytes: int) -> float:
        return self.elements * item_bytes + self.other_bytes


NONE = TensorSize()


@dataclass(frozen=True)
class Kernels:
    """What a pass launches: matrix products, and `count` kernels in all, of which the others move `moved`."""

    matmuls: tuple[Matmul, ...] = ()
    moved: TensorSize = NONE
    count: int = 0

    @property
    def flops(self) -> float:
        return sum(each.flops for each in self.matmuls)


@dataclass(frozen=True)
class Part:
    """A leaf module, or what a module does itself between two of its leaves; of all samples of a trace together.

    kept: until the backward pass. received: what it and all after it need of what was computed before; tensors: how
    many these are.
    """

    name: str
    forward: Kernels
    backward: Kernels
    parameters: int
    kept: TensorSize
    received: TensorSize
    tensors: int


@dataclass(frozen=True)
class Gradient:
    """Of one parameter. part: the index of the part whose backward pass completes it."""

    elements: int
    part: int


# DDP's first bucket is smaller, so that something travels soon (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
_FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Traced:
    """parts, doubled: of `samples` samples, and of twice as many; what others take lies on the line through both.

    gradients: in the order in which the backward pass completes them. notes: what the trace cannot say.
    Compared by identity: it is asked for thousands of times, and large.
    """

    name: str
    samples: int
    parts: tuple[Part, ...]
    doubled: tuple[Part, ...] = field(repr=False)
    gradients: tuple[Gradient, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> float:
        return float(sum(part.parameters for part in self.parts))

    @cached_property
    def flops(self) -> float:
        """Of the products, as they were issued; what a module computes again for itself among them."""
        return sum(part.forward.flops + part.backward.flops for part in self.parts) / self.samples

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """Runs of parts, cut wherever what is handed on is no more than at the places around: at the ends of residual
        blocks, not inside them."""
        return _blocks(self.parts)

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """Parts together, from one place where little is handed on to the next: what a pipeline can be cut into.

        Raises ValueError for tensor ranks, and for selective recomputation, which is for attention.
        """
        if share.tensor > 1:
            raise ValueError(f"{self.name}: {share.tensor} tensor ranks cannot split it; take tensor 1")
        if share.recomputation == "selective":
            raise ValueError(f"{self.name}: selective recomputation is for transformers; take none or full")
        return _layers(self, share)

    def buckets(self, bucket_bytes: float, gradient_bytes: int) -> tuple[Bucket, ...]:
        """As DDP cuts them from its second step on: in the order in which gradients are complete, each closed by the
        gradient that fills it."""
        return _buckets(self, bucket_bytes, gradient_bytes)


@lru_cache(maxsize=64)
def _layers(model: Traced, share: ShardSpec) -> tuple[Layer, ...]:
    further = share.micro_batch / model.samples - 1
    made = {run: _layer(model, run, further, share) for run in set(_alike(model))}
    return tuple(made[run] for run in _alike(model))


@lru_cache(maxsize=64)
def _alike(model: Traced) -> tuple[range, ...]:
    """For each block the first one that does the same: most of a deep model's do, and are worked out once."""
    first: dict[tuple[Part, ...], range] = {}
    found = []
    for run in model.blocks:
        both = (*model.parts[run.start : run.stop], *model.doubled[run.start : run.stop])
        found.append(first.setdefault(tuple(replace(part, name="") for part in both), run))
    return tuple(found)


def _layer(model: Traced, run: range, further: float, share: ShardSpec) -> Layer:
    here = [model.parts[index] for index in run]
    there = [model.doubled[index] for index in run]
    item = share.item_bytes

    def size(low: Iterable[TensorSize], high: Iterable[TensorSize]) -> float:
        return _between(sum(each.bytes(item) for each in low), sum(each.bytes(item) for each in high), further)

    def launched(low: Sequence[Kernels], high: Sequence[Kernels]) -> Pass:
        matmuls = tuple(
            _matmul(one, two, further)
            for each, more in zip(low, high, strict=True)
            for one, two in zip(each.matmuls, more.matmuls, strict=True)
        )
        moved = size((each.moved for each in low), (each.moved for each in high))
        return Pass(matmuls, moved, sum(each.count for each in low))

    forward = launched([each.forward for each in here], [each.forward for each in there])
    backward = launched([each.backward for each in here], [each.backward for each in there])
    received = size([here[0].received], [there[0].received])
    kept = size((each.kept for each in here), (each.kept for each in there))
    full = share.recomputation == "full"
    return Layer(
        name=here[0].name,
        forward=forward,
        backward=backward,
        again=forward if full else Pass(),
        parameters=float(sum(each.parameters for each in here)),
        kept_bytes=min(received, kept) if full else kept,
        input_bytes=received,
        live_bytes=max(0.0, kept - received) if full else 0.0,
    )


def _between(low: float, high: float, further: float) -> float:
    return max(0.0, low + (high - low) * further)


def _matmul(low: Matmul, high: Matmul, further: float) -> Matmul:
    def whole(one: int, two: int) -> int:
        return max(1, round(_between(one, two, further)))

    return Matmul(
        whole(low.m, high.m), whole(low.n, high.n), whole(low.k, high.k), whole(low.count, high.count), low.fused
    )


@lru_cache(maxsize=64)
def _buckets(model: Traced, bucket_bytes: float, gradient_bytes: int) -> tuple[Bucket, ...]:
    layer_of = {part: number for number, run in enumerate(model.blocks) for part in run}
    made: list[Bucket] = []
    elements, most = 0, float(min(_FIRST_BUCKET_BYTES, bucket_bytes))
    for number, gradient in enumerate(model.gradients):
        elements += gradient.elements
        if elements * gradient_bytes >= most or number + 1 == len(model.gradients):
            made.append(Bucket(float(elements), layer_of[gradient.part]))
            elements, most = 0, bucket_bytes
    return tuple(made)


def _blocks(parts: Sequence[Part]) -> tuple[range, ...]:
    sizes = [part.received.elements + part.received.other_bytes for part in parts]
    # In front of the first there is nothing to cut off.
    sizes[0] = float("inf")
    # The ends of each level stretch of sizes, and whether it lies no higher than what is beside it.
    starts = [0, *(index for index in range(1, len(parts)) if sizes[index] != sizes[index - 1]), len(parts)]
    cuts = [0]
    for before, (start, end) in zip([0, *starts], pairwise(starts), strict=False):
        lower_left = start == 0 or sizes[before] > sizes[start]
        lower_right = end == len(parts) or sizes[end] > sizes[start]
        if lower_left and lower_right:
            cuts += [index for index in range(start, end) if index > 0]
    return tuple(range(start, end) for start, end in pairwise([*cuts, len(parts)]) if end > start)
