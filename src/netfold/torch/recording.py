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

A user's own profiler and this one exclude each other: the user's goes first, and what was missed is said.
"""

from __future__ import annotations

import collections
import ctypes
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _autograd, _profiler
from torch._C import _distributed_c10d as _c10d
from torch.autograd import profiler as user_profiler
from torch.optim import optimizer as optimizers

from netfold.profile.record import RECORD
from netfold.profile.recording import UNKNOWN, Batch, Identity, Names, Recording
from netfold.profile.run import GroupName

# A window is read at the first boundary after so long or so many operations (the flight recorder keeps 2000 unless it
# is told), and without boundaries, after a while more, when the main thread next can.
WINDOW_S, NO_BOUNDARY_S = 2.0, 5.0
_WINDOW_OPERATIONS = 800
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
_OPERATIONS = {"alltoall": "all_to_all", "allreduce": "all_reduce", "recvAnySource": "receive", "recv": "receive"}
# What lists a tensor a rank: a record says the size of one.
_LISTED = ("scatter", "gather", "all_gather", "reduce_scatter")
# No netfold group has such a number; other groups count on from it, it stands for those that cannot be told apart.
_NUMBER = 1 << 32
# What is under way between two steps would be missing: then the window stays open, so many boundaries at most.
_PATIENCE = 10
_MESSAGES = ("send", "receive")

_TORN = "A profiler of the job's own ran: what other backends did meanwhile, and since the step before it, is missing."


@dataclass
class _Window:
    result: Any
    # CLOCK_REALTIME and how far it is ahead of CLOCK_MONOTONIC, at the beginning and at the end.
    began: tuple[int, int]
    ended: tuple[int, int]
    # How many collectives each group had begun when it began, by torch's name of the group.
    begun: Mapping[str, int]

    def monotonic(self, ns: int) -> int:
        (began, first), (ended, last) = self.began, self.ended
        share = min(1.0, max(0.0, (ns - began) / max(1, ended - began)))
        return ns - first - round((last - first) * share)


@dataclass
class _Seen:
    """What the main thread leaves for who writes."""

    windows: collections.deque[_Window] = field(default_factory=lambda: collections.deque(maxlen=_WINDOWS_KEPT))
    torn: bool = False
    dropped: int = 0


class TorchSource:
    """See `netfold.profile.recording.Source`."""

    name = "torch profiler"

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        # Of the window that is open: the clocks, and what groups had begun.
        self._began: tuple[tuple[int, int], dict[str, int]] | None = None
        self._patience = _PATIENCE
        self._looked_s = time.monotonic()
        self._seen = _Seen()
        self._messages = 0
        self._uncertain = False
        self._hook: Any = None
        self._optimizer: weakref.ref[Any] | None = None
        self._others: dict[str, GroupName] = {}  # by torch's name; those that are gone too
        self._asked = False
        # Kept: the interpreter calls it when it can, not at once.
        self._pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._called_back)
        self._ended = False

    def begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        self._hook = optimizers.register_optimizer_step_post_hook(self._stepped)
        if threading.current_thread() is threading.main_thread():
            self._open()
        # On another thread: the profiler sees the thread that starts it; the main thread will, when it can.

    def end(self) -> None:
        self._ended = True
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if threading.current_thread() is threading.main_thread():
            self._close()

    def forget(self) -> None:
        self._ended = True
        if self._hook is not None:
            self._hook.remove()
        if self._began is not None and _autograd._profiler_enabled() and not user_profiler._is_profiler_enabled:
            _autograd._disable_profiler()
        self._began = None

    def identity(self) -> Identity | None:
        if not dist.is_initialized():
            return None
        return Identity(dist.get_rank(), dist.get_world_size())

    def boundary(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if time.monotonic() - self._looked_s < WINDOW_S and self._submitted() < _WINDOW_OPERATIONS:
            return
        if self._patience > 0 and _under_way():
            self._patience -= 1
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
        self._close()
        wanted = not self._ended and _is_wanted()
        if wanted:
            self._open()
        if self._began is not None or not wanted:
            self._looked_s = time.monotonic()
        # else another profiler is in the way: the next boundary tries again
        self._patience = _PATIENCE

    def _open(self) -> None:
        # Another's is left alone: starting ours would end it.
        if _autograd._profiler_enabled() or user_profiler._is_profiler_enabled:
            self._seen.torn = True
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

    def _close(self) -> None:
        began, self._began = self._began, None
        if began is None:
            return
        if user_profiler._is_profiler_enabled or not _autograd._profiler_enabled():
            self._seen.torn = True  # a profiler of the user's has replaced ours, and may still run
            return
        result = _autograd._disable_profiler()
        if len(self._seen.windows) == _WINDOWS_KEPT:
            self._seen.dropped += len(self._seen.windows[0].result.events())
        clocks, begun = began
        self._seen.windows.append(_Window(result, clocks, _clocks(), begun))

    def _called_back(self, _: Any) -> int:
        self._asked = False
        if not self._ended:
            self._turn()
        return 0

    def _ask_main_thread(self) -> None:
        """A job without boundaries: the main thread turns the window between two of its bytecodes."""
        if not self._asked and time.monotonic() - self._looked_s > NO_BOUNDARY_S:
            self._asked = True
            if ctypes.pythonapi.Py_AddPendingCall(self._pending, None) != 0:
                self._asked = False  # its list is full; the next time

    def take(self, names: Names) -> Batch:
        if not self._ended:
            self._ask_main_thread()
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
        events = sorted(
            (each for each in window.result.events() if _is_operation(each)), key=lambda each: each.start_ns()
        )
        if not events:
            return [], 0
        known = list(self._remember())
        kept = _Kept(window)
        entries = [kept.find(each) for each in events]
        # Without its entry an operation of the only group there is may still be counted, that of one of several not.
        counted = dict(window.begun) if len(known) == 1 else None
        rows: list[tuple[int, ...]] = []
        for event, entry in zip(events, entries, strict=True):
            operation = event.name().partition(":")[2]
            operation = _OPERATIONS.get(operation, operation)
            began = window.monotonic(event.start_ns())
            group, sequence, queued = None, 0, began
            if entry is not None:
                group, sequence = entry.group, entry.sequence
                queued = min(began, window.monotonic(entry.created_ns))
            elif counted is not None:
                group = known[0]
            if operation in _MESSAGES:
                self._messages += 1
                sequence = self._messages
            elif entry is None:
                self._uncertain = True
                if counted is not None and group is not None:
                    sequence = counted[group] = counted.get(group, 0) + 1
            elif counted is not None:
                counted[entry.group] = entry.sequence
            number = _NUMBER + 1 + known.index(group) if group in known else _NUMBER
            dtypes = event.dtypes()
            dtype, item_bytes = _DTYPES.get(dtypes[0] if dtypes else "", ("?", 0))
            sizes = [math.prod(shape) * item_bytes for shape in event.shapes()]
            if operation in _LISTED:
                sizes = sizes[:1]
            numbers = names.number("operation", operation), names.number("dtype", dtype)
            rows.append((number, sum(sizes), queued, began, began + event.duration_ns(), sequence, *numbers, *_UNKNOWN))
        return rows, kept.left()

    def _remember(self) -> dict[str, GroupName]:
        self._others.update(_others())
        return self._others

    def groups(self) -> Mapping[str, GroupName]:
        found = {str(_NUMBER + 1 + index): group for index, group in enumerate(self._remember().values())}
        if len(found) > 1:
            backends = sorted({group.backend for group in found.values()})
            found[str(_NUMBER)] = GroupName("one of several groups", " and ".join(backends))
        return found

    def blind_spots(self) -> list[str]:
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
        if len(found) > 1:
            said.append("Which of several groups a message between two ranks was of is not seen.")
        if any(group.backend != "gloo" for group in found.values()):
            said.append("On accelerators only the submission of operations is seen, not their run on the device.")
        if self._seen.torn:
            said.append(_TORN)
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
        for entry in json.loads(_c10d._dump_fr_trace_json()).get("entries", ()):  # type: ignore[attr-defined]
            created_ns = entry["time_created_ns"]
            if window.began[0] <= created_ns <= window.ended[0] and not entry["is_p2p"]:
                row = _Entry(entry["process_group"][0], entry["collective_seq_id"], created_ns)
                key = (entry["profiling_name"], repr(entry["input_sizes"]))
                self._entries.setdefault(key, collections.deque()).append(row)

    def find(self, event: Any) -> _Entry | None:
        """Of the next event, in order of time."""
        entries = self._entries.get((event.name(), repr(event.shapes())))
        return entries.popleft() if entries else None

    def left(self) -> int:
        """How many no mark was found for."""
        return sum(map(len, self._entries.values()))


_UNKNOWN = (UNKNOWN, UNKNOWN, UNKNOWN)
_COLUMNS = (
    *("group", "bytes", "queued_ns", "started_ns", "finished_ns", "sequence"),
    *("operation", "dtype", "reduce", "algorithm", "wire"),
)


def _is_operation(event: Any) -> bool:
    return event.name().partition(":")[0] in _BACKENDS


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


def _under_way() -> bool:
    """Whether some operation of another backend is; as far as the flight recorder knows. Tens of microseconds."""
    dump = _c10d._dump_fr_trace_json(includeCollectives=False)  # type: ignore[attr-defined]
    status = json.loads(dump).get("pg_status", {})
    return any(each["last_enqueued_collective"] != each["last_completed_collective"] for each in status.values())


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
