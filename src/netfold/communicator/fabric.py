"""Streams over libfabric in the place of the mesh's connections, for NETFOLD_TRANSPORT=fabric:PROVIDER.

The connections of the handshake stay: over them, proved as they are, ranks tell each other their endpoints' names, the
tags of their streams, and a greeting for each. A stream counts once the other rank's greeting came over it. Later they
show who is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netfold import control
from netfold._native import fabric
from netfold.communicator.errors import RendezvousError

Streams = list[list[Any]]  # by lane and rank; None at our own place

_GREETING_BYTES = 16
# Between two looks at what a provider has to do, while other ranks are waited for.
_LOOK_S = 0.0005

# One a provider and set of interfaces, for all groups of this process; never closed before it ends.
_ports: dict[tuple[int, str, tuple[str, ...]], Any] = {}
_lock = threading.Lock()


def port_of(provider: str, hosts: Sequence[str]) -> Any:
    """This process's place on that fabric. FabricError where it cannot have one."""
    key = os.getpid(), provider, tuple(hosts)
    with _lock:
        # One whose endpoint had to be closed is its streams' alone.
        if key not in _ports or not _ports[key].is_open:
            _ports[key] = fabric.Port(provider, list(hosts))
        return _ports[key]


def meet(
    provider: str,
    hosts: Sequence[str],
    rank: int,
    lanes: int,
    sockets: Sequence[socket.socket | None],
    deadline: float,
    *,
    settings: Mapping[str, int],
    port: Any = None,
) -> Streams:
    """A stream a lane and rank, over this host's interfaces with the addresses `hosts`, or over `port`.

    sockets: one to each rank, proved. settings: the options direct_bytes, registrations, registered_bytes.
    Raises RendezvousError that names the provider's reason, or the rank that does not answer.
    """
    peers = {peer: stream for peer, stream in enumerate(sockets) if stream is not None}
    for stream in peers.values():
        stream.settimeout(max(0.001, deadline - time.monotonic()))
    streams: Streams = [[None] * len(sockets) for _ in range(lanes)]
    try:
        port = port or port_of(provider, hosts)
        port.set(**settings)
        bell = fabric.make_bell()
        for peer in peers:
            for lane in streams:
                lane[peer] = port.open(bell, lanes * len(peers))
    except fabric.FabricError as error:
        for stream in peers.values():
            with contextlib.suppress(OSError):  # who has gone need not hear it
                control.send(stream, {"type": "fabric", "error": str(error)})
        raise RendezvousError(
            f"rank {rank} cannot use the fabric '{provider}' (NETFOLD_TRANSPORT): {error}", rank=rank
        ) from None
    names = port.names
    greetings = {peer: secrets.token_bytes(_GREETING_BYTES) for peer in peers}
    expected = {}
    for peer, stream in peers.items():
        with _told(rank, peer, port.provider, hosts):
            mine = {"provider": port.provider, "names": names, "terms": [lane[peer].terms for lane in streams]}
            control.send(stream, {"type": "fabric", "greeting": greetings[peer], **mine})
    for peer, stream in peers.items():
        with _told(rank, peer, port.provider, hosts):
            theirs = control.receive(stream)
            _check(rank, peer, port.provider, theirs)
            for lane, terms in zip(streams, theirs["terms"], strict=True):
                lane[peer].connect(theirs["names"], tuple(terms))
            expected[peer] = theirs["greeting"]
    for peer, lane in itertools.product(peers, streams):
        with _told(rank, peer, port.provider, hosts):
            lane[peer].send(greetings[peer], _left_ns(deadline))
    for peer, lane in itertools.product(peers, streams):
        with _told(rank, peer, port.provider, hosts):
            greeting = lane[peer].receive(_GREETING_BYTES, _left_ns(deadline))
            if not hmac.compare_digest(greeting, expected[peer]) or not lane[peer].flush(_left_ns(deadline)):
                raise TimeoutError
    # A provider may need us until the others have heard us as well.
    for peer, stream in peers.items():
        with _told(rank, peer, port.provider, hosts):
            control.send(stream, {"type": "met"})
    for peer, stream in peers.items():
        with _told(rank, peer, port.provider, hosts):
            while not select.select([stream], [], [], _LOOK_S)[0]:
                port.progress()
                _left_ns(deadline)
            control.receive(stream)
    return streams


@contextlib.contextmanager
def _told(rank: int, peer: int, provider: str, hosts: Sequence[str]) -> Iterator[None]:
    """What goes wrong towards a rank, as a RendezvousError that names it."""
    try:
        yield
    except fabric.FabricError as error:
        raise RendezvousError(f"rank {rank} does not reach rank {peer} over the fabric: {error}", rank=peer) from None
    except TimeoutError:
        raise RendezvousError(
            f"rank {rank}: rank {peer} did not answer over provider {provider} in time; does {', '.join(hosts)} reach "
            "its host by that fabric (NETFOLD_INTERFACE, netfold doctor fabric)?",
            rank=peer,
        ) from None
    except (OSError, EOFError) as error:
        raise RendezvousError(
            f"rank {rank}: rank {peer} left while the ranks met over the fabric ({error}); see its own output",
            rank=peer,
        ) from None


def as_streams(lane: Sequence[Any], sockets: Sequence[socket.socket | None], provider: str) -> list[Talk | None]:
    """By rank: what ranks speak over before the native floor takes the streams."""
    return [
        None if beside is None else Talk(stream, beside, provider) for stream, beside in zip(lane, sockets, strict=True)
    ]


def _check(rank: int, peer: int, provider: str, theirs: dict[str, Any]) -> None:
    if "error" in theirs:
        raise RendezvousError(f"rank {peer} cannot use the fabric (NETFOLD_TRANSPORT): {theirs['error']}", rank=peer)
    if theirs["provider"] != provider:
        raise RendezvousError(
            f"rank {rank} goes over provider {provider}, rank {peer} over {theirs['provider']}: all ranks need the "
            "same (NETFOLD_TRANSPORT)",
            rank=peer,
        )


def _left_ns(deadline: float) -> int:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return int(left * 1e9)


class Talk:
    """A stream as the socket that the probe speaks over."""

    def __init__(self, stream: Any, beside: socket.socket, provider: str) -> None:
        self._stream, self._beside, self._provider = stream, beside, provider
        self._timeout_ns = 0

    def settimeout(self, seconds: float) -> None:
        self._timeout_ns = int(seconds * 1e9)

    def setsockopt(self, *option: int) -> None:
        """Nothing here waits to be sent together with more."""

    def getsockname(self) -> tuple[str, int]:
        return f"{self._provider} {self._beside.getsockname()[0]}", 0

    def getpeername(self) -> tuple[str, int]:
        return f"{self._provider} {self._beside.getpeername()[0]}", 0

    def sendall(self, data: bytes) -> None:
        if self._stream.send(data, self._timeout_ns) < len(data) or not self._stream.flush(self._timeout_ns):
            raise TimeoutError("the fabric does not take what is sent")

    def recv(self, count: int) -> bytes:
        data: bytes = self._stream.receive(count, self._timeout_ns)
        if not data:
            raise TimeoutError("nothing comes over the fabric")
        return data
