"""One rank's records with names in place of numbers, and with sizes as nccl-tests counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from netfold.profile.run import Run, Trace

Names: TypeAlias = "np.ndarray[Any, np.dtype[np.str_]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

EVENTS = "event records"
TRANSFERS = ("send", "receive")
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


@dataclass(frozen=True)
class Columns:
    """Of one rank, each [n], in the order of its records.

    group: its name, empty where the rank named none; ranks: how many are in it; bytes: of the whole operation;
    bus_bytes: times nccl-tests' factor; failed: it ended in an error.
    """

    operation: Names
    group: Names
    algorithm: Names
    wire: Names
    ranks: Integers
    bytes: Floats
    bus_bytes: Floats
    failed: Bools

    def __len__(self) -> int:
        return len(self.operation)


def columns_of(run: Run) -> list[Columns]:
    """One a trace, in the order of `run.traces`."""
    everybody = group_members(run)
    return [_columns(trace, everybody) for trace in run.traces]


def group_members(run: Run) -> dict[str, tuple[int, ...] | None]:
    """Which ranks are in the group of a name. None where ranks say different things, or nobody says and some left none.

    Where no member lists the ranks, they are those that name the group, provided that all ranks of the job left
    records.
    """
    listed: dict[str, set[tuple[int, ...]]] = {}
    named: dict[str, set[int]] = {}
    for trace in run.traces:
        for group in trace.about.groups.values():
            named.setdefault(group.name, set()).add(trace.about.rank)
            listed.setdefault(group.name, set())
            if group.ranks:
                listed[group.name].add(tuple(sorted(group.ranks)))
    complete = bool(run.traces) and len(run.traces) == run.traces[0].about.size
    members: dict[str, tuple[int, ...] | None] = {}
    for name, said in listed.items():
        if len(said) == 1:
            (members[name],) = said
        else:
            members[name] = tuple(sorted(named[name])) if not said and complete else None
    return members


def _columns(trace: Trace, everybody: dict[str, tuple[int, ...] | None]) -> Columns:
    about, records = trace.about, trace.operations
    numbers, inverse = np.unique(records["group"], return_inverse=True)
    known = [about.groups.get(str(number)) for number in numbers]
    sizes = []
    for group in known:
        members = everybody.get(group.name) if group is not None else None
        sizes.append(about.size if members is None else len(members))
    ranks = np.array(sizes, np.int64)[inverse]
    operation = _names(trace, "operation")
    whole = records["bytes"].astype(np.float64)
    whole[np.isin(operation, _BLOCKS)] *= ranks[np.isin(operation, _BLOCKS)]
    bus = whole.copy()
    for name, factor in _BUS_FACTORS.items():
        mine = operation == name
        bus[mine] *= factor(ranks[mine])
    errors = _names(trace, "error")
    return Columns(
        operation=operation,
        group=_strings(["" if group is None else group.name for group in known])[inverse],
        algorithm=_names(trace, "algorithm"),
        wire=_names(trace, "wire"),
        ranks=ranks,
        bytes=whole,
        bus_bytes=bus,
        failed=(records["error"] != 0) & (errors != "none"),
    )


def _names(trace: Trace, field: str) -> Names:
    numbers, inverse = np.unique(trace.operations[field], return_inverse=True)
    return _strings([trace.about.name_of(field, number) for number in numbers])[inverse]


def _strings(words: Sequence[str]) -> Names:
    return np.array(words, np.str_)
