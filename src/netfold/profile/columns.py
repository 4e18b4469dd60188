"""One rank's records with names in place of numbers, and with sizes as nccl-tests counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from netfold.profile.run import GroupName, RankMetadata, Run, Trace

Names: TypeAlias = "np.ndarray[Any, np.dtype[np.str_]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

EVENTS = "event records"
TRANSFERS = ("send", "receive")
# Backends of torch whose mark of an operation ends with the operation. Others mark the submission to a device.
COMPLETING = ("gloo", "mpi")
# A record has the bytes of one output: a rank's block here, of which there are as many as ranks. What is counted is
# the larger of what a rank gives and gets (nccl-tests, doc/PERFORMANCE.md).
_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
# busbw over algbw: what a link carries whatever the operation and the number of ranks (the same page).
_BUS_FACTORS: dict[str, Callable[[Integers], Floats]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}


# Its number in Columns.group.
NO_GROUP = -1


@dataclass(frozen=True)
class Group:
    """What ranks of one name and one list of ranks are to each other. ranks: ascending; empty where they are not known.

    A name alone is not enough: the groups of a mesh's rows may all be called after the mesh.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Columns:
    """Of one rank, each [n], in the order of its records.

    group: place in `groups_of(run)`, or NO_GROUP; engine: whether it is an engine's event record; completes: whether
    it ends when the operation was done, and not when the host had submitted it to a device; ranks: how many are in the
    group, all of the job where that is not known;
    bytes: of the whole operation; bus_bytes: times nccl-tests' factor; failed: it ended in an error.
    """

    operation: Names
    group: Integers
    engine: Bools
    completes: Bools
    algorithm: Names
    wire: Names
    ranks: Integers
    bytes: Floats
    bus_bytes: Floats
    failed: Bools

    def __len__(self) -> int:
        return len(self.operation)


def groups_of(run: Run) -> list[Group]:
    """Each once, in the order in which the first rank that is in it names them."""
    return list(dict.fromkeys(_group(group) for trace in run.traces for group in trace.metadata.groups.values()))


def columns_of(run: Run) -> list[Columns]:
    """One a trace, in the order of `run.traces`."""
    places = {group: place for place, group in enumerate(groups_of(run))}
    return [_columns(trace, places) for trace in run.traces]


def completes(trace: Trace) -> Bools:
    """[n] whether each of a rank's records ends when its operation was done."""
    numbers, inverse = np.unique(trace.operations["group"], return_inverse=True)
    return np.array([_completes(trace.metadata, int(number)) for number in numbers], np.bool_)[inverse]


def submitted_to(trace: Trace) -> dict[str, int]:
    """How many of a rank's records are submissions alone, by backend; `?` where the group is not known."""
    found: Counter[str] = Counter()
    for number, count in zip(*np.unique(trace.operations["group"], return_counts=True), strict=True):
        if not _completes(trace.metadata, int(number)):
            group = trace.metadata.groups.get(str(number))
            found["?" if group is None else group.backend] += int(count)
    return dict(found)


def _is_engine(about: RankMetadata, number: int) -> bool:
    """A rank with records of both kinds says which backend serves a group."""
    group = about.groups.get(str(number))
    return about.source == EVENTS or (EVENTS in about.source and group is not None and group.backend == "netfold")


def _completes(about: RankMetadata, number: int) -> bool:
    group = about.groups.get(str(number))
    return _is_engine(about, number) or (group is not None and group.backend in COMPLETING)


def _group(named: GroupName) -> Group:
    return Group(named.name, tuple(sorted(named.ranks)))


def _columns(trace: Trace, places: dict[Group, int]) -> Columns:
    about, records = trace.metadata, trace.operations
    numbers, inverse = np.unique(records["group"], return_inverse=True)
    known = [about.groups.get(str(number)) for number in numbers]
    place = np.array([NO_GROUP if group is None else places[_group(group)] for group in known], np.int64)
    size = np.array([about.size if group is None or not group.ranks else len(group.ranks) for group in known], np.int64)
    ranks = size[inverse]
    operation = _names(trace, "operation")
    whole = records["bytes"].astype(np.float64)
    blocks = np.isin(operation, _BLOCKS)
    whole[blocks] *= ranks[blocks]
    bus = whole.copy()
    for name, factor in _BUS_FACTORS.items():
        mine = operation == name
        bus[mine] *= factor(ranks[mine])
    return Columns(
        operation=operation,
        group=place[inverse],
        engine=np.array([_is_engine(about, int(number)) for number in numbers], np.bool_)[inverse],
        completes=completes(trace),
        algorithm=_names(trace, "algorithm"),
        wire=_names(trace, "wire"),
        ranks=ranks,
        bytes=whole,
        bus_bytes=bus,
        failed=(records["error"] != 0) & (_names(trace, "error") != "none"),
    )


def _names(trace: Trace, field: str) -> Names:
    numbers = trace.operations[field]
    used = np.bincount(numbers, minlength=256) > 0  # they are bytes
    names = _strings([trace.metadata.name_of(field, number) if used[number] else "" for number in range(256)])
    named: Names = names[numbers]
    return named


def _strings(words: Sequence[str]) -> Names:
    return np.array(words, np.str_)
