"""Record a process of a job while it trains, into the folder of its rank.

A `Recording` has a sampler of the training thread, and one thread that writes the new records every half second and at
the end. The records are of netfold's groups (their event records) and, for other backends, of torch's profiler
(`netfold.profile.torch.source`, if torch is loaded when the recording starts). A recording begins armed. It writes
nothing before the process is in a group, since the group tells the process's rank. A process without a group, such as a
launcher or a worker that loads data, leaves no files.

States: armed -> writing -> ended, and from armed or writing to failed (a disk is full, a folder was removed). A failure
prints one sentence on stderr, ends the recording, and does not end the training. The child of a fork has no recording.
If an environment variable requested the recording, a new one begins with the child's first group.

May use: the event record, a run's folder, `netfold._native` (only while recording). Code that needs torch is imported
by name once torch is loaded. Cost without a recording: a test of a global variable for each group.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
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
# The prefix of a launcher's file (netfold.profile.launch).
LAUNCHER = "launch-"
# The prefix of a folder of NCCL's profiler (netfold.profile.nccl).
NCCL = "nccl-"
WRITE_S = 0.5
# After more new records of a group than this, the next write comes sooner, before the group's ring buffer overflows.
_MANY = 2048
_SOON_S = 0.05
# The interval in which an armed recording looks for a first group.
_ARMED_S = 0.1
_STEPS_KEPT = 1 << 16

# Numbers of names that netfold does not have: operations of other backends have numbers from 128.
UNKNOWN = 255
_OTHERS_FROM = 128


@dataclass
class Member:
    """A netfold group of this process."""

    number: int
    group: GroupName
    rank: int
    size: int
    read: Callable[[int], tuple[int, bytes]]  # read(since): the number of records so far, and the records after `since`
    registrations: Callable[[], Mapping[str, int]] = dict  # of the process, as in `RankMetadata`
    read_up_to: int = 0


@dataclass(frozen=True)
class Identity:
    rank: int
    size: int


@dataclass
class Batch:
    """The records of other backends since the last call of `TorchSource.take`."""

    operations: list[Records] = field(default_factory=list)
    lost: int = 0


class Names:
    """The names of numbers in records: netfold's own names, and new names of other backends."""

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


class Source(Protocol):
    """Records of other backends in this process: `netfold.profile.torch.source` has the one of torch."""

    name: str

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def forget(self) -> None: ...
    def boundary(self) -> None: ...
    def identity(self) -> Identity | None: ...
    def take(self, names: Names) -> Batch: ...
    def groups(self) -> Mapping[str, GroupName]: ...
    def coverage_gaps(self) -> list[str]: ...
    def versions(self) -> Mapping[str, str]: ...


class Recording:
    """See `netfold.profile`."""

    def __init__(self, folder: str | os.PathLike[str], *, replaces: bool = False) -> None:
        """replaces: overwrite records that this rank left before an elastic restart."""
        self.folder = Path(folder).absolute()
        self._replaces = replaces
        self._lock = threading.Lock()  # for writing
        self._writer: RankWriter | None = None
        self._about: RankMetadata | None = None
        self._sampler: Any = None
        self._torch: Source | None = None
        self._names: Names | None = None
        self._ended = threading.Event()
        self._stopped = False
        self._failed = False
        self._thread: threading.Thread | None = None
        self._boundary_ns: int | None = None
        # The training thread appends, the writing thread removes.
        self._steps: collections.deque[tuple[int, int]] = collections.deque(maxlen=_STEPS_KEPT)
        self._marked_by_hand = False
        self._lost = 0
        self._read: set[str] = set()  # `event records`, `torch profiler`: the sources that had operations
        self._closed: dict[str, GroupName] = {}  # groups that were closed

    def start(self) -> Recording:
        """Begin to record this process.

        Raises RuntimeError if it is already being recorded, ValueError if `folder` holds other files than a run's or a
        profile of this rank.
        """
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
            from netfold.profile.torch.source import TorchSource  # torch may be absent

            self._torch = TorchSource(self)
            self._torch.begin()
        self._thread = threading.Thread(target=self._run, name="netfold records", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Write the remaining records and end the recording. Idempotent.

        If an exception interrupts it (a signal handler may raise), it runs again at the end of the process.
        """
        global _current
        if self._stopped:
            return
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        try:
            if self._torch is not None:
                self._torch.end()
        except Exception as error:
            self._fail(error)
        with self._lock:
            if self._sampler is not None:
                self._sampler.stop()
            self._write_or_fail()
            self._stopped = True
            if self._writer is not None:
                self._writer.close()
            self._sampler = None
        atexit.unregister(self.stop)
        if _current is self:
            _current = None

    def step(self) -> None:
        """Mark the boundary between two steps. From the first call, optimizer steps are no boundaries."""
        self._marked_by_hand = True
        self._at_boundary()

    def optimizer_stepped(self) -> None:
        """Mark the boundary after an optimizer step, unless `step` was called. `TorchSource` calls it."""
        if not self._marked_by_hand:
            self._at_boundary()

    def forget(self) -> None:
        """Drop the recording in the child of a fork: thread, sampler and open files belong to the parent."""
        self._ended = threading.Event()  # the parent's event may have been locked
        self._ended.set()
        self._stopped = True
        atexit.unregister(self.stop)
        if self._torch is not None:
            self._torch.forget()
        self._sampler = self._writer = None

    def __enter__(self) -> Recording:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _at_boundary(self) -> None:
        # After another thread has ended the recording, torch's profiler may still have work on this thread.
        if not self._ended.is_set():
            now = time.perf_counter_ns()
            if self._boundary_ns is not None:
                self._steps.append((self._boundary_ns, now))
            self._boundary_ns = now
        try:
            if self._torch is not None:
                self._torch.boundary()
        except Exception as error:
            if not self._failed:
                self._fail(error)

    def _run(self) -> None:
        wait_s = _ARMED_S
        while not self._ended.wait(wait_s):
            with self._lock:
                many = self._write_or_fail()
            wait_s = _ARMED_S if self._writer is None else _SOON_S if many else WRITE_S

    def joined(self) -> None:
        """A group was created: write if the process's rank is known now."""
        with self._lock:
            self._write_or_fail()

    def left(self, member: Member) -> None:
        """A netfold group is about to close: write its last records."""
        with self._lock:
            self._write_or_fail()
            self._closed[str(member.number)] = member.group

    def _identity(self) -> Identity | None:
        if self._torch is not None and (who := self._torch.identity()) is not None:
            return who
        return next((Identity(member.rank, member.size) for member in _members.values()), None)

    def _refuse_rank(self, who: Identity) -> None:
        if (self.folder / f"rank-{who.rank:04}").exists():
            raise ValueError(f"{self.folder} holds a profile of rank {who.rank} already; name another folder")

    def _write_or_fail(self) -> bool:
        """Write new records; return whether there were so many that the next write should come soon."""
        if self._failed:
            return False
        try:
            if self._writer is None and not self._open():
                return False
            return self._write()
        except Exception as error:  # no error of the recording may reach the job
            self._fail(error)
            return False

    def _fail(self, error: Exception) -> None:
        self._failed = True
        print(f"netfold: profiling ends here, training goes on: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            if self._torch is not None:
                self._torch.end()

    def _open(self) -> bool:
        who = self._identity()
        if who is None:
            return False
        if not self._replaces:
            self._refuse_rank(who)
        from netfold._native import engine  # loaded by the first group

        self._names = Names(engine)
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # the launcher or another rank was first
            describe_run(self.folder, sys.orig_argv)
        self._about = RankMetadata(rank=who.rank, size=who.size, host=socket.gethostname(), pid=os.getpid(), source="")
        self._writer = RankWriter(self.folder, self._about)
        main = threading.main_thread()
        # The native id of the first thread is the process's id. After a fork, Python's `native_id` is stale.
        self._sampler = engine.ComputeSampler(main.ident, os.getpid())
        return True

    def _write(self) -> bool:
        assert self._writer is not None and self._names is not None and self._about is not None
        most = 0
        groups = dict(self._closed)
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
        coverage_gaps: list[str] = []
        versions = {"netfold": _version(), "python": platform.python_version()}
        if self._torch is not None:
            batch = self._torch.take(self._names)
            for records in batch.operations:
                self._read.add(self._torch.name)
                self._writer.append("operations", records)
            self._lost += batch.lost
            groups |= self._torch.groups()
            coverage_gaps += self._torch.coverage_gaps()
            versions |= self._torch.versions()
        if (progress := np.frombuffer(self._sampler.take(), PROGRESS)).size:
            self._writer.append("progress", progress)
        if not self._sampler.sees_queue:
            coverage_gaps.append(
                "This kernel does not report how long a thread waits for a core: such time is not computing."
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
    """The recording of this process, or None."""
    return _current


def members() -> list[Member]:
    """The netfold groups of this process."""
    return list(_members.values())


def start_if_requested() -> None:
    """Record this process if the environment requests it. Never raises; prints errors on stderr."""
    folder = os.environ.get(VARIABLE)
    if not folder or _current is not None:
        return
    try:
        Recording(folder, replaces=True).start()
    except Exception as error:
        print(f"netfold: no profile of process {os.getpid()}: {error}", file=sys.stderr, flush=True)


def joined(member: Member) -> None:
    """A netfold group was created. Called also without a recording, since a recording may begin later."""
    _members[member.number] = member
    start_if_requested()
    if _current is not None:
        _current.joined()


def left(member: Member) -> None:
    """A netfold group is about to close: a recording reads its last records."""
    if _current is not None:
        _current.left(member)
    _members.pop(member.number, None)


def require_profile_folder(folder: Path) -> None:
    """Raise ValueError if `folder` holds files that no profile writes."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; a profile needs a folder of its own")
    if foreign := unknown_files(sorted(os.listdir(folder))):
        raise ValueError(f"{folder} holds {foreign[0]}, which is not part of a profile; name another folder")


def unknown_files(names: Sequence[str]) -> list[str]:
    """Select the names of files that no recording writes."""
    return [name for name in names if name != "run.json" and not name.startswith(("rank-", NCCL, LAUNCHER))]


def describe_run(folder: Path, command: Sequence[str]) -> None:
    """Write run.json. Raises FileExistsError if it exists."""
    description = {
        "format": FORMAT,
        "command": list(command),
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": {"netfold": _version(), "python": platform.python_version()},
    }
    with open(folder / "run.json", "x") as file:
        json.dump(description, file, indent=1)


def _version() -> str:
    from netfold import __version__  # loads the native module

    return __version__


def _after_fork_in_child() -> None:
    global _current
    if _current is not None:
        _current.forget()
    _current = None
    _members.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
