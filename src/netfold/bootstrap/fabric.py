"""Streams over libfabric instead of the mesh's TCP connections, for NETFOLD_TRANSPORT=fabric:PROVIDER.

The authenticated connections of the handshake stay open. Over them ranks exchange the names of their endpoints, the
tags of their streams, and a greeting for each rank. A stream is in use once the other rank's greeting has come over it.
Later the connections show which ranks are gone.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

from netfold._native import fabric
from netfold.bootstrap.addresses import own_interfaces
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol import control_messages

Streams = list[list[Any]]  # by lane and rank; None at this rank

_GREETING_BYTES = 16
# While this rank waits for others: between two calls of a provider's progress, and between two polls of messages.
_PROGRESS_S, _SLICE_S = 0.0005, 0.02

# One for each provider and set of interfaces, for all groups of this process. Closed when the process ends.
_ports: dict[tuple[int, str, tuple[str, ...]], Any] = {}
_lock = threading.Lock()


def port_of(provider: str, hosts: Sequence[str]) -> Any:
    """This process's port on that fabric. Raises FabricError where none can be opened."""
    key = os.getpid(), provider, tuple(hosts)
    with _lock:
        if not any(pid == os.getpid() for pid, _, _ in _ports):
            # Not `atexit`, which processes of multiprocessing do not run.
            Finalize(None, release_ports, exitpriority=0)
        # A port whose endpoint had to be closed serves only its remaining streams.
        if key not in _ports or not _ports[key].is_open:
            _ports[key] = fabric.StreamMux(provider, list(hosts))
        return _ports[key]


def release_ports() -> None:
    """At the end of the process, let providers remove external resources, such as shm's file in /dev/shm.

    A group that was not closed keeps its port.
    """
    with _lock:
        _ports.clear()


def describe_port(port: Any) -> str:
    """In words: provider, version, and the device of each rail."""
    return f"provider {port.provider} {port.version} of libfabric {fabric.version()} on {', '.join(port.domains)}"


def preview_transport(options: Options, store_host: str | None = None) -> tuple[str, str]:
    """Return the fabric that a group with these options would use on this host instead of TCP, and why it cannot.

    One of the two is empty; both are for TCP. Opens the port of a fabric.
    """
    why = f"NETFOLD_TRANSPORT={options.transport}"
    if options.fabric is None:
        return "", ""
    try:
        interfaces = own_interfaces(options, store_host)
        return f"{describe_port(port_of(options.fabric, interfaces.hosts[: interfaces.rails]))} ({why})", ""
    except (fabric.FabricError, RendezvousError) as error:
        return "", f"{why}: {error}"


def connect(
    provider: str,
    hosts: Sequence[str],
    rank: int,
    lanes: int,
    sockets: Sequence[socket.socket | None],
    deadline: float,
    *,
    settings: Mapping[str, int],
) -> Streams:
    """Connect a stream for each lane and rank, over this host's interfaces `hosts`.

    sockets: an authenticated connection to each rank.
    settings: the options rma_min_bytes, registration_cache_entries, registration_cache_bytes.
    Raises RendezvousError, on every rank, with the provider's reason, or the rank that does not answer.
    """
    others = _Others(rank, sockets, provider, hosts, deadline)
    try:
        streams: Streams = [[None] * len(sockets) for _ in range(lanes)]
        with others.errors_named():
            port = port_of(provider, hosts)
            port.set(**settings)
            doorbell = fabric.make_doorbell()
            for peer in others.peers:
                for lane in streams:
                    lane[peer] = port.open(doorbell, lanes * len(others.peers))
        others.streams = streams
        others.provider, names = port.provider, port.names
        greetings = {peer: secrets.token_bytes(_GREETING_BYTES) for peer in others.peers}
        for peer in others.peers:
            own = {"provider": port.provider, "names": names, "terms": [lane[peer].params for lane in streams]}
            others.send(peer, {"type": "fabric", "greeting": greetings[peer], **own})
        expected = {}
        for peer in others.peers:
            message = others.receive(peer, "fabric")
            if message["provider"] != port.provider:
                raise RendezvousError(
                    f"rank {rank} uses provider {port.provider}, rank {peer} {message['provider']}: all ranks "
                    "need the same (NETFOLD_TRANSPORT)",
                    rank=peer,
                )
            with others.errors_named(peer):
                for lane, params in zip(streams, message["terms"], strict=True):
                    lane[peer].connect(message["names"], tuple(params))
            expected[peer] = message["greeting"]
        for peer, lane in itertools.product(others.peers, streams):
            others.until(peer, _sends(lane[peer], greetings[peer]))
        for peer, lane in itertools.product(others.peers, streams):
            others.until(peer, _receives(lane[peer], expected[peer]))
            others.until(peer, lane[peer].flush)
        # A provider may need this rank's progress until the others have received its greeting.
        for peer in others.peers:
            others.send(peer, {"type": "connected"})
        for peer in others.peers:
            others.receive(peer, "connected", meanwhile=port.progress)
        return streams
    except RendezvousError as error:
        others.send_error(error)
        raise


class _Others:
    """The other ranks of the fabric, and the connections to them.

    The connections are polled while this rank waits for the fabric: a rank that fails sends its reason there, and the
    death of a rank shows there.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket.socket | None],
        provider: str,
        hosts: Sequence[str],
        deadline: float,
    ) -> None:
        self.rank, self.provider = rank, provider
        self._hosts, self._deadline = hosts, deadline
        self.peers = {peer: stream for peer, stream in enumerate(sockets) if stream is not None}
        for stream in self.peers.values():
            stream.settimeout(max(0.001, deadline - time.monotonic()))
        self._ranks = {stream.fileno(): peer for peer, stream in self.peers.items()}
        self._readable = select.poll()
        for number in self._ranks:
            self._readable.register(number, select.POLLIN)
        self._received: dict[tuple[int, str], control_messages.Message] = {}  # by rank and type
        self.streams: Streams = []

    def send(self, peer: int, message: control_messages.Message) -> None:
        with self.errors_named(peer):
            try:
                control_messages.send(self.peers[peer], message)
            except OSError:
                self._poll(0)  # the peer may have sent its reason
                raise

    def receive(self, peer: int, kind: str, *, meanwhile: Callable[[], None] | None = None) -> control_messages.Message:
        """Wait for a message of this type from that rank. meanwhile: called every _PROGRESS_S."""
        while (peer, kind) not in self._received:
            if meanwhile is not None:
                meanwhile()
            self._left_s(peer)
            self._poll(_SLICE_S if meanwhile is None else _PROGRESS_S)
        return self._received.pop((peer, kind))

    def until(self, peer: int, is_done: Callable[[int], bool]) -> None:
        """Call `is_done` until it returns True. It may take as many nanoseconds as its argument says."""
        while True:
            with self.errors_named(peer):
                if is_done(int(min(_SLICE_S, self._left_s(peer)) * 1e9)):
                    return
            self._poll(0)

    def send_error(self, error: RendezvousError) -> None:
        """Send all ranks the reason of a failure, with the rank at fault."""
        for stream in self.peers.values():
            with contextlib.suppress(OSError):  # the rank is gone
                control_messages.send(stream, {"type": "connect_failed", "error": str(error), "rank": error.rank})

    @contextlib.contextmanager
    def errors_named(self, peer: int | None = None) -> Iterator[None]:
        """Raise errors of the block as a RendezvousError that names this rank, or `peer`."""
        try:
            yield
        except fabric.FabricError as error:
            text = (
                f"rank {self.rank} cannot use the fabric '{self.provider}' (NETFOLD_TRANSPORT): {error}"
                if peer is None
                else f"rank {self.rank} does not reach rank {peer} over the fabric: {error}"
            )
            raise RendezvousError(text, rank=self.rank if peer is None else peer) from None
        except (OSError, EOFError) as error:
            assert peer is not None
            raise RendezvousError(
                f"rank {self.rank}: rank {peer} left while the ranks met over the fabric ({error}); see its own output",
                rank=peer,
            ) from None

    def _left_s(self, peer: int) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise RendezvousError(
                f"rank {self.rank}: rank {peer} did not answer over provider {self.provider} in time; does "
                f"{', '.join(self._hosts)} reach its host by that fabric (NETFOLD_INTERFACE, netfold doctor fabric)?",
                rank=peer,
            )
        return left

    def _poll(self, wait_s: float) -> None:
        """Receive all messages. RendezvousError where any rank failed or left, or any stream failed.

        All ranks count: while this rank waits for one, another may wait for it over a stream that has failed.
        """
        for peer, lane in itertools.product(self.peers, self.streams):
            if lane[peer].failure:
                with self.errors_named(peer):
                    raise fabric.FabricError(lane[peer].failure)
        while ready := self._readable.poll(wait_s * 1000):
            wait_s = 0
            for number, _ in ready:
                peer = self._ranks[number]
                with self.errors_named(peer):
                    message = control_messages.receive(self.peers[peer])
                if message["type"] == "connect_failed":
                    raise RendezvousError(message["error"], rank=message["rank"])
                self._received[peer, message["type"]] = message
                if message["type"] == "connected":
                    self._readable.unregister(number)  # later bytes are for the connection's next user


def _sends(stream: Any, data: bytes) -> Callable[[int], bool]:
    left = data

    def sends(within_ns: int) -> bool:
        nonlocal left
        left = left[stream.send(left, within_ns) :]
        return not left

    return sends


def _receives(stream: Any, expected: bytes) -> Callable[[int], bool]:
    got = b""

    def receives(within_ns: int) -> bool:
        nonlocal got
        got += stream.receive(len(expected) - len(got), within_ns)
        if len(got) == len(expected) and not hmac.compare_digest(got, expected):
            raise fabric.FabricError("the peer on that stream is not of this group")
        return len(got) == len(expected)

    return receives


class FabricByteStream:
    """A fabric stream with the methods of a socket that the probe uses, before the native engine takes it over."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._timeout_ns = 0

    def settimeout(self, seconds: float) -> None:
        self._timeout_ns = int(seconds * 1e9)

    def setsockopt(self, *option: int) -> None:
        """Has no effect: a fabric stream sends at once."""

    def sendall(self, data: bytes) -> None:
        if self._stream.send(data, self._timeout_ns) < len(data) or not self._stream.flush(self._timeout_ns):
            raise TimeoutError("the fabric did not accept the data in time")

    def recv(self, count: int) -> bytes:
        data: bytes = self._stream.receive(count, self._timeout_ns)
        if not data:
            raise TimeoutError("nothing came over the fabric in time")
        return data
