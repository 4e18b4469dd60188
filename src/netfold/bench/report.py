"""A benchmark's result as rows: nccl-tests' columns, the ratio to a peer, a spread for both."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from netfold.bench.config import Config, Measured, Result, SizeResult, labels
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
    """algbw and busbw as nccl-tests defines them (bytes a second); wire_bytes: sent and received, a rank's mean."""

    size_bytes: int
    count: int
    dtype: str
    redop: str
    backend: str
    times_ns: list[int]
    time_ns: Spread
    algbw: float
    busbw: float
    goodput_bits: float
    wrong: int
    wire_bytes: float | None
    wire_bytes_by_rank: list[list[int]] | None
    ratio: Ratio | None
    breakdown: Breakdown | None


def make_rows(config: Config, result: Result) -> list[Row]:
    return [_row(config, size, index) for size in result.sizes for index in range(len(config.backends))]


def total_wrong(rows: Sequence[Row]) -> int:
    return sum(row.wrong for row in rows)


def describe_run(config: Config, result: Result, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything about a run, for JSON: times in ns, bandwidths in bytes a second, goodput in bits a second."""
    return {
        "command": sys.argv,
        "machine": {**describe_machine(), "tcp_congestion_control": result.congestion_control},
        "versions": describe_versions(result.torch_version),
        "config": config.to_json(),
        "rows": [asdict(row) for row in rows],
    }


def _row(config: Config, size: SizeResult, index: int) -> Row:
    measured = size.backends[index]
    time_ns = spread(measured.times_ns)
    algbw = size.size_bytes / time_ns.median * 1e9
    wire = measured.wire_bytes
    return Row(
        size_bytes=size.size_bytes,
        count=size.count,
        dtype=config.dtype,
        redop="sum",
        backend=labels(config.backends)[index],
        times_ns=measured.times_ns,
        time_ns=time_ns,
        algbw=algbw,
        busbw=algbw * 2 * (config.workers - 1) / config.workers,
        goodput_bits=algbw * 8,
        wrong=measured.wrong,
        wire_bytes=statistics.mean(sum(rank) for rank in wire) if wire else None,
        wire_bytes_by_rank=wire,
        ratio=_ratio(config, size, index),
        breakdown=_breakdown(measured),
    )


def _ratio(config: Config, size: SizeResult, index: int) -> Ratio | None:
    if len(config.backends) < 2:
        return None
    peer = 1 if index == 0 else 0
    ratios = paired_ratios(size.backends[peer].times_ns, size.backends[index].times_ns)
    return Ratio(labels(config.backends)[peer], ratios, spread(ratios))


def _breakdown(measured: Measured) -> Breakdown | None:
    if measured.call_ns is None:
        return None
    parts: list[float] | list[None] = [None, None, None]
    if measured.parts_ns is not None:
        parts = [statistics.median(column) for column in zip(*measured.parts_ns, strict=True)]
    return Breakdown(len(measured.call_ns), statistics.median(measured.call_ns), *parts)
