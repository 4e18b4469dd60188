"""A run: the folder of a profiled job, with a subfolder for each rank. Its format, its writer and its reader.

    RUN/run.json                   the command, the time, the versions
    RUN/rank-0003/metadata.json    a `RankMetadata`: the rank, the source of its records, the gaps in them
    RUN/rank-0003/operations       `RECORD`s, in the order in which operations ended
    RUN/rank-0003/steps            `STEP`s, one for each training step
    RUN/rank-0003/progress         `PROGRESS`: the computing time of the training thread, a line every few milliseconds
    RUN/nccl-HOST-PID/             what NCCL's profiler saw in a process (netfold.profile.nccl)

The lists are plain arrays of fixed-size structs. Writers only append, so a killed rank leaves valid lists.
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
# busy_ns: time of the training thread on a core or runnable, outside of collectives, since the first sample. It never
# decreases. Between two lines, elapsed time minus busy time is time in which the thread did not compute.
PROGRESS = np.dtype([("at_ns", "i8"), ("busy_ns", "i8")])

Steps: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"
Progress: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"
# A rank's gap where torch's marks are all there is of operations on a device.
SUBMISSIONS_ONLY = "On accelerators only the submission of operations is seen, not their run on the device."
_LISTS = {"operations": RECORD, "steps": STEP, "progress": PROGRESS}


class RunError(ValueError):
    """A folder is not a run, or a file in it is unreadable. The message names the file and a remedy."""


@dataclass(frozen=True)
class GroupName:
    """A group of ranks."""

    name: str  # the same on all members, unlike the number in records
    backend: str
    ranks: list[int] = field(default_factory=list)  # ranks of the job, in the group's order; empty: unknown
    is_timed: bool = False  # NCCL's profiler gave its records, which end with the operations


@dataclass(frozen=True)
class RankMetadata:
    """One rank's description of its records."""

    rank: int
    size: int
    host: str
    pid: int
    source: str  # of the records: `event records` or `torch profiler`
    # Field of a record (operation, dtype, reduce, algorithm, wire, error) -> number -> name.
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    groups: Mapping[str, GroupName] = field(default_factory=dict)  # by the number in records, as text for JSON
    coverage_gaps: list[str] = field(default_factory=list)  # sentences on what the records lack
    versions: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0  # operations that came faster than they could be written
    # Of a fabric's registration cache: `evictions`, and the current `ranges` and `bytes`. Empty without a fabric.
    registrations: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def name_of(self, what: str, number: int) -> str:
        """Return the name of a number: `name_of("operation", 0)` is `all_reduce`; `?` if unknown."""
        return self.names.get(what, {}).get(str(int(number)), "?")


@dataclass(frozen=True)
class NcclDetails:
    """Details of a rank's operations that NCCL's profiler saw, beyond their records (netfold.profile.nccl)."""

    places: np.ndarray[Any, np.dtype[np.int64]]  # [k] of `rows`, in the trace's operations
    rows: Records  # [k] OPERATION
    transfers: Records  # [m] TRANSFER


@dataclass(frozen=True)
class Trace:
    """One rank's files: `operations` [n] RECORD, `steps` [n] STEP, `progress` [n] PROGRESS; any may be empty."""

    metadata: RankMetadata
    operations: Records
    steps: Steps
    progress: Progress
    nccl: NcclDetails | None = None

    @classmethod
    def empty(cls, metadata: RankMetadata) -> Trace:
        return cls(metadata, np.empty(0, RECORD), np.empty(0, STEP), np.empty(0, PROGRESS))


@dataclass(frozen=True)
class Run:
    """A run that was read."""

    folder: Path
    description: Mapping[str, Any]  # run.json
    traces: list[Trace]  # in the order of ranks, without ranks that have no files
    left_out: str = ""  # what `window.in_steps` left out, in a clause


class RankWriter:
    """Appends to one rank's folder, unbuffered: every call is a write system call.

    Raises OSError if the disk is full or the folder is gone. The caller reports it once and continues training.
    """

    def __init__(self, run: Path, about: RankMetadata) -> None:
        self._folder = run / f"rank-{about.rank:04}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.describe(about)
        self._files = {name: (self._folder / name).open("wb", buffering=0) for name in _LISTS}

    def describe(self, about: RankMetadata) -> None:
        """Replace the rank's metadata atomically."""
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
    """Read a run. Raises RunError if `folder` holds none. Drops an incomplete last record of a list."""
    from netfold.profile.nccl import add_nccl  # it uses the types of this module

    traces = add_nccl(folder, [_read_rank(path) for path in sorted(folder.glob("rank-*/metadata.json"))])
    if not traces:
        raise RunError(
            f"{folder} holds no profile: no rank left a metadata.json there; `netfold profile run` makes one"
        )
    try:
        path = folder / "run.json"
        description = json.loads(path.read_text()) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON: {error}") from None
    if not isinstance(description, dict):
        raise RunError(f"{path} is not what describes a run: a JSON object")
    return Run(folder, description, sorted(traces, key=lambda trace: trace.metadata.rank))


def _read_rank(path: Path) -> Trace:
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise RunError(f"{path} is of format {raw['format']}, this netfold reads {FORMAT}")
        raw["groups"] = {number: GroupName(**group) for number, group in raw["groups"].items()}
        raw.setdefault("registrations", {})  # older runs lack the key
        about = RankMetadata(**{one.name: raw[one.name] for one in fields(RankMetadata)})
        _check_types(about)
    except RunError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is not what a rank writes of itself: {error!r}") from None
    operations, steps, progress = (read_list(path.parent / name, dtype) for name, dtype in _LISTS.items())
    return Trace(about, operations, steps, progress)


def _check_types(about: RankMetadata) -> None:
    """Raise TypeError for a field of the wrong type, which an edited file may contain."""
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


def read_list(path: Path, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The structs of a file, without an incomplete last one; none without a file."""
    raw = path.read_bytes() if path.exists() else b""
    return np.frombuffer(raw, dtype=dtype, count=len(raw) // dtype.itemsize)
