"""The interface to devices. `netfold.torch.device.cuda` implements it by torch.cuda."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from netfold.errors import CollectiveTimeout, NetfoldError

Tensor = torch.Tensor

# Queries of an event before the thread sleeps between two queries.
_SPIN_QUERIES = 50
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3


class Event(Protocol):
    """A point in a stream: the device API's own, or a `_native.device.Event`, which is no argument of native calls."""

    cuda_event: Any

    def query(self) -> bool:
        """Whether the device has passed the event. Raises the device's error."""

    def wait(self, stream: Any) -> None:
        """Have later work of the stream wait for the event. Does not block the host."""


class Stream(Protocol):
    """A queue of work on one device, executed in order. Only events order work of different streams."""

    def record_event(self) -> Any: ...

    def wait_event(self, event: Any) -> None:
        """Have later work of the stream wait for the event. Does not block the host."""


class Gate(Protocol):
    """A word of pinned memory for which streams wait. Opens once; a stream that waits later does not stop.

    CUDA knows nothing of the order that a gate makes. See "Streams" in docs/how-to/cuda.md for what follows.
    """

    def hold(self, stream: Any) -> None:
        """Have later work of the stream wait until the gate opens. Does not block the host."""

    def open_after(self, stream: Any) -> None:
        """Open once the stream has run all work submitted so far."""

    def open(self) -> None:
        """Open at once, by the host. Needs no device and no lock of CUDA's. Not after `open_after`."""


class NcclGroup(Protocol):
    """An NCCL group. Its collectives run in the order of the given stream and do not block the host.

    NCCL ends no operation and no process here: the caller handles deadlines and failures.
    """

    def reduce_scatter(self, stream: Any, output: Tensor, source: Tensor, reduce: str) -> None:
        """source: `output`'s number of elements times the number of ranks."""

    def all_gather(self, stream: Any, output: Tensor, source: Tensor) -> None: ...

    def abort(self, reason: str) -> None:
        """End all operations under way, also on other ranks. Their outputs are undefined."""

    def close(self, wait_s: float) -> None:
        """Wait up to `wait_s` for the other ranks' devices, and free the group. This rank's device must be done.

        Another rank reads memory of this rank's part of the group until its own device is done.
        """


class DeviceApi(Protocol):
    """One kind of device. Functions raise RuntimeError with the device's error text if it fails or is out of memory.

    Call `enter` or `on` first: the calling thread's current device must be the device of the call. At a thread's first
    call CUDA makes a context of 300 to 500 MB on the current device, which is device 0 by default. Only `holds`,
    `device_of`, `visible`, `uuid`, `future` and `current_stream` need no current device. Methods of streams and events
    need one.
    """

    kind: str

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is on a device of this kind."""

    def device_of(self, tensor: Tensor) -> torch.device: ...

    def uuid(self, device: torch.device) -> str:
        """A name of the device that is the same in every process, whatever devices are visible there."""

    def visible(self) -> Sequence[str]:
        """The UUIDs of the devices that this process sees, by index."""

    def enter(self, device: torch.device) -> None:
        """Make `device` the calling thread's current device, and keep the thread from ending other threads' captures.

        For netfold's own threads, before their first call here. Lasts until the thread ends.
        """

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Do what `enter` does inside the context, and restore the thread's state at its end.

        For the user's threads, and for threads that serve several groups.
        """

    def current_stream(self, device: torch.device) -> Stream:
        """The calling thread's current stream on `device`."""

    def captures(self) -> bool:
        """Whether the calling thread's current stream records work into a graph instead of running it."""

    def new_stream(self, device: torch.device) -> Stream:
        """Make a stream that no other code uses, as long as a reference to it exists.

        In a stream shared with the user's code, netfold's copies would wait for the user's kernels, and the user's
        capture would record the copies into a graph.
        """

    def launch(self, stream: Any, work: Callable[[], Any]) -> None:
        """Call `work`, whose torch operations then run in the stream. They may allocate temporaries."""

    def copy(self, stream: Any, to: Tensor, source: Tensor) -> None:
        """Copy between device and pinned memory, or on a device. Does not block the host."""

    def native_driver(self, device: torch.device) -> Any:
        """The `_native.device.CudaDriver` of `device`, which copies between it and pinned memory without the GIL.

        Raises RuntimeError with the reason if there is none. Streams have their handle as `cuda_stream`, and events as
        `cuda_event`.
        """

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate [nbytes] u8 of pinned host memory."""

    def register(self, memory: Tensor) -> bool:
        """Pin a CPU tensor's memory, until `unregister`, for copies as from `pinned`. False if the device cannot."""

    def unregister(self, memory: Tensor) -> None:
        """Undo `register`, before the memory is freed. No copy may use it any more."""

    def empty(self, stream: Any, nbytes: int) -> Tensor:
        """Allocate [nbytes] u8 on the stream's device. Only that stream may use it at once."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep the tensor's memory from reuse until the stream has run all work submitted so far."""

    def export(self, stream: Any, tensor: Tensor) -> dict[str, Any]:
        """Export the tensor's memory to one other process. Returns the handle: numbers, strings and bytes.

        The host may wait for the stream's work.
        The handle is a lease with one user. The allocator does not reuse the memory, even if the exporter frees it,
        until that process has closed or declined the lease.
        """

    def open(self, handle: dict[str, Any], device: torch.device) -> Tensor:
        """Open another process's memory for `device`: [as exported] u8. The exporter's device need not be visible.

        `close` closes the lease.
        """

    def close(self, stream: Any, windows: list[Tensor]) -> None:
        """Clear `windows`, which has the last references to opened memory. No kernel may read that memory.

        The host waits for the stream's work. Where another reference is dropped last, the host waits for the work of
        the thread's current stream. In a thread of netfold this is the legacy default stream, which waits for the
        user's streams; they may wait at a gate that only this thread opens.
        """

    def decline(self, handle: dict[str, Any], device: torch.device) -> None:
        """End a lease without opening it."""

    def new_gate(self, device: torch.device) -> Gate | None:
        """Make a gate for streams of `device`; None if the device cannot wait for a word of memory."""

    def future(self, device: torch.device) -> torch.futures.Future[Any]:
        """Make a Future whose `wait` has the current stream wait for the stream in which it was resolved."""

    def resolve(self, stream: Any, future: torch.futures.Future[Any], value: Any) -> None: ...

    def nccl(self, device: torch.device, store: Any, rank: int, size: int) -> NcclGroup:
        """Make an NCCL group. Raises ValueError if torch has no NCCL."""


def refuse_capture(device_api: DeviceApi, rank: int, what: str) -> None:
    """Raise ValueError while a graph is captured: the host takes part in all operations, which no graph replays."""
    if device_api.captures():
        raise ValueError(
            f"rank {rank}: {what} cannot be captured into a {device_api.kind} graph: netfold goes through the host, "
            "which a graph does not replay; leave it out of the capture, or have NCCL do it (cuda:nccl)"
        )


def wait_for(event: Event, deadline: float, rank: int, what: str) -> None:
    """Block the host until the device has passed `event`. Raises CollectiveTimeout at the deadline."""
    for _ in range(_SPIN_QUERIES):
        if event.query():
            return
    began, pause = time.monotonic(), SHORTEST_PAUSE_S
    while not event.query():
        now = time.monotonic()
        if now > deadline:
            raise overdue(rank, what, now - began)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def overdue(rank: int, what: str, waited_s: float) -> CollectiveTimeout:
    """The error for a device that has not done `what` at the deadline."""
    return CollectiveTimeout(
        f"rank {rank}: {what} timed out after {waited_s:.1f} s: the device is not done with what came before; a kernel "
        "hangs, or waits for another rank",
        rank=rank,
    )


def device_failed(rank: int, what: str, reason: object) -> NetfoldError:
    """The error for a call of CUDA's that failed during `what`."""
    return NetfoldError(
        f"rank {rank}: {what} failed: {reason}; the device may be lost to this process, and come back in a new one",
        rank=rank,
    )
