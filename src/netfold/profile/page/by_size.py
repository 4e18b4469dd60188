"""What each operation did, by the size of its messages: the table with everything, and the three pictures of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from netfold.profile.findings import Row
from netfold.profile.page import units
from netfold.profile.page.table import Bar, Column, of_largest, table, times_taken

_BACKEND = "the backend does not say"
_SUBMITTED = "only the submission to a device was recorded, not how long the operation took there"
_NAMES: tuple[Column[Row], ...] = (
    Column("operation", lambda row: row.name),
    Column("size", lambda row: units.bucket(row.above_bytes, row.to_bytes)),
)

COLUMNS: tuple[Column[Row], ...] = (
    *_NAMES,
    Column("count", lambda row: row.count, units.count, "operations, of one rank (the mean over ranks)"),
    Column("bytes", lambda row: row.bytes, units.size, "of all their tensors, of one rank"),
    Column(
        "total", lambda row: row.total_s, units.seconds, "time from start to end, added up, of one rank", _SUBMITTED
    ),
    Column("share", lambda row: row.share, units.ratio, "of the total time of all rows", _SUBMITTED),
    Column("mean", lambda row: row.mean_s, units.seconds, "time of one operation, over all ranks", _SUBMITTED),
    Column("p50", lambda row: row.p50_s, units.seconds, "half of all ranks' operations took no longer", _SUBMITTED),
    Column("p99", lambda row: row.p99_s, units.seconds, "99 of 100 took no longer", _SUBMITTED),
    Column("algbw", lambda row: row.algbw, units.rate, "bytes over total time (a GB is 10⁹ bytes here)", _SUBMITTED),
    Column(
        "busbw",
        lambda row: row.busbw,
        units.rate,
        "algbw times nccl-tests' factor for the operation: what a link would have to carry",
        _SUBMITTED,
    ),
    Column(
        "exposed",
        lambda row: row.exposed_s,
        units.seconds,
        "part of the total in which the training thread did not compute, of one rank",
        lambda row: _SUBMITTED if row.submitted_only else "nobody watched the training thread",
    ),
    Column(
        "queue",
        lambda row: row.queue_s,
        units.seconds,
        "between submission and start, added up, of one rank",
        _SUBMITTED,
    ),
    Column(
        "skew",
        lambda row: row.skew_s,
        units.seconds,
        "between a rank's own start and the last rank's, added up, of one rank",
        lambda row: _SUBMITTED if row.submitted_only else "the ranks' starts could not be compared",
    ),
    Column("algorithms", lambda row: row.algorithms, times_taken, "how often each was taken, over all ranks"),
    Column("wire formats", lambda row: row.wires, times_taken, "how often values travelled as which, over all ranks"),
    Column(
        "wire bytes",
        lambda row: row.wire_bytes,
        units.size,
        "what one rank sent, headers and retransmissions included",
        _BACKEND,
    ),
    Column("resent", lambda row: row.retransmissions, units.count, "retransmissions of one rank", _BACKEND),
    Column(
        "registered",
        lambda row: row.registration_hits,
        units.count,
        "buffers that were known to the transport already, of one rank",
        _BACKEND,
    ),
    Column(
        "not registered",
        lambda row: row.registration_misses,
        units.count,
        "buffers that had to be made known first, of one rank",
        _BACKEND,
    ),
    Column("errors", lambda row: row.errors, units.count, "operations that failed, over all ranks"),
)


def rows(each: Sequence[Row]) -> str:
    caption = "Every operation by the size of its messages. A rank's numbers are the mean over ranks."
    return table("rows", caption, COLUMNS, each, heads=2)


def pictures(each: Sequence[Row]) -> str:
    """Share, busbw and the spread of one operation's time, a line a row; empty where no row has times."""
    each = [row for row in each if not row.submitted_only]
    if not each:
        return ""
    columns: tuple[Column[Row], ...] = (
        Column("operation", lambda row: f"{row.operation}, {units.bucket(row.above_bytes, row.to_bytes)}"),
        Column("share", lambda row: row.share, units.ratio, bar=of_largest(each, lambda row: row.share)),
        Column("busbw", lambda row: row.busbw, units.rate, bar=of_largest(each, lambda row: row.busbw)),
        Column(
            "time of one: p50 to p99",
            lambda row: (row.p50_s, row.p99_s),
            lambda times: " to ".join(map(units.seconds, times)),
            bar=_spread(each),
        ),
    )
    caption = (
        "The same rows as pictures: share of communication time, bus bandwidth, and from the median time of one "
        "operation to the 99th percentile, with a mark at the mean, on a logarithmic scale"
    )
    return table("by-size", caption + _ends(each) + ".", columns, each)


def _spread(each: Sequence[Row]) -> Callable[[Row], Bar | None]:
    low, high = _decades(each)

    def at(value: float) -> float:
        return min(1.0, max(0.0, (math.log10(value) - low) / (high - low)))

    def bar(row: Row) -> Bar | None:
        times = _times(row)
        if len(times) < 3:
            return None
        p50, mean, p99 = map(at, times)
        return p50, p99, mean

    return bar


def _times(row: Row) -> list[float]:
    """Median, mean and 99th percentile, as far as a logarithm has them."""
    values = (row.p50_s, row.mean_s, row.p99_s)
    return [value for value in values if value is not None and value > 0 and math.isfinite(value)]


def _decades(each: Sequence[Row]) -> tuple[int, int]:
    """The powers of ten that hold all times."""
    times = [value for row in each for value in _times(row)]
    low = math.floor(math.log10(min(times, default=1e-6)))
    return low, max(low + 1, math.ceil(math.log10(max(times, default=1.0))))


def _ends(each: Sequence[Row]) -> str:
    low, high = _decades(each)
    return f" from {units.seconds(10.0**low)} to {units.seconds(10.0**high)}"
