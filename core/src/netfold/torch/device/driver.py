"""The thread that runs a group's collectives on device memory, in the order of the calls.

A caller submits a call with an event of its stream, and gets a Work at once. Ranks match calls by their order, so later
collectives of the group on CPU tensors must not overtake: their callers wait until this queue is empty
(`wait_until_idle`).
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from netfold._native import engine
from netfold.communicator import Group
from netfold.errors import CollectiveTimeout, GroupAborted, NetfoldError
from netfold.torch.calls import Prepared
from netfold.torch.device.device_api import (
    LONGEST_PAUSE_S,
    SHORTEST_PAUSE_S,
    DeviceApi,
    Event,
    device_failed,
    refuse_capture,
)
from netfold.torch.device.paths import MEET_S, SETTLE_S, DevicePaths, choose_paths
from netfold.torch.device.work import DeviceWork

log = logging.getLogger("netfold")

Tensor = torch.Tensor

# The most calls that may be queued. The caller of one more waits.
MAX_QUEUED = 4096
# `join` waits _STOP_S until the thread sees that the group is closed. A thread that waits for a hanging device sees
# this only at its operation's deadline. Then `join` waits _JOIN_S for the thread's end: the thread waits for its own
# device and for the other ranks' devices first.
_STOP_S = 2.0
_JOIN_S = SETTLE_S + MEET_S + 20.0
# After a group's failure, a kernel that waits for other ranks' kernels may run this much longer: a rank that finished
# and left also ends the group, and its kernels have done their part.
_GRACE_S = 3.0
# After this time, a waiting kernel may be waiting for a lost rank.
_WATCH_AFTER_S = 1.0
_FAR_S = 1e6  # timeout of the barrier that only watches for failures: other ranks may never join it

# Errors name the user's calling line, not a line of this thread.
engine.hide_from_call_sites(threading.__file__)


@dataclass(eq=False)
class _Job:
    """The calls of one operation."""

    calls: Sequence[Prepared]
    work: DeviceWork
    ready: Event
    deadline: float
    device: torch.device
    left: int
    events: list[Event] = field(default_factory=list)


class DeviceDriver:
    """The device driver of one group. Thread-safe."""

    def __init__(self, group: Group, device_api: DeviceApi) -> None:
        self._group = group
        self.device_api = device_api
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: collections.deque[_Job] = collections.deque()
        self._unsettled: collections.deque[_Job] = collections.deque()
        self._closed = ""
        self._thread: threading.Thread | None = None
        # Only the thread uses the attributes below.
        self._paths: DevicePaths | None = None
        self._failed = False
        self._meet_s = MEET_S
        self._ending = threading.Event()
        # Jobs whose results are complete only after their event, with that event, in order.
        self._awaited: collections.deque[tuple[_Job, Event]] = collections.deque()
        self._pause_s, self._give_up, self._watch_from = SHORTEST_PAUSE_S, float("inf"), float("inf")
        self._watching: Any = None

    def submit(self, calls: Sequence[Prepared], result: Any, timeout_s: float | None) -> DeviceWork:
        """Queue a call. Its tensors hold their values once the current stream has run all work submitted so far."""
        device = self._device_of(calls)
        with self.device_api.on(device):
            refuse_capture(self.device_api, self._group.rank, f"{calls[0].kind} on {device}")
            ready = self.device_api.current_stream(device).record_event()
        seconds = self._group.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + seconds
        work = DeviceWork(self.device_api, device, result, self._group.rank, deadline, self._end_group)
        job = _Job(calls, work, ready, deadline, device, len(calls))
        with self._changed:
            if self._pid != os.getpid():
                raise RuntimeError("this group was made before a fork; make a new one in the child")
            if not self._changed.wait_for(lambda: len(self._unsettled) < MAX_QUEUED or self._closed, seconds):
                raise CollectiveTimeout(
                    f"rank {self._group.rank}: {calls[0].kind} found {MAX_QUEUED} calls on {device} before it for "
                    f"{seconds:g} s; wait for some of them"
                )
            if self._closed:
                raise GroupAborted(self._closed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="netfold-device", daemon=True)
                self._thread.start()
            self._queue.append(job)
            self._unsettled.append(job)
            if self._paths is not None:
                self._paths.staged.interrupt()
            self._changed.notify_all()
        return work

    def wait_until_idle(self) -> None:
        """Wait until every earlier call is submitted. Raises nothing: the group's next call raises a failure."""
        if self._unsettled:
            with self._changed:
                self._changed.wait_for(lambda: not self._unsettled, self._group.timeout_s)

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Accept no more calls. Calls that wait for the network fail once the group is closed, too. Idempotent.

        Work that only the device has left to do completes, unless the group ends by a failure.
        """
        with self._changed:
            self._failed = self._failed or failed
            if not self._closed and self._group.failure is not None:
                self._meet_s = _GRACE_S  # a lost rank never comes
            self._closed = self._closed or f"rank {self._group.rank}: {reason}"
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread's end, once the group is closed."""
        thread = self._thread
        if thread is None or self._pid != os.getpid() or thread is threading.current_thread():
            return
        if self._ending.wait(_STOP_S):
            thread.join(_JOIN_S)

    def _end_group(self, error: Exception) -> None:
        """End the group from another thread, while the thread may be blocked in a call of CUDA's."""
        self._group.abort(str(error))
        self.close(str(error), failed=True)

    def why(self) -> str:
        """Describe the paths on which the ranks agreed, in a sentence."""
        if self._paths is None:
            return f"{self.device_api.kind}: no collective on its memory yet"
        return self._paths.reason

    def _device_of(self, calls: Sequence[Prepared]) -> torch.device:
        tensors = [tensor for call in calls for tensor in (*call.inputs, *call.outputs)]
        found = {
            self.device_api.device_of(tensor) if self.device_api.holds(tensor) else tensor.device for tensor in tensors
        }
        if len(found) > 1:
            raise ValueError(
                f"rank {self._group.rank}: {calls[0].kind} has tensors on {', '.join(sorted(map(str, found)))}; an "
                "operation takes those of one device"
            )
        return found.pop()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            job = None  # release the previous job's tensors while waiting
            with self._changed:
                while not self._queue and not self._closed and not self._busy() and not self._awaited:
                    self._changed.wait()
                job = self._queue.popleft() if self._queue else None
                if self._closed:
                    break
            try:
                if job is not None:
                    self._begin(job)
                elif self._paths is not None and self._paths.staged.busy:
                    interrupts = self._interrupts()
                    if interrupts is None:
                        self._paths.staged.move()
                    else:
                        self._paths.staged.step(interrupts)
                self._hand_over()
            except Exception as error:
                self._failed = True
                if not self._closed:
                    self._fail(self._in_context(error, job))
        job = None
        self._end()

    def _busy(self) -> bool:
        return self._paths is not None and self._paths.staged.busy

    def _interrupts(self) -> int | None:
        """Up to which interrupt the staged path goes on by itself; None: other jobs wait for this thread."""
        assert self._paths is not None
        with self._changed:
            return None if self._queue or self._awaited else self._paths.staged.interrupts

    def _hand_over(self) -> None:
        """Finish the jobs whose events have passed. Sleep briefly if there is nothing else to do.

        Raises CollectiveTimeout after a job's deadline, and a failure of the group _GRACE_S after the failure.
        """
        while self._awaited:
            job, made = self._awaited[0]
            if not made.query():
                self._keep_deadline(job)
                with self._changed:
                    if not self._queue and not self._closed and not self._busy():
                        self._changed.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                return
            self._awaited.popleft()
            self._wait_for_next()
            self._returned(job, made)

    def _wait_for_next(self) -> None:
        self._pause_s, self._give_up = SHORTEST_PAUSE_S, float("inf")
        self._watch_from = time.monotonic() + _WATCH_AFTER_S

    def _keep_deadline(self, job: _Job) -> None:
        now, rank = time.monotonic(), self._group.rank
        if now > job.deadline:
            raise CollectiveTimeout(
                f"rank {rank}: {job.calls[0].kind} on {job.device} timed out: a kernel waits for that of "
                "another rank of this host, which hangs, or made no such call",
                rank=rank,
            )
        failure = None if self._closed else self._group.failure or self._remote_failure(now)
        if failure is not None:
            self._give_up = min(self._give_up, now + _GRACE_S)
            if now > self._give_up:
                raise failure

    def _remote_failure(self, now: float) -> NetfoldError | None:
        """The failure of another rank of this host, once a kernel has waited for `_WATCH_AFTER_S`.

        A group detects failures only while an operation runs. So a barrier runs in a group made for this purpose.
        """
        assert self._paths is not None and self._paths.intra_host is not None
        watch = self._paths.intra_host.watch
        if watch is None or now < self._watch_from:
            return None
        if self._watching is None or (self._watching.done and self._watching.failure is None):
            self._watching = watch.submit("barrier", timeout_s=_FAR_S, wait_here=False)
        return watch.error(self._watching) if self._watching.done and self._watching.failure is not None else None

    def _end(self) -> None:
        """After `close`: wait for the work that the device has begun, then free everything."""
        self._ending.set()
        give_up = time.monotonic() + SETTLE_S
        try:
            while self._awaited and not self._failed and time.monotonic() < give_up:
                self._hand_over()
                if self._awaited:
                    time.sleep(self._pause_s)
        except Exception as error:
            self._failed = True
            log.debug("rank %d: what was under way when the group was closed failed: %s", self._group.rank, error)
        self._failed = self._failed or bool(self._awaited)
        self._drop(GroupAborted(self._closed))
        if self._paths is not None:
            self._paths.close(failed=self._failed, meet_s=self._meet_s)

    def _begin(self, job: _Job) -> None:
        if self._paths is None:
            self.device_api.enter(job.device)
            self._paths = choose_paths(self._group, self.device_api, job.device, job.deadline)
        elif job.device != self._paths.device:
            raise ValueError(
                f"rank {self._group.rank}: {job.calls[0].kind} came with tensors on {job.device}, after others on "
                f"{self._paths.device}; a rank of a group uses one device"
            )
        staged, last = self._paths.staged, job.calls[-1]
        for call in job.calls:
            path = self._paths.other_than_staged(call)
            if path is not None:
                staged.drain()
                tensors = [*call.inputs, *call.outputs]
                done = path.run(call, [job.ready, *staged.events_on(tensors)], job.deadline)
                staged.in_use(tensors, done)
                if path.kernels_wait:
                    if not self._awaited:
                        self._wait_for_next()
                    self._awaited.append((job, done))
                else:
                    self._returned(job, done)
            else:
                returned = lambda event: self._returned(job, event)
                staged.begin(call, job.ready, job.deadline, returned, self._interrupts() if call is last else None)

    def _returned(self, job: _Job, event: Event) -> None:
        """Count one finished call of the job. After the last, copy the results back and settle the Work."""
        assert self._paths is not None
        job.events.append(event)
        job.left -= 1
        if job.left:
            return
        done = self._paths.done
        for each in job.events:
            done.wait_event(each)
        for call in job.calls:
            if call.finish is not None:
                for tensor in (*call.outputs, *_tensors(job.work.result())):
                    self.device_api.keep(tensor, done)
                self.device_api.launch(done, call.finish)
        job.work.settle_after(done.record_event(), done)
        self._settled(job)

    def _settled(self, job: _Job) -> None:
        with self._changed:
            self._unsettled.remove(job)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """End the group, as a failure of a native operation does. The other ranks get the reason."""
        try:
            self._group.abort(str(error))
            if self._paths is not None:
                self._paths.abort(str(error))
        finally:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Fail all jobs that are still under way on this rank, and accept no more."""
        with self._changed:
            self._closed = self._closed or str(error)
            jobs = list(self._unsettled)
            self._unsettled.clear()
            self._queue.clear()
            self._changed.notify_all()
        self._awaited.clear()
        if self._paths is not None:
            self._paths.staged.forget()
        for job in jobs:
            job.work.fail(error)

    def _in_context(self, error: Exception, job: _Job | None) -> Exception:
        """Add the rank and the operation to an error that lacks them."""
        rank = self._group.rank
        if isinstance(error, (NetfoldError, ValueError, TimeoutError)):
            return error
        return device_failed(rank, f"{job.calls[0].kind} on {job.device}" if job is not None else "a copy", error)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for each in result for tensor in _tensors(each)]
