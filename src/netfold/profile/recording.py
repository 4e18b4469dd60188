"""Recording: what a process of a job does while it trains, into a folder of its rank.

A `Recording` has sources of operations (netfold's groups by their event records; netfold/torch/profiler_source.py for
other backends), a watcher of the training thread, and one thread that writes what they have every half second, and at
the end. It begins armed: nothing is written before the process is in a group, since who it is (its rank) says the
group, and a process without one, such as a launcher or a worker that loads data, leaves nothing.

States: armed -> writing -> ended, and from either of the first to failed (a disk is full, a folder has gone): one
sentence on stderr, nothing more is recorded, training goes on. A fork's child has no recording; one that a variable of
the environment asked for begins anew with the child's first group.

May use: the event record, a run's folder, `netfold._native` (once it records, not before). What needs torch is looked
up by name once torch is there. Costs: off, a test of a global a group.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import importlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from netfold.profile.record import Records, records_of
from netfold.profile.run import FORMAT, PROGRESS, STEP, GroupName, RankMetadata, RankWriter

VARIABLE = "NETFOLD_PROFILE"
# What the file of a launcher (netfold.profile.launch) begins with.
LAUNCHER = "launch-"
WRITE_S = 0.5
# So many of a group's ring are left at most before it is looked at sooner.
_MANY = 2048
_SOON_S = 0.05
# How soon a process that has just come into its first group is taken for one of a job.
_ARMED_S = 0.1
_STEPS_KEPT = 1 << 16

# Numbers for what netfold has no name for: of other backends' operations from 128 on.
UNKNOWN = 255
_OTHERS_FROM = 128


@dataclass
class Member:
    """A netfold group that this process is in. read(since): how many records there ever were, and those after that.
    registrations(): as About has them, of the process."""

    number: int
    group: GroupName
    rank: int
    size: int
    read: Callable[[int], tuple[int, bytes]]
    registrations: Callable[[], Mapping[str, int]] = dict
    read_up_to: int = 0


@dataclass(frozen=True)
class Identity:
    rank: int
    size: int


@dataclass
class Batch:
    """What a source has had since it was last asked."""

    operations: list[Records] = field(default_factory=list)
    lost: int = 0


class Source(Protocol):
    """Operations of others than netfold groups. `begin` and `end` are called on the main thread where that can be."""

    name: str

    def begin(self) -> None: ...

    def identity(self) -> Identity | None:
        """None: this process is in no group yet."""

    def boundary(self) -> None:
        """The training thread is between two steps."""

    def take(self, names: Names) -> Batch: ...

    def groups(self) -> Mapping[str, GroupName]: ...

    def coverage_gaps(self) -> list[str]: ...

    def versions(self) -> Mapping[str, str]: ...

    def end(self) -> None: ...

    def forget(self) -> None:
        """In a fork's child, as `end`; what was seen is the parent's."""


class Names:
    """What the numbers in records mean: netfold's own, and others as they turn up."""

    def __init__(self, engine: Any) -> None:
        unknown = {"?": UNKNOWN}
        self.tables: dict[str, dict[str, int]] = {
            "operation": dict(engine.KINDS),
            "dtype": {**engine.DTYPES, **unknown},
            "reduce": {**engine.REDUCE_OPS, **unknown},
            "algorithm": {**engine.ALGORITHMS, **unknown},
            "wire": {**engine.DTYPES, **unknown},
            "error": {name: number for number, name in enumerate(engine.FAILURES)},
        }

    def number(self, what: str, name: str) -> int:
        table = self.tables[what]
        if name not in table:
            number = max(_OTHERS_FROM, *(each + 1 for each in table.values() if each != UNKNOWN))
            if number >= UNKNOWN:
                return table.setdefault("?", UNKNOWN)
            table[name] = number
        return table[name]

    def by_number(self) -> dict[str, dict[str, str]]:
        return {what: {str(number): name for name, number in table.items()} for what, table in self.tables.items()}


class Recording:
    """See `netfold.profile`."""

    def __init__(self, folder: str | os.PathLike[str], *, replaces: bool = False) -> None:
        """replaces: an earlier life of this rank may have left records (an elastic restart); they go."""
        self.folder = Path(folder).absolute()
        self._replaces = replaces
        self._lock = threading.Lock()  # who writes
        self._writer: RankWriter | None = None
        self._about: RankMetadata | None = None
        self._watcher: Any = None
        self._sources: list[Source] = []
        self._names: Names | None = None
        self._ended = threading.Event()
        self._stopped = False
        self._failed = False
        self._thread: threading.Thread | None = None
        self._boundary_ns: int | None = None
        # Appended to by the training thread, emptied by who writes.
        self._steps: collections.deque[tuple[int, int]] = collections.deque(maxlen=_STEPS_KEPT)
        self._by_hand = False
        self._lost = 0
        self._read: set[str] = set()  # which kinds of source have had operations
        self._former: dict[str, GroupName] = {}  # groups that were closed

    def start(self) -> Recording:
        """Record this process from now on. Raises RuntimeError where it is recorded already, ValueError where
        `folder` holds something else than a run, or this rank's part of one."""
        global _current
        if self._ended.is_set():
            raise RuntimeError("a recording cannot be started twice; make another, in another folder")
        if _current is not None:
            raise RuntimeError(f"this process is recorded already, to {_current.folder}")
        require_profile_folder(self.folder)
        if not self._replaces and (who := self._identity()) is not None:
            self._refuse_rank(who)
        for member in members():
            member.read_up_to = member.read(0)[0]  # earlier operations belong to no recording
        _current = self
        if "torch" in sys.modules:
            self._add_torch()
        self._thread = threading.Thread(target=self._run, name="netfold records", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Write what is left. Idempotent; one that an exception interrupts (a signal's handler may raise) is done again
        at the end of the process."""
        global _current
        if self._stopped:
            return
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        try:
            for source in self._sources:
                source.end()
        except Exception as error:
            self._fail(error)
        with self._lock:
            if self._watcher is not None:
                self._watcher.stop()
            self._write_or_fail()
            self._stopped = True
            if self._writer is not None:
                self._writer.close()
            self._watcher = None
        atexit.unregister(self.stop)
        if _current is self:
            _current = None

    def step(self) -> None:
        """The training thread is between two steps. Called by hand, steps of optimizers are no boundaries any more."""
        self._by_hand = True
        self._at_boundary()

    def optimizer_stepped(self) -> None:
        """As `step`, for the source that sees optimizers."""
        if not self._by_hand:
            self._at_boundary()

    def forget(self) -> None:
        """In a fork's child: the recording is the parent's, and its thread, watcher and open files are too."""
        self._ended = threading.Event()  # the parent's may have been locked
        self._ended.set()
        self._stopped = True
        atexit.unregister(self.stop)
        for source in self._sources:
            source.forget()
        self._watcher = self._writer = None

    def __enter__(self) -> Recording:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _at_boundary(self) -> None:
        # Ended by another thread: a source may have something left to do on this one.
        if not self._ended.is_set():
            now = time.perf_counter_ns()
            if self._boundary_ns is not None:
                self._steps.append((self._boundary_ns, now))
            self._boundary_ns = now
        try:
            for source in self._sources:
                source.boundary()
        except Exception as error:
            if not self._failed:
                self._fail(error)

    def _add_torch(self) -> None:
        # By name: this room imports none of ours, and without torch there is nothing to import.
        source = importlib.import_module("netfold.torch.profiler_source").TorchSource(self)
        source.begin()
        self._sources.append(source)

    def _run(self) -> None:
        wait_s = _ARMED_S
        while not self._ended.wait(wait_s):
            with self._lock:
                many = self._write_or_fail()
            wait_s = _ARMED_S if self._writer is None else _SOON_S if many else WRITE_S

    def joined(self) -> None:
        """A group was made, or is about to end. From here on there is somebody to write of."""
        with self._lock:
            self._write_or_fail()

    def left(self, member: Member) -> None:
        """A netfold group was closed: its last records."""
        with self._lock:
            self._write_or_fail()
            self._former[str(member.number)] = member.group

    def _identity(self) -> Identity | None:
        for source in self._sources:
            if (who := source.identity()) is not None:
                return who
        for member in _members.values():
            return Identity(member.rank, member.size)
        return None

    def _refuse_rank(self, who: Identity) -> None:
        if (self.folder / f"rank-{who.rank:04}").exists():
            raise ValueError(f"{self.folder} holds a profile of rank {who.rank} already; name another folder")

    def _write_or_fail(self) -> bool:
        """True where there was so much that the next look should come soon."""
        if self._failed:
            return False
        try:
            if self._writer is None and not self._open():
                return False
            return self._write()
        except Exception as error:  # whatever it is, it is none of the job's
            self._fail(error)
            return False

    def _fail(self, error: Exception) -> None:
        self._failed = True
        print(f"netfold: profiling ends here, training goes on: {error}", file=sys.stderr, flush=True)
        for source in self._sources:
            with contextlib.suppress(Exception):
                source.end()

    def _open(self) -> bool:
        who = self._identity()
        if who is None:
            return False
        if not self._replaces:
            self._refuse_rank(who)
        engine = importlib.import_module("netfold._native").engine
        self._names = Names(engine)
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # the launcher or another rank was first
            describe_run(self.folder, sys.orig_argv)
        self._about = RankMetadata(rank=who.rank, size=who.size, host=socket.gethostname(), pid=os.getpid(), source="")
        self._writer = RankWriter(self.folder, self._about)
        main = threading.main_thread()
        # The kernel's name of a process's first thread is the process's; Python's idea of it is stale after a fork.
        self._watcher = engine.ComputeSampler(main.ident, os.getpid())
        return True

    def _write(self) -> bool:
        assert self._writer is not None and self._names is not None and self._about is not None
        most = 0
        groups = dict(self._former)
        registrations = self._about.registrations
        for member in list(_members.values()):
            groups[str(member.number)] = member.group
            registrations = member.registrations() or registrations
            since = member.read_up_to
            total, raw = member.read(since)
            records = records_of(raw)
            if len(records):
                self._read.add("event records")
                self._writer.append("operations", records)
            self._lost += total - since - len(records)
            member.read_up_to = total
            most = max(most, len(records))
        coverage_gaps = []
        versions = {"netfold": _version(), "python": platform.python_version()}
        for source in self._sources:
            batch = source.take(self._names)
            for records in batch.operations:
                self._read.add(source.name)
                self._writer.append("operations", records)
            self._lost += batch.lost
            groups.update(source.groups())
            coverage_gaps += source.coverage_gaps()
            versions.update(source.versions())
        if (progress := np.frombuffer(self._watcher.take(), PROGRESS)).size:
            self._writer.append("progress", progress)
        if not self._watcher.sees_queue:
            coverage_gaps.append(
                "This kernel does not say how long a thread waits for a core: such time is not computing."
            )
        if steps := [self._steps.popleft() for _ in range(len(self._steps))]:
            self._writer.append("steps", np.array(steps, STEP))
        about = replace(
            self._about,
            source=" and ".join(sorted(self._read)),
            names=self._names.by_number(),
            groups=groups,
            coverage_gaps=coverage_gaps,
            versions=versions,
            lost=self._lost,
            registrations=registrations,
        )
        if about != self._about:
            self._writer.describe(about)
            self._about = about
        return most > _MANY


_current: Recording | None = None
_members: dict[int, Member] = {}


def current() -> Recording | None:
    """What records this process; None: nothing does."""
    return _current


def members() -> list[Member]:
    """The netfold groups that this process is in."""
    return list(_members.values())


def step() -> None:
    """Mark, on the training thread, the boundary between two steps. Does nothing where nothing is recorded."""
    if _current is not None:
        _current.step()


def start_if_requested() -> None:
    """Record this process if the environment asks for it. Never raises; what it cannot do it says on stderr."""
    folder = os.environ.get(VARIABLE)
    if not folder or _current is not None:
        return
    try:
        Recording(folder, replaces=True).start()
    except Exception as error:
        print(f"netfold: no profile of process {os.getpid()}: {error}", file=sys.stderr, flush=True)


def joined(member: Member) -> None:
    """A netfold group was made. Always told, so that a recording may begin later."""
    _members[member.number] = member
    start_if_requested()
    if _current is not None:
        _current.joined()


def left(member: Member) -> None:
    """It is about to be forgotten: who records reads the end of it."""
    if _current is not None:
        _current.left(member)
    _members.pop(member.number, None)


def require_profile_folder(folder: Path) -> None:
    """Raises ValueError where there is something in `folder` that no profile leaves."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; a profile is written into a folder of its own")
    if foreign := unknown_files(sorted(os.listdir(folder))):
        raise ValueError(f"{folder} holds {foreign[0]}, which is no profile's; name another folder")


def unknown_files(names: Sequence[str]) -> list[str]:
    """Those of a folder's `names` that no recording leaves there."""
    return [name for name in names if name != "run.json" and not name.startswith(("rank-", LAUNCHER))]


def describe_run(folder: Path, command: Sequence[str]) -> None:
    """Write run.json. Raises FileExistsError where it is there already."""
    words = {
        "format": FORMAT,
        "command": list(command),
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": {"netfold": _version(), "python": platform.python_version()},
    }
    with open(folder / "run.json", "x") as file:
        json.dump(words, file, indent=1)


def _version() -> str:
    return str(importlib.import_module("netfold").__version__)


def _after_fork_in_child() -> None:
    global _current
    if _current is not None:
        _current.forget()
    _current = None
    _members.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
