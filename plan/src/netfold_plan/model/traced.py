"""A torch module as a trace shows it, part by part in order of execution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from netfold_plan.model.layer_cost import Bucket, Layer, Matmul, Pass, ShardSpec, check_unsplit
from netfold_plan.shared_rules import bucket_ends


@dataclass(frozen=True)
class TensorSize:
    """The size of one tensor or several.

    elements: of floating-point tensors, each with the bytes of the job's precision. other_bytes: of indices and masks.
    """

    elements: float = 0.0
    other_bytes: float = 0.0

    def __add__(self, more: TensorSize) -> TensorSize:
        return TensorSize(self.elements + more.elements, self.other_bytes + more.other_bytes)

    def bytes(self, item_bytes: int) -> float:
        return self.elements * item_bytes + self.other_bytes


NONE = TensorSize()


@dataclass(frozen=True)
class Kernels:
    """The kernels of a pass: matrix products, and `count` kernels in all; the other ones move `moved`."""

    matmuls: tuple[Matmul, ...] = ()
    moved: TensorSize = NONE
    count: int = 0

    @property
    def flops(self) -> float:
        return sum(each.flops for each in self.matmuls)


@dataclass(frozen=True)
class Part:
    """A leaf module, or a module's own work between two leaves; for all samples of a trace together.

    kept: until the backward pass.
    received: earlier results that this part and all later ones need. tensors: how many tensors these are.
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
    """The gradient of one parameter. part: the index of the part whose backward pass completes it."""

    elements: int
    part: int


# DDP's first bucket is smaller, so that it is sent early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
_FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Traced:
    """parts: for `samples` samples. doubled: for twice as many; other numbers are on the line through both.

    gradients: in the order in which the backward pass completes them. notes: what the trace does not show.
    Compared by identity: the search hashes it thousands of times, and it is large.
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
        """Of the products as issued, including a module's own recomputation."""
        return sum(part.forward.flops + part.backward.flops for part in self.parts) / self.samples

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """Runs of parts, cut where no more is handed on than at the positions around: between residual blocks."""
        return _blocks(self.parts)

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """One layer per block: a pipeline is cut between blocks."""
        check_unsplit(self.name, share)
        return _layers(self, share)

    def buckets(self, bucket_bytes: float, gradient_bytes: int) -> tuple[Bucket, ...]:
        """DDP's buckets from its second step on: in the order in which gradients are completed."""
        return _buckets(self, bucket_bytes, gradient_bytes)


@lru_cache(maxsize=64)
def _layers(model: Traced, share: ShardSpec) -> tuple[Layer, ...]:
    further = share.micro_batch / model.samples - 1
    made = {run: _layer(model, run, further, share) for run in set(_first_equal(model))}
    return tuple(made[run] for run in _first_equal(model))


@lru_cache(maxsize=64)
def _first_equal(model: Traced) -> tuple[range, ...]:
    """For each block the first equal block: a deep model repeats its blocks, and each is computed once."""
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
    sizes = [gradient.elements * gradient_bytes for gradient in model.gradients]
    ends = bucket_ends(sizes, bucket_bytes, min(_FIRST_BUCKET_BYTES, bucket_bytes))
    runs = [model.gradients[begin:end] for begin, end in pairwise([0, *ends])]
    return tuple(Bucket(float(sum(each.elements for each in run)), layer_of[run[-1].part]) for run in runs)


def _blocks(parts: Sequence[Part]) -> tuple[range, ...]:
    sizes = [part.received.elements + part.received.other_bytes for part in parts]
    # Nothing is cut off before the first part.
    sizes[0] = float("inf")
    # The ends of each run of equal sizes; it is a cut where the sizes on both sides are larger.
    starts = [0, *(index for index in range(1, len(parts)) if sizes[index] != sizes[index - 1]), len(parts)]
    cuts = [0]
    for before, (start, end) in zip([0, *starts], pairwise(starts), strict=False):
        lower_left = start == 0 or sizes[before] > sizes[start]
        lower_right = end == len(parts) or sizes[end] > sizes[start]
        if lower_left and lower_right:
            cuts += [index for index in range(start, end) if index > 0]
    return tuple(range(start, end) for start, end in pairwise([*cuts, len(parts)]) if end > start)
