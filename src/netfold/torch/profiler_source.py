"""Recording operations of other backends (gloo, mpi, nccl), and the optimizer's steps.

DDP calls a backend from C++, past everything that Python could wrap. But every backend of torch's own marks its
operations for torch's profiler; so that profiler runs, restricted to such marks (no operator of aten is recorded), on
the training thread, and is read and started anew between steps, since what it keeps grows.

Its times are CLOCK_REALTIME's. The distance to CLOCK_MONOTONIC is measured at both ends of a window, each time by the
narrowest of a few brackets (below a microsecond), and a time in between is moved by what lies in between: a clock that
is slewed meanwhile costs nothing, one that is set is off by the jump within one window.

A mark says neither which group an operation was of, nor its number there, nor when it was submitted. The flight
recorder does, torch's own list of the last operations: the k-th mark of a name and of sizes is of the k-th entry of
these since the window began. Ranks so count alike, whatever one of them missed.

Reading a window frees the memory to which whatever is marked as under way writes its end, so it is only done when there
is none: when the flight recorder has retired all that it knows. It knows collectives; messages, and marks that Python
code makes (an optimizer's step is one, within which its hooks run), are kept out of windows. Nor is a window opened or
read within a backward pass, which has thread-local state of its own. What is still under way when the recording has
waited for it at its end may end at any time: the profiler is then abandoned, which frees nothing, and the window is
lost. A process that ended with the profiler's callback in place would crash in torch's destructors.

A user's own profiler and this one exclude each other: the user's goes first, and what was missed is said.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _autograd, _profiler
from torch._C import _distributed_c10d as _c10d
from torch.autograd import profiler as user_profiler
from torch.optim import optimizer as optimizers

from netfold.profile.columns import COMPLETING
from netfold.profile.record import RECORD
from netfold.profile.recording import UNKNOWN, Batch, Identity, Names, Recording
from netfold.profile.run import GroupName

# A window is read at the first boundary after so long or so many operations (the flight recorder keeps 2000 unless it
# is told).
WINDOW_S = 2.0
_WINDOW_OPERATIONS = 1200
# Windows that nobody has written yet; beyond it the oldest go.
_WINDOWS_KEPT = 64
_ACTIVITIES = {_profiler.ProfilerActivity.CPU}
# Above all that kineto has to say: it would announce each window on stderr.
_QUIET = "6"
_BACKENDS = ("gloo", "mpi", "nccl", "ucc", "xccl", "hccl")

_DTYPES = {
    "float": ("f32", 4),
    "double": ("f64", 8),
    "c10::Half": ("f16", 2),
    "c10::BFloat16": ("bf16", 2),
    "signed char": ("i8", 1),
    "unsigned char": ("u8", 1),
    "short int": ("i16", 2),
    "int": ("i32", 4),
    "long int": ("i64", 8),
    "bool": ("u8", 1),
    "c10::complex<float>": ("?", 8),
    "c10::complex<double>": ("?", 16),
}
# Marks that are netfold's operations by another name.
_OPERATIONS = {"alltoall": "all_to_all", "allreduce": "all_reduce"}
# What lists a tensor a rank: a record says the size of one.
_LISTED = ("scatter", "gather", "all_gather", "reduce_scatter")
# No netfold group has such a number; numbers of other groups count on from it, one for each backend of a group.
_NUMBER = 1 << 32
# What is marked while no window can be read is bounded: beyond so many collectives none is.
_MOST_OPERATIONS = 20_000
# How long the end of a recording waits for what is under way, looking every so often.
_END_S, _END_LOOK_S = 1.0, 0.001
_MESSAGES = ("send", "recv", "recv_anysource")
_LIVES = ("init_process_group", "new_group", "destroy_process_group")

_TORN = "A profiler of the job's own ran: what other backends did meanwhile, and since the step before it, is missing."
_ABANDONED = (
    "An operation of another backend did not end within 1 s of the end of a recording: what such backends did since "
    "the last records were read, and after that, is missing."
)
# The end of a recording has left torch's profiler as it was.
_abandoned = False


@dataclass(frozen=True)
class _Event:
    """A mark: `name` is `gloo:all_reduce`; shapes and dtypes of inputs, in torch's words."""

    name: str
    start_ns: int
    duration_ns: int
    shapes: list[list[int]]
    dtypes: list[str]


@dataclass
class _Window:
    events: list[_Event]
    # CLOCK_REALTIME and how far it is ahead of CLOCK_MONOTONIC, at the beginning and at the end.
    began: tuple[int, int]
    ended: tuple[int, int]
    # How many collectives each group had begun when it began, by torch's name of the group.
    begun: Mapping[str, int]
    # What the flight recorder had to say when it ended.
    kept: bytes
    submitted: int  # how many calls there were, messages included

    def monotonic(self, ns: int) -> int:
        (began, first), (ended, last) = self.began, self.ended
        share = min(1.0, max(0.0, (ns - began) / max(1, ended - began)))
        return ns - first - round((last - first) * share)


@dataclass
class _Seen:
    """What the main thread leaves for who writes."""

    windows: collections.deque[_Window] = field(default_factory=lambda: collections.deque(maxlen=_WINDOWS_KEPT))
    torn: bool = False
    abandoned: bool = False
    dropped: int = 0


class TorchSource:
    """See `netfold.profile.recording.Source`."""

    name = "torch profiler"

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        # Of the window that is open: the clocks, and what groups had begun.
        self._began: tuple[tuple[int, int], dict[str, int]] | None = None
        self._looked_s = time.monotonic()
        self._seen = _Seen()
        self._unmarked: list[tuple[Any, str, Any]] = []  # torch's own functions, to be put back
        self._messages = False
        self._unread = False
        self._full = False
        self._uncertain = False
        self._hook: Any = None
        self._optimizer: weakref.ref[Any] | None = None
        self._others: dict[str, GroupName] = {}  # by torch's name; those that are gone too
        # By torch's name of a group (None: it cannot be told which) and the backend that served the operation.
        self._numbers: dict[tuple[str | None, str], int] = {}
        self._ended = False
        # Kept here: the interpreter calls it when it can, not at once.
        self._enough = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._stop_marking)

    def begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        self._hook = optimizers.register_optimizer_step_post_hook(self._stepped)
        for module in (dist, dist.distributed_c10d):
            for name in _LIVES:
                original = getattr(module, name)
                self._unmarked.append((module, name, original))
                setattr(module, name, self._noticed(original))
        if not _has_flight_recorder():
            return
        for owner, names in ((dist.ProcessGroup, _MESSAGES), (user_profiler.record_function, ("__enter__",))):
            for name in names:
                original = getattr(owner, name)
                self._unmarked.append((owner, name, original))
                setattr(owner, name, self._without_mark(original))
        # Else the first boundary does: the profiler sees the thread that starts it.
        if threading.current_thread() is threading.main_thread() and not _in_backward() and _is_wanted():
            self._open()

    def end(self) -> None:
        self._ended = True
        if threading.current_thread() is not threading.main_thread():
            atexit.register(self.end)  # where no boundary does it before
            return
        atexit.unregister(self.end)
        self._let_go()
        if self._began is None:
            return
        until_s = time.monotonic() + _END_S
        while (kept := self._when_quiet()) is None and time.monotonic() < until_s:
            time.sleep(_END_LOOK_S)
        if kept is None:
            self._abandon()
        else:
            self._close(kept)

    def forget(self) -> None:
        # The profiler stays as it is: operations of the parent's would write into what reading it freed.
        self._ended = True
        self._let_go()

    def _abandon(self) -> None:
        """Mark nothing more, and read nothing: operations under way have what they write to until they have ended.

        The profiler counts as enabled on this thread from here on: no other window is opened in this process.
        """
        global _abandoned
        self._seen.dropped += self._submitted()
        self._began = None
        if self._full:
            self._full = False
            _autograd._enable_record_function(True)
        if user_profiler._is_profiler_enabled or not _autograd._profiler_enabled():
            self._seen.torn = True  # as in _close: it is not ours
            return
        # It warns of devices, which are not in the profile.
        _autograd._toggle_collection_dynamic(False, _ACTIVITIES)
        self._seen.abandoned = _abandoned = True

    def _let_go(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        while self._unmarked:
            setattr(*self._unmarked.pop())

    def _noticed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Groups may come and go between two looks of who writes, the world among them."""

        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            if original.__name__ == "destroy_process_group":
                self._recording.joined()
                return original(*arguments, **named)
            made = original(*arguments, **named)
            self._recording.joined()
            return made

        return call

    def _without_mark(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._began is None or user_profiler._is_profiler_enabled:
                return original(*arguments, **named)
            self._messages |= original.__name__ in _MESSAGES
            _autograd._enable_record_function(False)
            try:
                return original(*arguments, **named)
            finally:
                _autograd._enable_record_function(not self._full)

        return call

    def identity(self) -> Identity | None:
        if not dist.is_initialized():
            return None
        return Identity(dist.get_rank(), dist.get_world_size())

    def boundary(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._ended:
            if not _in_backward():
                self.end()
            return
        if time.monotonic() - self._looked_s < WINDOW_S and self._submitted() < _WINDOW_OPERATIONS:
            return
        self._turn()

    def _submitted(self) -> int:
        """How many collectives since the window began."""
        before = self._began[1] if self._began is not None else {}
        return sum(count - before.get(name, 0) for name, count in _begun().items())

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Jobs with several optimizers step each: the first one's steps are the job's."""
        first = self._optimizer() if self._optimizer is not None else None
        if first is None:
            self._optimizer = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._recording.optimizer_stepped()

    def _turn(self) -> None:
        """Read what is there and start anew, if nothing is under way; else the next time."""
        if _in_backward():
            return
        if self._began is not None:
            if not self._seems_quiet() or (kept := self._when_quiet()) is None:
                return
            self._close(kept)
        wanted = _has_flight_recorder() and _is_wanted()
        if wanted:
            self._open()
        if self._began is not None or not wanted:
            self._looked_s = time.monotonic()
        # else another profiler is in the way: the next boundary tries again

    def _open(self) -> None:
        # Another's is left alone: starting ours would end it.
        if _autograd._profiler_enabled() or user_profiler._is_profiler_enabled:
            self._seen.abandoned |= _abandoned
            self._seen.torn |= not _abandoned
            return
        shapes, rest = True, (False, False, False, False)
        config = _profiler.ProfilerConfig(
            _profiler.ProfilerState.KINETO, shapes, *rest, _profiler._ExperimentalConfig()
        )
        began = _clocks()
        _autograd._prepare_profiler(config, _ACTIVITIES)
        # The stubs do not know of scopes.
        _autograd._enable_profiler(config, _ACTIVITIES, {_profiler.RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        self._began = began, _begun()

    def _seems_quiet(self) -> bool:
        """The short answer, the last collective that was completed: tens of microseconds instead of milliseconds.

        Where two threads complete in another order than they began it says no until there is another collective.
        """
        status = json.loads(_c10d._dump_fr_trace_json(includeCollectives=False))  # type: ignore[attr-defined]
        return all(
            each["last_enqueued_collective"] == each["last_completed_collective"]
            for each in status.get("pg_status", {}).values()
        )

    def _when_quiet(self) -> bytes | None:
        """What the flight recorder says, if it says that no collective of the window is under way; else None.

        torch retires an entry after all that the thread which ran the operation has to do with it.
        """
        kept: bytes = _c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        # What it has forgotten may be under way.
        remembers = kept.count(b'"retired":') >= self._submitted()
        return kept if remembers and b'"retired":false' not in kept else None

    def _close(self, kept: bytes) -> None:
        submitted = self._submitted()
        began, self._began = self._began, None
        if began is None:
            return
        if self._full:
            self._full = False
            _autograd._enable_record_function(True)
        if user_profiler._is_profiler_enabled or not _autograd._profiler_enabled():
            self._seen.torn = True  # a profiler of the user's has replaced ours, and may still run
            return
        # Torn down where it was made: kineto frees on this thread what the next window may be about to use.
        events = _read(_autograd._disable_profiler())
        if len(self._seen.windows) == _WINDOWS_KEPT:
            self._seen.dropped += len(self._seen.windows[0].events)
        clocks, begun = began
        self._seen.windows.append(_Window(events, clocks, _clocks(), begun, kept, submitted))

    def _stop_marking(self, _: Any) -> int:
        if self._began is not None:
            self._full = self._unread = True
            _autograd._enable_record_function(False)
        return 0

    def take(self, names: Names) -> Batch:
        if self._began is not None and self._submitted() > _MOST_OPERATIONS:
            # On the main thread, whose state it is; where it is undone, by the end of a backward pass, it comes again.
            ctypes.pythonapi.Py_AddPendingCall(self._enough, None)
        dropped, self._seen.dropped = self._seen.dropped, 0
        batch = Batch(lost=dropped)
        while self._seen.windows:
            window = self._seen.windows.popleft()
            rows, missing = self._rows(window, names)
            batch.lost += missing
            if rows:
                records = np.zeros(len(rows), RECORD)
                for name, column in zip(_COLUMNS, zip(*rows, strict=True), strict=True):
                    records[name] = column
                records["slowest_rank"] = -1
                batch.operations.append(records[np.argsort(records["finished_ns"], kind="stable")])
        return batch

    def _rows(self, window: _Window, names: Names) -> tuple[list[tuple[int, ...]], int]:
        """What fills _COLUMNS, and how many operations are missing."""
        events = sorted(window.events, key=lambda each: each.start_ns)
        known = list(self._remember())
        kept = _Kept(window)
        entries = [kept.find(each) for each in events]
        # Without its entry an operation of the only group there is may still be counted, that of one of several not.
        counted = dict(window.begun) if len(known) == 1 else None
        rows: list[tuple[int, ...]] = []
        for event, entry in zip(events, entries, strict=True):
            backend, _, operation = event.name.partition(":")
            operation = _OPERATIONS.get(operation, operation)
            began = window.monotonic(event.start_ns)
            group, sequence, queued = None, 0, began
            if entry is not None:
                group, sequence = entry.group, entry.sequence
                queued = min(began, window.monotonic(entry.created_ns))
            elif counted is not None:
                group = known[0]
            if entry is None:
                self._uncertain = True
                if counted is not None and group is not None:
                    sequence = counted[group] = counted.get(group, 0) + 1
            elif counted is not None:
                counted[entry.group] = entry.sequence
            number = self._number(group if group in known else None, backend)
            dtypes = event.dtypes
            dtype, item_bytes = _DTYPES.get(dtypes[0] if dtypes else "", ("?", 0))
            sizes = [math.prod(shape) * item_bytes for shape in event.shapes]
            if operation in _LISTED:
                sizes = sizes[:1]
            elif operation == "all_to_all":  # a record says the size of one block
                sizes = [sum(sizes) // self._ranks_in(group)]
            numbers = names.number("operation", operation), names.number("dtype", dtype)
            rows.append((number, sum(sizes), queued, began, began + event.duration_ns, sequence, *numbers, *_UNKNOWN))
        return rows, kept.left() if kept.count >= window.submitted else max(0, window.submitted - len(events))

    def _number(self, group: str | None, backend: str) -> int:
        return self._numbers.setdefault((group, backend), _NUMBER + len(self._numbers))

    def _ranks_in(self, group: str | None) -> int:
        """1 where the group cannot be told."""
        return max(1, len(self._others[group].ranks)) if group in self._others else 1

    def _remember(self) -> dict[str, GroupName]:
        self._others.update(_others())
        return self._others

    def groups(self) -> Mapping[str, GroupName]:
        """A group of several backends once for each: only some of them say when an operation has ended."""
        known = self._remember()
        for name, group in known.items():
            for backend in group.backend.split(" and "):
                self._number(name, backend)
        return {
            str(number): GroupName("one of several groups", backend)
            if name is None
            else replace(known[name], backend=backend)
            for (name, backend), number in self._numbers.items()
        }

    def coverage_gaps(self) -> list[str]:
        found = self._others
        said = []
        if torch.get_num_threads() > 1:
            said.append(
                f"torch computes with {torch.get_num_threads()} threads; only the main one is watched, so computing by "
                "the others while it waits counts as exposed communication."
            )
        if not found:
            return said
        said += [
            "An operation of another backend that was under way while records were read, or at the end, is missing.",
            "What threads other than the main one submit to other backends is not recorded, except by autograd on CPU.",
        ]
        if self._uncertain:
            said.append(
                "Of some operations of other backends the flight recorder kept nothing (TORCH_FR_BUFFER_SIZE): their "
                "sequence numbers are counted, their groups not known where there are several."
            )
        if self._messages:
            said.append("Messages between two ranks over other backends are not recorded.")
        if not _has_flight_recorder():
            said.append(
                "Operations of other backends are not recorded: torch's flight recorder is off (TORCH_FR_BUFFER_SIZE), "
                "without which they cannot be read safely."
            )
        if any(set(group.backend.split(" and ")) - {*COMPLETING} for group in found.values()):
            said.append("On accelerators only the submission of operations is seen, not their run on the device.")
        if self._seen.torn:
            said.append(_TORN)
        if self._seen.abandoned:
            said.append(_ABANDONED)
        if self._unread:
            said.append(
                f"Of other backends only the first {_MOST_OPERATIONS} operations or so between two times at which they "
                "could be read are there: a job without an optimizer should call netfold.profile.step()."
            )
        return said

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}


@dataclass(frozen=True)
class _Entry:
    group: str
    sequence: int
    created_ns: int


class _Kept:
    """The flight recorder's entries of a window, each to be found once."""

    def __init__(self, window: _Window) -> None:
        self._entries: dict[tuple[str, str], collections.deque[_Entry]] = {}
        said = json.loads(window.kept).get("entries", ())
        self.count = len(said)
        for entry in said:
            created_ns = entry["time_created_ns"]
            if window.began[0] <= created_ns <= window.ended[0]:
                row = _Entry(entry["process_group"][0], entry["collective_seq_id"], created_ns)
                key = (entry["profiling_name"], repr(entry["input_sizes"]))
                self._entries.setdefault(key, collections.deque()).append(row)

    def find(self, event: _Event) -> _Entry | None:
        """Of the next event, in order of time."""
        entries = self._entries.get((event.name, repr(event.shapes)))
        return entries.popleft() if entries else None

    def left(self) -> int:
        """How many no mark was found for."""
        return sum(map(len, self._entries.values()))


_UNKNOWN = (UNKNOWN, UNKNOWN, UNKNOWN)
_COLUMNS = (
    *("group", "bytes", "queued_ns", "started_ns", "finished_ns", "sequence"),
    *("operation", "dtype", "reduce", "algorithm", "wire"),
)


def _read(result: Any) -> list[_Event]:
    return [
        _Event(name, each.start_ns(), each.duration_ns(), each.shapes(), each.dtypes())
        for each in result.events()
        if (name := each.name()).partition(":")[0] in _BACKENDS
    ]


def _groups() -> list[tuple[dist.ProcessGroup, str, str]]:
    """Groups of more than one rank that other backends than netfold serve, alone or for some devices: torch's name, and
    the backends."""
    if not dist.is_initialized():
        return []
    world = dist.distributed_c10d._world
    found = []
    for group in list(world.pg_map):
        config = world.pg_backend_config.get(group, "")
        backends = {part.partition(":")[2] or part for part in config.split(",")} - {"netfold", "fake", "undefined"}
        if backends and group.size() > 1:
            found.append((group, world.pg_names.get(group, "?"), " and ".join(sorted(backends))))
    return found


def _others() -> dict[str, GroupName]:
    found = {}
    for group, name, backends in _groups():
        words = group.group_desc if group.group_desc not in ("", "undefined") else f"group {name}"
        found[name] = GroupName(words, backends, dist.get_process_group_ranks(group))
    return found


def _begun() -> dict[str, int]:
    """How many collectives each such group has begun."""
    return {name: cast(Any, group)._get_sequence_number_for_group() for group, name, _ in _groups()}


def _has_flight_recorder() -> bool:
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    return hasattr(_c10d, "_dump_fr_trace_json") and "0" not in sizes


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_wanted() -> bool:
    """Not where netfold serves every group: its event records say more, and cost less."""
    return not dist.is_initialized() or bool(_groups())


def _clocks() -> tuple[int, int]:
    """CLOCK_REALTIME, and how far it is ahead of CLOCK_MONOTONIC."""
    best = (1 << 62, 0, 0)
    for _ in range(5):
        before = time.perf_counter_ns()
        real = time.time_ns()
        after = time.perf_counter_ns()
        best = min(best, (after - before, real, real - (before + after) // 2))
    return best[1], best[2]
