"""A benchmark's result as rows: nccl-tests' columns, the ratio to a peer, a spread for both."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from netfold.bench.collectives import parse_collective
from netfold.bench.config import BenchEnvironment, Measured, Result, SizeResult, Trials
from netfold.bench.machine import describe_machine, describe_versions
from netfold.bench.spread import Spread, paired_ratios, spread


@dataclass(frozen=True)
class Ratio:
    """The peer's time over ours, round by round: above 1 we are the faster."""

    peer: str
    rounds: list[float]
    spread: Spread


@dataclass(frozen=True)
class Breakdown:
    """Medians over all ranks' single calls, each on its own: they need not add up.

    The parts are None for a backend that keeps no event records.
    """

    calls: int
    call_ns: float
    python_ns: float | None
    queue_ns: float | None
    wire_ns: float | None


@dataclass(frozen=True)
class Row:
    """algbw and busbw as nccl-tests defines them (bytes a second); wire_bytes: sent and received, a rank's mean.

    refused: the backend's own sentence; its times and bandwidths are None then. algorithm, wire: of netfold alone.
    tolerance: see config.Measured.
    """

    collective: str
    size_bytes: int
    count: int
    dtype: str
    redop: str
    backend: str
    times_ns: list[int]
    time_ns: Spread | None
    algbw: float | None
    busbw: float | None
    goodput_bits: float | None
    wrong: int | None
    wire_bytes: float | None
    wire_bytes_by_rank: list[list[int]] | None
    ratio: Ratio | None
    breakdown: Breakdown | None
    refused: str | None
    algorithm: str | None
    wire: str | None
    tolerance: float


def make_rows(place: BenchEnvironment, trials: Trials, result: Result) -> list[Row]:
    return [_row(place, trials, size, index) for size in result.sizes for index in range(len(trials.backends))]


def total_wrong(rows: Sequence[Row]) -> int:
    return sum(row.wrong or 0 for row in rows)


def describe_run(place: BenchEnvironment, trials: Trials, result: Result, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything about a run, for JSON: times in ns, bandwidths in bytes a second, goodput in bits a second."""
    return {
        "command": sys.argv,
        "machine": {**describe_machine(), "tcp_congestion_control": result.congestion_control, "load": result.load},
        "versions": describe_versions(result.versions),
        "place": asdict(place),
        "config": trials.to_json(),
        "rows": [asdict(row) for row in rows],
    }


def _row(place: BenchEnvironment, trials: Trials, size: SizeResult, index: int) -> Row:
    measured = size.backends[index]
    collective = parse_collective(trials.collective)
    time_ns = spread(measured.times_ns) if measured.times_ns else None
    # As nccl-tests: of the elements that really travelled, which are whole parts.
    moved = size.size_bytes
    algbw = None if time_ns is None or collective.name == "barrier" else moved / time_ns.median * 1e9
    wire = measured.wire_bytes
    return Row(
        collective=collective.name,
        size_bytes=moved,
        count=size.count,
        dtype=trials.dtype,
        redop=trials.redop if collective.reduces else "none",
        backend=trials.labels()[index],
        times_ns=measured.times_ns,
        time_ns=time_ns,
        algbw=algbw,
        busbw=None if algbw is None else algbw * collective.bus_factor(place.workers),
        goodput_bits=None if algbw is None else algbw * 8,
        wrong=measured.wrong,
        wire_bytes=statistics.mean(sum(rank) for rank in wire) if wire else None,
        wire_bytes_by_rank=wire,
        ratio=_ratio(trials, size, index),
        breakdown=_breakdown(measured),
        refused=measured.refused,
        algorithm=measured.algorithm,
        wire=measured.wire,
        tolerance=measured.tolerance,
    )


def _ratio(trials: Trials, size: SizeResult, index: int) -> Ratio | None:
    """To the first backend, or of the first to the second."""
    if len(trials.backends) < 2:
        return None
    peer = 1 if index == 0 else 0
    if not size.backends[peer].times_ns or not size.backends[index].times_ns:
        return None
    ratios = paired_ratios(size.backends[peer].times_ns, size.backends[index].times_ns)
    return Ratio(trials.labels()[peer], ratios, spread(ratios))


def _breakdown(measured: Measured) -> Breakdown | None:
    if measured.call_ns is None:
        return None
    parts: list[float] | list[None] = [None, None, None]
    if measured.parts_ns is not None:
        parts = [statistics.median(column) for column in zip(*measured.parts_ns, strict=True)]
    return Breakdown(len(measured.call_ns), statistics.median(measured.call_ns), *parts)
