"""Status pages (native/engine/status.hpp) of the processes of this machine, by way of /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from netfold._native import engine

_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("layout", "u4"),
        ("capacity", "u4"),
        ("entry_bytes", "u4"),
        ("pid", "i4"),
        ("reserved", "u8"),
    ]
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
        ("reserved", "u1"),
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
    ]
)
_LAYOUT = 1
_LINK = "/memfd:netfold-status"
# A page that is written all the while is read as it is in the end: it is a picture, not a proof.
_TRIES = 20


@dataclass(frozen=True)
class Rank:
    """One rank of one group, as its process last said. Times are CLOCK_MONOTONIC nanoseconds."""

    pid: int
    process_state: str  # /proc's letter: R running, S sleeping, T stopped, Z dead but not waited for
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
    site: str  # where the operation under way was called, and the newest that is done; empty: not known
    done_site: str
    without_switch: bool  # its group joined one, and that is lost
    transfer: Transfer | None  # the oldest send or receive that is not done


@dataclass(frozen=True)
class Transfer:
    """A send or receive under way."""

    kind: str
    peer: int  # -1: any
    tag: int
    bytes: int
    since_ns: int
    site: str


def find_ranks(pid: int | None = None) -> list[Rank]:
    """Every rank of every group on this machine that this user may look at, or those of one process."""
    found = []
    for folder in [Path("/proc", str(pid))] if pid is not None else Path("/proc").glob("[0-9]*"):
        page = _page_of(folder)
        if page is not None:
            found += list(_ranks(page, folder))
    return sorted(found, key=lambda rank: (rank.job, rank.rank))


def _page_of(folder: Path) -> Path | None:
    try:
        names = os.listdir(folder / "fd")
    except OSError:
        return None  # it has just ended, or is not ours to look at
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(folder / "fd" / name).startswith(_LINK):
                return folder / "fd" / name
    return None


def _ranks(page: Path, folder: Path) -> Iterator[Rank]:
    try:
        raw = page.read_bytes()
        state, command = _process(folder)
        header = np.frombuffer(raw, _HEADER, count=1)[0]
        if header["magic"] != b"NFSTATUS" or header["layout"] != _LAYOUT or header["entry_bytes"] != _ENTRY.itemsize:
            return
        # A child made by fork inherits the descriptor, not the groups.
        if header["pid"] != int(folder.name):
            return
        for number in range(int(header["capacity"])):
            entry = _steady(page, raw, _HEADER.itemsize + number * _ENTRY.itemsize)
            if entry["in_use"]:
                yield _rank(int(folder.name), state, command, entry)
    except (OSError, ValueError):
        return


def _steady(page: Path, raw: bytes, offset: int) -> np.void:
    """An entry that nobody wrote while it was read."""
    entry: np.void = np.frombuffer(raw, _ENTRY, count=1, offset=offset)[0]
    for _ in range(_TRIES):
        with page.open("rb", buffering=0) as file:
            file.seek(offset)
            again: np.void = np.frombuffer(file.read(_ENTRY.itemsize), _ENTRY, count=1)[0]
        if entry["version"] == again["version"] and entry["version"] % 2 == 0:
            break
        entry = again
    return entry


def _rank(pid: int, state: str, command: str, entry: np.void) -> Rank:
    awaited = entry["awaited"][: min(int(entry["awaited_count"]), len(entry["awaited"]))]
    return Rank(
        pid=pid,
        process_state=state,
        command=command,
        group=int(entry["group"]),
        job=bytes(entry["job"]).decode(errors="replace"),
        rank=int(entry["rank"]),
        size=int(entry["size"]),
        joined_ns=int(entry["joined_ns"]),
        sequence=int(entry["sequence"]),
        operation=_name(engine.KINDS, entry["kind"]),
        dtype=_name(engine.DTYPES, entry["dtype"]),
        reduce=_name(engine.REDUCE_OPS, entry["reduce"]),
        algorithm=_name(engine.ALGORITHMS, entry["algorithm"]),
        bytes=int(entry["bytes"]),
        queued_ns=int(entry["queued_ns"]),
        waiting=int(entry["waiting"]),
        awaited=tuple(int(rank) for rank in awaited),
        done_sequence=int(entry["done_sequence"]),
        done_operation=_name(engine.KINDS, entry["done_kind"]),
        done_ns=int(entry["done_ns"]),
        failure=bytes(entry["failure"]).decode(errors="replace"),
        site=bytes(entry["site"]).decode(errors="replace"),
        done_site=bytes(entry["done_site"]).decode(errors="replace"),
        without_switch=bool(entry["without_switch"]),
        transfer=_transfer(entry) if entry["transfers"] else None,
    )


def _transfer(entry: np.void) -> Transfer:
    return Transfer(
        kind=_name(engine.KINDS, entry["transfer_kind"]),
        peer=int(entry["transfer_peer"]),
        tag=int(entry["transfer_tag"]),
        bytes=int(entry["transfer_bytes"]),
        since_ns=int(entry["transfer_ns"]),
        site=bytes(entry["transfer_site"]).decode(errors="replace"),
    )


def _name(names: dict[str, int], number: int) -> str:
    return next((name for name, value in names.items() if value == number), "?")


def _process(folder: Path) -> tuple[str, str]:
    # The name in the second field may hold anything, brackets and spaces included.
    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return state, command
