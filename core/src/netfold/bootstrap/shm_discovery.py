"""Find out which ranks share memory. This is tried and never inferred from addresses.

Candidates are ranks of one host and one network namespace, as `host_identity` names them. Every rank has a datagram
socket with an abstract name that only the group can derive (`NodeSocket`). Each candidate tries to reach the socket of
every other one. Ranks that all reach each other are a node. The lowest rank of a node makes the node's memory (memfd)
and sends it to each rank of the node; where it cannot, they communicate by TCP. Later the ranks wake each other, and
pass descriptors of buffers, by the same sockets. So a rank has one socket and one memory, whatever the number of ranks.

Names of abstract sockets can be listed by every user of the host. Each message therefore carries a token, and a filter
in the kernel drops messages without it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import hmac
import logging
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from netfold._native import engine
from netfold.errors import NetfoldError

log = logging.getLogger("netfold")

_REMEDIES = {
    errno.EPERM: "let the container's seccomp profile allow memfd_create",
    errno.ENOSYS: "let the container's seccomp profile allow memfd_create",
    errno.EFBIG: "raise the bound of a file's size (ulimit -f)",
    errno.ENOMEM: "raise the memory of this host or container",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
}
_TOKEN_BYTES = 16
_FILLING = bytes(24)  # up to the length of native messages; operation 0
_SO_ATTACH_FILTER = 26


class Exchange(Protocol):
    """A collective among the candidates. Every candidate calls it equally often."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all candidates, in their order. RendezvousError that names a rank that left.

        value: of what control messages can carry, at most some hundred bytes.
        """


def host_identity() -> str:
    """Name this host and network namespace: abstract sockets reach no further. Empty where they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/thread-self/ns/net")  # of the thread that makes the socket
    except OSError:
        return ""
    return f"{boot} {namespace.st_dev} {namespace.st_ino}"


class NodeSocket:
    """This rank's datagram socket. Made before the rank publishes its host, so that other ranks then reach it.

    secret: of the group.
    """

    def __init__(self, rank: int, secret: bytes) -> None:
        self.rank = rank
        self.name = f"netfold-{_derive(secret, b'node').hex()}-"  # and the rank
        self.token = _derive(secret, b"node token")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            # Without the filter, the receiver's check of the token is enough for safety.
            with contextlib.suppress(OSError):
                _pass_only(self._socket, self.token)
            self._socket.bind(self._address(rank))
        except BaseException:
            self._socket.close()
            raise

    @property
    def host(self) -> str:
        return host_identity()

    def reaches(self, peer: int) -> bool:
        """Whether this process may send to the peer's socket. Sends nothing."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex(self._address(peer)) == 0

    def send_memory(self, peer: int, memory: int) -> None:
        """Send the node's memory. The peer tells whether it has received it."""
        # Not socket.send_fds: that of Python 3.11 ignores the address.
        descriptor = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))
        with contextlib.suppress(OSError):
            self._socket.sendmsg([self.token + _FILLING], [descriptor], 0, self._address(peer))

    def receive_memory(self, expected_bytes: int) -> int | None:
        """The memory that was sent to this socket; None: none of that size was."""
        room = _TOKEN_BYTES + len(_FILLING), socket.CMSG_LEN(array.array("i").itemsize)
        while True:
            try:
                packet, ancillary, flags, _ = self._socket.recvmsg(*room, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return None
            fds = array.array("i")
            for _, _, data in ancillary:  # descriptors alone: the socket asked for nothing else
                fds.frombytes(data)
            is_whole = not flags & socket.MSG_TRUNC and packet[_TOKEN_BYTES:] == _FILLING
            is_of_node = is_whole and hmac.compare_digest(packet[:_TOKEN_BYTES], self.token)
            if is_of_node and len(fds) == 1 and os.fstat(fds[0]).st_size == expected_bytes:
                return fds[0]
            for fd in fds:
                os.close(fd)

    def detach(self) -> int:
        """The descriptor, which the caller owns from here on."""
        return self._socket.detach()

    def close(self) -> None:
        self._socket.close()

    def _address(self, rank: int) -> bytes:
        return f"\0{self.name}{rank}".encode()


@dataclass
class Node:
    """The ranks that share memory, and the memory. Owns both descriptors until they are taken."""

    ranks: tuple[int, ...]
    position: int
    memory: int
    socket: NodeSocket

    def take_descriptors(self) -> tuple[int, int]:
        """The memory and the socket. The caller owns them from here on."""
        memory, self.memory = self.memory, -1
        return memory, self.socket.detach()

    def close(self) -> None:
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1
        self.socket.close()


def form_node(own: NodeSocket, candidates: Sequence[int], exchange: Exchange) -> tuple[tuple[int, ...], Node | None]:
    """The lowest rank of each candidate's node; and this rank's own node, None where the rank is alone.

    candidates: ascending, with this rank. Every one made its NodeSocket before any of them comes here.
    """
    if len(candidates) == 1:
        return tuple(candidates), None
    rank, place = own.rank, {peer: place for place, peer in enumerate(candidates)}
    unreached = sum(1 << place[peer] for peer in candidates if peer != rank and not own.reaches(peer))
    found = exchange.all_gather(unreached.to_bytes((len(candidates) + 7) // 8, "little"))
    nodes = _divide(candidates, [int.from_bytes(each, "little") for each in found])
    members = next(node for node in nodes if rank in node)
    memory: int | None = None
    try:
        if rank == members[0] and len(members) > 1:
            try:
                memory = give_memory(own, members)
            except NetfoldError as error:
                log.warning("%s; the ranks of this host communicate by TCP", error)
        exchange.all_gather(None)  # every node's memory has been sent
        if rank != members[0]:
            memory = take_memory(own, members)
        has_memory = dict(zip(candidates, exchange.all_gather(memory is not None), strict=True))
        leader = {peer: node[0] if has_memory[peer] else peer for node in nodes for peer in node}
        leaders = tuple(leader[peer] for peer in candidates)
        ranks = tuple(peer for peer in members if leader[peer] == leader[rank])
        if memory is None or len(ranks) == 1:
            return leaders, None
        kept, memory = memory, None
        return leaders, Node(ranks, ranks.index(rank), kept, own)
    finally:
        if memory is not None:
            os.close(memory)


def give_memory(own: NodeSocket, members: Sequence[int]) -> int:
    """Make the memory of a node, and send it to all other members, which have their sockets. The caller owns it.

    Raises NetfoldError, with a remedy, where the host makes no memory that can be shared.
    """
    bytes_ = engine.node_bytes(len(members))
    try:
        memory = _make_memory(bytes_)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see what bounds this process (ulimit -a, cgroup, seccomp)")
        raise NetfoldError(
            f"rank {own.rank} cannot make the {bytes_} bytes that the {len(members)} ranks of its host would share "
            f"({error.strerror}): {remedy}"
        ) from None
    for peer in members:
        if peer != own.rank:
            own.send_memory(peer, memory)
    return memory


def take_memory(own: NodeSocket, members: Sequence[int]) -> int | None:
    """The memory that the first member gave; None where it did not arrive. The caller owns it."""
    return own.receive_memory(engine.node_bytes(len(members)))


def _divide(candidates: Sequence[int], unreached: Sequence[int]) -> list[list[int]]:
    """Divide the candidates into nodes whose members all reach each other. All ranks compute the same.

    unreached: by place among the candidates, the places that this one does not reach, as bits.
    Cost: steps as many as candidates and pairs that do not reach each other.
    """
    apart = list(unreached)  # the same in both directions
    for place, bits in enumerate(unreached):
        while bits:
            apart[(bits & -bits).bit_length() - 1] |= 1 << place
            bits &= bits - 1
    nodes: list[tuple[list[int], int]] = []  # the places of each, also as bits
    open_nodes: list[int] = []  # the numbers of those that are not full
    for place in range(len(candidates)):
        number = next((each for each in open_nodes if not apart[place] & nodes[each][1]), len(nodes))
        if number == len(nodes):
            nodes.append(([], 0))
            open_nodes.append(number)
        places, bits = nodes[number]
        places.append(place)
        nodes[number] = places, bits | 1 << place
        if len(places) == engine.MAX_NODE_SIZE:
            open_nodes.remove(number)
    return [[candidates[place] for place in places] for places, _ in nodes]


def _make_memory(bytes_: int) -> int:
    memory = os.memfd_create("netfold", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, bytes_)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, b"netfold " + purpose, "sha256")[:_TOKEN_BYTES]


def _pass_only(receiver: socket.socket, token: bytes) -> None:
    """Let the kernel drop messages that do not begin with the token (classic BPF, see socket(7) SO_ATTACH_FILTER)."""
    load, jump_if_equal, result = 0x20, 0x15, 0x06
    words = struct.unpack(f">{len(token) // 4}I", token)
    program = b""
    for number, word in enumerate(words):
        to_drop = 2 * (len(words) - 1 - number) + 1
        program += struct.pack("HBBI", load, 0, 0, 4 * number)
        program += struct.pack("HBBI", jump_if_equal, 0, to_drop, word)
    program += struct.pack("HBBI", result, 0, 0, 0xFFFFFFFF) + struct.pack("HBBI", result, 0, 0, 0)
    memory = ctypes.create_string_buffer(program)
    filter_ = struct.pack("HP", len(program) // 8, ctypes.addressof(memory))
    receiver.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
