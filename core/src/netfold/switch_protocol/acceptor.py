"""Accept connections, and bound the peers that are not authenticated yet.

A switch, its metrics, a rank's listener and netfold's store accept by the same rule. A peer is unauthenticated until
`Peer.authenticated`. Its connection lasts for a timeout at most, and at most MAX_UNAUTHENTICATED such peers exist at
once. For one more, the oldest is dropped, so peers that connect and send nothing keep no other peer out. A peer has
LEAST_S before it can be dropped for another one: a worker is authenticated within milliseconds, and a burst of workers
must not drop each other. Until then, further peers wait in the kernel's queue. Where descriptors run out, the oldest is
dropped too. core/native/nccl/endpoint.cpp has the same rule for NCCL's network.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

MAX_UNAUTHENTICATED = 256
LEAST_S = 0.25
# After a failed accept where nothing can be dropped; and for the descriptor of a dropped peer.
_RETRY_S = 0.2


def _ignore(*_: object) -> None:
    pass


@dataclass(eq=False)
class Peer:
    """The other end of an accepted connection. `stream` is non-blocking, and owned by the function that serves it."""

    stream: socket.socket
    host: str
    port: int
    accepted_s: float  # the loop's time
    authenticated: Callable[[], None]  # call it once the peer has proved that it may be here


class Acceptor:
    """Runs `serve(peer)` as a task for each connection, all on one event loop.

    serve: handles the connection to its end, and closes it; a dropped peer's task is cancelled.
    timeout_s: from the connection to `Peer.authenticated`.
    most: peers that are not authenticated.
    dropped(peer, why): called for each peer that was dropped.
    failed(error): called where the system takes no connection.
    """

    def __init__(
        self,
        serve: Callable[[Peer], Coroutine[Any, Any, None]],
        *,
        timeout_s: float,
        most: int = MAX_UNAUTHENTICATED,
        dropped: Callable[[Peer, str], None] = _ignore,
        failed: Callable[[OSError], None] = _ignore,
    ) -> None:
        self._serve, self._timeout_s, self._most = serve, timeout_s, most
        self._dropped, self._failed = dropped, failed
        self._accepting: list[asyncio.Task[None]] = []
        self._connections: set[asyncio.Task[None]] = set()
        # In order of arrival.
        self._unauthenticated: dict[asyncio.Task[None], tuple[Peer, asyncio.TimerHandle]] = {}
        self._one_less = asyncio.Event()  # of the unauthenticated

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def unauthenticated(self) -> int:
        return len(self._unauthenticated)

    def start(self, listener: socket.socket) -> None:
        """Accept at `listener`, which is non-blocking and stays the caller's. Call it on the event loop."""
        self._accepting.append(asyncio.ensure_future(self._accept(listener)))

    async def stop(self) -> None:
        """Accept nothing more, and end all connections."""
        tasks = [*self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stream, address = await loop.sock_accept(listener)
            except OSError as error:
                self._failed(error)
                if not await self._drop_oldest("this process is short of descriptors or memory"):
                    await asyncio.sleep(_RETRY_S)
                continue
            self._begin(stream, address)
            del stream
            await asyncio.sleep(0)  # a backlog of a thousand connections must not hold up the other tasks
            while len(self._unauthenticated) > self._most:
                await self._drop_oldest("others came")

    def _begin(self, stream: socket.socket, address: tuple[Any, ...]) -> None:
        loop = asyncio.get_running_loop()
        stream.setblocking(False)
        peer = Peer(stream, str(address[0]), int(address[1]), loop.time(), lambda: self._forget(task))
        task = loop.create_task(self._serve(peer))
        timer = loop.call_later(self._timeout_s, self._drop, task, f"{self._timeout_s:.0f} s were over")
        self._connections.add(task)
        self._unauthenticated[task] = peer, timer
        task.add_done_callback(self._end)

    async def _drop_oldest(self, why: str) -> bool:
        """Drop the oldest unauthenticated peer, or wait until one has ended or can be dropped; False for no peer."""
        if not self._unauthenticated:
            return False
        task, (peer, _) = next(iter(self._unauthenticated.items()))
        left_s = peer.accepted_s + LEAST_S - asyncio.get_running_loop().time()
        if left_s > 0:
            self._one_less.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._one_less.wait(), left_s)
            return True
        self._drop(task, why)
        await asyncio.wait([task], timeout=_RETRY_S)  # until its descriptor is free
        return True

    def _drop(self, task: asyncio.Task[None], why: str) -> None:
        peer, timer = self._unauthenticated.pop(task)
        timer.cancel()
        task.cancel()
        self._one_less.set()
        self._dropped(peer, why)

    def _forget(self, task: asyncio.Task[None]) -> None:
        if task in self._unauthenticated:
            self._unauthenticated.pop(task)[1].cancel()
            self._one_less.set()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._forget(task)
