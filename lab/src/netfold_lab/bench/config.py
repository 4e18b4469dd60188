"""The request and the measurements of a benchmark, as plain values that become JSON."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from netfold_lab.bench.backends import parse_backends
from netfold_lab.bench.collectives import parse_collective, parse_redops
from netfold_lab.bench.program import BUCKET_BYTES
from netfold_lab.bench.sizes import parse_dtype
from netfold_plan.model.catalogue import find_model

# A rank's answer.
Message: TypeAlias = dict[str, Any]
SMALL_BYTES = 64 << 10
# (bytes, calls): a round of messages up to this size is that many calls back to back, and its time is their mean.
# The time of a single small call would depend on how evenly the ranks leave the start line.
CALLS = ((1 << 10, 128), (SMALL_BYTES, 32), (4 << 20, 4))


@dataclass(frozen=True)
class BenchEnvironment:
    """The place of a benchmark: this machine or, with rack_rate, a rack with one rank per host.

    Raises ValueError for values that leave nothing to run.
    """

    workers: int
    rack_rate: str | None = None  # of each link, in tc's form
    rack_loss: str = "0%"
    rack_delay: str = "0us"
    switch: bool | None = None  # an aggregator for netfold's ranks; None: in a rack yes, here as NETFOLD_SWITCH says
    deadline_s: float = 600  # for the whole run, from the ranks' start to their end

    def __post_init__(self) -> None:
        if self.workers < 1 or self.deadline_s <= 0:
            raise ValueError("workers must be 1 or more, and the deadline above 0")


@dataclass(frozen=True)
class Trials:
    """A request: one collective at some sizes on some backends. Raises ValueError where it cannot be measured.

    A backend may occur twice (an A/A test).
    """

    collective: str
    backends: list[str]  # in the order of the command line
    sizes: list[int]  # bytes
    rounds: int = 20
    warmups: int = 5
    dtype: str = "f32"
    check: bool = True  # compare every element of every result
    breakdown: bool = False  # keep the Python, queue and wire time of small calls
    redop: str = "sum"

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("no backend to measure; name one or more: --backend netfold --backend gloo")
        _check_rounds(self.rounds, self.warmups)
        parse_backends(self.backends)
        parse_collective(self.collective)
        parse_redops(self.redop)
        item_bytes = parse_dtype(self.dtype).item_bytes
        if min(self.sizes) < item_bytes and self.collective != "barrier":
            raise ValueError(f"{min(self.sizes)} bytes hold no element of {self.dtype} ({item_bytes} bytes each)")


@dataclass(frozen=True)
class Replay:
    """A request: training steps of some models (see program.py) on some backends. Raises ValueError as Trials."""

    models: list[str]
    backends: list[str]  # in the order of the command line
    rounds: int = 10
    warmups: int = 1
    bucket_bytes: int = BUCKET_BYTES  # DDP's bucket_cap_mb
    shrink: int = 1  # divides the elements of every transfer
    compute_scale: float = 1.0  # accelerators are so many times as fast as published
    check: bool = True

    def __post_init__(self) -> None:
        if not self.models or not self.backends:
            raise ValueError(
                "nothing to measure; name a model and one or more backends: resnet50 --backend netfold --backend gloo"
            )
        if self.bucket_bytes < 1 or self.shrink < 1 or self.compute_scale <= 0:
            raise ValueError("a bucket, --shrink and --compute-scale must be above 0, and --shrink a whole number")
        for model in self.models:
            find_model(model)
        _check_rounds(self.rounds, self.warmups)
        parse_backends(self.backends)

    def scales(self) -> dict[str, Any]:
        """Return the arguments of program.build_program."""
        return {"bucket_bytes": self.bucket_bytes, "shrink": self.shrink, "compute_scale": self.compute_scale}


def _check_rounds(rounds: int, warmups: int) -> None:
    if rounds < 1 or warmups < 0:
        raise ValueError("rounds (-n) must be 1 or more, warm-ups (-w) 0 or more")


def calls_a_round(size_bytes: int) -> int:
    return next((calls for most_bytes, calls in CALLS if size_bytes <= most_bytes), 1)


@dataclass
class Measured:
    """The measurements of one backend at one size; `Runner` adds to them round by round."""

    times_ns: list[int] = field(default_factory=list)  # of one call, the slowest rank's; one a round
    wrong: int | None = None  # elements, over all ranks and rounds; None: not checked
    wire_bytes: list[list[int]] | None = None  # a rank each: [sent, received] in one call, medians
    call_ns: list[int] = field(default_factory=list)  # with a breakdown: every call of every rank
    parts_ns: list[list[int]] = field(default_factory=list)  # of the same calls: [Python, queue, wire]; netfold only
    refused: str | None = None  # the backend's reason for having no times
    algorithm: str | None = None  # of the first call, from netfold's event record; None: not netfold
    wire: str | None = None  # likewise, the wire format
    tolerance: float = 0.0  # an element counts as wrong where its error is larger


@dataclass(frozen=True)
class Replayed:
    """One backend's steps of one model."""

    steps: Measured  # whole steps
    alone_ns: int | None  # a step without its transfers: a median, of the slowest rank
    late_ns: list[int]  # how late the timer made each start, over all ranks and steps


@dataclass(frozen=True)
class SizeResult:
    size_bytes: int
    count: int
    backends: list[Measured]
