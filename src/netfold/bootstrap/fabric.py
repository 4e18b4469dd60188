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
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

from netfold._native import fabric
from netfold.bootstrap.addresses import own_interfaces
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol import control_messages

Streams = list[list[Any]]  # by lane and rank; None at our own place

_GREETING_BYTES = 16
# Between two looks at what a provider has to do, while other ranks are waited for, and at what those say.
_LOOK_S, _SLICE_S = 0.0005, 0.02

# One a provider and set of interfaces, for all groups of this process; not closed before it ends.
_ports: dict[tuple[int, str, tuple[str, ...]], Any] = {}
_lock = threading.Lock()


def port_of(provider: str, hosts: Sequence[str]) -> Any:
    """This process's place on that fabric. FabricError where it cannot have one."""
    key = os.getpid(), provider, tuple(hosts)
    with _lock:
        if not any(pid == os.getpid() for pid, _, _ in _ports):
            # As Python's own, so that the processes of multiprocessing do so, too, which end without `atexit`.
            Finalize(None, _let_go, exitpriority=0)
        # One whose endpoint had to be closed is its streams' alone.
        if key not in _ports or not _ports[key].is_open:
            _ports[key] = fabric.StreamMux(provider, list(hosts))
        return _ports[key]


def _let_go() -> None:
    """At the end of the process: have providers take away what they keep outside of it, as shm its file in /dev/shm.
    A group that was not closed keeps its port."""
    with _lock:
        _ports.clear()


def describe_port(port: Any) -> str:
    """What is gone over: provider, version, and the device of each rail."""
    if port.provider == "mpi":
        return f"MPI ({port.version})"
    return f"provider {port.provider} {port.version} of libfabric {fabric.version()} on {', '.join(port.domains)}"


def preview_transport(options: Options, store_host: str | None = None) -> tuple[str, str]:
    """What a group with these options would go over on this host in the place of TCP, and why it cannot: one of the two
    is empty, both where that is TCP. Opens the port that it would use; an MPI is left alone."""
    why = f"NETFOLD_TRANSPORT={options.transport}"
    if options.over_mpi:
        return f"the MPI of mpirun ({why})", ""
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
    port: Any = None,
) -> Streams:
    """A stream a lane and rank, over this host's interfaces with the addresses `hosts`, or over `port`.

    sockets: one to each rank, proved. settings: the options rma_min_bytes, registration_cache_entries,
    registration_cache_bytes. Raises RendezvousError that names the provider's reason, or the rank that does not answer;
    every rank hears of it.
    """
    others = _Others(rank, sockets, port.provider if port else provider, hosts, deadline)
    try:
        streams: Streams = [[None] * len(sockets) for _ in range(lanes)]
        with others.told_of():
            port = port or port_of(provider, hosts)
            port.set(**settings)
            bell = fabric.make_doorbell()
            for peer in others.peers:
                for lane in streams:
                    lane[peer] = port.open(bell, lanes * len(others.peers))
        others.streams = streams
        others.provider, names = port.provider, port.names
        greetings = {peer: secrets.token_bytes(_GREETING_BYTES) for peer in others.peers}
        for peer in others.peers:
            mine = {"provider": port.provider, "names": names, "terms": [lane[peer].params for lane in streams]}
            others.tell(peer, {"type": "fabric", "greeting": greetings[peer], **mine})
        expected = {}
        for peer in others.peers:
            theirs = others.hear(peer, "fabric")
            if theirs["provider"] != port.provider:
                raise RendezvousError(
                    f"rank {rank} goes over provider {port.provider}, rank {peer} over {theirs['provider']}: all ranks "
                    "need the same (NETFOLD_TRANSPORT)",
                    rank=peer,
                )
            with others.told_of(peer):
                for lane, terms in zip(streams, theirs["terms"], strict=True):
                    lane[peer].connect(theirs["names"], tuple(terms))
            expected[peer] = theirs["greeting"]
        for peer, lane in itertools.product(others.peers, streams):
            others.until(peer, _sends(lane[peer], greetings[peer]))
        for peer, lane in itertools.product(others.peers, streams):
            others.until(peer, _receives(lane[peer], expected[peer]))
            others.until(peer, lane[peer].flush)
        # A provider may need us until the others have heard us as well.
        for peer in others.peers:
            others.tell(peer, {"type": "connected"})
        for peer in others.peers:
            others.hear(peer, "connected", meanwhile=port.progress)
        return streams
    except RendezvousError as error:
        others.part(error)
        raise


class _Others:
    """The ranks that one comes to a fabric with, and the connections to them.

    Those are listened to while the fabric is waited for: who cannot go on says why there, and who dies shows there.
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
        self._said: dict[tuple[int, str], control_messages.Message] = {}
        self.streams: Streams = []

    def tell(self, peer: int, message: control_messages.Message) -> None:
        with self.told_of(peer):
            try:
                control_messages.send(self.peers[peer], message)
            except OSError:
                self._listen(0)  # it may have said why it went
                raise

    def hear(self, peer: int, kind: str, *, meanwhile: Callable[[], None] | None = None) -> control_messages.Message:
        """What that rank says of this kind; `meanwhile` is called again and again."""
        while (peer, kind) not in self._said:
            if meanwhile is not None:
                meanwhile()
            self._left_s(peer)
            self._listen(_SLICE_S if meanwhile is None else _LOOK_S)
        return self._said.pop((peer, kind))

    def until(self, peer: int, is_done: Callable[[int], bool]) -> None:
        """Until something has come about with that rank, by calls that take up to so many nanoseconds."""
        while True:
            with self.told_of(peer):
                if is_done(int(min(_SLICE_S, self._left_s(peer)) * 1e9)):
                    return
            self._listen(0)

    def part(self, error: RendezvousError) -> None:
        """Tell everybody why nothing comes of it: who is at fault, and in whose words."""
        for stream in self.peers.values():
            with contextlib.suppress(OSError):  # who has gone need not hear it
                control_messages.send(stream, {"type": "connect_failed", "error": str(error), "rank": error.rank})

    @contextlib.contextmanager
    def told_of(self, peer: int | None = None) -> Iterator[None]:
        """What goes wrong, here or towards a rank, as a RendezvousError."""
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

    def _listen(self, wait_s: float) -> None:
        """Take all that was said; RendezvousError when a rank parted or left, or a stream failed.

        Whichever: who waits for one rank may have failed towards another, which waits for it.
        """
        for peer, lane in itertools.product(self.peers, self.streams):
            if lane[peer].failure:
                with self.told_of(peer):
                    raise fabric.FabricError(lane[peer].failure)
        while ready := self._readable.poll(wait_s * 1000):
            wait_s = 0
            for number, _ in ready:
                peer = self._ranks[number]
                with self.told_of(peer):
                    message = control_messages.receive(self.peers[peer])
                if message["type"] == "connect_failed":
                    raise RendezvousError(message["error"], rank=message["rank"])
                self._said[peer, message["type"]] = message
                if message["type"] == "connected":
                    self._readable.unregister(number)  # what comes now is for who has this connection next


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
            raise fabric.FabricError("who answers there is not of this group")
        return len(got) == len(expected)

    return receives


def byte_streams(
    lane: Sequence[Any], sockets: Sequence[socket.socket | None], provider: str
) -> list[FabricByteStream | None]:
    """By rank: what ranks speak over before the native floor takes the streams."""
    return [
        None if beside is None else FabricByteStream(stream, beside, provider)
        for stream, beside in zip(lane, sockets, strict=True)
    ]


class FabricByteStream:
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
