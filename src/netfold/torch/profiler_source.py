"""Record the operations of other backends (gloo, mpi, nccl), and the optimizer's steps.

DDP calls a backend from C++, which Python cannot wrap. But torch's own backends mark their operations for torch's
profiler. So that profiler runs on the training thread, restricted to such marks: it records no operator of aten. Its
memory grows, so it is read and restarted between steps. The time between two restarts is a window.

Clock: the profiler's times are CLOCK_REALTIME. Both ends of a window measure the offset to CLOCK_MONOTONIC by the
narrowest of five brackets (below 1 us). Times inside the window are converted by linear interpolation. So slewing the
clock causes no error; setting the clock causes an error of the jump, within one window.

Identity: a mark holds neither the operation's group, nor its sequence number, nor its time of submission. torch's
flight recorder, the list of its last operations, holds all three. The k-th mark of a name and sizes belongs to the k-th
entry of that name and sizes since the window began. So all ranks count alike, even if one of them missed a mark.

Safety: an operation under way writes its end to memory that reading a window frees. So a window is read only when the
flight recorder has retired all its entries. The flight recorder knows collectives only. So messages, and marks that
Python code makes, are kept out of windows; an optimizer's step is such a mark, and its hooks run inside it. No window
is opened or read inside a backward pass, which has its own thread-local state. An operation that is still under way
after the wait at the end of a recording may end at any time. Then the profiler is abandoned: nothing is freed, and the
window is lost. A process that ended with the profiler's callback installed would crash in torch's destructors.

A user's profiler and this one exclude each other. The user's has precedence, and `coverage_gaps` reports the loss.
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

# A window is read at the first step boundary after this time or this many operations. The flight recorder keeps 2000
# operations by default.
WINDOW_S = 2.0
_WINDOW_OPERATIONS = 1200
# Windows that are read and not written yet. Beyond this, the oldest are dropped.
_WINDOWS_KEPT = 64
_ACTIVITIES = {_profiler.ProfilerActivity.CPU}
# Above all levels of kineto's messages: kineto would print a message for each window.
_QUIET_LOG_LEVEL = "6"
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
# Marks' names to netfold's names of the same operations.
_OPERATIONS = {"alltoall": "all_to_all", "allreduce": "all_reduce"}
# Operations whose marks list one tensor a rank. A record holds the size of one of the tensors.
_LISTED = ("scatter", "gather", "all_gather", "reduce_scatter")
# Other groups' numbers start here, one for each backend of a group. netfold's groups have smaller numbers.
_FIRST_NUMBER = 1 << 32
# While no window can be read, marking stops after this many collectives.
_MAX_OPERATIONS = 20_000
# The end of a recording waits this long for operations under way, and polls at this interval.
_END_S, _END_POLL_S = 1.0, 0.001
_MESSAGES = ("send", "recv", "recv_anysource")
_GROUP_FUNCTIONS = ("init_process_group", "new_group", "destroy_process_group")

_TORN = "A profiler of the job's own ran: what other backends did meanwhile, and since the step before it, is missing."
_ABANDONED = (
    "An operation of another backend did not end within 1 s of the end of a recording: what such backends did since "
    "the last records were read, and after that, is missing."
)
# A recording's end has left torch's profiler running.
_abandoned = False


@dataclass(frozen=True)
class _Event:
    """A mark of one operation."""

    name: str  # such as gloo:all_reduce
    start_ns: int
    duration_ns: int
    shapes: list[list[int]]  # of the inputs
    dtypes: list[str]  # of the inputs, torch's names


@dataclass
class _Window:
    events: list[_Event]
    # CLOCK_REALTIME and its offset from CLOCK_MONOTONIC, at the beginning and at the end.
    began: tuple[int, int]
    ended: tuple[int, int]
    # Collectives that each group had submitted when the window began, by torch's name of the group.
    begun: Mapping[str, int]
    # The flight recorder's dump at the end, JSON.
    dump: bytes
    submitted: int  # calls during the window, messages included

    def monotonic(self, ns: int) -> int:
        (began, first), (ended, last) = self.began, self.ended
        share = min(1.0, max(0.0, (ns - began) / max(1, ended - began)))
        return ns - first - round((last - first) * share)


@dataclass
class _Pending:
    """What the main thread passes to the writing thread."""

    windows: collections.deque[_Window] = field(default_factory=lambda: collections.deque(maxlen=_WINDOWS_KEPT))
    torn: bool = False
    abandoned: bool = False
    dropped: int = 0


class TorchSource:
    """See `netfold.profile.recording.Source`."""

    name = "torch profiler"

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        # Of the open window: the clocks, and the collectives that each group had submitted.
        self._began: tuple[tuple[int, int], dict[str, int]] | None = None
        self._checked_s = time.monotonic()
        self._pending = _Pending()
        self._originals: list[tuple[Any, str, Any]] = []  # torch's functions, to be restored
        self._messages = False
        self._unread = False
        self._full = False
        self._uncertain = False
        self._hook: Any = None
        self._optimizer: weakref.ref[Any] | None = None
        self._groups: dict[str, GroupName] = {}  # by torch's name, destroyed groups included
        # By torch's name of a group (None: unknown) and the backend that served the operation.
        self._numbers: dict[tuple[str | None, str], int] = {}
        self._ended = False
        # Kept alive here: the interpreter calls it later.
        self._stop_marking_callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._stop_marking)

    def begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_LOG_LEVEL)
        self._hook = optimizers.register_optimizer_step_post_hook(self._stepped)
        for module in (dist, dist.distributed_c10d):
            for name in _GROUP_FUNCTIONS:
                original = getattr(module, name)
                self._originals.append((module, name, original))
                setattr(module, name, self._reporting(original))
        if not _has_flight_recorder():
            return
        for owner, names in ((dist.ProcessGroup, _MESSAGES), (user_profiler.record_function, ("__enter__",))):
            for name in names:
                original = getattr(owner, name)
                self._originals.append((owner, name, original))
                setattr(owner, name, self._without_mark(original))
        # Otherwise the first boundary opens the window: the profiler records only the thread that starts it.
        if threading.current_thread() is threading.main_thread() and not _in_backward() and _is_wanted():
            self._open()

    def end(self) -> None:
        self._ended = True
        if threading.current_thread() is not threading.main_thread():
            atexit.register(self.end)  # unless a boundary on the main thread comes first
            return
        atexit.unregister(self.end)
        self._restore()
        if self._began is None:
            return
        until_s = time.monotonic() + _END_S
        while (dump := self._dump_if_quiet()) is None and time.monotonic() < until_s:
            time.sleep(_END_POLL_S)
        if dump is None:
            self._abandon()
        else:
            self._close(dump)

    def forget(self) -> None:
        # Leave the profiler running: reading it would free memory that the parent's operations write to.
        self._ended = True
        self._restore()

    def _abandon(self) -> None:
        """Stop marking, and read nothing: operations under way still write to the profiler's memory.

        The profiler counts as enabled on this thread from now on: this process opens no other window.
        """
        global _abandoned
        self._pending.dropped += self._submitted()
        self._began = None
        if self._full:
            self._full = False
            _autograd._enable_record_function(True)
        if user_profiler._is_profiler_enabled or not _autograd._profiler_enabled():
            self._pending.torn = True  # as in _close: this is the user's profiler
            return
        # torch warns about devices, which this profile does not include.
        _autograd._toggle_collection_dynamic(False, _ACTIVITIES)
        self._pending.abandoned = _abandoned = True

    def _restore(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        while self._originals:
            setattr(*self._originals.pop())

    def _reporting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that makes or destroys groups: a group may exist only between two writes of the recording."""

        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            if original.__name__ == "destroy_process_group":
                self._recording.joined()
                return original(*arguments, **named)
            result = original(*arguments, **named)
            self._recording.joined()
            return result

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
        if time.monotonic() - self._checked_s < WINDOW_S and self._submitted() < _WINDOW_OPERATIONS:
            return
        self._next_window()

    def _submitted(self) -> int:
        """The number of collectives since the window began."""
        before = self._began[1] if self._began is not None else {}
        return sum(count - before.get(name, 0) for name, count in _begun().items())

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Count a step. In a job with several optimizers, only the first one's steps count."""
        first = self._optimizer() if self._optimizer is not None else None
        if first is None:
            self._optimizer = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._recording.optimizer_stepped()

    def _next_window(self) -> None:
        """Read the window and open the next one, if no operation is under way; else leave it to the next boundary."""
        if _in_backward():
            return
        if self._began is not None:
            if not self._seems_quiet() or (dump := self._dump_if_quiet()) is None:
                return
            self._close(dump)
        wanted = _has_flight_recorder() and _is_wanted()
        if wanted:
            self._open()
        if self._began is not None or not wanted:
            self._checked_s = time.monotonic()
        # else another profiler is running: the next boundary tries again

    def _open(self) -> None:
        # To start this profiler would end another that is running.
        if _autograd._profiler_enabled() or user_profiler._is_profiler_enabled:
            self._pending.abandoned |= _abandoned
            self._pending.torn |= not _abandoned
            return
        shapes, rest = True, (False, False, False, False)
        config = _profiler.ProfilerConfig(
            _profiler.ProfilerState.KINETO, shapes, *rest, _profiler._ExperimentalConfig()
        )
        began = _clocks()
        _autograd._prepare_profiler(config, _ACTIVITIES)
        # torch's stubs lack the scopes.
        _autograd._enable_profiler(config, _ACTIVITIES, {_profiler.RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        self._began = began, _begun()

    def _seems_quiet(self) -> bool:
        """Whether each group's last submitted collective is complete. Costs tens of microseconds, a dump milliseconds.

        False negative: if two threads complete in another order than they began, until the next collective.
        """
        status = json.loads(_c10d._dump_fr_trace_json(includeCollectives=False))  # type: ignore[attr-defined]
        return all(
            each["last_enqueued_collective"] == each["last_completed_collective"]
            for each in status.get("pg_status", {}).values()
        )

    def _dump_if_quiet(self) -> bytes | None:
        """Return the flight recorder's dump if no collective of the window is under way; else None.

        torch retires an entry after the thread that ran the operation has finished with it.
        """
        dump: bytes = _c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        # An entry that the flight recorder has overwritten may be under way.
        is_complete = dump.count(b'"retired":') >= self._submitted()
        return dump if is_complete and b'"retired":false' not in dump else None

    def _close(self, dump: bytes) -> None:
        submitted = self._submitted()
        began, self._began = self._began, None
        if began is None:
            return
        if self._full:
            self._full = False
            _autograd._enable_record_function(True)
        if user_profiler._is_profiler_enabled or not _autograd._profiler_enabled():
            self._pending.torn = True  # the user's profiler has replaced this one, and may still run
            return
        # Stop on the thread that started it: kineto frees memory on this thread that the next window may use.
        events = _read(_autograd._disable_profiler())
        if len(self._pending.windows) == _WINDOWS_KEPT:
            self._pending.dropped += len(self._pending.windows[0].events)
        clocks, begun = began
        self._pending.windows.append(_Window(events, clocks, _clocks(), begun, dump, submitted))

    def _stop_marking(self, _: Any) -> int:
        if self._began is not None:
            self._full = self._unread = True
            _autograd._enable_record_function(False)
        return 0

    def take(self, names: Names) -> Batch:
        if self._began is not None and self._submitted() > _MAX_OPERATIONS:
            # Marking is thread-local state of the main thread, so the call must run there. The end of a backward pass
            # may restore marking; the next take() then stops it again.
            ctypes.pythonapi.Py_AddPendingCall(self._stop_marking_callback, None)
        dropped, self._pending.dropped = self._pending.dropped, 0
        batch = Batch(lost=dropped)
        while self._pending.windows:
            window = self._pending.windows.popleft()
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
        """The rows of _COLUMNS, and the number of missing operations."""
        events = sorted(window.events, key=lambda each: each.start_ns)
        known = list(self._update_groups())
        recorded = _FlightEntries(window)
        entries = [recorded.find(each) for each in events]
        # An operation without an entry can be counted if there is only one group.
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
            elif operation == "all_to_all":  # a record holds the size of one block
                sizes = [sum(sizes) // self._ranks_in(group)]
            numbers = names.number("operation", operation), names.number("dtype", dtype)
            rows.append((number, sum(sizes), queued, began, began + event.duration_ns, sequence, *numbers, *_UNKNOWN))
        missing = recorded.left() if recorded.count >= window.submitted else max(0, window.submitted - len(events))
        return rows, missing

    def _number(self, group: str | None, backend: str) -> int:
        return self._numbers.setdefault((group, backend), _FIRST_NUMBER + len(self._numbers))

    def _ranks_in(self, group: str | None) -> int:
        """The size of the group; 1 if the group is unknown."""
        return max(1, len(self._groups[group].ranks)) if group in self._groups else 1

    def _update_groups(self) -> dict[str, GroupName]:
        self._groups.update(_group_names())
        return self._groups

    def groups(self) -> Mapping[str, GroupName]:
        """The groups by number. A group of several backends appears once for each: not all report completion."""
        known = self._update_groups()
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
        groups = self._groups
        gaps = []
        if torch.get_num_threads() > 1:
            gaps.append(
                f"torch computes with {torch.get_num_threads()} threads; only the main one is watched, so computing by "
                "the others while it waits counts as exposed communication."
            )
        if not groups:
            return gaps
        gaps += [
            "An operation of another backend that was under way while records were read, or at the end, is missing.",
            "What threads other than the main one submit to other backends is not recorded, except by autograd on CPU.",
        ]
        if self._uncertain:
            gaps.append(
                "Of some operations of other backends the flight recorder kept nothing (TORCH_FR_BUFFER_SIZE): their "
                "sequence numbers are counted, their groups not known where there are several."
            )
        if self._messages:
            gaps.append("Messages between two ranks over other backends are not recorded.")
        if not _has_flight_recorder():
            gaps.append(
                "Operations of other backends are not recorded: torch's flight recorder is off (TORCH_FR_BUFFER_SIZE), "
                "without which they cannot be read safely."
            )
        if any(set(group.backend.split(" and ")) - {*COMPLETING} for group in groups.values()):
            gaps.append("On accelerators only the submission of operations is seen, not their run on the device.")
        if self._pending.torn:
            gaps.append(_TORN)
        if self._pending.abandoned:
            gaps.append(_ABANDONED)
        if self._unread:
            gaps.append(
                f"Of other backends only about the first {_MAX_OPERATIONS} operations between two reads are recorded: "
                "a job without an optimizer should call netfold.profile.step()."
            )
        return gaps

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}


@dataclass(frozen=True)
class _Entry:
    group: str
    sequence: int
    created_ns: int


class _FlightEntries:
    """The flight recorder's entries of a window. Each is returned once."""

    def __init__(self, window: _Window) -> None:
        self._entries: dict[tuple[str, str], collections.deque[_Entry]] = {}
        entries = json.loads(window.dump).get("entries", ())
        self.count = len(entries)
        for entry in entries:
            created_ns = entry["time_created_ns"]
            if window.began[0] <= created_ns <= window.ended[0]:
                row = _Entry(entry["process_group"][0], entry["collective_seq_id"], created_ns)
                key = (entry["profiling_name"], repr(entry["input_sizes"]))
                self._entries.setdefault(key, collections.deque()).append(row)

    def find(self, event: _Event) -> _Entry | None:
        """Return the entry of an event; call this for the events in order of time."""
        entries = self._entries.get((event.name, repr(event.shapes)))
        return entries.popleft() if entries else None

    def left(self) -> int:
        """The number of entries without a mark."""
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
    """List the groups of several ranks that other backends than netfold serve, alone or for some devices.

    Of each: the group, torch's name, the backends.
    """
    if not dist.is_initialized():
        return []
    world = dist.distributed_c10d._world
    groups = []
    for group in list(world.pg_map):
        config = world.pg_backend_config.get(group, "")
        backends = {part.partition(":")[2] or part for part in config.split(",")} - {"netfold", "fake", "undefined"}
        if backends and group.size() > 1:
            groups.append((group, world.pg_names.get(group, "?"), " and ".join(sorted(backends))))
    return groups


def _group_names() -> dict[str, GroupName]:
    names = {}
    for group, name, backends in _groups():
        text = group.group_desc if group.group_desc not in ("", "undefined") else f"group {name}"
        names[name] = GroupName(text, backends, dist.get_process_group_ranks(group))
    return names


def _begun() -> dict[str, int]:
    """The number of collectives that each group of `_groups` has submitted."""
    return {name: cast(Any, group)._get_sequence_number_for_group() for group, name, _ in _groups()}


def _has_flight_recorder() -> bool:
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    return hasattr(_c10d, "_dump_fr_trace_json") and "0" not in sizes


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_wanted() -> bool:
    """False if netfold serves every group: netfold's event records hold more, and cost less."""
    return not dist.is_initialized() or bool(_groups())


def _clocks() -> tuple[int, int]:
    """CLOCK_REALTIME, and its offset from CLOCK_MONOTONIC, in ns."""
    best = (1 << 62, 0, 0)
    for _ in range(5):
        before = time.perf_counter_ns()
        real = time.time_ns()
        after = time.perf_counter_ns()
        best = min(best, (after - before, real, real - (before + after) // 2))
    return best[1], best[2]
