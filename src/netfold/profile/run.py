"""A run: the folder that a profiled job leaves, a folder a rank in it. What is written, and how it is read back.

    RUN/run.json                what was run, when, by which versions
    RUN/rank-0003/metadata.json    an `RankMetadata`: who the rank is, where its records come from, what they cannot
    show RUN/rank-0003/operations    `RECORD`s, in the order in which operations ended
    RUN/rank-0003/steps         `STEP`s: one of training each
    RUN/rank-0003/progress      `PROGRESS`: how long the training thread has computed, a line every few milliseconds

The three lists are plain arrays of fixed-size structs, only ever appended to: a rank that is killed leaves what it had.
All times are CLOCK_MONOTONIC nanoseconds of the rank's own host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from netfold.profile.record import RECORD, Records

FORMAT = 1
STEP = np.dtype([("began_ns", "i8"), ("ended_ns", "i8")])
# busy_ns: what the training thread has spent since it was first looked at on anything but waiting and communicating:
# on a core or in the queue for one, outside of collectives. It never falls. Between two lines, time passed minus busy
# time is time that the thread did not compute.
PROGRESS = np.dtype([("at_ns", "i8"), ("busy_ns", "i8")])

Steps: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"
Progress: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"
_LISTS = {"operations": RECORD, "steps": STEP, "progress": PROGRESS}


class RunError(ValueError):
    """A folder is no run, or holds what cannot be read; the message says which file and what to do."""


@dataclass(frozen=True)
class GroupName:
    """A group of ranks, as its members call it: `name` is the same on all of them, unlike the number in records.

    ranks: which ranks of the job are in it, in the group's order; empty where that is not known.
    """

    name: str
    backend: str
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RankMetadata:
    """One rank's own words on its records.

    source: where operations come from, `event records` or `torch profiler`; names: for each field of a record that is
    a number for a name (operation, dtype, reduce, algorithm, wire, error) what each number means; groups: by the number
    in records (as text, since JSON has no other keys); coverage_gaps: sentences on what is not in the records; lost:
    how many operations came faster than they could be written; registrations: what a fabric's cache of registered
    memory did (`evictions`) and has (`ranges`, `bytes`), empty where there is no fabric.
    """

    rank: int
    size: int
    host: str
    pid: int
    source: str
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    groups: Mapping[str, GroupName] = field(default_factory=dict)
    coverage_gaps: list[str] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0
    registrations: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def name_of(self, what: str, number: int) -> str:
        """`name_of("operation", 0)` is `all_reduce`; `?` where the rank named nothing so."""
        return self.names.get(what, {}).get(str(int(number)), "?")


@dataclass(frozen=True)
class Trace:
    """What one rank left: `operations` [n] RECORD, `steps` [n] STEP, `progress` [n] PROGRESS; any may be empty."""

    metadata: RankMetadata
    operations: Records
    steps: Steps
    progress: Progress


@dataclass(frozen=True)
class Run:
    """traces: in the order of ranks; a rank that left nothing is absent. description: run.json."""

    folder: Path
    description: Mapping[str, Any]
    traces: list[Trace]


class RankWriter:
    """Appends to one rank's folder. Nothing is kept in memory; every call writes through to the kernel.

    Raises OSError where the disk is full or the folder is gone; the caller says so once and goes on training.
    """

    def __init__(self, run: Path, about: RankMetadata) -> None:
        self._folder = run / f"rank-{about.rank:04}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.describe(about)
        self._files = {name: (self._folder / name).open("wb", buffering=0) for name in _LISTS}

    def describe(self, about: RankMetadata) -> None:
        """Replace what the rank says of itself, whole or not at all."""
        new = self._folder / "metadata.json.new"
        new.write_text(json.dumps(asdict(about), indent=1))
        os.replace(new, self._folder / "metadata.json")

    def append(self, name: str, records: np.ndarray[Any, Any]) -> None:
        """records: of `operations`, `steps` or `progress`, with that list's dtype."""
        assert records.dtype == _LISTS[name], f"{name} are {_LISTS[name]}, not {records.dtype}"
        self._files[name].write(records.tobytes())

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read_run(folder: Path) -> Run:
    """Raises RunError where `folder` holds no run. The end of a list that was being written is left out."""
    ranks = sorted(folder.glob("rank-*/metadata.json"))
    if not ranks:
        raise RunError(
            f"{folder} holds no profile: no rank left an metadata.json there; `netfold profile run` makes one"
        )
    try:
        path = folder / "run.json"
        description = json.loads(path.read_text()) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON: {error}") from None
    if not isinstance(description, dict):
        raise RunError(f"{path} is not what describes a run: a JSON object")
    return Run(folder, description, sorted(map(_read_rank, ranks), key=lambda trace: trace.metadata.rank))


def _read_rank(path: Path) -> Trace:
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise RunError(f"{path} is of format {raw['format']}, this netfold reads {FORMAT}")
        raw["groups"] = {number: GroupName(**group) for number, group in raw["groups"].items()}
        raw.setdefault("registrations", {})  # a run of before
        about = RankMetadata(**{one.name: raw[one.name] for one in fields(RankMetadata)})
        _check_types(about)
    except RunError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is not what a rank writes of itself: {error!r}") from None
    return Trace(about, **{name: _read_list(path.parent / name, dtype) for name, dtype in _LISTS.items()})


def _check_types(about: RankMetadata) -> None:
    """Raise TypeError where a field is of another type than About says, as a file that was changed may have it."""
    of_all: list[tuple[str, object, type]] = [
        *((name, getattr(about, name), int) for name in ("rank", "size", "pid", "lost", "format")),
        *((name, getattr(about, name), str) for name in ("host", "source")),
        *((name, getattr(about, name), dict) for name in ("names", "groups", "versions", "registrations")),
        ("coverage_gaps", about.coverage_gaps, list),
    ]
    of_all += [("names", each, dict) for each in about.names.values()]
    for group in about.groups.values():
        of_all += [("groups", group.ranks, list), *(("groups", each, str) for each in (group.name, group.backend))]
        of_all += [("groups", rank, int) for rank in group.ranks]
    of_all += [("coverage_gaps", each, str) for each in about.coverage_gaps]
    for name, value, kind in of_all:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} holds {value!r}, expected {kind.__name__}")


def _read_list(path: Path, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    raw = path.read_bytes() if path.exists() else b""
    return np.frombuffer(raw, dtype=dtype, count=len(raw) // dtype.itemsize)
