"""Summarise operations by kind and size: hvprof's table (Awan et al., HotI 2019) with more columns.

The size of an operation is that of nccl-tests: the larger of a rank's input and output. A record has the bytes of one
output. If the output is one of as many blocks as there are ranks (all_gather, reduce_scatter, all_to_all, gather,
scatter), the size is that times the number of ranks, which is exact for equal blocks. Ranks that are not a gather's
root do not know the size and get the root's. An operation without bytes (a barrier) is in the first bucket. Operations
of which only the submission to a device was recorded have rows of their own, with counts and bytes and without times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from netfold.profile.columns import Columns, Floats, Integers
from netfold.profile.findings import Row, bucket_ends
from netfold.profile.matching import Matched
from netfold.profile.record import Records
from netfold.profile.run import Run

# Ranks other than the root may not know the size, and record none.
_ROOTED = ("gather", "scatter")
# (operation, bucket, whether the row has submissions only).
Key: TypeAlias = tuple[str, int, bool]


@dataclass(frozen=True)
class RowIndex:
    """The row of each record."""

    keys: list[Key]
    of_trace: list[Integers]  # [n] for each trace, indices into keys


def sized(columns: Sequence[Columns], groups: Sequence[Matched]) -> list[Columns]:
    """The columns with the root's size on all ranks of a gather or scatter."""
    found = list(columns)
    for matched in groups:
        rooted = matched.places[np.isin(found[matched.members[0]].operation[matched.places[:, 0]], _ROOTED)]
        if not len(rooted):
            continue
        whole = np.max([found[member].bytes[rooted[:, at]] for at, member in enumerate(matched.members)], axis=0)
        for at, member in enumerate(matched.members):
            size, bus = found[member].bytes.copy(), found[member].bus_bytes.copy()
            size[rooted[:, at]] = bus[rooted[:, at]] = whole
            found[member] = replace(found[member], bytes=size, bus_bytes=bus)
    return found


def assign_rows(columns: Sequence[Columns], buckets: Sequence[int]) -> RowIndex:
    """Find the row of each record.

    buckets: upper ends, ascending (ValueError otherwise). A size is in the first bucket whose end is not below the
    size; one more bucket is above the last end.
    """
    if not buckets or buckets[0] < 1 or any(one >= next_ for one, next_ in pairwise(buckets)):
        raise ValueError(f"buckets are upper ends of sizes, ascending, at least one: not {list(buckets)}")
    names = sorted({str(name) for each in columns for name in np.unique(each.operation)})
    ends = len(buckets) + 1
    # Each key as one number, in the order of keys.
    numbers = [
        (np.searchsorted(np.array(names, np.str_), each.operation) * ends + np.searchsorted(buckets, each.bytes)) * 2
        + ~each.completes
        for each in columns
    ]
    used = sorted({number for each in numbers for number in np.unique(each).tolist()})
    keys = [(names[number // 2 // ends], number // 2 % ends, number % 2 == 1) for number in used]
    return RowIndex(keys, [np.searchsorted(used, each) for each in numbers])


def summarise(
    run: Run,
    columns: Sequence[Columns],
    places: RowIndex,
    buckets: Sequence[int],
    exposed: Sequence[Floats | None],
    skew: Sequence[Floats],
) -> list[Row]:
    """Return the rows. The operation with the longest total time is first, its sizes ascending; submissions are last.

    exposed, skew: [n] seconds of each record, for each trace; skew is NaN if it is unknown.
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
    above_bytes, to_bytes = bucket_ends(bucket, buckets)
    ranks = len(run.traces)
    rows = [np.flatnonzero(of_trace == index) for of_trace in places.of_trace]

    def of_row(values: Iterable[Any]) -> Any:
        """[n] of this row's records, from the values of each trace's records."""
        return np.concatenate([each[of_trace] for each, of_trace in zip(values, rows, strict=True)])

    records = of_row(trace.operations for trace in run.traces)
    good = ~of_row(each.failed for each in columns)
    size, bus = of_row(each.bytes for each in columns), of_row(each.bus_bytes for each in columns)
    algorithms, wires = of_row(each.algorithm for each in columns), of_row(each.wire for each in columns)
    # Wire bytes and the like are means over the ranks with event records. Such a rank without records in this row sent
    # nothing of it.
    engines: list[Records] = []
    if of_row(each.engine for each in columns).any():
        engines = [
            trace.operations[of_trace]
            for trace, each, of_trace in zip(run.traces, columns, rows, strict=True)
            if each.engine.any()
        ]

    def mean(field: str) -> float | None:
        return sum(float(each[field].sum()) for each in engines) / len(engines) if engines else None

    row = Row(
        operation=name,
        above_bytes=above_bytes,
        to_bytes=to_bytes,
        count=len(records) / ranks,
        bytes=float(size[good].sum()) / ranks,
        algorithms=dict(Counter(algorithms.tolist()).most_common()),
        wires=dict(Counter(wires[size > 0].tolist()).most_common()),
        wire_bytes=mean("wire_bytes"),
        retransmissions=mean("retransmissions"),
        errors=int((~good).sum()),
        submitted_only=submitted,
    )
    # A backend without a registration cache has neither hits nor misses.
    if mean("registration_hits") or mean("registration_misses"):
        row = replace(row, registration_hits=mean("registration_hits"), registration_misses=mean("registration_misses"))
    if submitted:
        return row
    times = (records["finished_ns"] - records["started_ns"]) / 1e9
    well = times[good]
    whole = float(well.sum())
    p50, p99 = np.percentile(well, (50, 99)) if len(well) else (0.0, 0.0)
    watched = [each[of_trace].sum() for each, of_trace in zip(exposed, rows, strict=True) if each is not None]
    skews = of_row(skew)
    known = ~np.isnan(skews)
    return replace(
        row,
        total_s=float(times.sum()) / ranks,
        mean_s=float(well.mean()) if len(well) else 0.0,
        p50_s=float(p50),
        p99_s=float(p99),
        algbw=float(size[good].sum()) / whole if whole > 0 else 0.0,
        busbw=float(bus[good].sum()) / whole if whole > 0 else 0.0,
        share=0.0,
        exposed_s=float(np.mean(watched)) if watched else None,
        queue_s=float((records["started_ns"] - records["queued_ns"]).sum()) / 1e9 / ranks,
        skew_s=float(skews[known].sum()) / ranks if known.any() else None,
    )
