"""Whether the ranks of a node may read each other's memory: every pair tries, and all agree.

The kernel decides by users, capabilities, Yama and namespaces, so every rank reads a mark from every other's memory.
The kernel also names the process at the other end of the local socket, by its pid here. All ranks of a node use
single-copy, or none does, since a sender must know how its memory is read.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Any

from netfold._native import engine
from netfold.bootstrap.shm_discovery import Node
from netfold.errors import RendezvousError

_MARK_BYTES = 16
_OFFER = struct.Struct(f">?Q{_MARK_BYTES}s")  # whether there is a mark; its address; the mark
_REASON_BYTES = 512
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def negotiate(node: Node, *, enabled: bool, deadline: float) -> tuple[Any, str]:
    """A reader of the other ranks' memory, None where some rank of the node may not read; and a sentence that says so.

    Raises RendezvousError if a rank is gone, or does not reply before the deadline.
    """
    rank = node.ranks[node.position]
    with contextlib.ExitStack() as stack:
        links: dict[int, socket.socket] = {}
        for position, fd in enumerate(node.links):
            if position != node.position:
                links[position] = link = socket.socket(fileno=fd)
                stack.callback(link.detach)
        memory, reason = _own(len(node.ranks)) if enabled else (None, f"rank {rank} has NETFOLD_SINGLE_COPY=off")
        offer = (False, 0, b"") if memory is None else (True, memory.address, memory.mark)
        for packet, position in _exchange(node, links, _OFFER.pack(*offer), _OFFER.size, deadline):
            has_mark, address, mark = _OFFER.unpack(packet)
            if memory is None or not has_mark or reason:
                continue
            why = _try(memory, position, links[position], address, mark)
            if why:
                reason = f"rank {rank} cannot read the memory of rank {node.ranks[position]}: {why}"
        reasons = {node.position: reason}
        for packet, position in _exchange(node, links, b"." + reason.encode()[:_REASON_BYTES], 0, deadline):
            reasons[position] = packet[1:].decode(errors="replace")
    refusals = [reasons[position] for position in sorted(reasons) if reasons[position]]
    if refusals:
        return None, f"two copies through slots, since {refusals[0]}"
    return memory, "one copy, each rank reads the others' memory"


def _own(size: int) -> tuple[Any, str]:
    try:
        return engine.PeerMemory(size), ""
    except OSError as error:
        return None, str(error)


def _try(memory: Any, position: int, link: socket.socket, address: int, mark: bytes) -> str:
    pid, _, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if pid == 0:
        return "its process is in a pid namespace that cannot be seen from here"
    why: str = memory.probe(position, pid, address, mark)
    return why


def _exchange(
    node: Node, links: dict[int, socket.socket], packet: bytes, expected_bytes: int, deadline: float
) -> list[tuple[bytes, int]]:
    """Send a packet to every other position; returns theirs. expected_bytes: 0 for any length above 0."""
    packets = []
    peer = -1
    try:
        for position, link in links.items():
            peer = node.ranks[position]
            link.settimeout(max(0.001, deadline - time.monotonic()))
            link.sendall(packet)
        for position, link in links.items():
            peer = node.ranks[position]
            received = link.recv(_REASON_BYTES + 1)
            if not received or (expected_bytes and len(received) != expected_bytes):
                raise ConnectionError("it closed the connection")
            packets.append((received, position))
    except OSError as error:
        rank = node.ranks[node.position]
        raise RendezvousError(
            f"rank {rank}: rank {peer} was lost while the group formed: {error}", rank=peer
        ) from error
    return packets
