"""Read the status segments (netfold/engine/status.hpp) of this machine's processes through /proc.

A segment is a memfd, found by its descriptor in /proc/PID/fd, so processes in containers are included. `pid` is always
the process's number in this PID namespace; in its container the process has another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from netfold._native import engine

_T = TypeVar("_T")
_HEADER = np.dtype(
    [("magic", "S8"), ("layout", "u4"), ("capacity", "u4"), ("entry_bytes", "u4"), ("pid", "i4"), ("reserved", "u8")]
)
_ENTRY = np.dtype(
    [
        ("version", "u4"),
        ("in_use", "u4"),
        ("group", "u8"),
        ("rank", "i4"),
        ("size", "i4"),
        ("job", "S40"),
        ("joined_ns", "i8"),
        ("sequence", "u4"),
        ("kind", "u1"),
        ("dtype", "u1"),
        ("reduce", "u1"),
        ("algorithm", "u1"),
        ("bytes", "u8"),
        ("queued_ns", "i8"),
        ("deadline_ns", "i8"),
        ("waiting", "u4"),
        ("awaited_count", "u4"),
        ("awaited", "i4", 16),
        ("done_sequence", "u4"),
        ("done_kind", "u1"),
        ("failed", "u1"),
        ("without_switch", "u1"),
        ("with_switch", "u1"),
        ("done_ns", "i8"),
        ("failure", "S512"),
        ("site", "S160"),
        ("done_site", "S160"),
        ("transfers", "u4"),
        ("transfer_peer", "i4"),
        ("transfer_tag", "i4"),
        ("transfer_kind", "u1"),
        ("transfer_reserved", "u1", 3),
        ("transfer_bytes", "u8"),
        ("transfer_ns", "i8"),
        ("transfer_site", "S160"),
        ("operations", "u8"),
        ("tensor_bytes", "u8"),
        ("wire_bytes", "u8"),
        ("retransmissions", "u8"),
        ("judged", "u8"),
        ("last", "u8"),
        ("under_way", "i8"),
        ("inside", "i8"),
    ]
)
# The fields that hold a native code, and the names of the codes.
_NAMED = {
    "kind": engine.KINDS,
    "done_kind": engine.KINDS,
    "transfer_kind": engine.KINDS,
    "dtype": engine.DTYPES,
    "reduce": engine.REDUCE_OPS,
    "algorithm": engine.ALGORITHMS,
}
_LAYOUT = 2
_LINK = "/memfd:netfold-status"
# After this many attempts, an entry that its process keeps writing is used as read: it may be inconsistent.
_TRIES = 20
# Further looks at a process in state D, and the time between them.
_LOOKS, _LOOK_S = 5, 0.02


@dataclass(frozen=True)
class Rank:
    """One rank of one group, as last written by its process. Times are CLOCK_MONOTONIC nanoseconds."""

    pid: int
    process_state: str  # /proc's letter: R running, S sleeping, D waiting for a disk, T stopped, Z dead
    command: str
    group: int
    job: str
    rank: int
    size: int
    joined_ns: int
    sequence: int  # of the oldest operation under way, 0: none
    operation: str
    dtype: str
    reduce: str
    algorithm: str
    bytes: int
    queued_ns: int
    waiting: int
    awaited: tuple[int, ...]
    done_sequence: int
    done_operation: str
    done_ns: int
    failure: str
    site: str  # where the operation under way was called; empty: unknown
    done_site: str  # of the newest operation that is done
    with_switch: bool  # the group joined a switch
    without_switch: bool  # the switch is lost
    transfer: Transfer | None  # the oldest send or receive that is not done
    counters: Counters


@dataclass(frozen=True)
class Transfer:
    """A send or receive under way."""

    kind: str
    peer: int  # -1: any
    tag: int
    bytes: int
    since_ns: int
    site: str


@dataclass(frozen=True)
class Counters:
    """Totals of a rank since its group began, sends and receives included."""

    read_ns: int  # when the totals were read
    operations: int
    tensor_bytes: int
    wire_bytes: int
    retransmissions: int
    judged: int  # collectives whose last rank is known
    last: int  # of these, collectives in which this rank was last
    is_under_way: bool
    under_way_ns: int  # time with at least one operation submitted and not done, the current one included
    inside_ns: int  # time that a calling thread waited inside netfold or ran an operation, the current one included


def find_ranks(pid: int | None = None) -> list[Rank]:
    """List all ranks on this machine whose processes this user may inspect, or the ranks of one process."""
    ranks: list[Rank] = []
    for segment in find_segments(pid):
        with contextlib.closing(segment), contextlib.suppress(OSError):
            ranks += segment.ranks()
    return sorted(_recheck_disk_waits(ranks), key=lambda rank: (rank.job, rank.rank))


def _recheck_disk_waits(ranks: list[Rank]) -> list[Rank]:
    """Look at processes in state D again: one page fault causes that state, so only a lasting one is a finding."""
    states = {rank.pid: rank.process_state for rank in ranks}
    for _ in range(_LOOKS):
        waiting = [pid for pid, state in states.items() if state == "D"]
        if not waiting:
            break
        time.sleep(_LOOK_S)
        for pid in waiting:
            with contextlib.suppress(OSError):  # the process ended; keep its last state
                states[pid] = _process(Path("/proc", str(pid)))[0]
    return [replace(rank, process_state=states[rank.pid]) for rank in ranks]


def find_segments(pid: int | None = None) -> list[StatusSegment]:
    """Map the segments of all processes on this machine that this user may inspect, or of one process."""
    segments = []
    for folder in [Path("/proc", str(pid))] if pid is not None else Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # ended, not permitted, or without a segment
            segments.append(StatusSegment(folder))
    return segments


class StatusSegment:
    """The mapped status segment of one process. Reading it again costs that process nothing. Close it after use.

    Raises OSError if there is no such process or it has no segment, ValueError for a segment of another layout.
    """

    def __init__(self, folder: Path) -> None:
        self.pid = int(folder.name)
        self._folder = folder
        reason: Exception = FileNotFoundError("no status page")
        # A process that inspects itself opens its segment a second time, for a moment. That descriptor may belong to
        # another file when it is opened here, so try all descriptors that look like the segment.
        for name in os.listdir(folder / "fd"):
            path = folder / "fd" / name
            try:
                if os.readlink(path).startswith(_LINK):
                    self._open(path)
                    return
            except OSError:  # closed meanwhile
                continue
            except ValueError as error:
                reason = error
        raise reason

    def _open(self, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        try:
            self._entries = self._checked()
        except ValueError:
            self._memory.close()
            raise

    def ranks(self) -> list[Rank]:
        """The process's ranks, one for each group. Raises OSError if the process has ended."""
        state, command = _process(self._folder)
        in_use = np.flatnonzero(self._entries["in_use"]).tolist()
        return [_rank(self.pid, state, command, self._steady(number)) for number in in_use]

    def close(self) -> None:
        del self._entries
        self._memory.close()

    def _checked(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        header = np.frombuffer(self._memory, _HEADER, count=1)[0].copy()
        if header["magic"] != b"NFSTATUS" or header["layout"] != _LAYOUT or header["entry_bytes"] != _ENTRY.itemsize:
            raise ValueError("a page of another netfold")
        # The segment holds the process's number in its own PID namespace.
        if header["pid"] != _own_pid(self._folder):
            raise ValueError("a child made by fork inherits the descriptor, not the groups")
        return np.frombuffer(self._memory, _ENTRY, count=int(header["capacity"]), offset=_HEADER.itemsize)

    def _steady(self, number: int) -> np.void:
        """Copy an entry that its process did not write meanwhile (a seqlock)."""
        for _ in range(_TRIES):
            entry: np.void = self._entries[number].copy()
            if entry["version"] % 2 == 0 and entry["version"] == self._entries[number]["version"]:
                break
        return entry


def _rank(pid: int, state: str, command: str, entry: np.void) -> Rank:
    values = {name: _plain(entry[name]) for name in _ENTRY.names or ()}
    values |= {name: _name(names, values[name]) for name, names in _NAMED.items()}
    values["read_ns"] = now_ns = time.monotonic_ns()
    values["is_under_way"], values["under_way_ns"] = _stopwatch(values["under_way"], now_ns)
    values["inside_ns"] = _stopwatch(values["inside"], now_ns)[1]
    values |= {"pid": pid, "process_state": state, "command": command}
    values |= {"operation": values["kind"], "done_operation": values["done_kind"]}
    values["awaited"] = values["awaited"][: values["awaited_count"]]
    values |= {name: bool(values[name]) for name in ("with_switch", "without_switch")}
    transfer = {name.removeprefix("transfer_"): value for name, value in values.items() if "transfer_" in name}
    values["transfer"] = _made(Transfer, {**transfer, "since_ns": transfer["ns"]}) if values["transfers"] else None
    values["counters"] = _made(Counters, values)
    return _made(Rank, values)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    return value.decode(errors="replace") if isinstance(value, bytes) else int(value)


def _made(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Make a dataclass of the values of its fields."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def _stopwatch(word: int, now_ns: int) -> tuple[bool, int]:
    """Whether the stopwatch runs, and its time in ns (status.hpp)."""
    runs, ns = bool(word & 1), word >> 1
    return runs, ns + now_ns if runs else ns


def _name(names: dict[str, int], number: int) -> str:
    return next((name for name, value in names.items() if value == number), "?")


def _own_pid(folder: Path) -> int:
    """The process's number in its innermost PID namespace."""
    for line in (folder / "status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return int(folder.name)  # a kernel without namespaces


def _process(folder: Path) -> tuple[str, str]:
    # The second field, the process's name, may hold brackets and spaces.
    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return state, command
