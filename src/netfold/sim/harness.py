"""A job in one address space: N production workers, their production switch, and an eye on all they promise.

No clock and no network: bytes come in (`arrive`), time is an argument, packets go out as values. A simulation drives
it along one schedule; a search can drive it along all of them.

The glue around the machines is that of production: contributions are read from, and results written into, one buffer
a worker and operation (native/collective/in_network.cpp); a contribution counts only from its sender's own address
(native/dataplane/data_plane.cpp).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from netfold._native import protocol
from netfold.sim import values
from netfold.sim.network import SWITCH, Packet, leaf_of

# Of native/protocol/include/netfold/protocol/worker.hpp; the bounds on retransmission rest on them.
PROBE_GROWTH = 2
MIN_TIMEOUT_NS = 10_000_000

# An honest packet, whatever the network did to its order, its copies and its delay, is dropped for these alone.
EXPECTED_DROPS = ("stale", "duplicate")


class InvariantError(AssertionError):
    """A machine did what the protocol says it never does."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One all-reduce: the same on every worker. `number` is the group's sequence number."""

    number: int
    elements: int
    wire: str = "f32"
    reduce: str = "sum"
    table: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """Which life of which job: what makes packets of another one foreign."""

    job: int = 7
    epoch: int = 3
    incarnation: int = 0x5EED_CAFE

    def fields(self) -> dict[str, int]:
        return {"job": self.job, "epoch": self.epoch, "incarnation": self.incarnation}


@dataclass(frozen=True, slots=True)
class Chunk:
    """What chunk c of the endless line is, as laid out here and not by the machines."""

    operation: int  # its place in the list, not its number
    first: int
    count: int
    first_byte: int
    end_byte: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A packet that a worker wants to send; follow up with `sent` or `not_sent`."""

    chunk: int
    again: bool
    packet: Packet


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an arrival: the machine's outcome, the drop's reason, and the packets that answer it."""

    outcome: str
    drop: str
    answers: tuple[Packet, ...] = ()


Contributions = Callable[[Operation, int], values.Array]


def seeded_contributions(operation: Operation, worker: int) -> values.Array:
    return values.contribution(operation.number, worker, operation.elements, operation.wire)


class Harness:
    """N workers, their switch, and what each has been seen to do.

    compare_machines: hold every machine against a copy of its state before each packet that may change nothing; costs
    a copy of the machine a packet.
    """

    def __init__(
        self,
        *,
        workers: int,
        window: int,
        payload_bytes: int,
        operations: Sequence[Operation],
        contributions: Contributions = seeded_contributions,
        identity: Identity | None = None,
        compare_machines: bool = True,
    ) -> None:
        self.identity = identity or Identity()
        self.window = window
        self.operations = tuple(operations)
        shape = {**self.identity.fields(), "workers": workers, "window": window, "payload_bytes": payload_bytes}
        self.packet_bytes: int = protocol.HEADER_BYTES + payload_bytes
        self.switch: Any = self._make_switch(shape)
        self.gap_detectors: list[Any] = [protocol.GapDetector() for _ in range(workers)]
        self._named = [0] * workers  # the last packet that a NACK named
        self.workers = tuple(_WorkerSide(index, self._make_worker(shape, index)) for index in range(workers))
        self.chunks = _lay_out(self.operations, payload_bytes)
        self.drops: Counter[str] = Counter()
        self._compare = compare_machines
        self._kept: dict[int, bytes] = {}  # every answer ever announced
        self._contributed: dict[int, set[int]] = {}

        given = [[contributions(op, index) for index in range(workers)] for op in self.operations]
        self._expected = [self._fold(op, terms).tobytes() for op, terms in zip(self.operations, given, strict=True)]
        for side in self.workers:
            side.buffers = [bytearray(terms[side.index].tobytes()) for terms in given]
            side.unanswered = [0] * len(self.operations)
            for chunk in self.chunks:
                side.unanswered[chunk.operation] += 1

    # What a world with more than one switch makes otherwise (tree.py).

    def _make_switch(self, shape: dict[str, int]) -> Any:
        return protocol.SwitchJob(**shape)

    def _make_worker(self, shape: dict[str, int], index: int) -> Any:
        return protocol.Worker(**shape, worker=index)

    def _fold(self, operation: Operation, terms: Sequence[values.Array]) -> values.Array:
        return values.reference_reduce(operation.reduce, operation.wire, terms)

    def switch_of(self, worker: int) -> int:
        """The address that it contributes to."""
        return SWITCH

    # What happens to a worker.

    def submit(self, worker: int) -> None:
        """The training script calls its next operation; it starts as soon as the machine takes one more."""
        self.workers[worker].submitted += 1
        self._start_submitted(self.workers[worker])

    def offers(self, worker: int, now_ns: int) -> list[Offer]:
        """Everything that the worker would send now."""
        side = self.workers[worker]
        offers = []
        while (send := side.machine.poll_send(now_ns)) is not None:
            offers.append(self._offer(side, send))
            room = side.machine.congestion_window
            if not 1 <= room <= self.window:
                raise InvariantError(f"worker {worker} has a congestion window of {room} within {self.window}")
            # What is sent again may be a probe, which does not wait for room.
            if not send.again and side.machine.in_flight > room:
                raise InvariantError(
                    f"worker {worker} has {side.machine.in_flight} chunks in flight, its congestion window is {room}"
                )
            if len(offers) > self.window:
                raise InvariantError(
                    f"worker {worker} offers {len(offers)} packets at once, its window is {self.window}"
                )
        return offers

    def sent(self, worker: int, offer: Offer) -> None:
        side = self.workers[worker]
        side.left.add(offer.chunk)
        side.sent_again += offer.again

    def not_sent(self, worker: int, offer: Offer) -> None:
        self.workers[worker].machine.not_sent(offer.chunk)

    def timeout(self, worker: int, now_ns: int) -> bool:
        """A timer rang, perhaps an old one; True when the worker's timeout had really come."""
        side = self.workers[worker]
        machine = side.machine
        due_ns: int = machine.poll_timeout()
        if due_ns < 0 or now_ns < due_ns:
            before = machine.copy()
            machine.handle_timeout(now_ns)
            self._unchanged(f"worker {worker}", machine, before, "a timer that rang too early")
            return False
        flight: int = machine.in_flight
        probes: int = machine.probe_results
        machine.handle_timeout(now_ns)
        given_up = flight - machine.in_flight
        if probes > 0:
            if given_up > PROBE_GROWTH * probes:
                raise InvariantError(f"worker {worker} gave up {given_up} chunks after {probes} answered probes")
            return True
        if given_up != 1:
            raise InvariantError(f"worker {worker} gave up {given_up} chunks at one timeout, not 1")
        if side.timeout_ns is not None and now_ns - side.timeout_ns < MIN_TIMEOUT_NS:
            raise InvariantError(f"worker {worker} had two timeouts within {now_ns - side.timeout_ns} ns")
        side.timeout_ns = now_ns
        side.timeouts += 1
        return True

    def arrive(self, packet: Packet, now_ns: int) -> Verdict:
        """A datagram reaches a machine."""
        verdict = self._at_switch(packet) if packet.to < 0 else self._at_worker(packet, now_ns)
        if verdict.outcome == "dropped":
            where = "switch" if packet.to < 0 else "worker"
            self.drops[f"{where}.{verdict.drop}"] += 1
            if not packet.must_drop and verdict.drop not in EXPECTED_DROPS:
                raise InvariantError(f"an honest packet was dropped as {verdict.drop}: {describe(packet)}")
        elif packet.must_drop:
            raise InvariantError(f"a damaged or forged packet was {verdict.outcome}: {describe(packet)}")
        elif verdict.outcome == "mismatch":
            raise InvariantError(f"workers that agree were said not to: {describe(packet)}")
        return verdict

    # How it all stands.

    @property
    def finished(self) -> bool:
        return all(side.machine.idle and side.submitted == len(self.operations) for side in self.workers)

    def check_finished(self, now_ns: int) -> None:
        """After the last event: everything came, nothing is left, and repairs stayed within their bounds."""
        for side in self.workers:
            who, machine = f"worker {side.index}", side.machine
            if not machine.idle or side.submitted < len(self.operations):
                raise InvariantError(f"nothing is due any more, but {who} waits for chunk {side.base}")
            if machine.in_flight != 0 or machine.sendable() != 0 or machine.poll_timeout() != -1:
                raise InvariantError(f"{who} is idle, yet has something in flight, to send, or a timer")
            for operation, expected, got in zip(self.operations, self._expected, side.buffers, strict=True):
                if got != expected:
                    raise InvariantError(f"{who} ended with a wrong result of {operation}")
            if machine.retransmissions != side.sent_again:
                raise InvariantError(
                    f"{who} counts {machine.retransmissions} retransmissions, but sent {side.sent_again}"
                )
            # Every other mark of chunk c rests on the answer to a chunk of (c, c + W) that was sent, for the first
            # time, after c was last sent: at most W - 1 a chunk. A chunk that is answered after it was sent again
            # brings at most PROBE_GROWTH overdue ones. All others are a timeout's, one each, or a NACK's.
            bound = side.timeouts + side.nacked + (self.window - 1 + PROBE_GROWTH) * len(self.chunks)
            if side.timeouts > now_ns // MIN_TIMEOUT_NS + 1 or side.sent_again > bound:
                raise InvariantError(
                    f"{who} sent {side.sent_again} packets again after {side.timeouts} timeouts in {now_ns} ns"
                )

    def state(self) -> list[str]:
        """A line a machine, for the message of a failure."""
        lines = [
            f"worker {side.index}: {side.submitted} operations called, {side.started} started, oldest unanswered chunk "
            f"{side.machine.oldest_outstanding}, {side.machine.in_flight} in flight, timer at "
            f"{side.machine.poll_timeout()} ns, {side.machine.retransmissions} sent again"
            for side in self.workers
        ]
        oldest = min(side.base for side in self.workers)
        lines.append(f"switch: chunk {oldest} misses workers {self.switch.missing(oldest)}")
        return lines

    # Inside.

    def _start_submitted(self, side: _WorkerSide) -> None:
        while side.started < side.submitted and side.machine.can_start():
            operation = self.operations[side.started]
            side.machine.start(
                operation.number,
                operation.elements,
                values.WIRES[operation.wire].code,
                values.REDUCES[operation.reduce],
                operation.table,
            )
            side.started += 1

    def _offer(self, side: _WorkerSide, send: Any) -> Offer:
        who = f"worker {side.index}"
        header = send.header
        number: int = header.chunk
        if number >= len(self.chunks) or self.chunks[number].operation >= side.started:
            raise InvariantError(f"{who} sends chunk {number}, which no operation has")
        # The switch's whole argument rests on this rule.
        if not side.base <= number < side.base + self.window:
            raise InvariantError(
                f"{who} sends chunk {number} with every answer up to {side.base} and window {self.window}"
            )
        if number in side.received:
            raise InvariantError(f"{who} sends chunk {number} again although it has the answer")
        if header.packet_number <= side.packet_number:
            raise InvariantError(f"{who} repeats packet number {header.packet_number}")
        side.packet_number = header.packet_number
        again: bool = send.again
        if again != (number in side.left):
            raise InvariantError(f"{who} sends chunk {number} with again={again}, expected {not again}")
        chunk = self.chunks[number]
        if (send.first, send.count) != (chunk.first, chunk.count):
            raise InvariantError(f"{who} sends {send.count} elements from {send.first} as chunk {number}, not {chunk}")

        head: bytes = header.pack()
        data = head + side.buffers[chunk.operation][chunk.first_byte : chunk.end_byte]
        return Offer(
            number, again, Packet(side.index, self.switch_of(side.index), data.ljust(self.packet_bytes, b"\0"))
        )

    def _at_switch(self, packet: Packet) -> Verdict:
        header = protocol.Header.parse(packet.data)
        if header is not None and header.worker < len(self.workers) and header.worker != packet.source:
            return Verdict("dropped", "source")
        switch = self.switch
        before = switch.copy() if self._compare else None
        outcome, drop, slot, number, worker, _ = switch.handle_packet(packet.data)
        nacks = self._nacks(header) if outcome != "dropped" or drop in EXPECTED_DROPS else ()
        if outcome in ("stored", "completed"):
            self._count(number, worker, outcome)
            if outcome == "stored":
                return Verdict(outcome, drop, nacks)
            self._announce(number, slot)
            answers = tuple(self._answer(slot, side.index) for side in self.workers)
            return Verdict(outcome, drop, nacks + answers)
        self._unchanged("the switch", switch, before, f"a packet that was {outcome}")
        if outcome == "resend_result":
            self._announce(number, slot)
            return Verdict(outcome, drop, (*nacks, self._answer(slot, worker)))
        return Verdict(outcome, drop, nacks)

    def _nacks(self, header: Any) -> tuple[Packet, ...]:
        worker: int = header.worker
        first, count = self.gap_detectors[worker].observe(header.packet_number)
        if count == 0:
            return ()
        last = first + count - 1
        if first <= self._named[worker] or last + protocol.REORDER_THRESHOLD > header.packet_number:
            raise InvariantError(
                f"worker {worker} is told of packets {first} to {last} by packet {header.packet_number}, after it was "
                f"told "
                f"of those up to {self._named[worker]}"
            )
        self._named[worker] = last
        return (Packet(SWITCH, worker, self.switch.nack_packet(worker, first, count)),)

    def _count(self, number: int, worker: int, outcome: str) -> None:
        contributed = self._contributed.setdefault(number, set())
        if worker in contributed:
            raise InvariantError(f"worker {worker}'s contribution to chunk {number} was counted twice")
        contributed.add(worker)
        missing = [side.index for side in self.workers if side.index not in contributed]
        if (outcome == "completed") != (not missing):
            raise InvariantError(f"chunk {number} was {outcome} while workers {missing} are missing")
        if self.switch.missing(number) != missing:
            raise InvariantError(f"chunk {number} misses {missing}, the switch says {self.switch.missing(number)}")

    def _announce(self, number: int, slot: int) -> None:
        frame: bytes = self.switch.frame(slot)
        if self._kept.setdefault(number, frame) != frame:
            raise InvariantError(f"the result of chunk {number} changed after it was announced")

    def _answer(self, slot: int, worker: int) -> Packet:
        frame: bytes = self.switch.frame(slot)
        return Packet(SWITCH, worker, frame)

    def _at_worker(self, packet: Packet, now_ns: int) -> Verdict:
        side = self.workers[packet.to]
        before = side.machine.copy() if self._compare else None
        flight: int = side.machine.in_flight
        outcome, drop, header, first, finished, got = side.machine.handle_packet(packet.data, now_ns)
        if outcome == "nack":
            side.nacked += flight - side.machine.in_flight
            return Verdict(outcome, drop)
        if outcome != "received":
            self._unchanged(f"worker {side.index}", side.machine, before, f"a packet that was {outcome}")
            return Verdict(outcome, drop)
        if packet.must_drop:
            return Verdict(outcome, drop)  # the caller says so; its bytes are not to be looked at
        self._deliver(side, header, first, finished, got)
        self._start_submitted(side)
        return Verdict(outcome, drop)

    def _deliver(self, side: _WorkerSide, header: Any, first: int, finished: bool, got: bytes) -> None:
        number: int = header.chunk
        who, chunk = f"worker {side.index}", self.chunks[number]
        if number in side.received:
            raise InvariantError(f"{who} was given chunk {number} twice")
        side.received.add(number)
        expected = self._expected[chunk.operation][chunk.first_byte : chunk.end_byte]
        operation = self.operations[chunk.operation]
        if (first, header.count, header.operation) != (chunk.first, chunk.count, operation.number):
            raise InvariantError(f"{who} was given chunk {number} as elements {first} to {first + header.count}")
        if got != expected:
            raise InvariantError(
                f"{who} was given a wrong result of chunk {number}: {got.hex()}, expected {expected.hex()}"
            )
        side.buffers[chunk.operation][chunk.first_byte : chunk.end_byte] = got
        side.unanswered[chunk.operation] -= 1
        if finished != (side.unanswered[chunk.operation] == 0):
            raise InvariantError(f"{who}: chunk {number} came with finished={finished} for {operation}")
        while side.base in side.received:
            side.base += 1
        if side.machine.oldest_outstanding != side.base:
            raise InvariantError(f"{who} moved its window to {side.machine.oldest_outstanding}, expected {side.base}")

    def _unchanged(self, who: str, machine: Any, before: Any, why: str) -> None:
        if before is not None and not (machine == before and machine.canonical() == before.canonical()):
            raise InvariantError(f"{who} was changed by {why}")


class _WorkerSide:
    """A worker's machine, its buffers, and what it has been seen to do."""

    def __init__(self, index: int, machine: Any) -> None:
        self.index = index
        self.machine = machine
        self.buffers: list[bytearray] = []
        self.unanswered: list[int] = []
        self.submitted = 0
        self.started = 0
        self.base = 0
        self.packet_number = 0
        self.received: set[int] = set()
        self.left: set[int] = set()
        self.sent_again = 0
        self.timeouts = 0
        self.timeout_ns: int | None = None
        self.nacked = 0  # chunks given up to NACKs


def _lay_out(operations: Sequence[Operation], payload_bytes: int) -> tuple[Chunk, ...]:
    chunks = []
    for place, operation in enumerate(operations):
        element_bytes = values.WIRES[operation.wire].element_bytes
        per_chunk = payload_bytes // element_bytes
        for first in range(0, operation.elements, per_chunk):
            count = min(per_chunk, operation.elements - first)
            chunks.append(Chunk(place, first, count, first * element_bytes, (first + count) * element_bytes))
    return tuple(chunks)


def describe(packet: Packet) -> str:
    """A packet in one line, whatever its bytes."""
    way = f"{_place(packet.source)} -> {_place(packet.to)}"
    header = protocol.Header.parse(packet.data)
    if header is None:
        return f"{way} {len(packet.data)} bytes that are no packet"
    if header.flags & protocol.FLAGS["nack"]:
        return f"{way} notice that packets {header.chunk} to {header.chunk + header.elements - 1} did not come"
    kind = "answer" if header.flags & protocol.FLAGS["from_switch"] else "contribution"
    return (
        f"{way} {kind} to chunk {header.chunk} of operation {header.operation}, worker {header.worker}, epoch "
        f"{header.epoch}, {len(packet.data)} bytes"
    )


def _place(address: int) -> str:
    if address >= 0:
        return f"worker {address}"
    return "switch" if address == SWITCH else f"leaf {leaf_of(address)}"
