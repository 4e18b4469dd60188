"""Find out which ranks share memory. This is tried and never inferred from addresses: network namespaces of a machine
share memory, and containers may not.

Every rank listens on a socket in the file system (TMPDIR), under a name that only the group learns. A rank that reaches
it is on the same machine with the same view of the file system. The two exchange their segments (memfd) and doorbells
(eventfd) over it, and keep it to pass descriptors of buffers later. Tokens authenticate the two: each sends the other
one over the mesh, whose connections are already authenticated.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import itertools
import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from netfold._native import engine
from netfold.errors import RendezvousError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_messages import receive_exactly

_TOKEN_BYTES = 16
_PACKET = struct.Struct(f">I{_TOKEN_BYTES}s")  # the sender's rank, and the token that the receiver gave it
_GREETING_S = 5.0  # for a connection to authenticate itself
_SHARED = b"\1"
_APART = b"\0"


@dataclass
class Node:
    """The ranks of this machine, and one descriptor of each kind from every rank. Owns them until they are taken."""

    ranks: tuple[int, ...]
    position: int
    segments: list[int]
    doorbells: list[int]
    links: list[int]  # -1 at this rank's position

    def take_descriptors(self) -> tuple[list[int], list[int], list[int]]:
        """Segments, doorbells and links. The caller owns them from here on."""
        taken = self.segments, self.doorbells, self.links
        self.segments, self.doorbells, self.links = [], [], []
        return taken

    def close(self) -> None:
        for fd in itertools.chain(*self.take_descriptors()):
            if fd >= 0:
                os.close(fd)


def discover_nodes(
    rank: int, size: int, sockets: Sequence[socket.socket | None], *, enabled: bool, deadline: float
) -> tuple[tuple[int, ...], Node | None]:
    """The number of every rank's node; and this rank's own node, None where the rank is alone.

    sockets: a connection of the mesh to each rank.
    enabled: False on a rank means that no rank shares memory with it.
    """
    segment = os.memfd_create("netfold", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(segment, engine.SEGMENT_BYTES)
    fcntl.fcntl(segment, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    given: dict[int, tuple[int, int, int]] = {rank: (segment, doorbell, -1)}
    try:
        with _listener(enabled) as (listener, path):
            _exchange(rank, size, sockets, listener, path, given, deadline)
        nodes = _agree(rank, size, sockets, set(given), deadline)
        members = tuple(peer for peer in range(size) if nodes[peer] == nodes[rank])
    except BaseException:
        members = ()
        raise
    finally:
        for peer in list(given):
            if peer not in members or len(members) == 1:
                for fd in given.pop(peer):
                    if fd >= 0:
                        os.close(fd)
    if len(members) == 1:
        return nodes, None
    segments, doorbells, links = zip(*(given[peer] for peer in members), strict=True)
    return nodes, Node(members, members.index(rank), list(segments), list(doorbells), list(links))


@contextlib.contextmanager
def _listener(enabled: bool) -> Iterator[tuple[socket.socket | None, str]]:
    if not enabled:
        yield None, ""
        return
    folder = tempfile.mkdtemp(prefix="netfold-")  # for this user alone
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with _address(folder) as address:
                listener.bind(address)
            listener.listen(engine.MAX_NODE_SIZE)
            yield listener, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _address(folder: str) -> Iterator[str]:
    """The socket's path through the folder's descriptor, which always fits in the 108 bytes of a socket's name."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def _exchange(
    rank: int,
    size: int,
    sockets: Sequence[socket.socket | None],
    listener: socket.socket | None,
    path: str,
    given: dict[int, tuple[int, int, int]],
    deadline: float,
) -> None:
    """Add the descriptors of every reachable rank to `given`. The higher rank of a pair connects."""
    own = given[rank][:2]
    tokens = {peer: secrets.token_bytes(_TOKEN_BYTES) for peer in range(size) if peer != rank}
    for peer, stream in _others(sockets):
        with _errors_named(rank, peer):
            stream.settimeout(max(0.001, deadline - time.monotonic()))
            control_messages.send(stream, {"type": "node", "path": path, "token": tokens[peer]})
    received = {}
    for peer, stream in _others(sockets):
        with _errors_named(rank, peer):
            received[peer] = control_messages.receive(stream)
    for peer, stream in _others(sockets[:rank]):
        with _errors_named(rank, peer):
            link = _connect(received[peer]["path"]) if listener is not None else None
            stream.sendall(_APART if link is None else _SHARED)
            if link is None:
                continue
            with link:
                link.settimeout(max(0.001, deadline - time.monotonic()))
                _send_descriptors(link, rank, received[peer]["token"], own)
                found = _receive_descriptors(link, tokens)
                if found is None or found[0] != peer:
                    raise RendezvousError(
                        f"rank {rank}: the process at rank {peer}'s socket is not rank {peer}", rank=peer
                    )
                given[peer] = (*found[1], link.detach())
    expected = set()
    for peer, stream in _others(sockets):
        if peer > rank:
            with _errors_named(rank, peer):
                if receive_exactly(stream, 1) == _SHARED:
                    expected.add(peer)
    while expected:
        assert listener is not None
        with _errors_named(rank, min(expected)):
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            link, _ = listener.accept()
        with link:
            link.settimeout(_GREETING_S)
            try:
                found = _receive_descriptors(link, tokens)
            except OSError:
                found = None
            if found is None:
                continue  # an unauthenticated peer
            peer, fds = found
            if peer not in expected:
                for fd in fds:
                    os.close(fd)
                continue
            with _errors_named(rank, peer):
                _send_descriptors(link, rank, received[peer]["token"], own)
            given[peer] = (*fds, link.detach())
            expected.remove(peer)


def _others(sockets: Sequence[socket.socket | None]) -> Iterator[tuple[int, socket.socket]]:
    return ((peer, stream) for peer, stream in enumerate(sockets) if stream is not None)


@contextlib.contextmanager
def _errors_named(rank: int, peer: int) -> Iterator[None]:
    """Raise errors of the connection to `peer` as a RendezvousError."""
    try:
        yield
    except (OSError, EOFError) as error:
        what = "did not answer in time" if isinstance(error, TimeoutError) else f"left ({error})"
        raise RendezvousError(
            f"rank {rank}: rank {peer} {what} while the ranks found out which of them share memory; see its own output",
            rank=peer,
        ) from error


def _connect(folder: str) -> socket.socket | None:
    """Connect to a rank's socket. None where that rank is on another machine, or has another view of the files."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _address(folder) as address:
            stream.connect(address)
        return stream
    except OSError:
        stream.close()
        return None


def _send_descriptors(stream: socket.socket, rank: int, token: bytes, fds: tuple[int, int]) -> None:
    socket.send_fds(stream, [_PACKET.pack(rank, token)], list(fds))


def _receive_descriptors(stream: socket.socket, tokens: dict[int, bytes]) -> tuple[int, tuple[int, int]] | None:
    """Receive a rank, and its segment and doorbell; None for a sender without that rank's token."""
    packet, fds, _, _ = socket.recv_fds(stream, _PACKET.size, 2, socket.MSG_CMSG_CLOEXEC)
    if len(packet) == _PACKET.size and len(fds) == 2:
        rank, token = _PACKET.unpack(packet)
        if hmac.compare_digest(token, tokens.get(rank, b"")) and os.fstat(fds[0]).st_size == engine.SEGMENT_BYTES:
            return rank, (fds[0], fds[1])
    for fd in fds:
        os.close(fd)
    return None


def _agree(
    rank: int, size: int, sockets: Sequence[socket.socket | None], reached: set[int], deadline: float
) -> tuple[int, ...]:
    """The node of every rank: sets whose members all reach each other. All ranks compute the same."""
    reaches = {rank: reached}
    for peer, stream in _others(sockets):
        with _errors_named(rank, peer):
            stream.settimeout(max(0.001, deadline - time.monotonic()))
            control_messages.send(stream, {"type": "reached", "ranks": sorted(reached)})
    for peer, stream in _others(sockets):
        with _errors_named(rank, peer):
            reaches[peer] = set(control_messages.receive(stream)["ranks"])
    members: list[list[int]] = []
    nodes = []
    for peer in range(size):
        for number, node in enumerate(members):
            if len(node) < engine.MAX_NODE_SIZE and all(
                each in reaches[peer] and peer in reaches[each] for each in node
            ):
                node.append(peer)
                nodes.append(number)
                break
        else:
            nodes.append(len(members))
            members.append([peer])
    return tuple(nodes)
