"""A job whose workers are below leaf switches: the same worker machines, the production leaf, and its link to the root.

As world.py, and as careful: a leaf's sum is held against the one that its own workers' values have, packets to the root
never repeat a number, and a result that was announced never changes at any switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from netfold._native import protocol
from netfold.sim import values
from netfold.sim.harness import EXPECTED_DROPS, Harness, InvariantError, Operation, Verdict
from netfold.sim.network import SWITCH, Packet, address_of


class TreeHarness(Harness):
    """leaves: how many of the workers are below each, in order. Each link has a life of its own."""

    def __init__(self, *, leaves: Sequence[int], **how: Any) -> None:
        ends = list(accumulate(leaves))
        self._below = [range(end - count, end) for count, end in zip(leaves, ends, strict=True)]
        self._leaf_of = [leaf for leaf, count in enumerate(leaves) for _ in range(count)]
        if not leaves or min(leaves) < 1 or len(self._leaf_of) != how["workers"]:
            raise ValueError(f"leaves {leaves} are not those of {how['workers']} workers")
        self._sides: dict[int, _SwitchSide] = {}
        self._sums: dict[tuple[int, int], bytes] = {}  # by leaf and operation: of its own workers' values
        super().__init__(**how)

    def switch_of(self, worker: int) -> int:
        return address_of(self._leaf_of[worker])

    def _make_switch(self, shape: dict[str, int]) -> Any:
        identity = self.identity.fields()
        names = [below[0] for below in self._below]
        root = protocol.SwitchJob(**{**shape, "workers": len(self._below)}, names=names)
        children = [address_of(leaf) for leaf in range(len(self._below))]
        self._sides[SWITCH] = _SwitchSide(SWITCH, root, children, None, protocol.job_slots(self.window))
        for leaf, below in enumerate(self._below):
            parent = (identity["job"], identity["epoch"], identity["incarnation"], leaf)
            own = {**shape, **self._life(leaf), "workers": len(below)}
            machine = protocol.SwitchJob(**own, parent=parent, names=list(below))
            address = address_of(leaf)
            self._sides[address] = _SwitchSide(address, machine, list(below), SWITCH, protocol.job_slots(self.window))
        return root

    def _make_worker(self, shape: dict[str, int], index: int) -> Any:
        leaf = self._leaf_of[index]
        return protocol.Worker(**{**shape, **self._life(leaf)}, worker=index - self._below[leaf][0])

    def _life(self, leaf: int) -> dict[str, int]:
        return {name: value + 1 + leaf for name, value in self.identity.fields().items()}

    def _fold(self, operation: Operation, terms: Sequence[values.Array]) -> values.Array:
        sums = [self._fold_of(operation, leaf, terms) for leaf in range(len(self._below))]
        return values.reference_reduce(operation.reduce, operation.wire, sums)

    def _fold_of(self, operation: Operation, leaf: int, terms: Sequence[values.Array]) -> values.Array:
        total = values.reference_reduce(
            operation.reduce, operation.wire, [terms[worker] for worker in self._below[leaf]]
        )
        self._sums[leaf, operation.number] = total.tobytes()
        return total

    @property
    def sums_resent(self) -> int:
        """Sums that went up more than once, of all leaves."""
        return sum(side.sender.sent_again for side in self._sides.values() if side.sender is not None)

    def _at_switch(self, packet: Packet) -> Verdict:
        side = self._sides[packet.to]
        before = side.machine.copy() if self._compare else None
        if packet.source == side.parent:
            return self._from_parent(side, packet, before)
        header = protocol.Header.parse(packet.data)
        children = side.children
        if header is not None and header.worker < len(children) and children[header.worker] != packet.source:
            return Verdict("dropped", "source")
        outcome, drop, slot, number, worker, _ = side.machine.handle_packet(packet.data)
        answers: tuple[Packet, ...] = ()
        if outcome != "dropped" or drop in EXPECTED_DROPS:
            answers = side.nacks(header)
        if outcome in ("stored", "completed", "summed"):
            side.count(number, worker, outcome)
        else:
            self._unchanged(side.name, side.machine, before, f"a packet that was {outcome}")
        if outcome in ("summed", "resend_sum"):
            side.sender.offer(slot)
        elif outcome == "completed":
            answers += tuple(side.answer(number, slot, child) for child in children)
        elif outcome == "resend_result":
            answers += (side.answer(number, slot, children[worker]),)
        return Verdict(outcome, drop, answers + self._send_to_parent(side))

    def _from_parent(self, side: _SwitchSide, packet: Packet, before: Any) -> Verdict:
        outcome, drop, slot, number, _, _ = side.machine.handle_parent(packet.data)
        header = protocol.Header.parse(packet.data)
        if outcome == "completed":
            if number in side.results:
                raise InvariantError(f"{side.name} took the result of chunk {number} twice")
            side.results.add(number)
            side.sender.handle_result(slot, header.packet_number)
            answers = tuple(side.answer(number, slot, child) for child in side.children)
            return Verdict(outcome, drop, answers + self._send_to_parent(side))
        self._unchanged(side.name, side.machine, before, f"a packet of its parent that was {outcome}")
        if outcome == "nack" and side.sender.handle_nack(header.chunk, header.elements) == 0:
            return Verdict("dropped", "stale")
        return Verdict(outcome, drop, self._send_to_parent(side))

    def _send_to_parent(self, side: _SwitchSide) -> tuple[Packet, ...]:
        """All that it sends up now."""
        packets: list[Packet] = []
        while side.sender is not None and (send := side.sender.poll_send()) is not None:
            slot, packet_number = send
            if packet_number <= side.packet_number:
                raise InvariantError(f"{side.name} repeats packet number {packet_number}")
            side.packet_number = packet_number
            data: bytes = side.machine.sum(slot, packet_number)
            header = protocol.Header.parse(data)
            chunk = self.chunks[header.chunk]
            leaf = self._leaf_of[side.children[0]]
            expected = self._sums[leaf, self.operations[chunk.operation].number][chunk.first_byte : chunk.end_byte]
            if data[protocol.HEADER_BYTES :] != expected.ljust(len(data) - protocol.HEADER_BYTES, b"\0"):
                raise InvariantError(f"{side.name} sends a wrong sum of chunk {header.chunk} up")
            if len(packets) > protocol.job_slots(self.window):
                raise InvariantError(f"{side.name} sends more sums at once than it has slots")
            packets.append(Packet(side.address, SWITCH, data))
        return tuple(packets)


class _SwitchSide:
    """A switch's machine, what it has heard from whom, and what it has been seen to do."""

    def __init__(self, address: int, machine: Any, children: list[int], parent: int | None, slots: int) -> None:
        self.address = address
        self.machine = machine
        self.children = children  # addresses, in order of their numbers here
        self.parent = parent
        self.sender: Any = None if parent is None else protocol.ParentSender(slots)
        self.packet_number = 0
        self.results: set[int] = set()
        self._gap_detectors = [protocol.GapDetector() for _ in children]
        self._kept: dict[int, bytes] = {}
        self._contributed: dict[int, set[int]] = {}

    @property
    def name(self) -> str:
        return "the root" if self.parent is None else f"leaf {address_of(self.address)}"

    def nacks(self, header: Any) -> tuple[Packet, ...]:
        first, count = self._gap_detectors[header.worker].observe(header.packet_number)
        if count == 0:
            return ()
        packet = self.machine.nack_packet(header.worker, first, count)
        return (Packet(self.address, self.children[header.worker], packet),)

    def count(self, number: int, worker: int, outcome: str) -> None:
        contributed = self._contributed.setdefault(number, set())
        if worker in contributed:
            raise InvariantError(f"{self.name} counted contribution {worker} to chunk {number} twice")
        contributed.add(worker)
        missing = [each for each in range(len(self.children)) if each not in contributed]
        full = "completed" if self.parent is None else "summed"
        if outcome != ("stored" if missing else full):
            raise InvariantError(f"{self.name}: chunk {number} was {outcome} while {missing} are missing")
        if self.machine.missing(number) != missing:
            raise InvariantError(f"{self.name}: chunk {number} misses {missing}, and it says otherwise")

    def answer(self, number: int, slot: int, child: int) -> Packet:
        frame: bytes = self.machine.frame(slot)
        if self._kept.setdefault(number, frame) != frame:
            raise InvariantError(f"{self.name}: the result of chunk {number} changed after it was announced")
        return Packet(self.address, child, frame)
