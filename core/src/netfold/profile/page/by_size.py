"""Operations by the size of their messages: a table with all values, bars, and scatter plots of single operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from netfold import units
from netfold.page.chart import SIDE, Axis, Chart
from netfold.page.table import Bar, Column, table
from netfold.profile.columns import Floats, completes
from netfold.profile.findings import Row
from netfold.profile.record import Records
from netfold.profile.run import Run

# Cells of a scatter plot, across and up, and shades of a cell.
_ACROSS, _UP = 48, 32
_SHADES = 8
_BACKEND = "the backend does not report it"
_SUBMITTED = "only the submission to a device was recorded, not how long the operation took there"


def _submitted_or(reason: str) -> Callable[[Row], str]:
    return lambda row: _SUBMITTED if row.submitted_only else reason


def _size(row: Row) -> str:
    return units.size_range(row.above_bytes, row.to_bytes)


COLUMNS: tuple[Column[Row], ...] = (
    Column("operation", "name"),
    Column("size", _size),
    Column("count", "count", units.count, "operations of one rank (the mean over ranks)"),
    Column("bytes", "bytes", units.size, "of all their tensors, of one rank"),
    Column("total", "total_s", units.seconds, "time from start to end, summed, of one rank", _SUBMITTED),
    Column("share", "share", units.ratio, "of the total time of all rows", _SUBMITTED),
    Column("mean", "mean_s", units.seconds, "time of one operation, over all ranks", _SUBMITTED),
    Column("p50", "p50_s", units.seconds, "half of all ranks' operations took no longer", _SUBMITTED),
    Column("p99", "p99_s", units.seconds, "99 of 100 took no longer", _SUBMITTED),
    Column("algbw", "algbw", units.rate, "bytes over total time (here a GB is 10⁹ bytes)", _SUBMITTED),
    Column("busbw", "busbw", units.rate, "algbw times nccl-tests' factor: the rate that a link must carry", _SUBMITTED),
    Column(
        "exposed",
        "exposed_s",
        units.seconds,
        "part of the total in which the training thread did not compute, of one rank",
        _submitted_or("the training thread was not watched"),
    ),
    Column("queue", "queue_s", units.seconds, "between submission and start, summed, of one rank", _SUBMITTED),
    Column(
        "skew",
        "skew_s",
        units.seconds,
        "between a rank's own start and the last rank's, summed, of one rank",
        _submitted_or("the ranks' starts could not be compared"),
    ),
    Column("algorithms", "algorithms", units.counts, "operations by algorithm, over all ranks"),
    Column("wire formats", "wires", units.counts, "operations by number format, over all ranks"),
    Column("wire bytes", "wire_bytes", units.size, "sent by one rank, with headers and retransmissions", _BACKEND),
    Column("resent", "retransmissions", units.count, "retransmissions of one rank", _BACKEND),
    Column("registered", "registration_hits", units.count, "buffers of one rank already registered", _BACKEND),
    Column("not registered", "registration_misses", units.count, "buffers of one rank registered first", _BACKEND),
    Column("errors", "errors", units.count, "operations that failed, over all ranks"),
)


def rows(each: Sequence[Row]) -> str:
    """The table of all rows."""
    caption = "Every operation by the size of its messages. A rank's numbers are the mean over ranks."
    return table("rows", caption, COLUMNS, each, heads=2)


def pictures(each: Sequence[Row]) -> str:
    """A table of bars: share, busbw and the spread of times of each row; empty if no row has times."""
    each = [row for row in each if not row.submitted_only]
    if not each:
        return ""
    low, high = _decades(each)
    columns: tuple[Column[Row], ...] = (
        Column("operation", lambda row: f"{row.operation}, {_size(row)}"),
        Column("share", "share", units.ratio, bar=True),
        Column("busbw", "busbw", units.rate, bar=True),
        Column(
            "time of one: p50 to p99",
            lambda row: (row.p50_s, row.p99_s),
            lambda times: " to ".join(map(units.seconds, times)),
            bar=lambda row: _spread(row, low, high),
        ),
    )
    caption = (
        "The same rows as bars: share of communication time, bus bandwidth, and the time of one operation from the "
        "median to the 99th percentile. A mark is at the mean. The scale is logarithmic, from "
        f"{units.seconds(10.0**low)} to {units.seconds(10.0**high)}."
    )
    return table("by-size", caption, columns, each)


def _spread(row: Row, low: int, high: int) -> Bar | None:
    times = _times(row)
    if len(times) < 3:
        return None
    p50, mean, p99 = (min(1.0, max(0.0, (math.log10(value) - low) / (high - low))) for value in times)
    return p50, p99, mean


def _times(row: Row) -> list[float]:
    """Median, mean and 99th percentile, without values that have no logarithm."""
    values = (row.p50_s, row.mean_s, row.p99_s)
    return [value for value in values if value is not None and value > 0 and math.isfinite(value)]


def _decades(each: Sequence[Row]) -> tuple[int, int]:
    """The exponents of the powers of 10 around all times."""
    times = [value for row in each for value in _times(row)]
    low = math.floor(math.log10(min(times, default=1e-6)))
    return low, max(low + 1, math.ceil(math.log10(max(times, default=1.0))))


def scatter(run: Run) -> str:
    """A scatter plot for each kind of operation: time by size. Operations without bytes are left out."""
    by_name = _operations(run)
    if not by_name:
        return "<p>No operation of this run has both bytes and a time.</p>"
    sizes = np.concatenate([each["bytes"] for parts in by_name.values() for each in parts])
    times = np.concatenate([_time_s(each) for parts in by_name.values() for each in parts])
    across = Axis.holding("bytes of one rank's tensor", int(sizes.min()), int(sizes.max()), units.size, base=2)
    up = Axis.holding("time", times.min(), times.max(), units.seconds, base=10)
    figures = "".join(
        _scatter(name, parts, across, up)
        for name, parts in sorted(by_name.items(), key=lambda pair: -sum(len(part) for part in pair[1]))
    )
    return (
        f'<div class="charts">{figures}</div><p class="quiet">The time of every operation by its size, both on '
        "logarithmic scales. A stronger colour means more operations. Operations without bytes (a barrier) are left "
        "out.</p>"
    )


def _operations(run: Run) -> Mapping[str, list[Records]]:
    """By name, the operations with bytes and a recorded end; one part for each rank."""
    found: dict[str, list[Records]] = {}
    for trace in run.traces:
        with_bytes = trace.operations[(trace.operations["bytes"] > 0) & completes(trace)]
        for number in np.unique(with_bytes["operation"]):
            name = trace.metadata.name_of("operation", int(number))
            found.setdefault(name, []).append(with_bytes[with_bytes["operation"] == number])
    return found


def _time_s(operations: Records) -> Floats:
    taken: Floats = np.maximum(operations["finished_ns"] - operations["started_ns"], 1) * 1e-9
    return taken


def _scatter(name: str, parts: list[Records], across: Axis, up: Axis) -> str:
    counts = np.zeros((_ACROSS, _UP))
    x_edges = np.geomspace(across.low, across.high, _ACROSS + 1)
    y_edges = np.geomspace(up.low, up.high, _UP + 1)
    for part in parts:
        # Rounding must not put a value outside its own axis.
        size = np.clip(part["bytes"].astype(np.float64), x_edges[0], x_edges[-1])
        counts += np.histogram2d(size, np.clip(_time_s(part), y_edges[0], y_edges[-1]), bins=(x_edges, y_edges))[0]
    # One path for each shade and one unit square for each cell: a full plot takes 20 KB of the page.
    shade = np.ceil(_SHADES * np.log1p(counts) / np.log1p(counts.max()))
    marks = "".join(
        f'<path opacity="{0.2 + 0.8 * each / _SHADES:.2f}" d="'
        + "".join(f"M{x} {_UP - 1 - y}h1v1h-1z" for x, y in zip(*np.nonzero(shade == each), strict=True))
        + '"/>'
        for each in range(1, _SHADES + 1)
        if (shade == each).any()
    )
    chart = Chart(across, up)
    chart.svg(f'<g class="cloud ink-0" transform="scale({SIDE / _ACROSS:.4f} {SIDE / _UP:.4f})">{marks}</g>')
    return chart.render(
        f"{name}: time by size of all operations; the table of all rows has the numbers",
        f"{name}, {units.count(sum(map(len, parts)))} operations of all ranks",
    )
