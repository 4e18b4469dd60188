"""One rank's records as columns, with names instead of numbers, and sizes as nccl-tests counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
# For these a record holds the bytes of one rank's block. The counted size is the larger of a rank's input and output,
# which is one block for each rank (nccl-tests, doc/PERFORMANCE.md).
_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
# busbw over algbw, so that busbw compares to a link's rate for any operation and number of ranks (the same page).
_BUS_FACTORS: dict[str, Callable[[Integers], Floats]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}


# In Columns.group: the group is unknown.
NO_GROUP = -1


@dataclass(frozen=True)
class Group:
    """The identity of a group. Its name alone is ambiguous: all rows of a mesh may have the mesh's name."""

    name: str
    ranks: tuple[int, ...]  # ascending; empty: unknown


@dataclass(frozen=True)
class Columns:
    """The columns of one rank, each [n], in the order of its records."""

    operation: Names
    group: Integers  # index into `groups_of(run)`, or NO_GROUP
    engine: Bools  # whether the native engine or NCCL's profiler gave it: with a sequence number and bytes sent
    completes: Bools  # whether the record ends with the operation, not with its submission to a device
    algorithm: Names
    wire: Names
    ranks: Integers  # size of the group; of the job if unknown
    bytes: Floats  # of the whole operation
    bus_bytes: Floats  # bytes times nccl-tests' factor
    failed: Bools

    def __len__(self) -> int:
        return len(self.operation)


def groups_of(run: Run) -> list[Group]:
    """The groups of a run, each once, in the order of their first mention."""
    return list(dict.fromkeys(_group(group) for trace in run.traces for group in trace.metadata.groups.values()))


def columns_of(run: Run) -> list[Columns]:
    """The columns of all traces, in the order of `run.traces`."""
    places = {group: place for place, group in enumerate(groups_of(run))}
    return [_columns(trace, places) for trace in run.traces]


def completes(trace: Trace) -> Bools:
    """[n], whether each of a rank's records ends with its operation."""
    numbers, inverse = np.unique(trace.operations["group"], return_inverse=True)
    return np.array([_completes(trace.metadata, int(number)) for number in numbers], np.bool_)[inverse]


def submissions(run: Run) -> dict[str, int]:
    """Count the records of all ranks that are submissions only, by backend; `?` if the group is unknown."""
    found: Counter[str] = Counter()
    for trace in run.traces:
        for number, count in zip(*np.unique(trace.operations["group"], return_counts=True), strict=True):
            if not _completes(trace.metadata, int(number)):
                group = trace.metadata.groups.get(str(number))
                found["?" if group is None else group.backend] += int(count)
    return dict(found)


def _is_engine(about: RankMetadata, number: int) -> bool:
    """Whether a group's records are event records. With records of both kinds, the group's backend tells."""
    group = about.groups.get(str(number))
    if group is not None and group.is_timed:
        return True
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
        selected = operation == name
        bus[selected] *= factor(ranks[selected])
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
    names = [trace.metadata.name_of(field, number) if used[number] else "" for number in range(256)]
    named: Names = np.array(names, np.str_)[numbers]
    return named
