"""What is asked of devices. `netfold.torch.device.cuda` answers by torch.cuda."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from netfold.errors import CollectiveTimeout

Tensor = torch.Tensor

# What an event is asked at once, before the thread sleeps between two looks.
_LOOKS = 50
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the device has come past it; raises what befell the device."""


class Stream(Protocol):
    """A line of work on one device, done in order; between streams only events order anything."""

    def record_event(self) -> Any: ...

    def wait_event(self, event: Any) -> None:
        """What comes after this in the stream begins behind the event. The host goes on."""


class NcclGroup(Protocol):
    """A group of NCCL's. Its collectives come in the order of the stream that is named; the host goes on.

    NCCL ends no operation and no process by itself here: deadlines and failures are the caller's concern.
    """

    def reduce_scatter(self, stream: Any, output: Tensor, source: Tensor, reduce: str) -> None:
        """`source`: as many times `output`'s elements as there are ranks."""

    def all_gather(self, stream: Any, output: Tensor, source: Tensor) -> None: ...

    def abort(self, reason: str) -> None:
        """End what is under way, also on other ranks; what it would have written is undefined."""

    def close(self, wait_s: float) -> None:
        """Once this rank's device is done: wait up to `wait_s` for the other ranks' devices, and free the group.

        Until its own device is done, another rank reads memory that belongs to this rank's part of the group.
        """


class DeviceApi(Protocol):
    """One kind of device. Functions raise RuntimeError in the device's own words where it fails or has no room.

    The calling thread's current device must be the one that the call is for: `enter` or `on` comes first. CUDA makes a
    context, some 300 to 500 MB, on whatever device is current at a thread's first call, and that is device 0 where the
    thread chose none. Only `holds`, `device_of`, `visible`, `uuid`, `future` and `current_stream` need no current
    device. The same holds for the methods of streams and events.
    """

    kind: str

    def holds(self, tensor: Tensor) -> bool:
        """Whether its memory is on such a device."""

    def device_of(self, tensor: Tensor) -> torch.device: ...

    def uuid(self, device: torch.device) -> str:
        """Names a device alike in every process, whichever of them are visible there."""

    def visible(self) -> Sequence[str]:
        """The UUIDs of the devices that this process sees, by index."""

    def enter(self, device: torch.device) -> None:
        """Make `device` the calling thread's current device, and keep the thread out of other threads' captures.

        For netfold's own threads, before their first call here. Lasts as long as the thread.
        """

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Do what `enter` does until the context ends, and restore then what the calling thread had before.

        For threads of the user's, and for threads that serve several groups.
        """

    def current_stream(self, device: torch.device) -> Stream:
        """That of the calling thread."""

    def captures(self) -> bool:
        """Whether what the calling thread gives its current stream is recorded into a graph, and not done."""

    def new_stream(self, device: torch.device) -> Stream:
        """A stream that no other code has, for as long as somebody holds it.

        A stream that the user's code has, too, would make netfold's copies wait for the user's kernels, and would have
        them recorded into a graph that the user captures.
        """

    def launch(self, stream: Any, work: Callable[[], Any]) -> None:
        """Have `work`'s torch operations done in the stream's order. They may use its temporaries."""

    def copy(self, stream: Any, to: Tensor, source: Tensor) -> None:
        """Between device and pinned memory, or on a device; the host goes on."""

    def pinned(self, nbytes: int) -> Tensor:
        """[nbytes] u8 of host memory that copy engines reach."""

    def empty(self, stream: Any, nbytes: int) -> Tensor:
        """[nbytes] u8 on the stream's device, for that stream: by others it may still be in use."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Its memory is nobody else's before the stream has come past what it has been given so far."""

    def export(self, tensor: Tensor) -> dict[str, Any]:
        """What one other process opens this memory by: numbers, words and bytes.

        A lease with one user. The allocator gives the memory to nobody else, also when the exporter lets go of it,
        until that process has closed what it opened, or has declined.
        """

    def open(self, handle: dict[str, Any], device: torch.device) -> Tensor:
        """[as exported] u8: another process's memory, for use by `device` of this one, which need not see its own.

        It is closed when the last reference to it goes: no kernel may read there any more.
        """

    def decline(self, handle: dict[str, Any], device: torch.device) -> None:
        """End a lease that cannot be opened here."""

    def future(self, device: torch.device) -> torch.futures.Future[Any]:
        """One whose `wait` also makes the current stream wait for the stream that it was resolved in."""

    def resolve(self, stream: Any, future: torch.futures.Future[Any], value: Any) -> None: ...

    def nccl(self, device: torch.device, store: Any, rank: int, size: int) -> NcclGroup:
        """ValueError where torch has none."""


def refuse_capture(layer: DeviceApi, rank: int, what: str) -> None:
    """ValueError while a graph is captured: the host takes part in all that is done here, and no graph replays it."""
    if layer.captures():
        raise ValueError(
            f"rank {rank}: {what} cannot be captured into a {layer.kind} graph: netfold goes through the host, which "
            "a graph does not replay; leave it out of the capture, or have NCCL do it (cuda:nccl)"
        )


def wait_for(event: Event, deadline: float, rank: int, what: str) -> None:
    """Have the host wait for a device; CollectiveTimeout where it does not come that far until the deadline."""
    for _ in range(_LOOKS):
        if event.query():
            return
    began, pause = time.monotonic(), SHORTEST_PAUSE_S
    while not event.query():
        now = time.monotonic()
        if now > deadline:
            raise CollectiveTimeout(
                f"rank {rank}: {what} did not come in {now - began:.1f} s: the device is not done with what came "
                "before; a kernel hangs, or waits for another rank",
                rank=rank,
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
