"""What drawing several ranks on one line of time needs: one clock, rows without overlaps, and who met in which call."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from netfold.profile.columns import Integers, columns_of
from netfold.profile.findings import ClockOffset
from netfold.profile.matching import match
from netfold.profile.record import Records
from netfold.profile.run import Run, Trace


def align_clocks(run: Run, clocks: Iterable[ClockOffset]) -> Run:
    """The run with every time as the first rank's clock would have shown it; a rank without an offset keeps its own.

    Memory: that of the run once more.
    """
    clock = {each.rank: each for each in clocks}
    traces = []
    for trace in run.traces:
        own = clock.get(trace.metadata.rank)
        if own is not None and (own.offset_ns or own.knots):
            operations, steps, progress = (
                _moved(each, own) for each in (trace.operations, trace.steps, trace.progress)
            )
            trace = Trace(trace.metadata, operations, steps, progress)
        traces.append(trace)
    return replace(run, traces=traces)


def _moved(records: Records, clock: ClockOffset) -> Records:
    moved = records.copy()
    for name in moved.dtype.names or ():
        # busy_ns is a sum, and no time of day.
        if name.endswith("_ns") and name != "busy_ns":
            moved[name] = clock.align(moved[name])
    return moved


def lanes(began: Integers, ended: Integers) -> Integers:
    """In which row each of n intervals is drawn, so that none overlaps another: always the first that is free.

    began: ascending; as many rows as intervals overlap at once. O(n log n).
    """
    row = np.zeros(len(began), np.int64)
    busy: list[tuple[int, int]] = []  # when it ends, the row
    free: list[int] = []
    for index, (begin, end) in enumerate(zip(began.tolist(), ended.tolist(), strict=True)):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row[index] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (max(end, begin + 1), int(row[index])))
    return row


def group_name(trace: Trace, group: int) -> str:
    """The name that all of a group's ranks share; one of this rank's own where it did not say."""
    known = trace.metadata.groups.get(str(group))
    return known.name if known is not None else f"group {group:x} of rank {trace.metadata.rank}"


def number_calls(run: Run) -> list[Integers]:
    """For each operation of each trace the number of the call that it is part of, the same on all ranks; 0: of none."""
    number = [np.zeros(len(trace.operations), np.int64) for trace in run.traces]
    known = 0
    for matched in match(run, columns_of(run)).groups:
        for at, member in enumerate(matched.members):
            number[member][matched.places[:, at]] = known + 1 + np.arange(len(matched.places))
        known += len(matched.places)
    return number
