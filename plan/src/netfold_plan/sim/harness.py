"""A job in one address space: N production workers, their production switch, and a check of every promise.

The harness has no clock and no network: bytes come in by `arrive`, time is an argument, packets go out as values.

The glue around the machines is production's. Contributions are read from one buffer for each worker and operation, and
results are written into it (core/native/collective/channel.cpp). A contribution counts only from its sender's own
address (core/native/dataplane/data_plane.cpp).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from netfold._native import protocol
from netfold_plan.sim import values
from netfold_plan.sim.network import SWITCH, Packet, leaf_of

# From core/native/protocol/include/netfold/protocol/worker.hpp; the bounds on retransmission depend on them.
PROBE_GROWTH = 2
MIN_TIMEOUT_NS = 10_000_000

# An honest packet is dropped only for these reasons, whatever its order, copies and delay.
EXPECTED_DROPS = ("stale", "duplicate")


class InvariantError(AssertionError):
    """A machine broke a promise of the protocol."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One all_reduce, the same on every worker."""

    number: int  # the group's sequence number
    elements: int
    wire: str = "f32"
    reduce: str = "sum"
    table: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """A generation of a job. Packets of any other identity are foreign."""

    job: int = 7
    epoch: int = 3
    incarnation: int = 0x5EED_CAFE

    def fields(self) -> dict[str, int]:
        return {"job": self.job, "epoch": self.epoch, "incarnation": self.incarnation}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of the chunk sequence space, computed here and not by the machines."""

    operation: int  # its index in the list, not its number
    first: int
    count: int
    first_byte: int
    end_byte: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A packet that a worker wants to send; the caller must call `sent` or `not_sent` for it."""

    chunk: int
    again: bool
    packet: Packet


@dataclass(frozen=True, slots=True)
class Verdict:
    """The effect of an arrival."""

    outcome: str  # of the machine
    drop: str  # the reason, where it was dropped
    answers: tuple[Packet, ...] = ()  # packets that the receiver sends


Contributions = Callable[[Operation, int], values.Array]


def seeded_contributions(operation: Operation, worker: int) -> values.Array:
    return values.contribution(operation.number, worker, operation.elements, operation.wire)


class Harness:
    """N workers, their switch, and what each has done.

    compare_machines: before each packet copy the machine, to check that a dropped packet does not change it.
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
        self.workers = tuple(_WorkerSide(index, self._make_worker(shape, index)) for index in range(workers))
        self.chunks = _lay_out(self.operations, payload_bytes)
        self.drops: Counter[str] = Counter()
        self._compare = compare_machines

        inputs = [[contributions(op, index) for index in range(workers)] for op in self.operations]
        self._expected = [self._reduce(op, terms).tobytes() for op, terms in zip(self.operations, inputs, strict=True)]
        for side in self.workers:
            side.buffers = [bytearray(terms[side.index].tobytes()) for terms in inputs]
            side.unanswered = [0] * len(self.operations)
            for chunk in self.chunks:
                side.unanswered[chunk.operation] += 1

    # --- overridden where there is more than one switch (tree.py) ---

    def _make_switch(self, shape: dict[str, int]) -> Any:
        switch = protocol.SwitchJob(**shape)
        self._switches = {SWITCH: SwitchSide(SWITCH, switch, list(range(shape["workers"])))}
        return switch

    def _make_worker(self, shape: dict[str, int], index: int) -> Any:
        return protocol.Worker(**shape, worker=index)

    def _reduce(self, operation: Operation, terms: Sequence[values.Array]) -> values.Array:
        return values.reference_reduce(operation.reduce, operation.wire, terms)

    def switch_of(self, worker: int) -> int:
        """The address of the switch that the worker sends to."""
        return SWITCH

    def _send_to_parent(self, side: SwitchSide) -> tuple[Packet, ...]:
        """Return the sums that a leaf sends to its parent now."""
        return ()

    # --- events of a worker ---

    def submit(self, worker: int) -> None:
        """The training script calls its next operation, which starts as soon as the machine takes one more."""
        self.workers[worker].submitted += 1
        self._start_submitted(self.workers[worker])

    def offers(self, worker: int, now_ns: int) -> list[Offer]:
        """Return everything that the worker would send now."""
        side = self.workers[worker]
        offers = []
        while (send := side.machine.poll_send(now_ns)) is not None:
            offers.append(self._offer(side, send))
            window = side.machine.congestion_window
            if not 1 <= window <= self.window:
                raise InvariantError(f"worker {worker} has a congestion window of {window} within {self.window}")
            # A retransmission may be a probe, which the congestion window does not hold back.
            if not send.again and side.machine.in_flight > window:
                raise InvariantError(
                    f"worker {worker} has {side.machine.in_flight} chunks in flight, its congestion window is {window}"
                )
            if len(offers) > self.window:
                raise InvariantError(
                    f"worker {worker} offers {len(offers)} packets at once, its window is {self.window}"
                )
        return offers

    def sent(self, worker: int, offer: Offer) -> None:
        side = self.workers[worker]
        side.sent.add(offer.chunk)
        side.sent_again += offer.again

    def not_sent(self, worker: int, offer: Offer) -> None:
        self.workers[worker].machine.not_sent(offer.chunk)

    def timeout(self, worker: int, now_ns: int) -> bool:
        """A timer expired, perhaps an outdated one; return whether the worker's timeout was due."""
        side = self.workers[worker]
        machine = side.machine
        due_ns: int = machine.poll_timeout()
        if due_ns < 0 or now_ns < due_ns:
            before = machine.copy()
            machine.handle_timeout(now_ns)
            self._unchanged(f"worker {worker}", machine, before, "a timer that expired too early")
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
        """A datagram arrives at a machine."""
        verdict = self._at_switch(packet) if packet.to < 0 else self._at_worker(packet, now_ns)
        if verdict.outcome == "dropped":
            where = "switch" if packet.to < 0 else "worker"
            self.drops[f"{where}.{verdict.drop}"] += 1
            if not packet.must_drop and verdict.drop not in EXPECTED_DROPS:
                raise InvariantError(f"an honest packet was dropped as {verdict.drop}: {describe(packet)}")
        elif packet.must_drop:
            raise InvariantError(f"a damaged or forged packet was {verdict.outcome}: {describe(packet)}")
        elif verdict.outcome == "mismatch":
            raise InvariantError(f"workers that agree were reported as mismatched: {describe(packet)}")
        return verdict

    # --- state ---

    @property
    def finished(self) -> bool:
        return all(side.machine.idle and side.submitted == len(self.operations) for side in self.workers)

    def check_finished(self, now_ns: int) -> None:
        """After the last event: check that all results came, nothing is pending, and retransmissions are bounded."""
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
            # A chunk c that counts as lost before a timeout or NACK does so for one of two reasons. The result of a
            # chunk in (c, c + W) came that was first sent after c was last sent: at most W - 1 times for each chunk.
            # Or a chunk was answered after a retransmission, which makes at most PROBE_GROWTH chunks overdue.
            bound = side.timeouts + side.nacked + (self.window - 1 + PROBE_GROWTH) * len(self.chunks)
            if side.timeouts > now_ns // MIN_TIMEOUT_NS + 1 or side.sent_again > bound:
                raise InvariantError(
                    f"{who} sent {side.sent_again} packets again after {side.timeouts} timeouts in {now_ns} ns"
                )

    def state(self) -> list[str]:
        """Return a line for each machine, for the text of a failure."""
        lines = [
            f"worker {side.index}: {side.submitted} operations called, {side.started} started, oldest unanswered chunk "
            f"{side.machine.oldest_outstanding}, {side.machine.in_flight} in flight, timer at "
            f"{side.machine.poll_timeout()} ns, {side.machine.retransmissions} sent again"
            for side in self.workers
        ]
        oldest = min(side.base for side in self.workers)
        lines.append(f"switch: chunk {oldest} misses workers {self.switch.missing(oldest)}")
        return lines

    # --- inside ---

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
        # The correctness of the switch depends on this rule.
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
        if again != (number in side.sent):
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
        side = self._switches[packet.to]
        header = protocol.Header.parse(packet.data)
        if header is not None and header.worker < len(side.children) and side.children[header.worker] != packet.source:
            return Verdict("dropped", "source")
        before = side.machine.copy() if self._compare else None
        outcome, drop, slot, number, worker, _ = side.machine.handle_packet(packet.data)
        answers = side.nacks(header) if outcome != "dropped" or drop in EXPECTED_DROPS else ()
        if outcome in ("stored", "completed", "summed"):
            side.count(number, worker, outcome)
        else:
            self._unchanged(side.name, side.machine, before, f"a packet that was {outcome}")
        if outcome in ("summed", "resend_sum"):
            side.sender.offer(slot)
        elif outcome == "completed":
            answers += side.results(number, slot)
        elif outcome == "resend_result":
            answers += (side.result(number, slot, side.children[worker]),)
        return Verdict(outcome, drop, answers + self._send_to_parent(side))

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
            return Verdict(outcome, drop)  # `arrive` reports it
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


class SwitchSide:
    """A switch's machine, and what it has received and done.

    children: their addresses, by their numbers at this switch.
    parent: its address; None at the root.
    """

    def __init__(self, address: int, machine: Any, children: list[int], parent: int | None = None) -> None:
        self.address = address
        self.machine = machine
        self.children = children
        self.parent = parent
        self._gap_detectors = [protocol.GapDetector() for _ in children]
        self._named = [0] * len(children)  # the last packet that a NACK named
        self._announced: dict[int, bytes] = {}  # by chunk, the result
        self._contributed: dict[int, set[int]] = {}  # by chunk, numbers of children
        # Of a leaf.
        self.sender: Any = None
        self.packet_number = 0
        self.received: set[int] = set()  # chunks with the parent's result

    @property
    def name(self) -> str:
        return describe_address(self.address)

    def nacks(self, header: Any) -> tuple[Packet, ...]:
        """Return the NACK that the packet of `header` causes, if any."""
        child: int = header.worker
        first, count = self._gap_detectors[child].observe(header.packet_number)
        if count == 0:
            return ()
        last = first + count - 1
        if first <= self._named[child] or last + protocol.REORDER_THRESHOLD > header.packet_number:
            raise InvariantError(
                f"{self.name} names packets {first} to {last} of child {child} as missing at packet "
                f"{header.packet_number}, after it named those up to {self._named[child]}"
            )
        self._named[child] = last
        return (Packet(self.address, self.children[child], self.machine.nack_packet(child, first, count)),)

    def count(self, number: int, child: int, outcome: str) -> None:
        """Record a contribution to chunk `number`, and check the machine's outcome."""
        contributed = self._contributed.setdefault(number, set())
        if child in contributed:
            raise InvariantError(f"{self.name} counted contribution {child} to chunk {number} twice")
        contributed.add(child)
        missing = [each for each in range(len(self.children)) if each not in contributed]
        full = "completed" if self.parent is None else "summed"
        if outcome != ("stored" if missing else full):
            raise InvariantError(f"{self.name}: chunk {number} was {outcome} while {missing} are missing")
        if self.machine.missing(number) != missing:
            raise InvariantError(
                f"{self.name}: chunk {number} misses {missing}, the machine says {self.machine.missing(number)}"
            )

    def result(self, number: int, slot: int, to: int) -> Packet:
        frame: bytes = self.machine.frame(slot)
        if self._announced.setdefault(number, frame) != frame:
            raise InvariantError(f"{self.name}: the result of chunk {number} changed after it was announced")
        return Packet(self.address, to, frame)

    def results(self, number: int, slot: int) -> tuple[Packet, ...]:
        """Return the result of a chunk for every child."""
        return tuple(self.result(number, slot, child) for child in self.children)


class _WorkerSide:
    """A worker's machine, its buffers, and what it has done."""

    def __init__(self, index: int, machine: Any) -> None:
        self.index = index
        self.machine = machine
        self.buffers: list[bytearray] = []  # by operation
        self.unanswered: list[int] = []  # by operation, chunks
        self.submitted = 0  # operations that the script called
        self.started = 0  # operations that the machine took
        self.base = 0  # the lowest chunk without a result
        self.packet_number = 0  # of its last packet
        self.received: set[int] = set()  # chunks
        self.sent: set[int] = set()  # chunks
        self.sent_again = 0  # packets
        self.timeouts = 0
        self.timeout_ns: int | None = None  # of the last one
        self.nacked = 0  # chunks given up to NACKs


def _lay_out(operations: Sequence[Operation], payload_bytes: int) -> tuple[Chunk, ...]:
    chunks = []
    for index, operation in enumerate(operations):
        element_bytes = values.WIRES[operation.wire].element_bytes
        per_chunk = payload_bytes // element_bytes
        for first in range(0, operation.elements, per_chunk):
            count = min(per_chunk, operation.elements - first)
            chunks.append(Chunk(index, first, count, first * element_bytes, (first + count) * element_bytes))
    return tuple(chunks)


def describe(packet: Packet) -> str:
    """Describe a packet in one line, whatever its bytes."""
    route = f"{describe_address(packet.source)} -> {describe_address(packet.to)}"
    header = protocol.Header.parse(packet.data)
    if header is None:
        return f"{route} {len(packet.data)} bytes that are no packet"
    if header.flags & protocol.FLAGS["nack"]:
        return f"{route} NACK of packets {header.chunk} to {header.chunk + header.elements - 1}"
    kind = "answer" if header.flags & protocol.FLAGS["from_switch"] else "contribution"
    return (
        f"{route} {kind} to chunk {header.chunk} of operation {header.operation}, worker {header.worker}, epoch "
        f"{header.epoch}, {len(packet.data)} bytes"
    )


def describe_address(address: int) -> str:
    if address >= 0:
        return f"worker {address}"
    return "switch" if address == SWITCH else f"leaf {leaf_of(address)}"
