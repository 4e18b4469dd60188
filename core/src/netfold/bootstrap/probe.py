"""Measure the links of a group before the first operation, and make the choice table.

Rank 0 exchanges pings over a new connection with one rank of another host, fits the cost model's links, builds the
table and sends it to all. A copy inside this process measures memory. A process measures the same hosts once.

On that connection there are frames of a letter and a length. `P`: a ping of that length, whose reply is one byte. `E`:
the end of the pings.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from netfold.bootstrap.tree import StartTree
from netfold.errors import RendezvousError
from netfold.switch_protocol.control_messages import receive_exactly
from netfold.tuning import DEFAULT_LINKS, ChoiceTable, Link, Links, Topology, fit_link

_FRAME = struct.Struct(">cI")
_PING, _END = b"P", b"E"
_MAX_PING_BYTES = 1 << 20

# (bytes, repetitions). Each size is at most eight times the last, whose time so bounds the next one's. The largest must
# exceed the burst that links pass at full speed after a pause (a rack's: 128 KB).
_PINGS = ((1, 20), (32 << 10, 3), (256 << 10, 2), (1 << 20, 2))
_GROWTH = 8
# The first long message on a new connection waits until its windows have opened: over tcp;ofi_rxm for an
# acknowledgement that the kernel delays by 40 ms. So a first message is sent whose time does not count.
_WARM_UP_BYTES = 32 << 10
# All pings together. Pings that would exceed this are left out.
BUDGET_S = 0.025

# Of this process, by set of hosts: their network link. Few entries, since a job's hosts rarely change.
_measured: dict[frozenset[str], Link] = {}
_local: tuple[float, float] | None = None


class ByteStream(Protocol):
    """The methods of a socket that the probe uses."""

    def settimeout(self, seconds: float, /) -> None: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...
    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, count: int, /) -> bytes: ...


class TableChoice(NamedTuple):
    """A table, and what it was made from."""

    table: ChoiceTable
    links: Links

    def to_json(self) -> bytes:
        return json.dumps({"table": self.table.to_json(), "links": self.links.to_json()}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> TableChoice:
        parts = json.loads(text)
        return cls(ChoiceTable.from_json(parts["table"]), Links.from_json(parts["links"]))


def agree(
    tree: StartTree,
    stream_to: Callable[[int], ByteStream],
    topology: Topology,
    build: Callable[[Links], ChoiceTable],
    deadline: float,
    *,
    hosts: frozenset[str],
    rails: int = 1,
    switches: tuple[float, ...] = (),
    progress: Callable[[], None] | None = None,
) -> TableChoice:
    """Rank 0 measures and chooses; every rank returns rank 0's choice.

    stream_to: the connection between rank 0 and the rank that it measures with, at both.
    build: makes the table, at rank 0.
    hosts: the addresses of all ranks. The links between these hosts are measured once.
    switches: the rates that rank 0 knows (Links.switches).
    progress: lets the streams go on, where they do so only in calls: rank 0's last bytes may need its peer's.
    Cost: about 30 ms, and 40 ms more over a fabric, the first time between these hosts.
    Raises RendezvousError that names the rank that left.
    """
    rank = tree.rank
    what = "the group chose its algorithms"
    peer = tree.broadcast(lambda: _measured_peer(tree, topology), what)
    links = DEFAULT_LINKS
    if rank in (0, peer):
        try:
            stream = stream_to(peer if rank == 0 else 0)
            stream.settimeout(max(0.1, deadline - time.monotonic()))
            if rank == 0:
                links = replace(_measure(stream, hosts, rails), switches=switches)
                stream.sendall(_FRAME.pack(_END, 0))
            else:
                _follow(stream)
        except (OSError, EOFError) as error:
            other = peer if rank == 0 else 0
            raise RendezvousError(
                f"rank {rank}: rank {other} left while {what} ({error}); see its own output", rank=other
            ) from None
    return TableChoice.from_json(tree.broadcast(lambda: TableChoice(build(links), links).to_json(), what, progress))


def _measured_peer(tree: StartTree, topology: Topology) -> int:
    """A rank on another host; where all are on one, any rank, since algorithms over the mesh use its loopback."""
    elsewhere = [peer for peer in tree.place.children if topology.nodes[peer] != topology.nodes[0]]
    return (elsewhere or list(tree.place.children))[0]


def _follow(leader: ByteStream) -> None:
    leader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        kind, size = _FRAME.unpack(receive_exactly(leader, _FRAME.size))
        if kind == _END:
            return
        if size > _MAX_PING_BYTES:
            raise RendezvousError(f"rank 0 sent a frame of {size} bytes; at most {_MAX_PING_BYTES} make sense", rank=0)
        leader.sendall(receive_exactly(leader, size)[:1])


def _measure(stream: ByteStream, hosts: frozenset[str], rails: int) -> Links:
    memory_bytes_per_s, reduce_bytes_per_s = _local_rates()
    links = replace(
        DEFAULT_LINKS,
        memory=replace(DEFAULT_LINKS.memory, bytes_per_s=memory_bytes_per_s),
        reduce_bytes_per_s=reduce_bytes_per_s,
        measured=True,
    )
    if hosts not in _measured:
        _measured[hosts] = fit_link(_ping(stream))
    # Transfers are striped over all rails, which are assumed to be as fast as the measured one.
    network = _measured[hosts]
    return replace(links, network=replace(network, bytes_per_s=network.bytes_per_s * rails))


def _ping(stream: ByteStream) -> list[tuple[int, float]]:
    """Samples of (bytes, one-way seconds). A round trip carries the bytes in one direction, one byte in the other.

    The byte back takes half of the quickest round trip of any size, since all pings of one byte may have been delayed.
    """
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    round_trips: list[tuple[int, float]] = []
    _round_trip(stream, _WARM_UP_BYTES)
    left_s = BUDGET_S
    least_s = 0.0
    for number, (size, repetitions) in enumerate(_PINGS):
        expected_s = _GROWTH * least_s
        for repetition in range(repetitions):
            # Two sizes are needed to fit a line, however slow the link. The first ping of all is repeated once in any
            # case: a lost packet delays it by hundreds of milliseconds, and that would seem to be a slow link.
            needed = (number < 2 and repetition == 0) or (number, repetition) == (0, 1)
            if not needed and expected_s > left_s:
                break
            took_s = _round_trip(stream, size)
            least_s = expected_s = took_s if repetition == 0 else min(least_s, took_s)
            # A ping that was delayed by other work uses up only the time of the fastest.
            left_s -= least_s
            round_trips.append((size, took_s))
    back_s = min(took_s for _, took_s in round_trips) / 2
    return [(size, took_s - back_s) for size, took_s in round_trips]


def _round_trip(stream: ByteStream, size: int) -> float:
    message = _FRAME.pack(_PING, size) + bytes(size)
    sent = time.perf_counter()
    stream.sendall(message)
    receive_exactly(stream, 1)
    return time.perf_counter() - sent


def _local_rates() -> tuple[float, float]:
    """Bytes a second that this process copies, and adds; measured once, in about 6 ms."""
    global _local
    if _local is None:
        source, target = np.ones(1 << 20, np.float32), np.ones(1 << 20, np.float32)
        copied_s = _quickest(lambda: np.copyto(target, source))
        added_s = _quickest(lambda: np.add(target, source, out=target))
        _local = 2 * source.nbytes / copied_s, source.nbytes / added_s
    return _local


def _quickest(work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return max(best, 1e-9)
