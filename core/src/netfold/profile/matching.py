"""Match the records of different ranks that belong to one operation.

Groups match by name and ranks, since each rank numbers groups itself. In a group, event records match by sequence
number. Records of torch's profiler have none: the k-th record of an operation and size matches the k-th on every other
rank, if all ranks have equally many. Records that only some ranks have are left out and counted; nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from netfold.profile.columns import NO_GROUP, TRANSFERS, Columns, Group, Integers, groups_of
from netfold.profile.run import Run

# No rank finishes one of these before every rank has begun it, if every rank sends data.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclass(frozen=True)
class Matched:
    """Operations of one group that all its members recorded, in the order of the calls."""

    group: Group
    members: tuple[int, ...]  # [P], indices into `run.traces`
    places: Integers  # [n, P], the index of each member's record in its trace

    def field(self, run: Run, name: str) -> np.ndarray[Any, Any]:
        """[n, P] of every member's records."""
        columns = [run.traces[member].operations[name][self.places[:, at]] for at, member in enumerate(self.members)]
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class Matching:
    """The result of `match`."""

    groups: list[Matched]
    left_out: Mapping[str, int]  # reason -> number of records, over all ranks


def match(run: Run, columns: list[Columns]) -> Matching:
    """Match all records of a run. Cost: sorting every rank's records."""
    trace_of = {trace.metadata.rank: index for index, trace in enumerate(run.traces)}
    left_out: Counter[str] = Counter()
    left_out["of a group that the rank does not name"] = sum(int((each.group == NO_GROUP).sum()) for each in columns)
    groups = []
    collective = [~np.isin(each.operation, TRANSFERS) for each in columns]
    for place, group in enumerate(groups_of(run)):
        rows = {index: np.flatnonzero((each.group == place) & collective[index]) for index, each in enumerate(columns)}
        count = sum(map(len, rows.values()))
        engines = {bool(each) for index, indices in rows.items() for each in columns[index].engine[indices[:1]]}
        if not group.ranks:
            left_out["of a group whose ranks are not known"] += count
        elif any(rank not in trace_of for rank in group.ranks):
            left_out["of a group in which a rank left no records"] += count
        elif len(engines) > 1:
            left_out["of a group whose ranks have records of different kinds"] += count
        elif len(group.ranks) > 1:
            order = tuple(trace_of[rank] for rank in group.ranks)
            by = _by_sequence if engines == {True} else _by_order
            places = by(run, columns, order, [rows[index] for index in order])
            groups.append(Matched(group, order, places))
            left_out["that not all ranks of the group have"] += count - places.size
    return Matching(groups, {reason: number for reason, number in left_out.items() if number})


def synchronising_operations(run: Run, columns: list[Columns], matched: Matched) -> Matched:
    """Select the operations that no rank can have finished before all had begun.

    Leaves out failed operations, and those of which only the submission was recorded. For an empty block no rank need
    wait, and the record of an all_to_all does not say which blocks are empty. The native engine sends a header even for
    an empty block; other backends may not.
    """
    first = columns[matched.members[0]]
    kind = first.operation[matched.places[:, 0]]
    waits = np.isin(kind, SYNCHRONISING)
    waits &= first.engine[matched.places[:, 0]] | (kind != "all_to_all")
    waits &= (kind == "barrier") | (matched.field(run, "bytes") > 0).all(axis=1)
    for at, member in enumerate(matched.members):
        indices = matched.places[:, at]
        waits &= columns[member].completes[indices] & ~columns[member].failed[indices]
    return Matched(matched.group, matched.members, matched.places[waits])


def _by_sequence(run: Run, columns: list[Columns], order: tuple[int, ...], rows: list[Integers]) -> Integers:
    """[n, P], matched by sequence number.

    Leaves out numbers that a rank used twice, in two generations of a group, and numbers of different operations.
    """
    numbers = []
    for index, indices in zip(order, rows, strict=True):
        values, counts = np.unique(run.traces[index].operations["sequence"][indices], return_counts=True)
        numbers.append(values[counts == 1])
    shared = reduce(lambda one, other: np.intersect1d(one, other, assume_unique=True), numbers)
    places, kinds = [], []
    for index, indices in zip(order, rows, strict=True):
        sequence = run.traces[index].operations["sequence"][indices]
        by_number = np.argsort(sequence, kind="stable")
        place = indices[by_number[np.searchsorted(sequence[by_number], shared)]]
        places.append(place)
        kinds.append(columns[index].operation[place])
    together = np.stack(places, axis=1)
    alike = np.all([kind == kinds[0] for kind in kinds], axis=0)
    return together[alike]


def _by_order(run: Run, columns: list[Columns], order: tuple[int, ...], rows: list[Integers]) -> Integers:
    """[n, P], matched by order, sorted by the start on the first member."""
    lists = []
    for index, indices in zip(order, rows, strict=True):
        records = run.traces[index].operations
        began = indices[np.argsort(records["started_ns"][indices], kind="stable")]
        keyed: dict[tuple[str, int], list[int]] = {}
        for place in began:
            keyed.setdefault((str(columns[index].operation[place]), int(records["bytes"][place])), []).append(place)
        lists.append(keyed)
    found = [
        np.stack([np.array(each[key], np.int64) for each in lists], axis=1)
        for key in lists[0]
        if len({len(each.get(key, ())) for each in lists}) == 1
    ]
    if not found:
        return np.empty((0, len(order)), np.int64)
    together = np.concatenate(found)
    return together[np.argsort(together[:, 0], kind="stable")]
