"""What a benchmark is asked to do, and what was measured: plain values that travel as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from netfold.bench.backends import BackendName, parse_backend, unique_labels
from netfold.bench.collectives import parse_collective, parse_redops
from netfold.bench.program import BUCKET_BYTES
from netfold.bench.sizes import parse_dtype
from netfold.plan.model.catalogue import find_model

SMALL_BYTES = 64 << 10
# Up to so many bytes a round is so many calls back to back, and its time is their mean: one alone would measure how
# unevenly the ranks leave the start line.
CALLS = ((1 << 10, 128), (SMALL_BYTES, 32), (4 << 20, 4))


@dataclass(frozen=True)
class BenchEnvironment:
    """Where: `workers` ranks on this machine, or, with rack_rate, on as many hosts of a rack with such links.

    rack_rate, rack_loss, rack_delay: in tc's words; switch: whether netfold's ranks get an aggregator (None: in a rack
    yes, on this machine as NETFOLD_SWITCH says); deadline_s: for everything, from the ranks' start to their end.
    """

    workers: int
    rack_rate: str | None = None
    rack_loss: str = "0%"
    rack_delay: str = "0us"
    switch: bool | None = None
    deadline_s: int = 600

    def __post_init__(self) -> None:
        if self.workers < 1 or self.deadline_s < 1:
            raise ValueError("workers and the deadline must be 1 or more")


@dataclass(frozen=True)
class Trials:
    """What: one collective at some sizes (bytes each), on backends in the order of the command line.

    The same backend may stand twice (an A/A test). check: compare every element of every result.
    """

    collective: str
    backends: list[str]
    sizes: list[int]
    rounds: int = 20
    warmups: int = 5
    dtype: str = "f32"
    check: bool = True
    breakdown: bool = False
    redop: str = "sum"

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("nobody to measure; name one or more backends: --backend netfold --backend gloo")
        if self.rounds < 1 or self.warmups < 0:
            raise ValueError("rounds (-n) must be 1 or more, warm-ups (-w) 0 or more")
        parse_collective(self.collective)
        parse_redops(self.redop)
        self.backend_names()
        item_bytes = parse_dtype(self.dtype).item_bytes
        if min(self.sizes) < item_bytes and self.collective != "barrier":
            raise ValueError(f"{min(self.sizes)} bytes hold no element of {self.dtype} ({item_bytes} bytes each)")

    def backend_names(self) -> list[BackendName]:
        return [parse_backend(backend, label) for backend, label in zip(self.backends, self.labels(), strict=True)]

    def labels(self) -> list[str]:
        return unique_labels(self.backends)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Replay:
    """What: a training step of some models, on backends in the order of the command line (see program.py).

    bucket_bytes: DDP's bucket_cap_mb; shrink: transfers have so many times fewer elements than the models';
    compute_scale: accelerators are so many times as fast as the published ones.
    """

    models: list[str]
    backends: list[str]
    rounds: int = 10
    warmups: int = 1
    bucket_bytes: int = BUCKET_BYTES
    shrink: int = 1
    compute_scale: float = 1.0
    check: bool = True

    def __post_init__(self) -> None:
        if not self.models or not self.backends:
            raise ValueError(
                "nobody to measure; name a model and one or more backends: resnet50 --backend netfold --backend gloo"
            )
        if self.rounds < 1 or self.warmups < 0:
            raise ValueError("rounds (-n) must be 1 or more, warm-ups (-w) 0 or more")
        if self.bucket_bytes < 1 or self.shrink < 1 or self.compute_scale <= 0:
            raise ValueError("a bucket, --shrink and --compute-scale must be above 0, and --shrink a whole number")
        for model in self.models:
            find_model(model)
        self.backend_names()

    def backend_names(self) -> list[BackendName]:
        return [parse_backend(backend, label) for backend, label in zip(self.backends, self.labels(), strict=True)]

    def labels(self) -> list[str]:
        return unique_labels(self.backends)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def calls_a_round(size_bytes: int) -> int:
    return next((calls for most_bytes, calls in CALLS if size_bytes <= most_bytes), 1)


@dataclass(frozen=True)
class Measured:
    """One backend at one size.

    times_ns: a round each, of one call, the slowest rank's; wrong: elements, over all ranks and rounds, None where
    nothing was checked; wire_bytes: a rank each, [sent, received] in one call, medians; call_ns: every rank's calls,
    one by one, and parts_ns: the same calls' [Python, queue, wire], both only where a breakdown was asked for;
    refused: why there are no times. algorithm, wire: what netfold's event record says of the first call; None of
    others. tolerance: how far an element may be from what is expected and not be counted as wrong.
    """

    times_ns: list[int]
    wrong: int | None
    wire_bytes: list[list[int]] | None = None
    call_ns: list[int] | None = None
    parts_ns: list[list[int]] | None = None
    refused: str | None = None
    algorithm: str | None = None
    wire: str | None = None
    tolerance: float = 0.0


@dataclass(frozen=True)
class Replayed:
    """One backend's steps of one model.

    steps: whole steps, the slowest rank's; alone_ns: a step without its transfers, the slowest rank's median of a few;
    late_ns: how late the timer made each start, over all ranks and steps.
    """

    steps: Measured
    alone_ns: int | None
    late_ns: list[int]


@dataclass(frozen=True)
class SizeResult:
    size_bytes: int
    count: int
    backends: list[Measured]


@dataclass(frozen=True)
class Result:
    """versions: of torch and whatever else took part; load: the machine's load average (1 minute) before and after."""

    versions: dict[str, str]
    congestion_control: str
    load: tuple[float, float]
    sizes: list[SizeResult]
