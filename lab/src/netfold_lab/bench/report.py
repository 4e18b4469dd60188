"""A benchmark's result as rows: nccl-tests' columns, the ratio to a peer, a spread for both."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from netfold_lab.bench.backends import unique_labels
from netfold_lab.bench.collectives import parse_collective
from netfold_lab.bench.config import BenchEnvironment, Measured, Replay, SizeResult, Trials
from netfold_lab.bench.spread import Spread, paired_ratios, spread


@dataclass(frozen=True)
class Ratio:
    """The peer's time over the row's, round by round: above 1 the row's backend is faster."""

    peer: str
    rounds: list[float]
    spread: Spread


@dataclass(frozen=True)
class Breakdown:
    """Medians over all ranks' single calls. Each is a median of its own, so the parts need not add up.

    The parts are None for a backend that keeps no event records.
    """

    calls: int
    call_ns: float
    python_ns: float | None = None
    queue_ns: float | None = None
    wire_ns: float | None = None


@dataclass(frozen=True)
class Row:
    """One backend at one size. algbw and busbw as nccl-tests defines them, in bytes per second."""

    collective: str
    size_bytes: int
    count: int
    dtype: str
    redop: str
    backend: str
    times_ns: list[int]
    time_ns: Spread | None  # None, as all that follows from times, where the backend refused
    algbw: float | None
    busbw: float | None
    goodput_bits: float | None
    wrong: int | None
    wire_bytes: float | None  # sent and received, the mean over the ranks
    wire_bytes_by_rank: list[list[int]] | None
    ratio: Ratio | None
    breakdown: Breakdown | None
    refused: str | None  # the backend's own sentence
    algorithm: str | None  # netfold's
    wire: str | None  # netfold's
    tolerance: float  # an element counts as wrong where its error is larger


def make_rows(place: BenchEnvironment, trials: Trials, sizes: Sequence[SizeResult]) -> list[Row]:
    return [_row(place, trials, size, index) for size in sizes for index in range(len(trials.backends))]


def total_wrong(rows: Sequence[Any]) -> int:
    """Return the wrong elements of all rows, which are Row or StepRow."""
    return sum(row.wrong or 0 for row in rows)


def describe_run(
    described: dict[str, Any], trials: Trials | Replay, rows: Sequence[Any], **more: Any
) -> dict[str, Any]:
    """Return everything about a run, for JSON: times in ns, bandwidths in bytes/s, goodput in bits/s.

    described: by `Runner.describe`.
    """
    return {
        # Without the folder in which this machine has the command.
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **described,
        "config": asdict(trials),
        **more,
        "rows": [asdict(row) for row in rows],
    }


def ratio_of(backends: Sequence[str], times_ns: Sequence[list[int]], index: int) -> Ratio | None:
    """Return a backend's ratio to the first backend, or the first's to the second. None where one has no times."""
    peer = 1 if index == 0 else 0
    if len(backends) < 2 or not times_ns[peer] or not times_ns[index]:
        return None
    ratios = paired_ratios(times_ns[peer], times_ns[index])
    return Ratio(unique_labels(backends)[peer], ratios, spread(ratios))


def _row(place: BenchEnvironment, trials: Trials, size: SizeResult, index: int) -> Row:
    measured = size.backends[index]
    collective = parse_collective(trials.collective)
    time_ns = spread(measured.times_ns) if measured.times_ns else None
    algbw = None
    if time_ns is not None and collective.name != "barrier":
        algbw = size.size_bytes / time_ns.median * 1e9
    wire = measured.wire_bytes
    return Row(
        collective=collective.name,
        size_bytes=size.size_bytes,
        count=size.count,
        dtype=trials.dtype,
        redop=trials.redop if collective.reduces else "none",
        backend=unique_labels(trials.backends)[index],
        times_ns=measured.times_ns,
        time_ns=time_ns,
        algbw=algbw,
        busbw=None if algbw is None else algbw * collective.bus_factor(place.workers),
        goodput_bits=None if algbw is None else algbw * 8,
        wrong=measured.wrong,
        wire_bytes=statistics.mean(sum(rank) for rank in wire) if wire else None,
        wire_bytes_by_rank=wire,
        ratio=ratio_of(trials.backends, [one.times_ns for one in size.backends], index),
        breakdown=_breakdown(measured),
        refused=measured.refused,
        algorithm=measured.algorithm,
        wire=measured.wire,
        tolerance=measured.tolerance,
    )


def _breakdown(measured: Measured) -> Breakdown | None:
    if not measured.call_ns:
        return None
    parts = [statistics.median(column) for column in zip(*measured.parts_ns, strict=True)]
    return Breakdown(len(measured.call_ns), statistics.median(measured.call_ns), *parts)
