"""Windows of torch's profiler: opened and read on the training thread, between its steps.

The profiler runs on the training thread, restricted to the marks of torch's own backends: it records no operator of
aten. Its memory grows, so it is read and restarted between steps. The time between two restarts is a window.

Clock: the profiler's times are CLOCK_REALTIME. Both ends of a window measure the offset to CLOCK_MONOTONIC by the
narrowest of five brackets (below 1 us). Times inside the window are converted by linear interpolation. So slewing the
clock causes no error; setting the clock causes an error of the jump, within one window.

Safety: an operation under way writes its end to memory that reading a window frees. So a window is read only when the
flight recorder, torch's list of its last operations, has retired all its entries. The flight recorder knows collectives
only. So messages, and marks that Python code makes, are kept out of windows; an optimizer's step is such a mark, and
its hooks run inside it. No window is opened or read inside a backward pass, which has its own thread-local state. An
operation that is still under way after the wait at the end of a recording may end at any time. Then the profiler is
abandoned: nothing is freed, and the window is lost. A process that ended with the profiler's callback installed would
crash in torch's destructors.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _autograd, _profiler
from torch._C import _distributed_c10d as _c10d
from torch.autograd import profiler as user_profiler

# A window is read at the first step boundary after this time or this many operations. The flight recorder keeps 2000
# operations by default.
WINDOW_S = 2.0
_WINDOW_OPERATIONS = 1200
# Windows that are read and not written yet. Beyond this, the oldest are dropped.
_WINDOWS_KEPT = 64
_ACTIVITIES = {_profiler.ProfilerActivity.CPU}
_BACKENDS = ("gloo", "mpi", "nccl", "ucc", "xccl", "hccl")
# While no window can be read, marking stops after this many collectives.
MAX_OPERATIONS = 20_000
# The end of a recording waits this long for operations under way, and polls at this interval.
_END_S, _END_POLL_S = 1.0, 0.001
MESSAGES = ("send", "recv", "recv_anysource")

# A recording's end has left torch's profiler running.
_abandoned = False


@dataclass(frozen=True)
class Event:
    """A mark of one operation."""

    name: str  # such as gloo:all_reduce
    start_ns: int
    duration_ns: int
    shapes: list[list[int]]  # of the inputs
    dtypes: list[str]  # of the inputs, torch's names


@dataclass
class Window:
    events: list[Event]
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


class Windows:
    """The windows of one recording. The training thread opens and reads them; another thread takes `read`."""

    def __init__(self) -> None:
        self.read: collections.deque[Window] = collections.deque(maxlen=_WINDOWS_KEPT)
        self.torn = False  # a user's profiler has ended a window
        self.abandoned = False
        self.dropped = 0  # operations of windows that were dropped
        self.has_messages = False
        self.has_stopped_marking = False
        # Of the open window: the clocks, and the collectives that each group had submitted.
        self._began: tuple[tuple[int, int], dict[str, int]] | None = None
        self._checked_s = time.monotonic()
        self._full = False  # marking is stopped
        # Kept alive here: the interpreter calls it later.
        self._stop_marking_callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._stop_marking)

    def open_if_wanted(self) -> bool:
        """Open a window, unless another profiler runs. Returns whether a window is wanted."""
        wanted = has_flight_recorder() and (not dist.is_initialized() or bool(other_groups()))
        # netfold's event records hold more, and cost less: no window is wanted if netfold serves every group.
        if wanted:
            self._open()
        return wanted

    def next_if_due(self) -> None:
        """Read the window and open the next one if that is due and no operation is under way; else try again later."""
        if time.monotonic() - self._checked_s < WINDOW_S and self._submitted() < _WINDOW_OPERATIONS:
            return
        if in_backward():
            return
        if self._began is not None:
            if not _seems_quiet() or (dump := self._dump_if_quiet()) is None:
                return
            self._close(dump)
        wanted = self.open_if_wanted()
        if self._began is not None or not wanted:
            self._checked_s = time.monotonic()
        # else another profiler is running: the next boundary tries again

    def end(self) -> None:
        """Read the last window, or abandon the profiler if an operation stays under way."""
        if self._began is None:
            return
        until_s = time.monotonic() + _END_S
        while (dump := self._dump_if_quiet()) is None and time.monotonic() < until_s:
            time.sleep(_END_POLL_S)
        if dump is None:
            self._abandon()
        else:
            self._close(dump)

    def limit(self) -> None:
        """Stop marking if too many collectives are unread. Callable from any thread."""
        if self._began is not None and self._submitted() > MAX_OPERATIONS:
            # Marking is thread-local state of the main thread, so the call must run there. The end of a backward pass
            # may restore marking; the next call here then stops it again.
            ctypes.pythonapi.Py_AddPendingCall(self._stop_marking_callback, None)

    def without_mark(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function whose mark must not be in a window."""

        def call(*arguments: Any, **named: Any) -> Any:
            if self._began is None or user_profiler._is_profiler_enabled:
                return original(*arguments, **named)
            self.has_messages |= original.__name__ in MESSAGES
            _autograd._enable_record_function(False)
            try:
                return original(*arguments, **named)
            finally:
                _autograd._enable_record_function(not self._full)

        return call

    def _stop_marking(self, _: Any) -> int:
        if self._began is not None:
            self._full = self.has_stopped_marking = True
            _autograd._enable_record_function(False)
        return 0

    def _submitted(self) -> int:
        """The number of collectives since the window began."""
        before = self._began[1] if self._began is not None else {}
        return sum(count - before.get(name, 0) for name, count in _begun().items())

    def _open(self) -> None:
        # To start this profiler would end another that is running.
        if _autograd._profiler_enabled() or user_profiler._is_profiler_enabled:
            self.abandoned |= _abandoned
            self.torn |= not _abandoned
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

    def _take_back(self) -> bool:
        """Mark again if marking was stopped. Returns whether this profiler still runs."""
        if self._full:
            self._full = False
            _autograd._enable_record_function(True)
        if user_profiler._is_profiler_enabled or not _autograd._profiler_enabled():
            self.torn = True  # the user's profiler has replaced this one, and may still run
            return False
        return True

    def _close(self, dump: bytes) -> None:
        submitted = self._submitted()
        began, self._began = self._began, None
        if began is None or not self._take_back():
            return
        # Stop on the thread that started it: kineto frees memory on this thread that the next window may use.
        events = [
            Event(name, each.start_ns(), each.duration_ns(), each.shapes(), each.dtypes())
            for each in _autograd._disable_profiler().events()
            if (name := each.name()).partition(":")[0] in _BACKENDS
        ]
        if len(self.read) == _WINDOWS_KEPT:
            self.dropped += len(self.read[0].events)
        clocks, begun = began
        self.read.append(Window(events, clocks, _clocks(), begun, dump, submitted))

    def _abandon(self) -> None:
        """Stop marking, and read nothing: operations under way still write to the profiler's memory.

        The profiler counts as enabled on this thread from now on: this process opens no other window.
        """
        global _abandoned
        self.dropped += self._submitted()
        self._began = None
        if self._take_back():
            # torch warns about devices, which this profile does not include.
            _autograd._toggle_collection_dynamic(False, _ACTIVITIES)
            self.abandoned = _abandoned = True

    def _dump_if_quiet(self) -> bytes | None:
        """Return the flight recorder's dump if no collective of the window is under way; else None.

        torch retires an entry after the thread that ran the operation has finished with it.
        """
        dump: bytes = _c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        # An entry that the flight recorder has overwritten may be under way.
        is_complete = dump.count(b'"retired":') >= self._submitted()
        return dump if is_complete and b'"retired":false' not in dump else None


def _seems_quiet() -> bool:
    """Whether each group's last submitted collective is complete. Costs tens of microseconds, a dump milliseconds.

    False negative: if two threads complete in another order than they began, until the next collective.
    """
    status = json.loads(_c10d._dump_fr_trace_json(includeCollectives=False))  # type: ignore[attr-defined]
    return all(
        each["last_enqueued_collective"] == each["last_completed_collective"]
        for each in status.get("pg_status", {}).values()
    )


def other_groups() -> list[tuple[dist.ProcessGroup, str, str]]:
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


def _begun() -> dict[str, int]:
    """The number of collectives that each of `other_groups` has submitted."""
    return {name: cast(Any, group)._get_sequence_number_for_group() for group, name, _ in other_groups()}


def has_flight_recorder() -> bool:
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    return hasattr(_c10d, "_dump_fr_trace_json") and "0" not in sizes


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _clocks() -> tuple[int, int]:
    """CLOCK_REALTIME, and its offset from CLOCK_MONOTONIC, in ns."""
    best = (1 << 62, 0, 0)
    for _ in range(5):
        before = time.perf_counter_ns()
        real = time.time_ns()
        after = time.perf_counter_ns()
        best = min(best, (after - before, real, real - (before + after) // 2))
    return best[1], best[2]
