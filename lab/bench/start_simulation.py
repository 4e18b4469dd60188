"""The start-up of a group of any size in virtual time, for lab/bench/simulate_scale.py.

Production's code decides what every rank does: claim, agree, publish and place of rendezvous.py run against a store in
memory that notes each request, and the steps of tree.py run as they are. Only links, cores and the order of events are
simulated. A rank's own work (parsing, tables, the native group) is given as seconds that were measured.

A host's link carries one message after the other in each direction. A core does one thing after the other. Ranks have a
core each, unless `cores` says that all share as many.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgpack

from netfold import Options
from netfold.bootstrap import rendezvous
from netfold.bootstrap.listener import RegisteredGroup
from netfold.bootstrap.store import MAX_KEYS, PrefixStore
from netfold.bootstrap.tree import Place, Receive, Send, broadcast_steps, end_steps, gather_steps
from netfold.switch_protocol import control_messages
from netfold_plan.sim.clock import Clock

# Below a message: headers of Ethernet, IPv4, TCP with time stamps.
_FRAME_BYTES, _SEGMENT_BYTES = 90, 1448
_TREE_HEAD_BYTES = 5
_HANDSHAKE_BYTES = (110, 65, 32, 1)
# A longer frame than a socket's buffer holds its sender up until it has left.
_BUFFER_BYTES = 256 << 10
# A listener with a full queue drops a SYN. The kernel sends it again after 1 s, and TcpStore begins again after 2 s.
_SYN_AGAIN_S = 1.0


class Fabric(Protocol):
    def latency_s(self, source: int, to: int) -> float:
        """Between two hosts, or inside one, from one process to another. Includes what both kernels take."""
        ...


@dataclass(frozen=True)
class Costs:
    """Seconds of one core. server, client: of the store."""

    server_connection_s: float
    client_connection_s: float
    server_request_s: float
    client_request_s: float
    accept_s: float
    """A connection between ranks, with its handshake, at the listener."""
    join_s: float
    """The same, at the rank that connects."""
    send_s: float
    """A frame of the tree, without its bytes."""
    receive_s: float
    copy_byte_s: float
    """A byte into or out of a socket."""
    encode_byte_s: float
    """A byte of msgpack, once for all children."""
    decode_byte_s: float
    alike_s: tuple[tuple[str, float], ...] = ()
    """Work of each rank at this P, by the phase that it belongs to."""
    store_is_rank_0: bool = True
    """Whether the store's server takes the core (and the GIL) of rank 0."""
    backlog: int = 4096
    """Connections that wait at the store's listener."""
    batch: int = MAX_KEYS
    """Keys that rank 0 reads or writes with one request of the store."""


class Request(NamedTuple):
    kind: str
    key: str
    sent_bytes: int
    reply_bytes: int


class RecordedStore:
    """A store in memory that notes each request, with the bytes that netfold's store would send."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self._counters: Counter[str] = Counter()

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self._note("set", key, None, value=value)

    def get(self, key: str, timeout_s: float) -> bytes:
        if key not in self.values:
            raise TimeoutError
        self._note("get", key, self.values[key], timeout_s=timeout_s)
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._counters[key] += amount
        self._note("add", key, self._counters[key], amount=amount)
        return self._counters[key]

    def take(self) -> list[Request]:
        """The requests since the last call."""
        taken, self.requests = self.requests, []
        return taken

    def _note(self, kind: str, key: str, reply: Any, **fields: Any) -> None:
        sent = control_messages.encode({"type": kind, "key": key, **fields})
        received = control_messages.encode({"type": "ok", "value": reply})
        self.requests.append(Request(kind, key, len(sent), len(received)))


class Rendezvous(NamedTuple):
    """The requests of production's ranks at the store, and the replies."""

    requests: list[dict[str, list[Request]]]  # by rank: by phase
    places: list[Place]
    published: list[tuple[list[str], str]]
    places_s: float  # CPU seconds of rank 0's part, without the store


def address(host: int, rank: int) -> str:
    return f"10.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}:{32768 + rank % 16384}"


def identity(host: int) -> str:
    """As long as a real one: boot id, and the network namespace."""
    return f"{host:08x}-89ab-4def-8123-456789abcdef 4 4026531840"


def meet(hosts: Sequence[Sequence[int]]) -> Rendezvous:
    """Run production's rendezvous for all ranks, one after the other, against a store in memory."""
    size, store = sum(map(len, hosts)), RecordedStore()
    deadline = time.monotonic() + 3600
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    options = Options().resolved({})
    requests: list[dict[str, list[Request]]] = [{} for _ in range(size)]
    own: Any = store
    for rank in range(size):
        own = rendezvous.claim(store, rank, size, deadline)
        requests[rank]["claim"] = store.take()
    assert isinstance(own, PrefixStore)
    for rank in range(size):
        job = rendezvous.agree(own, rank, size, options, deadline)
        requests[rank]["job"] = store.take()

    def group_of(rank: int) -> RegisteredGroup:
        return RegisteredGroup(job.secret, rank, size, 2, 1)

    for rank in range(size):
        host = host_of[rank]
        rendezvous.publish_address(own, group_of(rank), [address(host, rank)], None, identity(host))
        requests[rank]["address"] = store.take()
    began = time.process_time()
    published = rendezvous._publish_places(own, group_of(0), None, deadline)
    places_s = time.process_time() - began
    requests[0]["places"] = store.take()
    places = []
    for rank in range(size):
        places.append(rendezvous._read_place(own, group_of(rank), deadline)[0])
        requests[rank]["place"] = store.take()
    return Rendezvous(requests, places, published, places_s)


# A rank's next step. Send and Receive are those of tree.py.
class Work(NamedTuple):
    seconds: float


class Join(NamedTuple):
    """Connect to the parent in the tree."""


class Accept(NamedTuple):
    """Wait for the connections of all children."""


class Open(NamedTuple):
    """Connect to the store."""


class Reached(NamedTuple):
    """The rank has ended a phase."""

    phase: str


Step = Send | Receive | Work | Join | Accept | Open | Reached | list[Request]  # requests of the store, in this order
Script = Generator[Step, Any, None]


@dataclass
class Result:
    """Of one start-up. Seconds are virtual."""

    ends_s: dict[str, float] = field(default_factory=dict)  # by phase: when the last rank ended it
    requests: Counter[str] = field(default_factory=Counter)  # at the store, by kind
    frames: Counter[int] = field(default_factory=Counter)  # received from neighbours, by rank
    frame_bytes: Counter[int] = field(default_factory=Counter)  # of the largest, by rank
    store_busy_s: float = 0.0
    store_bytes: int = 0  # through the link of rank 0's host, both ways
    dropped: int = 0  # connections to the store that came to a full queue
    most_waiting: int = 0  # connections at the store's listener at once
    busy_s: dict[int, float] = field(default_factory=dict)  # CPU, by rank
    events: int = 0

    @property
    def seconds(self) -> float:
        return max(self.ends_s.values())


class StartUp:
    """One start-up. hosts: the ranks of each. cores: shared by all ranks; 0: a core each."""

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        rendezvous_: Rendezvous,
        costs: Costs,
        fabric: Fabric,
        bytes_per_s: float,
        *,
        cores: int = 0,
        begin_s: float = 0.0,
        switch: Callable[[int], float] | None = None,
        watch: Callable[[int, Step], None] | None = None,
    ) -> None:
        """begin_s: ranks begin at random moments of so long a time.

        switch: the seconds that the leader of a host waits for its switch; None: no switch.
        watch: called with each step of each rank.
        """
        self._hosts, self._met, self._costs, self._fabric = hosts, rendezvous_, costs, fabric
        self._size = len(rendezvous_.places)
        self._byte_s = 1 / bytes_per_s
        self._host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self._out_free, self._in_free = [0.0] * len(hosts), [0.0] * len(hosts)
        self._free = [0.0] * self._size  # by rank: its process does one thing after the other
        self._pool = [0.0] * cores
        self._store_free = 0.0
        self._switch, self._begin_s, self._watch = switch, begin_s, watch
        self._work = dict(costs.alike_s)
        self._clock: Clock[tuple[int, Any]] = Clock()
        self._scripts: list[Script] = []
        self._boxes: dict[tuple[int, int], deque[Any]] = {}
        self._waits: dict[int, int] = {}  # a rank that waits for a neighbour's frame
        self._accepted: Counter[int] = Counter()
        self._accepting: set[int] = set()
        self._set: set[str] = set()
        self._gets: dict[str, list[tuple[int, Request]]] = {}
        self._asking: dict[int, Iterator[Request]] = {}
        self._ended: set[int] = set()
        self._queue: list[float] = []  # when connections at the store's listener are accepted
        self._sizes: dict[int, tuple[Any, int]] = {}
        self.result = Result()

    def run(self) -> Result:
        chance = random.Random(self._size)
        for rank in range(self._size):
            self._scripts.append(self._script(rank))
            self._at(chance.random() * self._begin_s, rank)
        while (event := self._clock.next()) is not None:
            self.result.events += 1
            rank, what = event
            if callable(what):
                what()
            else:
                self._resume(rank, what)
        left = [rank for rank in range(self._size) if rank not in self._ended]
        assert not left, f"{len(left)} ranks never ended, the first is {left[0]}"
        return self.result

    # --- what a rank does, in production's order (communicator/startup.py) ---

    def _script(self, rank: int) -> Script:
        requests, place = self._met.requests[rank], self._met.places[rank]
        yield Work(self._work.get("alone", 0.0))
        yield Open()
        yield Reached("store")
        yield requests["claim"]
        yield requests["job"]
        yield Reached("job")
        yield requests["address"]
        if rank == 0:
            yield _batched(requests["places"], self._costs.batch)
            yield Work(self._work.get("places", 0.0))
        yield requests["place"]
        yield Reached("places")
        if place.parent is not None:
            yield Join()
        yield Accept()
        yield Reached("connected")
        # As published: frames carry it, and `connect_tree` reads it.
        yield from broadcast_steps(place, lambda: self._met.published)
        yield Work(self._work.get("addresses", 0.0))
        yield Reached("addresses")
        on_host = None if place.leads else place.parent
        ranks = self._hosts[self._host_of[rank]]
        if len(ranks) > 1:
            yield Work(self._work.get("memory", 0.0))
            bits = bytes((len(ranks) + 7) // 8)
            # form_node exchanges bits, nothing, and whether the memory came; then peer_memory.negotiate.
            for value in (bits, None, True, [4_000_000, 1 << 46, 1 << 62], ""):
                yield from gather_steps(rank, value, place.own_host, on_host)
        yield from gather_steps(rank, ranks[0], place.own_host, place.parent, elsewhere=place.other_hosts)
        yield Reached("shared memory")
        if len(self._hosts) > 1:  # else no link is measured
            yield from broadcast_steps(place, lambda: 1)
            if rank == 0:
                yield Work(self._work.get("probe", 0.0))
        table = bytes(8 << 10)
        yield from broadcast_steps(place, lambda: table)
        yield Work(self._work.get("table", 0.0))
        yield Reached("table")
        if self._switch is not None:
            leads = rank == ranks[0]
            path = {"type": "path_to_root", "ids": (rank, 1), "endpoints": (address(0, rank),) * 2, "error": ""}
            yield from gather_steps(
                rank, path if leads else None, place.own_host, place.parent, elsewhere=place.other_hosts
            )
            yield Work(self._work.get("switch", 0.0))
            if leads:
                yield Work(self._switch(rank))
            yield from gather_steps(rank, "", place.own_host, place.parent, elsewhere=place.other_hosts)
            yield Reached("switch")
        yield from end_steps(place)
        yield Work(self._work.get("native", 0.0))
        yield Reached("native group")

    # --- how long it takes ---

    def _at(self, when_s: float, rank: int, what: Any = None) -> None:
        self._clock.at(round(when_s * 1e9), (rank, what))

    @property
    def _now(self) -> float:
        return self._clock.now_ns / 1e9

    def _resume(self, rank: int, received: Any = None) -> None:
        """Go on with a rank, as far as that takes no time."""
        if rank in self._asking:
            if (request := next(self._asking[rank], None)) is not None:
                return self._ask(rank, request)
            del self._asking[rank]
        script, costs = self._scripts[rank], self._costs
        while True:
            try:
                step = script.send(received)
            except StopIteration:
                self._ended.add(rank)
                return
            received = None
            if self._watch is not None:
                self._watch(rank, step)
            if isinstance(step, Reached):
                self.result.ends_s[step.phase] = max(self.result.ends_s.get(step.phase, 0.0), self._now)
            elif isinstance(step, Receive):
                self._waits[rank] = step.peer
                return self._look(rank)
            elif isinstance(step, Accept):
                if self._accepted[rank] < len(self._met.places[rank].children):
                    self._accepting.add(rank)
                    return
            elif isinstance(step, Send):
                if step.peers:
                    return self._at(self._send(rank, step), rank)
            elif isinstance(step, Work):
                return self._at(self._compute(rank, step.seconds), rank)
            elif isinstance(step, Open):
                return self._open(rank)
            elif isinstance(step, Join):
                return self._join(rank, costs)
            else:
                self._asking[rank] = iter(step)
                return self._at(self._now, rank)

    def _compute(self, rank: int, seconds: float, since_s: float = 0.0) -> float:
        """The time at which the rank's core has done so much work. since_s: not before."""
        since_s = max(since_s, self._now, self._free[rank])
        self.result.busy_s[rank] = self.result.busy_s.get(rank, 0.0) + seconds
        if self._pool:
            since_s = max(since_s, heapq.heappop(self._pool))
            heapq.heappush(self._pool, since_s + seconds)
        self._free[rank] = since_s + seconds
        return self._free[rank]

    def _carry(self, source: int, to: int, size: int, since_s: float) -> tuple[float, float]:
        """The times at which a message of `size` bytes has left its host, and is there."""
        if source == to:
            there = since_s + self._fabric.latency_s(source, to)
            return since_s, there
        spent = (size + _FRAME_BYTES * (1 + size // _SEGMENT_BYTES)) * self._byte_s
        left = max(since_s, self._out_free[source]) + spent
        self._out_free[source] = left
        there = max(left + self._fabric.latency_s(source, to), self._in_free[to] + spent)
        self._in_free[to] = there
        if 0 in (source, to):
            self.result.store_bytes += size
        return left, there

    # --- the store, at rank 0's host ---

    def _serve(self, seconds: float, since_s: float) -> float:
        self.result.store_busy_s += seconds
        if self._costs.store_is_rank_0:
            return self._compute(0, seconds, since_s)
        self._store_free = max(self._store_free, since_s) + seconds
        return self._store_free

    def _open(self, rank: int) -> None:
        host, queue = self._host_of[rank], self._queue
        while queue and queue[0] <= self._now:
            heapq.heappop(queue)
        if len(queue) >= self._costs.backlog:
            self.result.dropped += 1
            self._at(self._now + _SYN_AGAIN_S, rank, lambda: self._open(rank))
            return
        ready = self._compute(rank, self._costs.client_connection_s)
        _, there = self._carry(host, 0, 200, ready)
        accepted = self._serve(self._costs.server_connection_s, there)
        heapq.heappush(queue, accepted)
        self.result.most_waiting = max(self.result.most_waiting, len(queue))
        # SYN and its answer, then hello and its answer.
        self._at(self._carry(0, host, 200, accepted)[1] + 2 * self._fabric.latency_s(host, 0), rank)

    def _ask(self, rank: int, request: Request) -> None:
        self.result.requests[request.kind] += 1
        ready = self._compute(rank, self._costs.client_request_s)
        _, there = self._carry(self._host_of[rank], 0, request.sent_bytes, ready)
        self._at(there, rank, lambda: self._answer(rank, request))

    def _answer(self, rank: int, request: Request) -> None:
        keys = request.key.split("\n")
        if request.kind == "get" and (missing := next((key for key in keys if key not in self._set), None)):
            self._gets.setdefault(missing, []).append((rank, request))
            return
        served = self._serve(self._costs.server_request_s, self._now)
        self._at(self._carry(0, self._host_of[rank], request.reply_bytes, served)[1], rank)
        if request.kind == "set":
            self._set.update(keys)
            for key in keys:
                for waiting, get in self._gets.pop(key, ()):
                    self._at(served, waiting, lambda waiting=waiting, get=get: self._answer(waiting, get))

    # --- the tree ---

    def _join(self, rank: int, costs: Costs) -> None:
        parent = self._met.places[rank].parent
        assert parent is not None
        here, there = self._host_of[rank], self._host_of[parent]
        trip_s = self._fabric.latency_s(here, there)
        ready = self._compute(rank, costs.join_s)
        arrived = self._carry(here, there, sum(_HANDSHAKE_BYTES), ready)[1] + 2 * trip_s
        accepted = self._compute(parent, costs.accept_s, arrived)
        # Its proof was the third message of four; the last one says that it was right.
        self._at(accepted + 3 * trip_s, rank)
        self._at(accepted + 3 * trip_s, parent, lambda: self._accept(parent))

    def _accept(self, rank: int) -> None:
        self._accepted[rank] += 1
        if rank in self._accepting and self._accepted[rank] == len(self._met.places[rank].children):
            self._accepting.discard(rank)
            self._resume(rank)

    def _send(self, rank: int, step: Send) -> float:
        """Encode once, send to each; when the rank goes on."""
        size = self._frame_bytes(step.value)
        done = self._compute(rank, size * self._costs.encode_byte_s)
        here = self._host_of[rank]
        for peer in step.peers:
            done = self._compute(rank, self._costs.send_s + size * self._costs.copy_byte_s, done)
            left, there = self._carry(here, self._host_of[peer], size, done)
            if size > _BUFFER_BYTES:
                done = left
            self._at(there, peer, lambda peer=peer: self._arrive(rank, peer, step.value, size))
        return done

    def _arrive(self, source: int, rank: int, value: Any, size: int) -> None:
        result = self.result
        result.frames[rank] += 1
        result.frame_bytes[rank] = max(result.frame_bytes[rank], size)
        self._boxes.setdefault((rank, source), deque()).append((value, size))
        if self._waits.get(rank) == source:
            self._look(rank)

    def _look(self, rank: int) -> None:
        box = self._boxes.get((rank, self._waits[rank]))
        if not box:
            return
        del self._waits[rank]
        value, size = box.popleft()
        spent = self._costs.receive_s + size * (self._costs.copy_byte_s + self._costs.decode_byte_s)
        self._at(self._compute(rank, spent), rank, value)

    def _frame_bytes(self, value: Any) -> int:
        """Each large value is encoded once, for all ranks."""
        known = self._sizes.get(id(value))
        if known is None or known[0] is not value:
            known = (value, len(msgpack.packb(value)) + _TREE_HEAD_BYTES)
            if known[1] > 1024:
                self._sizes[id(value)] = known
        return known[1]


def _batched(requests: Sequence[Request], batch: int) -> list[Request]:
    """Neighbouring requests of one kind as one request each, of up to `batch` keys."""
    if batch == 1:
        return list(requests)
    joined: list[Request] = []
    for request in requests:
        last = joined[-1] if joined else None
        if last is not None and last.kind == request.kind and last.key.count("\n") + 1 < batch:
            bytes_ = (last.sent_bytes + request.sent_bytes, last.reply_bytes + request.reply_bytes)
            joined[-1] = Request(last.kind, f"{last.key}\n{request.key}", *bytes_)
        else:
            joined.append(request)
    return joined


def even_hosts(size: int, per_host: int) -> list[list[int]]:
    return [list(range(at, min(size, at + per_host))) for at in range(0, size, per_host)]
