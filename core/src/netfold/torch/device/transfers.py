"""send and recv of device tensors: staged whole in host memory, as one native message.

So the other end may be a CPU tensor. A receive is posted at once; the waiting thread copies the message to the device.
A send is first copied to the host, by a thread that waits for devices but never for ranks, so no send delays another
for long.

Messages between two ranks with one tag arrive in the order of the calls. So a send of a CPU tensor uses the same thread
while that thread still has a send to the same rank with the same tag.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from netfold.communicator.group import KINDS
from netfold.errors import NetfoldError
from netfold.torch.device.chunks import as_bytes
from netfold.torch.device.device_api import DeviceApi, Event, refuse_capture, wait_for
from netfold.torch.device.pinned import TransferMemory
from netfold.torch.device.work import DeviceWork, resolve
from netfold.torch.forwarding import seconds_of
from netfold.torch.memory import is_plain, outgoing, with_memory, write
from netfold.torch.work import NetfoldWork

if TYPE_CHECKING:
    from netfold.torch.transfers import Transfers

Tensor = torch.Tensor

_HOST = torch.device("cpu")


class DeviceTransfers:
    """A group's messages from and to devices."""

    def __init__(self, transfers: Transfers, device_api: DeviceApi) -> None:
        self._transfers = transfers
        self._device_api = device_api
        self._memory = TransferMemory(device_api)
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._lock = threading.Lock()
        self._sends: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Sends in the queue by (rank, tag).
        self._queued: collections.Counter[tuple[int, int]] = collections.Counter()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False

    def takes(self, tensor: Tensor) -> bool:
        return self._device_api.holds(tensor)

    def send(self, tensor: Tensor, to: int, tag: int) -> SendWork:
        device_api, group = self._device_api, self._transfers.group
        device = device_api.device_of(tensor)
        with device_api.on(device):
            refuse_capture(device_api, group.rank, f"send to rank {to} from {device}")
            out, _ = self._of(device)
            staged = outgoing(tensor)
            ready = device_api.current_stream(device).record_event()
            device_api.keep(staged, out)
        deadline = time.monotonic() + group.timeout_s
        work = SendWork(device_api, device, [tensor], self._transfers, to, deadline)

        def copy_and_send() -> None:
            device_api.enter(device)
            memory = self._memory.take(staged.nbytes)
            out.wait_event(ready)
            device_api.copy(out, memory, as_bytes(staged))
            copied = out.record_event()
            wait_for(copied, deadline, group.rank, "send: the copy to the host")
            work.sent(self._start(tensor, memory, to, tag), copied, out)

        with self._lock:
            self._put(copy_and_send, work, to, tag, f"send to rank {to} from {device}")
        return work

    def send_queued(self, tensor: Tensor, staged: Tensor, to: int, tag: int) -> QueuedSend | None:
        """Send a CPU tensor, `staged`, after the queued sends from devices to `to` with `tag`; None if there are none.

        tensor: the Work's result.
        """
        if (to, tag) not in self._queued:
            return None
        deadline = time.monotonic() + self._transfers.group.timeout_s
        work = QueuedSend(self._device_api, _HOST, [tensor], self._transfers, to, deadline)
        with self._lock:
            if (to, tag) not in self._queued:
                return None
            send = lambda: work.sent(self._start(tensor, staged, to, tag), None, None)
            self._put(send, work, to, tag, f"send to rank {to}")
        return work

    def _start(self, tensor: Tensor, memory: Tensor, to: int, tag: int) -> Any:
        """Start the native send of `tensor`, whose bytes are in `memory`."""
        return self._transfers.start(KINDS["send"], tensor, memory, to, tag)

    def _put(self, send: Callable[[], None], work: SendWork, to: int, tag: int, what: str) -> None:
        """Queue a send; the caller holds the lock."""
        group = self._transfers.group

        def run() -> None:
            try:
                send()
            except (RuntimeError, ValueError) as error:
                failure = _in_context(error, group.rank, what)
                # Else the receiver would take the next message with this tag for the one that failed.
                if not isinstance(failure, ValueError):
                    group.abort(str(failure))
                work.fail(failure)
            finally:
                with self._lock:
                    self._queued[to, tag] -= 1
                    if not self._queued[to, tag]:
                        del self._queued[to, tag]

        if self._pid != os.getpid():
            raise RuntimeError("this group was made before a fork; make a new one in the child")
        if self._closed:
            raise ValueError("this group was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="netfold-sends", daemon=True)
            self._thread.start()
        self._queued[to, tag] += 1
        self._sends.put(run)

    def receive(self, tensor: Tensor, source: int, tag: int) -> ReceiveWork:
        device_api, group = self._device_api, self._transfers.group
        device = device_api.device_of(tensor)
        with device_api.on(device):
            refuse_capture(device_api, group.rank, f"receive on {device}")
            _, back = self._of(device)
            with_memory(tensor)
            try:
                memory = self._memory.take(tensor.nbytes)
            except RuntimeError as error:
                raise _in_context(error, group.rank, f"receive on {device}") from error
            ready = device_api.current_stream(device).record_event()
        operation = self._transfers.start(KINDS["receive"], tensor, memory, source, tag)
        return ReceiveWork(self._transfers, operation, device_api, device, back, tensor, memory, ready)

    def _of(self, device: torch.device) -> tuple[Any, Any]:
        """The streams for copies from a device and to it."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = self._device_api.new_stream(device), self._device_api.new_stream(device)
            return self._streams[device]

    def close(self) -> None:
        """Stop the thread. Queued sends fail, since the group is closed."""
        with self._lock:
            self._closed = True
            self._sends.put(_stop)

    def _serve(self) -> None:
        while (send := self._sends.get()) is not _stop:
            send()
            del send  # release its tensor while waiting


def _stop() -> None:
    """The queue's end marker."""


class SendWork(DeviceWork):
    """One send: settled once copied to the host, done when the native send is."""

    def __init__(
        self,
        device_api: DeviceApi,
        device: torch.device,
        result: Any,
        transfers: Transfers,
        to: int,
        deadline: float,
    ) -> None:
        group = transfers.group
        super().__init__(device_api, device, result, group.rank, deadline, lambda error: group.abort(str(error)))
        self._transfers = transfers
        self._to = to
        self._operation: Any = None

    def sent(self, operation: Any, event: Event | None, stream: Any) -> None:
        self._operation = operation
        self.settle_after(event, stream)

    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait(timeout)
        self._transfers.group.wait(self._operation, seconds_of(timeout))
        return True

    def is_completed(self) -> bool:
        return super().is_completed() and (self._operation is None or self._operation.done)

    def source_rank(self) -> int:
        """The other end's rank, as gloo has it."""
        return self._to

    def _resolve_here(self, future: torch.futures.Future[Any]) -> None:
        if self._failure is None:
            try:
                self._transfers.group.wait(self._operation)
            except NetfoldError as error:
                self._failure = error
        super()._resolve_here(future)


class QueuedSend(SendWork):
    """One send of a CPU tensor after queued sends from devices. No stream waits for it."""

    def _order_stream(self) -> None:
        """A CPU tensor is in no stream."""

    def _hold_stream(self) -> bool:
        return False

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()


class ReceiveWork(NetfoldWork):
    """One receive: the message arrives in host memory and is then copied to the device."""

    def __init__(
        self,
        transfers: Transfers,
        operation: Any,
        device_api: DeviceApi,
        device: torch.device,
        back: Any,
        tensor: Tensor,
        memory: Tensor,
        ready: Event,
    ) -> None:
        self._device_api = device_api
        self._device = device
        self._rank = transfers.group.rank
        self._back = back
        self._event: Event | None = None

        def copy_in() -> None:
            # This runs on the waiting thread, or on a completion thread that serves all groups.
            with device_api.on(device):
                copy_in_here()

        def copy_in_here() -> None:
            back.wait_event(ready)
            if is_plain(tensor):
                device_api.copy(back, as_bytes(tensor), memory)
            else:
                whole = device_api.empty(back, tensor.nbytes)
                device_api.copy(back, whole, memory)
                values = whole.view(tensor.dtype).view(tensor.shape)
                device_api.launch(back, lambda: write(tensor, values))
            device_api.keep(tensor, back)
            self._event = back.record_event()

        super().__init__(transfers.group, [operation], [tensor], finish=copy_in)

    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait(timeout)
        with self._device_api.on(self._device):
            refuse_capture(self._device_api, self._rank, "a wait for a receive that began before")
            self._device_api.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        if not super().is_completed() or self._event is None:
            return super().is_completed()
        with self._device_api.on(self._device):
            return self._event.query()

    def source_rank(self) -> int:
        """The group rank of the sender, once the receive is done."""
        return int(self._operations[0].peer)

    def make_future(self) -> torch.futures.Future[Any]:
        future = self._device_api.future(self._device)

        def resolve_here() -> None:
            try:
                super(ReceiveWork, self).wait()
                resolve(self._device_api, self._device, self._back, future, self._result, self._rank)
            except Exception as error:
                if self.exception() is None:
                    self._finish_error = error
                future.set_result(None)  # the callback raises

        visible = future.then(self._value)
        threading.Thread(target=resolve_here, name="netfold-future", daemon=True).start()
        return visible


def _in_context(error: Exception, rank: int, what: str) -> Exception:
    if isinstance(error, (NetfoldError, ValueError)):
        return error
    return NetfoldError(f"rank {rank}: {what} failed: {error}", rank=rank)
