"""A run's operations, by kind and size: hvprof's table (Awan et al., HotI 2019) with what else a record knows.

The size of an operation is nccl-tests': the larger of what a rank gives and gets. A record has one output's bytes;
where that is one of as many blocks as there are ranks (all_gather, reduce_scatter, all_to_all, gather, scatter) it is
taken times the ranks of the group: exact for equal blocks. Ranks that are not a gather's root have no size of their
own, and get the root's. An operation without bytes (a barrier) is in the first bucket. Operations of which only the
submission to a device was recorded have rows of their own, with counts and bytes and no times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from netfold.profile.columns import Columns, Floats, Integers
from netfold.profile.findings import Row
from netfold.profile.matching import Matched
from netfold.profile.record import Records
from netfold.profile.run import Run

# Others than the root may know no size, and record none.
_ROOTED = ("gather", "scatter")


@dataclass(frozen=True)
class RowIndex:
    """Which row each record is in. keys: (operation, bucket, whether it is of submissions alone) a row; of_trace: [n] a
    trace, places in keys."""

    keys: list[tuple[str, int, bool]]
    of_trace: list[Integers]


def sized(columns: Sequence[Columns], groups: Sequence[Matched]) -> list[Columns]:
    """The same, with the root's size on all ranks of a gather or scatter."""
    found = list(columns)
    for matched in groups:
        gathers = matched.places[np.isin(found[matched.members[0]].operation[matched.places[:, 0]], _ROOTED)]
        if not len(gathers):
            continue
        whole = np.max([found[member].bytes[gathers[:, at]] for at, member in enumerate(matched.members)], axis=0)
        for at, member in enumerate(matched.members):
            of_all = found[member].bytes.copy()
            of_all[gathers[:, at]] = whole
            found[member] = replace(found[member], bytes=of_all, bus_bytes=_bus(found[member], gathers[:, at], whole))
    return found


def _bus(columns: Columns, gathers: Integers, whole: Floats) -> Floats:
    bus = columns.bus_bytes.copy()
    bus[gathers] = whole
    return bus


def assign_rows(columns: Sequence[Columns], buckets: Sequence[int]) -> RowIndex:
    """buckets: upper ends; a size belongs to the first that is not below it, or to one more. ValueError, in a sentence,
    where they do not ascend."""
    if not buckets or buckets[0] < 1 or any(one >= next_ for one, next_ in pairwise(buckets)):
        raise ValueError(f"buckets are upper ends of sizes, ascending, at least one: not {list(buckets)}")
    numbers = [np.searchsorted(np.asarray(buckets, np.float64), each.bytes, side="left") for each in columns]
    keys = sorted(
        {
            (str(name), int(bucket), bool(submitted))
            for each, number in zip(columns, numbers, strict=True)
            for name in np.unique(each.operation)
            for submitted in (False, True)
            for bucket in np.unique(number[(each.operation == name) & (each.completes != submitted)])
        }
    )
    of_trace = []
    for each, number in zip(columns, numbers, strict=True):
        row = np.empty(len(each), np.int64)
        for index, (name, bucket, submitted) in enumerate(keys):
            row[(each.operation == name) & (number == bucket) & (each.completes != submitted)] = index
        of_trace.append(row)
    return RowIndex(keys, of_trace)


def summarise(
    run: Run,
    columns: Sequence[Columns],
    places: RowIndex,
    buckets: Sequence[int],
    exposed: Sequence[Floats | None],
    skew: Sequence[Floats],
) -> list[Row]:
    """The operation that took most of the time first, its sizes ascending; submissions last.

    exposed, skew: [n] seconds a trace, of each of its records; skew NaN where it is not known.
    """
    rows = [_row(index, run, columns, places, buckets, exposed, skew) for index in range(len(places.keys))]
    whole = sum(row.total_s or 0.0 for row in rows)
    of_kind = {name: sum(row.total_s or 0.0 for row in rows if row.operation == name) for name, *_ in places.keys}
    rows.sort(key=lambda row: (row.submitted_only, -of_kind[row.operation], row.operation, row.above_bytes))
    return [
        row if row.total_s is None else replace(row, share=row.total_s / whole if whole > 0 else 0.0) for row in rows
    ]


def _row(
    index: int,
    run: Run,
    columns: Sequence[Columns],
    places: RowIndex,
    buckets: Sequence[int],
    exposed: Sequence[Floats | None],
    skew: Sequence[Floats],
) -> Row:
    name, bucket, submitted = places.keys[index]
    mine = [np.flatnonzero(of_trace == index) for of_trace in places.of_trace]
    records = [trace.operations[rows] for trace, rows in zip(run.traces, mine, strict=True)]
    good = [~each.failed[rows] for each, rows in zip(columns, mine, strict=True)]
    times = [(each["finished_ns"] - each["started_ns"]) / 1e9 for each in records]
    ranks = len(run.traces)
    well = np.concatenate([time[ok] for time, ok in zip(times, good, strict=True)])
    moved, bus = (
        sum(float(of[rows][ok].sum()) for of, rows, ok in zip(column, mine, good, strict=True))
        for column in ([each.bytes for each in columns], [each.bus_bytes for each in columns])
    )
    p50, p99 = np.percentile(well, (50, 99)) if len(well) else (0.0, 0.0)
    watched = [each[rows].sum() for each, rows in zip(exposed, mine, strict=True) if each is not None]
    skews = np.concatenate([each[rows] for each, rows in zip(skew, mine, strict=True)])
    known = ~np.isnan(skews)
    # Of ranks that have such records; where a rank has none in this row it sent nothing of it.
    says = [bool(each.engine.any()) for each in columns]
    ours = any(bool(each.engine[rows].any()) for each, rows in zip(columns, mine, strict=True))
    engines = [each for each, speaks in zip(records, says, strict=True) if speaks and ours]
    hits, misses = (
        sum(int(each[field].sum()) for each in engines) for field in ("registration_hits", "registration_misses")
    )
    algorithms: Counter[str] = Counter()
    wires: Counter[str] = Counter()
    for each, rows in zip(columns, mine, strict=True):
        algorithms.update(each.algorithm[rows].tolist())
        wires.update(each.wire[rows[each.bytes[rows] > 0]].tolist())
    row = Row(
        operation=name,
        above_bytes=buckets[bucket - 1] if bucket else 0,
        to_bytes=buckets[bucket] if bucket < len(buckets) else None,
        count=sum(map(len, records)) / ranks,
        bytes=moved / ranks,
        total_s=sum(float(time.sum()) for time in times) / ranks,
        mean_s=float(well.mean()) if len(well) else 0.0,
        p50_s=float(p50),
        p99_s=float(p99),
        algbw=float(moved / well.sum()) if well.sum() > 0 else 0.0,
        busbw=float(bus / well.sum()) if well.sum() > 0 else 0.0,
        share=0.0,
        exposed_s=float(np.mean(watched)) if watched else None,
        queue_s=sum(float((each["started_ns"] - each["queued_ns"]).sum()) for each in records) / 1e9 / ranks,
        skew_s=float(skews[known].sum()) / ranks if known.any() else None,
        algorithms=dict(algorithms.most_common()),
        wires=dict(wires.most_common()),
        wire_bytes=_mean(engines, "wire_bytes"),
        retransmissions=_mean(engines, "retransmissions"),
        # Nobody who keeps registrations has neither: the backend has none to speak of.
        registration_hits=hits / len(engines) if hits + misses else None,
        registration_misses=misses / len(engines) if hits + misses else None,
        errors=sum(int((~ok).sum()) for ok in good),
    )
    return _untimed(row) if submitted else row


def _untimed(row: Row) -> Row:
    """Without what follows from when its operations ended."""
    row = replace(row, total_s=None, mean_s=None, p50_s=None, p99_s=None, algbw=None, busbw=None, share=None)
    return replace(row, exposed_s=None, queue_s=None, skew_s=None, submitted_only=True)


def _mean(records: Sequence[Records], field: str) -> float | None:
    return sum(float(each[field].sum()) for each in records) / len(records) if records else None
