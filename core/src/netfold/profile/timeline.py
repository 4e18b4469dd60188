"""Prepare ranks for one line of time: one clock, lanes without overlaps, calls, and computing in percent."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from netfold.profile.columns import Integers, columns_of
from netfold.profile.findings import ClockOffset
from netfold.profile.matching import match
from netfold.profile.record import Records
from netfold.profile.run import NcclDetails, Run, Trace


def align_clocks(run: Run, clocks: Iterable[ClockOffset]) -> Run:
    """Convert all times to the first rank's clock. A rank without an offset keeps its own clock.

    Memory: that of the run once more.
    """
    clock = {each.rank: each for each in clocks}
    traces = []
    for trace in run.traces:
        own = clock.get(trace.metadata.rank)
        if own is not None and (own.offset_ns or own.knots):
            operations, steps, progress = (
                _aligned(each, own) for each in (trace.operations, trace.steps, trace.progress)
            )
            nccl = None if trace.nccl is None else _aligned_details(trace.nccl, own)
            trace = Trace(trace.metadata, operations, steps, progress, nccl)
        traces.append(trace)
    return replace(run, traces=traces)


def _aligned_details(details: NcclDetails, clock: ClockOffset) -> NcclDetails:
    """The transfers' times; of an operation only its record's times are used."""
    transfers = details.transfers.copy()
    for name in ("began_ns", "ended_ns"):
        transfers[name] = clock.align(transfers[name])
    return replace(details, transfers=transfers)


def _aligned(records: Records, clock: ClockOffset) -> Records:
    aligned = records.copy()
    for name in aligned.dtype.names or ():
        # busy_ns is a duration.
        if name.endswith("_ns") and name != "busy_ns":
            aligned[name] = clock.align(aligned[name])
    return aligned


def lanes(began: Integers, ended: Integers) -> Integers:
    """Return the lane of each of n intervals: the first lane in which the interval overlaps no other.

    began: ascending. There are as many lanes as intervals overlap at once. Cost: O(n log n).
    """
    lane = np.zeros(len(began), np.int64)
    busy: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    for index, (begin, end) in enumerate(zip(began.tolist(), ended.tolist(), strict=True)):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane[index] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (max(end, begin + 1), int(lane[index])))
    return lane


def group_name(trace: Trace, group: int) -> str:
    """The name that all ranks of a group share; if it is unknown, a name that only this rank uses."""
    known = trace.metadata.groups.get(str(group))
    return known.name if known is not None else f"group {group:x} of rank {trace.metadata.rank}"


def number_calls(run: Run) -> list[Integers]:
    """For each operation of each trace the number of its call, the same on all ranks; 0: unknown."""
    number = [np.zeros(len(trace.operations), np.int64) for trace in run.traces]
    known = 0
    for matched in match(run, columns_of(run)).groups:
        for at, member in enumerate(matched.members):
            number[member][matched.places[:, at]] = known + 1 + np.arange(len(matched.places))
        known += len(matched.places)
    return number


def computing_percent(progress: Any) -> tuple[Integers, Integers]:
    """The percentage of time in which the training thread computed, where it changes: (times, percentages).

    Times are of the rank's own clock. The last entry is the end of the progress lines, with 0: later nothing is known.
    """
    apart = np.concatenate(([True], np.diff(progress["at_ns"]) > 0)) if len(progress) else np.zeros(0, bool)
    at, busy = progress["at_ns"][apart], progress["busy_ns"][apart]
    if len(at) < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    percent = np.clip(np.rint(100 * np.diff(busy) / np.diff(at)), 0, 100).astype(np.int64)
    changes = np.concatenate(([True], np.diff(percent) != 0))
    return np.append(at[:-1][changes], at[-1]), np.append(percent[changes], 0)
