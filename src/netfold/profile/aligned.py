"""What drawing several ranks on one line of time needs: one clock, rows without overlaps, and who met in which call."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from netfold.profile.findings import ClockOffset
from netfold.profile.run import Run, Trace

Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
# Between two ranks: their numbers are not in step with the group's other calls.
TRANSFERS = frozenset({"send", "receive", "recv"})


def offsets_ns(clocks: Iterable[ClockOffset]) -> dict[int, int]:
    """What to add to each rank's times: the best guess, also where nothing bounds how far it is off."""
    return {clock.rank: clock.offset_ns for clock in clocks}


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
    known = trace.about.groups.get(str(group))
    return known.name if known is not None else f"group {group:x} of rank {trace.about.rank}"


def calls(run: Run) -> list[Integers]:
    """For each operation of each trace the number of the call that it is part of, the same on all ranks; 0: of none.

    A call is found by its group's name, operation and sequence number. A key that a rank used twice finds none: which
    of the two another rank met is not known. Memory: some 100 bytes an operation of the run.
    """
    groups: dict[str, int] = {}
    names: dict[str, int] = {}
    keys = [_keys(trace, groups, names) for trace in run.traces]
    if not keys:
        return []
    ends = np.cumsum([len(key) for key in keys])
    rank = np.repeat(np.arange(len(keys)), [len(key) for key in keys])
    _, call, ranks = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
    _, own, times = np.unique(call * len(keys) + rank, return_inverse=True, return_counts=True)
    met = ranks > 1
    met[call[times[own] > 1]] = False
    number = np.where(met[call] & (np.concatenate(keys) >= 0), call + 1, 0).astype(np.int64)
    return list(np.split(number, ends[:-1]))


def _keys(trace: Trace, groups: dict[str, int], names: dict[str, int]) -> Integers:
    """Group, operation and sequence number as one number, 23, 8 and 32 bits of it; -1 for what is part of no call."""
    operations = trace.operations
    key = operations["sequence"].astype(np.int64)
    for group in np.unique(operations["group"]):
        number = groups.setdefault(group_name(trace, int(group)), len(groups))
        key[operations["group"] == group] |= number << 40
    for operation in np.unique(operations["operation"]):
        name = trace.about.name_of("operation", int(operation))
        here = operations["operation"] == operation
        key[here] = -1 if name in TRANSFERS else key[here] | names.setdefault(name, len(names)) << 32
    return key
