"""Record the operations of other backends (gloo, mpi, nccl), and the optimizer's steps.

DDP calls a backend from C++, which Python cannot wrap. But torch's own backends mark their operations for torch's
profiler. `window` reads these marks, `records` makes records of them.

A user's profiler and this one exclude each other. The user's has precedence, and `coverage_gaps` reports the loss.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler as user_profiler
from torch.optim import optimizer as optimizers

from netfold.profile.columns import COMPLETING
from netfold.profile.recording import Batch, Identity, Names, Recording
from netfold.profile.run import SUBMISSIONS_ONLY, GroupName
from netfold.profile.torch.records import WindowRecords
from netfold.profile.torch.window import MAX_OPERATIONS, MESSAGES, Windows, has_flight_recorder, in_backward

# Above all levels of kineto's messages: kineto would print a message for each window.
_QUIET_LOG_LEVEL = "6"
_GROUP_FUNCTIONS = ("init_process_group", "new_group", "destroy_process_group")

_TORN = "A profiler of the job's own ran: what other backends did meanwhile, and since the step before it, is missing."
_ABANDONED = (
    "An operation of another backend did not end within 1 s of the end of a recording: what such backends did since "
    "the last records were read, and after that, is missing."
)


class TorchSource:
    """The operations of other backends, for a recording, which calls `begin` and `end` on the main thread if it can."""

    name = "torch profiler"

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._windows = Windows()
        self._records = WindowRecords()
        self._originals: list[tuple[Any, str, Any]] = []  # torch's functions, to be restored
        self._hook: Any = None
        self._optimizer: weakref.ref[Any] | None = None
        self._ended = False

    def begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_LOG_LEVEL)
        self._hook = optimizers.register_optimizer_step_post_hook(self._stepped)
        for module in (dist, dist.distributed_c10d):
            self._wrap(module, _GROUP_FUNCTIONS, self._reporting)
        if not has_flight_recorder():
            return
        self._wrap(dist.ProcessGroup, MESSAGES, self._windows.without_mark)
        self._wrap(user_profiler.record_function, ("__enter__",), self._windows.without_mark)
        # Otherwise the first boundary opens the window: the profiler records only the thread that starts it.
        if threading.current_thread() is threading.main_thread() and not in_backward():
            self._windows.open_if_wanted()

    def _wrap(self, owner: Any, names: tuple[str, ...], wrapper: Callable[[Any], Any]) -> None:
        for name in names:
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, wrapper(original))

    def end(self) -> None:
        self._ended = True
        if threading.current_thread() is not threading.main_thread():
            atexit.register(self.end)  # unless a boundary on the main thread comes first
            return
        atexit.unregister(self.end)
        self._restore()
        self._windows.end()

    def forget(self) -> None:
        # Leave the profiler running: reading it would free memory that the parent's operations write to.
        self._ended = True
        self._restore()

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

    def identity(self) -> Identity | None:
        if not dist.is_initialized():
            return None
        return Identity(dist.get_rank(), dist.get_world_size())

    def boundary(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._ended:
            self._windows.next_if_due()
        elif not in_backward():
            self.end()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Count a step. In a job with several optimizers, only the first one's steps count."""
        first = self._optimizer() if self._optimizer is not None else None
        if first is None:
            self._optimizer = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._recording.optimizer_stepped()

    def take(self, names: Names) -> Batch:
        windows = self._windows
        windows.limit()
        dropped, windows.dropped = windows.dropped, 0
        batch = Batch(lost=dropped)
        while windows.read:
            records, missing = self._records.records(windows.read.popleft(), names)
            batch.lost += missing
            if len(records):
                batch.operations.append(records)
        return batch

    def groups(self) -> Mapping[str, GroupName]:
        """See `WindowRecords.groups`."""
        return self._records.groups()

    def coverage_gaps(self) -> list[str]:
        groups, windows = self._records.known, self._windows
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
        if any("gloo" in group.backend.split(" and ") for group in groups.values()):
            gaps.append("gloo runs a reduce_scatter as an all_reduce of the whole input, which the rows show as such.")
        if self._records.is_uncertain:
            gaps.append(
                "Of some operations of other backends the flight recorder kept nothing (TORCH_FR_BUFFER_SIZE): their "
                "sequence numbers are counted, their groups not known where there are several."
            )
        if windows.has_messages:
            gaps.append("Messages between two ranks over other backends are not recorded.")
        if not has_flight_recorder():
            gaps.append(
                "Operations of other backends are not recorded: torch's flight recorder is off (TORCH_FR_BUFFER_SIZE), "
                "without which they cannot be read safely."
            )
        if any(set(group.backend.split(" and ")) - {*COMPLETING} for group in groups.values()):
            gaps.append(SUBMISSIONS_ONLY)
        if windows.torn:
            gaps.append(_TORN)
        if windows.abandoned:
            gaps.append(_ABANDONED)
        if windows.has_stopped_marking:
            gaps.append(
                f"Of other backends only about the first {MAX_OPERATIONS} operations between two reads are recorded: "
                "a job without an optimizer should call netfold.profile.step()."
            )
        return gaps

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}
