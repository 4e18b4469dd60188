"""Read what NCCL's own profiler interface gave to netfold's plugin, and add it to a run.

The plugin writes a folder for each process (core/native/nccl/profile_files.hpp):

    RUN/nccl-HOST-PID/metadata.json   the process, its communicators, the names of numbers, what was dropped
    RUN/nccl-HOST-PID/operations      `OPERATION`s: a collective or message of one communicator
    RUN/nccl-HOST-PID/transfers       `TRANSFER`s: what one channel of an operation sent to or received from a peer

A process's operations become records of its rank. Where a recording of the same process has marks of torch's profiler
for its nccl groups, which only tell when the host submitted an operation, these records replace the marks.

A process does not know which ranks of the job form a communicator, only its own place in it. The ranks follow from the
folders of all processes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from netfold.profile.record import RECORD, Records
from netfold.profile.run import SUBMISSIONS_ONLY, GroupName, NcclDetails, RankMetadata, RunError, Trace, read_list

FORMAT = 1
SOURCE = "NCCL's profiler"
# Times are CLOCK_MONOTONIC nanoseconds; 0: not known. gpu_*: of the GPU's clock.
OPERATION = np.dtype(
    [
        ("id", "u8"),
        ("count", "u8"),
        ("called_ns", "i8"),
        ("submitted_ns", "i8"),
        ("launched_ns", "i8"),
        ("began_ns", "i8"),
        ("ended_ns", "i8"),
        ("gpu_began_ns", "u8"),
        ("gpu_ended_ns", "u8"),
        ("sent_bytes", "u8"),
        ("received_bytes", "u8"),
        ("sequence", "u8"),
        ("comm", "u4"),
        ("peer", "i4"),
        ("channels", "u2"),
        ("transfers", "u2"),
        ("operation", "u1"),
        ("dtype", "u1"),
        ("algorithm", "u1"),
        ("protocol", "u1"),
        ("ending", "u1"),
        ("reserved", "u1", 7),
    ]
)
# waits and net_ns: of all steps and requests together. net_*: of netfold's network plugin; 0 with another one.
TRANSFER = np.dtype(
    [
        ("operation", "u8"),
        ("began_ns", "i8"),
        ("ended_ns", "i8"),
        ("bytes", "u8"),
        ("gpu_wait_ns", "i8"),
        ("peer_wait_ns", "i8"),
        ("network_ns", "i8"),
        ("net_bytes", "u8"),
        ("net_ns", "i8"),
        ("net_requests", "u4"),
        ("steps", "u4"),
        ("comm", "u4"),
        ("peer", "i4"),
        ("channel", "u2"),
        ("is_send", "u1"),
        ("is_cut_off", "u1"),
        ("reserved", "u1", 4),
    ]
)
# OPERATION.ending.
BY_KERNEL, BY_TRANSFERS, BY_SUBMISSION, CUT_OFF = range(4)
# Other groups of a rank's records have smaller numbers (netfold.profile.torch.records).
_FIRST_GROUP = 1 << 48
_UNKNOWN = 255
_NAMED_FROM = 128
_TRANSFERS = ("send", "receive")
_ITEM_BYTES = {"i8": 1, "u8": 1, "f8e4m3": 1, "f8e5m2": 1, "f16": 2, "bf16": 2, "i32": 4, "u32": 4, "f32": 4}
_WIDE_BYTES = 8  # i64, u64, f64


@dataclass(frozen=True)
class Comm:
    """A process's place in a communicator."""

    id: str
    name: str
    rank: int
    ranks: int
    nodes: int


@dataclass(frozen=True)
class Process:
    """A process's folder."""

    host: str
    pid: int
    rank: int  # as the job's launcher says; -1: it does not
    comms: list[Comm]
    names: Mapping[str, list[str]]  # operation, dtype, algorithm, protocol: by number
    dropped: int  # events
    has_ended: bool
    operations: Records
    transfers: Records


def add_nccl(folder: Path, traces: list[Trace]) -> list[Trace]:
    """The ranks of a run with the operations that NCCL's profiler saw. Raises RunError for a folder it cannot read."""
    processes = [_read(path) for path in sorted(folder.glob("nccl-*/metadata.json"))]
    if not processes:
        return traces
    by_process = {(trace.metadata.host, trace.metadata.pid): trace for trace in traces}
    ranks = _ranks(processes, by_process)
    members: dict[str, dict[int, int]] = {}  # communicator -> place in it -> rank of the job
    doubled: set[str] = set()
    for process, rank in zip(processes, ranks, strict=True):
        for comm in process.comms:
            if members.setdefault(comm.id, {}).setdefault(comm.rank, rank) != rank:
                doubled.add(comm.id)
    size = max([rank + 1 for rank in ranks] + [comm.ranks for each in processes for comm in each.comms], default=1)
    found = {trace.metadata.rank: trace for trace in traces}
    for rank in dict.fromkeys(ranks):
        for process in (each for each, of in zip(processes, ranks, strict=True) if of == rank):
            about = RankMetadata(rank=rank, size=size, host=process.host, pid=process.pid, source="")
            trace = found.get(rank) or Trace.empty(about)
            found[rank] = _merged(trace, process, members, doubled)
    return list(found.values())


def _ranks(processes: Sequence[Process], by_process: Mapping[tuple[str, int], Trace]) -> list[int]:
    """Each process's rank: of its recording, else of its launcher, else its place in the first communicator."""
    ranks = []
    for process in processes:
        trace = by_process.get((process.host, process.pid))
        first = process.comms[0].rank if process.comms else 0
        ranks.append(trace.metadata.rank if trace is not None else process.rank if process.rank >= 0 else first)
    return ranks


def _merged(trace: Trace, process: Process, members: Mapping[str, Mapping[int, int]], doubled: set[str]) -> Trace:
    about = trace.metadata
    names = {what: dict(table) for what, table in about.names.items()}
    groups = dict(about.groups)
    gaps = list(about.coverage_gaps)
    rows = process.operations
    if (wrong := int((rows["comm"] >= len(process.comms)).sum())) > 0:
        gaps.append(f"{wrong} operations of NCCL name a communicator that {process.host}'s folder does not have.")
        rows = rows[rows["comm"] < len(process.comms)]
    replaced = np.zeros(len(trace.operations), np.bool_)
    if len(rows):
        marks = [int(number) for number, group in groups.items() if group.backend == "nccl" and not group.is_timed]
        replaced = np.isin(trace.operations["group"], marks)
        gaps = [gap for gap in gaps if gap != SUBMISSIONS_ONLY or not replaced.any()]
    first = _FIRST_GROUP + 2 * sum(group.is_timed for group in groups.values())
    for number, comm in enumerate(process.comms):
        places = members[comm.id]
        known = comm.id not in doubled and sorted(places) == list(range(comm.ranks))
        ranks = [places[place] for place in range(comm.ranks)] if known else []
        name = GroupName(comm.name or f"NCCL communicator {comm.id}", "nccl", ranks, is_timed=True)
        groups[str(first + 2 * number)] = name
        if np.any((rows["comm"] == number) & (rows["ending"] >= BY_SUBMISSION)):
            groups[str(first + 2 * number + 1)] = replace(name, name=f"{name.name}, not timed", is_timed=False)
    gaps += _gaps(process, rows)
    records = _records(rows, process, first, names)
    operations = np.concatenate([trace.operations[~replaced], records])
    order = np.argsort(operations["finished_ns"], kind="stable")
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    sources = [*([about.source] if about.source and not replaced.all() else []), *([SOURCE] if len(rows) else [])]
    return replace(
        trace,
        metadata=replace(
            about,
            source=" and ".join(dict.fromkeys(sources)) or about.source or SOURCE,
            names={what: {str(number): name for number, name in table.items()} for what, table in names.items()},
            groups=groups,
            coverage_gaps=gaps,
        ),
        operations=operations[order],
        nccl=NcclDetails(place_of[len(operations) - len(rows) :], rows, process.transfers),
    )


def _records(rows: Records, process: Process, first: int, names: dict[str, dict[str, str]]) -> Records:
    """The rows as records of operations; `names` gets the names that they use."""
    records = np.zeros(len(rows), RECORD)
    is_timed = rows["ending"] < BY_SUBMISSION
    records["group"] = first + 2 * rows["comm"].astype(np.int64) + ~is_timed
    operation = _texts(process, "operation", rows)
    dtype = _texts(process, "dtype", rows)
    items = np.array([_ITEM_BYTES.get(name, 0 if name == "?" else _WIDE_BYTES) for name in dtype], np.uint64)
    records["bytes"] = rows["count"] * items
    records["wire_bytes"] = rows["sent_bytes"]
    records["queued_ns"] = np.where(rows["called_ns"] > 0, rows["called_ns"], rows["submitted_ns"])
    records["started_ns"] = np.where(rows["began_ns"] > 0, rows["began_ns"], rows["submitted_ns"])
    records["finished_ns"] = np.maximum(rows["ended_ns"], records["started_ns"])
    # NCCL numbers the operations of each function; a record's number is of all operations of its group.
    numbers = rows["sequence"] * len(process.names["operation"]) + rows["operation"]
    records["sequence"] = np.where(np.isin(operation, _TRANSFERS), 0, numbers + 1).astype(np.uint32)
    algorithm = _texts(process, "algorithm", rows)
    protocol = _texts(process, "protocol", rows)
    both = [one if other == "?" else f"{one} {other}" for one, other in zip(algorithm, protocol, strict=True)]
    for what, texts in (("operation", operation), ("dtype", dtype), ("algorithm", both)):
        records[what] = _numbers(texts, names.setdefault(what, {}))
    records["reduce"] = records["wire"] = _UNKNOWN
    records["slowest_rank"] = -1
    return records


def _texts(process: Process, what: str, rows: Records) -> list[str]:
    table = process.names[what]
    return [table[number] if number < len(table) else "?" for number in rows[what].tolist()]


def _numbers(texts: Sequence[str], table: dict[str, str]) -> list[int]:
    """Each text's number in a rank's names: number (as text) -> name, to which new ones are added."""
    known = {name: int(number) for number, name in table.items()}
    for text in dict.fromkeys(texts):
        if text not in known:
            number = max([_NAMED_FROM - 1, *(each for each in known.values() if each != _UNKNOWN)]) + 1
            known[text] = number if text != "?" and number < _UNKNOWN else _UNKNOWN
            table[str(known[text])] = text if known[text] != _UNKNOWN else "?"
    return [known[text] for text in texts]


def _gaps(process: Process, rows: Records) -> list[str]:
    where = f"process {process.pid} of {process.host}"
    gaps = []
    if process.dropped:
        gaps.append(
            f"{process.dropped:,} events of NCCL in {where} came faster than they could be taken, and were dropped: "
            "operations are missing there, or have no times."
        )
    if cut := int((rows["ending"] == CUT_OFF).sum()):
        gaps.append(f"{cut:,} operations of NCCL in {where} had not ended: they count as submissions.")
    if not process.has_ended:
        gaps.append(
            f"The recording of NCCL in {where} has no end: the process was killed or still runs, or its disk was full."
        )
    several = [name for name, count in Counter(comm.id for comm in process.comms).items() if count > 1]
    if several:
        gaps.append(f"{where} is several ranks of one communicator: its operations are shown as one rank's.")
    return gaps


def _read(path: Path) -> Process:
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise RunError(f"{path} is of format {raw['format']}, this netfold reads {FORMAT}")
        comms = [Comm(**comm) for comm in raw["comms"]]
        names = {what: list(raw["names"][what]) for what in ("operation", "dtype", "algorithm", "protocol")}
        process = Process(
            raw["host"],
            raw["pid"],
            raw["rank"],
            comms,
            names,
            raw["dropped_events"],
            raw["has_ended"],
            read_list(path.parent / "operations", OPERATION),
            read_list(path.parent / "transfers", TRANSFER),
        )
        _check_types(process)
    except RunError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is not what netfold's plugin for NCCL writes: {error!r}") from None
    return process


def _check_types(process: Process) -> None:
    """Raise TypeError for a field of the wrong type, which an edited file may contain."""
    of_all: list[tuple[object, type]] = [(process.host, str), (process.pid, int), (process.rank, int)]
    of_all += [(process.dropped, int)]
    for comm in process.comms:
        of_all += [(comm.id, str), (comm.name, str), (comm.rank, int), (comm.ranks, int), (comm.nodes, int)]
    of_all += [(name, str) for table in process.names.values() for name in table]
    for value, kind in of_all:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{value!r}, expected {kind.__name__}")
