"""What a benchmark is asked to do, and what its workers hand back: plain values that travel as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from netfold.bench.sizes import parse_dtype

# Up to here a round is several calls back to back and the round's time is their mean: one alone would measure
# how unevenly the workers leave the barrier before it.
SMALL_BYTES = 64 << 10
SMALL_CALLS = 32


@dataclass(frozen=True)
class Config:
    """backends: torch's names, in the order of the command line; the same one may stand twice (an A/A test).

    sizes: bytes each; rack_rate: a rack's links in tc's words, None for this machine's loopback; rack_loss: of
    those links; deadline_s: for everything, from the workers' start to their end.
    """

    backends: list[str]
    workers: int
    sizes: list[int]
    rounds: int = 20
    warmups: int = 5
    dtype: str = "f32"
    breakdown: bool = False
    rack_rate: str | None = None
    rack_loss: str = "0%"
    deadline_s: int = 600

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("no backend to measure; name one or more: --backend netfold --backend gloo")
        if self.workers < 1 or self.rounds < 1 or self.warmups < 0 or self.deadline_s < 1:
            raise ValueError("workers, rounds (-n) and the deadline must be 1 or more, warm-ups (-w) 0 or more")
        item_bytes = parse_dtype(self.dtype).item_bytes
        if min(self.sizes) < item_bytes:
            raise ValueError(f"{min(self.sizes)} bytes hold no element of {self.dtype} ({item_bytes} bytes each)")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def labels(backends: Sequence[str]) -> list[str]:
    """The backends' names, with a number where one stands more than once: gloo, gloo#2."""
    seen: dict[str, int] = {}
    result = []
    for backend in backends:
        seen[backend] = seen.get(backend, 0) + 1
        result.append(backend if seen[backend] == 1 else f"{backend}#{seen[backend]}")
    return result


def calls_a_round(size_bytes: int) -> int:
    return SMALL_CALLS if size_bytes <= SMALL_BYTES else 1


@dataclass(frozen=True)
class Measured:
    """One backend at one size.

    times_ns: a round each, of one call, the slowest rank's; wrong: elements, over all ranks and rounds;
    wire_bytes: a rank each, [sent, received] in one call, medians; call_ns: every rank's calls, one by one, and
    parts_ns: the same calls' [Python, queue, wire], both only where a breakdown was asked for.
    """

    times_ns: list[int]
    wrong: int
    wire_bytes: list[list[int]] | None
    call_ns: list[int] | None
    parts_ns: list[list[int]] | None


@dataclass(frozen=True)
class SizeResult:
    size_bytes: int
    count: int
    backends: list[Measured]


@dataclass(frozen=True)
class Result:
    torch_version: str
    congestion_control: str
    sizes: list[SizeResult]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Result":
        sizes = [
            SizeResult(size["size_bytes"], size["count"], [Measured(**one) for one in size["backends"]])
            for size in data["sizes"]
        ]
        return Result(data["torch_version"], data["congestion_control"], sizes)
