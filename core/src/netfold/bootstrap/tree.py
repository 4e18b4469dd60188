"""A tree of connections over which the ranks of a group exchange what they need while the group starts.

The ranks of a host are a tree below the host's first rank, its leader, and the leaders are a tree below rank 0. So a
rank has few connections, and few messages pass between hosts. A rank connects to its parent, which has a lower number.
The connections later carry collectives like any other. A group of ranks that are in a group already needs none: its
tree goes over the messages of that group (communicator/message_links.py).

Every exchange is a gather up the tree and a broadcast down it. A rank's steps in it are generators without I/O, which
`StartTree` runs over sockets (and lab/bench/start_simulation.py in virtual time). Frames on a connection:

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
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgpack

from netfold.errors import RendezvousError
from netfold.switch_protocol.control_messages import receive_exactly

FAN_OUT = 8
# A rank's value in an exchange of P ranks takes up to 1/P of it. At 60,000 ranks 4 KB are left for each.
MAX_FRAME_BYTES = 1 << 28
FRAME = struct.Struct(">Ic")
_VALUE, _FAILURE = b"V", b"F"
# A rank waits so much longer than those below it, whose error then names the rank that is late.
_GRACE_S = 0.3
_FAIL_S = 1.0
# Between two calls of a provider's progress, while this rank waits.
_PROGRESS_S = 0.0005
# Between two looks at whether another thread wants this rank to give up.
_CHECK_S = 0.2

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

    @property
    def neighbours(self) -> tuple[int, ...]:
        return self.children if self.parent is None else (self.parent, *self.children)


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


class Send(NamedTuple):
    """Send a value to each of these neighbours."""

    peers: tuple[int, ...]
    value: Any
    last: bool = False
    """No frame to these neighbours follows."""


class Receive(NamedTuple):
    """Wait for a neighbour's value, which is the result of this step."""

    peer: int


Steps = Generator[Send | Receive, Any, Value]


def gather_steps(
    rank: int,
    value: Any,
    children: Sequence[int],
    parent: int | None,
    *,
    elsewhere: Sequence[int] = (),
    host_is_here: Callable[[], None] | None = None,
) -> Steps[dict[int, Any]]:
    """One rank's steps to gather the values of all ranks above and below it, by rank.

    elsewhere: more children, whose values are received after those of `children`, with `host_is_here` in between.
    """
    values = {rank: value}
    for child in children:
        values |= yield Receive(child)
    if host_is_here is not None:
        host_is_here()
    for child in elsewhere:
        values |= yield Receive(child)
    if parent is not None:
        yield Send((parent,), values)
        values = yield Receive(parent)
    yield Send((*elsewhere, *children), values)
    return values


def broadcast_steps(place: Place, make: Callable[[], Value]) -> Steps[Value]:
    """One rank's steps to send or receive what `make` gives at rank 0."""
    value = (yield Receive(place.parent)) if place.parent is not None else make()
    yield Send(place.children, value)
    result: Value = value
    return result


def end_steps(place: Place) -> Steps[None]:
    """One rank's steps to end the tree, once every rank is ready to."""
    for child in place.children:
        yield Receive(child)
    if place.parent is not None:
        yield Send((place.parent,), None, last=True)
        yield Receive(place.parent)
    yield Send(place.children, None, last=True)


class LinkError(Exception):
    """A neighbour has left, or sent what is no frame."""

    def __init__(self, peer: int, error: Exception) -> None:
        super().__init__(str(error))
        self.peer = peer


class Links(Protocol):
    """The ways to a rank's neighbours in the tree. Frames of one neighbour arrive in the order of sending."""

    def send(self, peer: int, kind: bytes, body: bytes, timeout_s: float) -> None:
        """Raises OSError."""

    def expect(self, peer: int) -> None:
        """The next frame of this neighbour is awaited from here on. Frames that nobody expects may stay unread."""

    def receive(self, wait_s: float, timeout_s: float) -> Iterator[tuple[int, bytes, bytes]]:
        """Sender, kind and body of frames that have arrived; wait_s: how long to wait for the first.

        timeout_s: by then a frame that has begun must be whole. Raises LinkError.
        """

    def close(self) -> None:
        """The tree is not needed any more. Connections stay open."""


class SocketLinks:
    """A connection to each neighbour."""

    def __init__(self, streams: dict[int, socket.socket]) -> None:
        """streams: by rank. They stay the caller's."""
        self.streams: dict[int, socket.socket] = {}
        self._readable = select.poll()
        self._peers: dict[int, int] = {}
        for peer, stream in streams.items():
            self.add(peer, stream)

    def add(self, peer: int, stream: socket.socket) -> None:
        """A neighbour's connection, where it was made after this object."""
        self.streams[peer] = stream
        # Else a frame waits for the acknowledgement of the one before, which kernels delay by 40 ms.
        with contextlib.suppress(OSError):  # not TCP
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[stream.fileno()] = peer
        self._readable.register(stream.fileno(), select.POLLIN)

    def send(self, peer: int, kind: bytes, body: bytes, timeout_s: float) -> None:
        stream = self.streams[peer]
        stream.settimeout(timeout_s)
        stream.sendall(FRAME.pack(len(body), kind) + body)

    def expect(self, peer: int) -> None: ...

    def receive(self, wait_s: float, timeout_s: float) -> Iterator[tuple[int, bytes, bytes]]:
        for number, _ in self._readable.poll(wait_s * 1000):
            peer = self._peers[number]
            stream = self.streams[peer]
            try:
                stream.settimeout(timeout_s)
                length, kind = FRAME.unpack(receive_exactly(stream, FRAME.size))
                check_length(length)
                body = receive_exactly(stream, length)
            except (OSError, EOFError) as error:
                raise LinkError(peer, error) from None
            yield peer, kind, body

    def close(self) -> None: ...


def packed_failure(text: str, at_fault: int | None) -> bytes:
    body: bytes = msgpack.packb([text, -1 if at_fault is None else at_fault])
    return body


def failure_frame(error: BaseException) -> bytes:
    """A whole frame that tells a neighbour why this rank gave up."""
    body = packed_failure(str(error) or type(error).__name__, getattr(error, "rank", None))
    return FRAME.pack(len(body), _FAILURE) + body


def check_length(length: int) -> None:
    """ConnectionError for a frame beyond the bound."""
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"it sent a frame of {length} bytes; the bound is {MAX_FRAME_BYTES}")


class StartTree:
    """This rank's end of the tree. For one thread. Raises RendezvousError that names the rank at fault."""

    def __init__(
        self, rank: int, place: Place, links: Links, deadline: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """check: raises where this rank is to give up; called every _CHECK_S while it waits."""
        self.rank, self.place, self.links = rank, place, links
        self._deadline, self._check_own = deadline, check
        self._received: dict[int, deque[Any]] = defaultdict(deque)
        self._ended: set[int] = set()  # the neighbours that were sent the last frame

    def check(self, what: str) -> None:
        """Raise the failure of a neighbour that has one or that left, or this rank's own. Does not wait."""
        self._check_own()
        self._look(0, what)

    def all_gather(
        self, value: Any, what: str, *, grace_s: float = 0.0, host_is_here: Callable[[], None] | None = None
    ) -> list[Any]:
        """Every rank's value, by rank.

        what: what the ranks do, for errors.
        grace_s: added to the deadline, where a rank may need all the time to find its value.
        host_is_here: called at the leader of each host, once all ranks of the host have called, and before any of them
        gets the values.
        """
        self._deadline += grace_s
        try:
            place = self.place
            here = host_is_here if place.leads else None
            return self._exchange(value, place.own_host, place.parent, what, place.other_hosts, here)
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
        return self._run(broadcast_steps(self.place, make), what, meanwhile)

    def end(self) -> None:
        """Wait until every rank has called this. Then other bytes follow on the connections.

        So a rank that cannot go on tells all others why, before any of them forms the group.
        """
        self._run(end_steps(self.place), "the start-up ended")

    def fail(self, text: str, at_fault: int | None) -> None:
        """Tell the neighbours why this rank does not go on, unless they were sent the last frame."""
        for peer in self.place.neighbours:
            if peer in self._ended:
                continue
            with contextlib.suppress(OSError, RendezvousError, KeyError):  # a neighbour that is not connected, or left
                self.links.send(peer, _FAILURE, packed_failure(text, at_fault), _FAIL_S)

    def close(self) -> None:
        """The tree is not needed any more. The connections stay open."""
        self.links.close()

    def _exchange(
        self,
        value: Any,
        children: Sequence[int],
        parent: int | None,
        what: str,
        elsewhere: Sequence[int] = (),
        host_is_here: Callable[[], None] | None = None,
    ) -> list[Any]:
        for child in (*children, *elsewhere):
            self._expect(child)
        steps = gather_steps(self.rank, value, children, parent, elsewhere=elsewhere, host_is_here=host_is_here)
        values = self._run(steps, what)
        return [values[rank] for rank in sorted(values)]

    def _run(self, steps: Steps[Value], what: str, meanwhile: Callable[[], None] | None = None) -> Value:
        received: Any = None
        while True:
            try:
                step = steps.send(received)
            except StopIteration as end:
                result: Value = end.value
                return result
            received = None
            if isinstance(step, Receive):
                received = self._receive(step.peer, what, meanwhile)
            else:
                self._send(step, what)

    def _send(self, step: Send, what: str) -> None:
        # Encoded once: the addresses of 60,000 ranks are 4 MB, and a leader has 16 children.
        body = msgpack.packb(step.value)
        for peer in step.peers:
            if step.last:
                self._ended.add(peer)
            try:
                self.links.send(peer, _VALUE, body, max(0.001, self._deadline - time.monotonic()))
            except OSError as error:
                if step.last and peer != self.place.parent:
                    continue  # the group that now forms notices
                self._look(0, what)  # the peer may have sent its reason
                raise self._left(peer, what, error) from None

    def _receive(self, peer: int, what: str, meanwhile: Callable[[], None] | None = None) -> Any:
        self._expect(peer)
        levels = self.place.height if peer != self.place.parent else self.place.height + 10
        while not self._received[peer]:
            left_s = self._deadline + levels * _GRACE_S - time.monotonic()
            if left_s <= 0:
                raise RendezvousError(f"rank {self.rank}: rank {peer} did not answer in time while {what}", rank=peer)
            if meanwhile is not None:
                meanwhile()
            self._check_own()
            self._look(min(left_s, _CHECK_S) if meanwhile is None else _PROGRESS_S, what)
        return self._received[peer].popleft()

    def _expect(self, peer: int) -> None:
        if not self._received[peer]:
            self.links.expect(peer)

    def _look(self, wait_s: float, what: str) -> None:
        """Receive from every neighbour that has sent something: any of them may have failed."""
        try:
            for peer, kind, body in self.links.receive(wait_s, max(1.0, self._deadline - time.monotonic())):
                try:
                    value = msgpack.unpackb(body, strict_map_key=False)
                except ValueError as error:
                    raise LinkError(peer, error) from None
                if kind == _FAILURE:
                    text, at_fault = value
                    raise RendezvousError(text, rank=None if at_fault < 0 else at_fault)
                self._received[peer].append(value)
        except LinkError as error:
            raise self._left(error.peer, what, error) from None

    def _left(self, peer: int, what: str, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"rank {self.rank}: rank {peer} left while {what} ({error}); see its own output", rank=peer
        )
