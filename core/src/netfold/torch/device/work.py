"""Works of operations on device memory.

`wait` blocks the host until the last copy back to the device is submitted: a stream cannot wait for an event that does
not exist yet. Then it has the caller's current stream wait for that copy, while the host continues.

`block_current_stream` does not block the host: the stream waits at a gate, which netfold's stream opens after that
copy. After a failure, or `_OVERDUE_S` after the operation's deadline, the host opens the gate: no stream waits for
ever. What the stream then reads is undefined, and the group's next call raises the error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from netfold.errors import CollectiveTimeout, NetfoldError, WaitTimeout
from netfold.torch.device.device_api import DeviceApi, Event, Gate, Stream, refuse_capture
from netfold.torch.forwarding import NetfoldWorkBase, resolved_future, seconds_of
from netfold.torch.typed_future import future_of_tensors

# The thread that runs the operation reports its deadline. It may itself be blocked in a call of CUDA's that waits for
# the stream at the gate, so another thread opens the gate this much later.
_OVERDUE_S = 1.0


class DeviceWork(NetfoldWorkBase):
    """The Work of one or several operations on device memory."""

    def __init__(
        self,
        device_api: DeviceApi,
        device: torch.device,
        result: Any,
        rank: int,
        deadline: float,
        end_group: Callable[[Exception], None],
    ) -> None:
        """Make the Work.

        result: the Future's value.
        deadline: of the operation, by time.monotonic().
        end_group: called before a gate is opened after the deadline. Must not wait for the device.
        """
        super().__init__()
        self._deadline = deadline
        self._end_group = end_group
        self._gate: Gate | None = None
        self._timer: threading.Timer | None = None
        self._device_api = device_api
        self._device = device
        self._result = result
        self._rank = rank
        self._settled = threading.Event()
        self._lock = threading.RLock()  # a signal handler may use the group
        self._event: Event | None = None
        self._stream: Stream | None = None
        self._failure: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None  # resolved by netfold
        self._visible: torch.futures.Future[Any]  # returned to users

    def settle_after(self, event: Event | None, stream: Stream | None) -> None:
        """Settle the Work: results are in place after `event`, recorded last in `stream`; None for host memory."""
        with self._lock:
            if self._settled.is_set():  # its gate was overdue
                return
            if self._gate is not None:
                self._gate.open_after(stream)
            self._event, self._stream = event, stream
            self._settle()

    def extended(self) -> None:
        """Record the result's event anew, in the caller's stream, which has waited and got more work for the result."""
        with self._device_api.on(self._device):
            self._event = self._device_api.current_stream(self._device).record_event()
            # A Future is resolved in a stream of netfold's. The group's own must not wait for the caller's, which may
            # stand at a gate that the group opens.
            self._stream = self._device_api.new_stream(self._device)
            self._stream.wait_event(self._event)

    def fail(self, failure: Exception, before: Callable[[Exception], None] | None = None) -> bool:
        """Settle the Work with an error. Returns False if it was settled before.

        before: called with the error before a stream goes on that waits for the Work.
        """
        with self._lock:
            if self._settled.is_set():
                return False
            self._failure = failure
            if before is not None:
                before(failure)
            if self._gate is not None:
                self._gate.open()
            self._settle()
            return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation, or raise its error. A timeout of 0 means none, as in torch."""
        seconds = seconds_of(timeout)
        if not self._settled.wait(seconds):
            raise WaitTimeout(f"rank {self._rank}: the wait timed out: the operation is not done after {seconds} s")
        self._value(None)
        self._order_stream()
        return True

    def block_current_stream(self) -> None:
        """Have the caller's current stream wait for the operation. The host does not wait, where the device can.

        Does not raise the operation's error: `exception` and the group's next call have it.
        """
        if not self._hold_stream():
            self.wait()

    def _hold_stream(self) -> bool:
        """Hold the caller's current stream at the gate of an operation under way. False if there can be none."""
        with self._device_api.on(self._device):
            refuse_capture(self._device_api, self._rank, "a wait for an operation that began before")
            stream = self._device_api.current_stream(self._device)
            made = None if self._settled.is_set() else self._device_api.new_gate(self._device)
            with self._lock:
                if not self._settled.is_set():
                    self._gate = self._gate or made
                    if self._gate is None:
                        return False
                    self._open_when_overdue()
                gate = self._gate
            if made is not None and made is not gate:
                made.open()  # gives its word back
            # Not under the lock: the call may block while the stream's queue is full.
            if gate is not None:
                gate.hold(stream)
            elif self._event is not None:
                stream.wait_event(self._event)
            return True

    def _open_when_overdue(self) -> None:
        if self._timer is None:
            wait_s = max(0.0, self._deadline - time.monotonic()) + _OVERDUE_S
            self._timer = threading.Timer(min(wait_s, threading.TIMEOUT_MAX), self._overdue)
            self._timer.daemon = True
            self._timer.start()

    def _overdue(self) -> None:
        error = CollectiveTimeout(
            f"rank {self._rank}: an operation timed out while a stream on {self._device} waited for it: the thread "
            "that runs it is blocked, maybe by a call of CUDA's that waits for that stream; wait() blocks the "
            "host instead",
            rank=self._rank,
        )
        self.fail(error, before=self._end_group)

    def _order_stream(self) -> None:
        """Have the caller's current stream wait for the result."""
        with self._device_api.on(self._device):
            refuse_capture(self._device_api, self._rank, "a wait for an operation that began before")
            self._device_api.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether the device has the results."""
        if not self._settled.is_set() or self._event is None:
            return self._settled.is_set()
        with self._device_api.on(self._device):
            return self._event.query()

    def exception(self) -> Any:
        return self._failure

    def source_rank(self) -> int:
        return self._rank

    def make_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                self._future = self._new_future()
                # DDP's reducer crashes on a Future with an exception set, but not on one whose callback raised.
                self._visible = self._future.then(self._value)
                if self._settled.is_set():
                    self._resolve(self._future)
            return self._visible

    def make_future_of_tensors(self) -> torch.futures.Future[Any]:
        """The Future, complete: the host waits, as in `wait`, and the caller's stream.

        A Future that TorchScript makes knows no device. The hook would continue on another thread, in that thread's
        stream, and overtake the copy back or the caller's stream. With a complete Future it continues in this one.
        """
        self.wait()
        future = future_of_tensors(resolved_future(None), self.result())
        future.wait()
        return future

    def _new_future(self) -> torch.futures.Future[Any]:
        return self._device_api.future(self._device)

    def _settle(self) -> None:
        """Notify all that wait; the caller holds the lock."""
        self._settled.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._future is not None:
            self._resolve(self._future)

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        """Resolve on a new thread: callbacks run there, and one may block on a later operation's Future."""
        threading.Thread(target=self._resolve_here, args=(future,), name="netfold-future", daemon=True).start()

    def _resolve_here(self, future: torch.futures.Future[Any]) -> None:
        if self._stream is None:
            future.set_result(None)  # the callback raises, or has the result
        else:
            try:
                resolve(self._device_api, self._device, self._stream, future, self._result, self._rank)
            except NetfoldError as error:
                self._failure = error
                future.set_result(None)


def resolve(
    device_api: DeviceApi,
    device: torch.device,
    stream: Stream,
    future: torch.futures.Future[Any],
    value: Any,
    rank: int,
) -> None:
    """Resolve a Future on a thread of netfold's. Raises NetfoldError if the device fails: it is not resolved then."""
    try:
        device_api.enter(device)
        device_api.resolve(stream, future, value)
    except RuntimeError as error:
        raise NetfoldError(f"rank {rank}: the result on {device} is lost: {error}", rank=rank) from error


class CoalescedWork(NetfoldWorkBase):
    """The Work of a coalescing manager: of all operations that began in it. Its result is the list of their results."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works
        self._result = [work.result() for work in works]

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def block_current_stream(self) -> None:
        for work in self._works:
            work.block_current_stream()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Any:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def make_future(self) -> torch.futures.Future[Any]:
        futures = [work.get_future() for work in self._works]
        together: torch.futures.Future[Any] = torch.futures.collect_all(futures).then(
            lambda all_done: [each.value() for each in all_done.value()]
        )
        return together
