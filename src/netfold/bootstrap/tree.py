"""A tree of connections over which the ranks of a group exchange what they need while the group starts.

The ranks of a host are a tree below the host's first rank, its leader, and the leaders are a tree below rank 0. So a
rank has few connections, and few messages pass between hosts. A rank connects to its parent, which has a lower number.
The connections later carry collectives like any other.

Every exchange is a gather up the tree and a broadcast down it. Frames on a connection:

    length (4 bytes), kind (1 byte), msgpack
    kind V   a value, or the values of a subtree by rank
    kind F   a failure: its text, and the rank at fault or -1. Whoever receives it passes it on
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgpack

from netfold.errors import RendezvousError
from netfold.switch_protocol.control_messages import receive_exactly

FAN_OUT = 8
# A rank's value in an exchange of P ranks takes up to 1/P of it. At 60,000 ranks 4 KB are left for each.
MAX_FRAME_BYTES = 1 << 28
_FRAME = struct.Struct(">Ic")
_VALUE, _FAILURE = b"V", b"F"
# A rank waits so much longer than those below it, whose error then names the rank that is late.
_GRACE_S = 0.3
# Between two calls of a provider's progress, while this rank waits.
_PROGRESS_S = 0.0005

Value = TypeVar("Value")


class Place(NamedTuple):
    """A rank's neighbours in the tree."""

    parent: int | None
    leads: bool
    """Whether the rank is its host's leader. The leader's parent is on another host."""
    own_host: tuple[int, ...]
    """Children on this host."""
    other_hosts: tuple[int, ...]
    """Children on other hosts; none but at a leader."""
    height: int
    """Connections down to the lowest rank below, at most."""

    @property
    def children(self) -> tuple[int, ...]:
        return self.other_hosts + self.own_host


def place_of(rank: int, hosts: Sequence[Sequence[int]]) -> Place:
    """hosts: the ranks of each host, ascending; the hosts in the order of their first ranks."""
    number = next(place for place, ranks in enumerate(hosts) if rank in ranks)
    return _place(number, hosts[number].index(rank), hosts, max(map(len, hosts)))


def places_of(hosts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Place]]:
    """Every rank with its place. hosts: as of `place_of`."""
    largest = max(map(len, hosts))
    for number, ranks in enumerate(hosts):
        for at, rank in enumerate(ranks):
            yield rank, _place(number, at, hosts, largest)


def _place(number: int, at: int, hosts: Sequence[Sequence[int]], largest: int) -> Place:
    """Of the rank at a position of a host. largest: the most ranks of a host."""
    ranks = hosts[number]
    below = tuple(ranks[child] for child in _children(at, len(ranks)))
    height = _height(at, len(ranks))
    if at > 0:
        return Place(ranks[_parent(at)], False, below, (), height)
    leaders = tuple(hosts[child][0] for child in _children(number, len(hosts)))
    parent = hosts[_parent(number)][0] if number > 0 else None
    return Place(parent, True, below, leaders, max(height, _height(number, len(hosts)) + _height(0, largest)))


def _parent(at: int) -> int:
    return (at - 1) // FAN_OUT


def _children(at: int, count: int) -> range:
    return range(min(count, at * FAN_OUT + 1), min(count, at * FAN_OUT + 1 + FAN_OUT))


def _height(at: int, count: int) -> int:
    below = _children(at, count)
    return 1 + _height(below[0], count) if below else 0


class StartTree:
    """This rank's end of the tree. For one thread. Raises RendezvousError that names the rank at fault."""

    def __init__(self, rank: int, place: Place, streams: dict[int, socket.socket], deadline: float) -> None:
        """streams: a connection to each neighbour. The tree does not close them."""
        self.rank, self.place, self.streams = rank, place, streams
        self._deadline = deadline
        self._received: dict[int, deque[Any]] = {}
        self._readable = select.poll()
        self._peers: dict[int, int] = {}
        for peer, stream in streams.items():
            self.add(peer, stream)

    def add(self, peer: int, stream: socket.socket) -> None:
        """A neighbour's connection, where it was made after this object."""
        self.streams[peer] = stream
        self._received[peer] = deque()
        self._peers[stream.fileno()] = peer
        self._readable.register(stream.fileno(), select.POLLIN)

    def check(self, what: str) -> None:
        """Raise the failure of a neighbour that has one, or that left. Does not wait."""
        self._look(0, what)

    def all_gather(self, value: Any, what: str, *, grace_s: float = 0.0) -> list[Any]:
        """Every rank's value, by rank.

        what: what the ranks do, for errors.
        grace_s: added to the deadline, where a rank may need all the time to find its value.
        """
        self._deadline += grace_s
        try:
            return self._exchange(value, self.place.children, self.place.parent, what)
        finally:
            self._deadline -= grace_s

    def all_gather_on_host(self, value: Any, what: str) -> list[Any]:
        """The values of this host's ranks, in their order."""
        place = self.place
        return self._exchange(value, place.own_host, None if place.leads else place.parent, what)

    def broadcast(self, make: Callable[[], Value], what: str, meanwhile: Callable[[], None] | None = None) -> Value:
        """Rank 0's value: `make` is called there alone.

        meanwhile: called every _PROGRESS_S where this rank waits for the value.
        """
        parent = self.place.parent
        value = self._receive(parent, what, meanwhile) if parent is not None else make()
        for child in self.place.children:
            self._send(child, value, what)
        result: Value = value
        return result

    def fail(self, text: str, at_fault: int | None) -> None:
        """Tell the other ranks why this one does not go on."""
        failure = msgpack.packb([text, -1 if at_fault is None else at_fault])
        for stream in self.streams.values():
            with contextlib.suppress(OSError):
                stream.settimeout(1.0)
                stream.sendall(_FRAME.pack(len(failure), _FAILURE) + failure)

    def _exchange(self, value: Any, children: Sequence[int], parent: int | None, what: str) -> list[Any]:
        values = {self.rank: value}
        for child in children:
            values |= self._receive(child, what)
        if parent is not None:
            self._send(parent, values, what)
            values = self._receive(parent, what)
        for child in children:
            self._send(child, values, what)
        return [values[rank] for rank in sorted(values)]

    def _send(self, peer: int, value: Any, what: str) -> None:
        frame = msgpack.packb(value)
        stream = self.streams[peer]
        try:
            stream.settimeout(max(0.001, self._deadline - time.monotonic()))
            stream.sendall(_FRAME.pack(len(frame), _VALUE) + frame)
        except OSError as error:
            self._look(0, what)  # the peer may have sent its reason
            raise self._left(peer, what, error) from None

    def _receive(self, peer: int, what: str, meanwhile: Callable[[], None] | None = None) -> Any:
        levels = self.place.height if peer != self.place.parent else self.place.height + 10
        while not self._received[peer]:
            left_s = self._deadline + levels * _GRACE_S - time.monotonic()
            if left_s <= 0:
                raise RendezvousError(f"rank {self.rank}: rank {peer} did not answer in time while {what}", rank=peer)
            if meanwhile is not None:
                meanwhile()
            self._look(left_s if meanwhile is None else _PROGRESS_S, what)
        return self._received[peer].popleft()

    def _look(self, wait_s: float, what: str) -> None:
        """Receive from every neighbour that has sent something: any of them may have failed."""
        for number, _ in self._readable.poll(wait_s * 1000):
            peer = self._peers[number]
            stream = self.streams[peer]
            try:
                stream.settimeout(max(1.0, self._deadline - time.monotonic()))
                length, kind = _FRAME.unpack(receive_exactly(stream, _FRAME.size))
                if length > MAX_FRAME_BYTES:
                    raise ConnectionError(f"it sent a frame of {length} bytes; the bound is {MAX_FRAME_BYTES}")
                value = msgpack.unpackb(receive_exactly(stream, length), strict_map_key=False)
            except (OSError, EOFError, ValueError) as error:
                raise self._left(peer, what, error) from None
            if kind == _FAILURE:
                text, at_fault = value
                raise RendezvousError(text, rank=None if at_fault < 0 else at_fault)
            self._received[peer].append(value)

    def _left(self, peer: int, what: str, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"rank {self.rank}: rank {peer} left while {what} ({error}); see its own output", rank=peer
        )
