"""A job whose workers are below leaf switches: the same worker machines, production's leaf, and its link to the root.

Beyond the checks of harness.py: each sum of a leaf is compared with the one of its own workers' values, and no two
packets to the root have the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from netfold._native import protocol
from netfold_plan.sim import values
from netfold_plan.sim.harness import Harness, InvariantError, Operation, SwitchSide, Verdict
from netfold_plan.sim.network import SWITCH, Packet, address_of


class TreeHarness(Harness):
    """A harness with leaf switches. Each leaf's job has an identity of its own.

    leaves: the number of workers below each, in order.
    """

    def __init__(self, *, leaves: Sequence[int], **how: Any) -> None:
        ends = list(accumulate(leaves))
        self._below = [range(end - count, end) for count, end in zip(leaves, ends, strict=True)]
        self._leaf_of = [leaf for leaf, count in enumerate(leaves) for _ in range(count)]
        if not leaves or min(leaves) < 1 or len(self._leaf_of) != how["workers"]:
            raise ValueError(f"leaves {leaves} are not those of {how['workers']} workers")
        self._sums: dict[tuple[int, int], bytes] = {}  # by leaf and operation number: its own workers' sum
        super().__init__(**how)

    def switch_of(self, worker: int) -> int:
        return address_of(self._leaf_of[worker])

    def _make_switch(self, shape: dict[str, int]) -> Any:
        identity = self.identity.fields()
        names = [below[0] for below in self._below]
        root = protocol.SwitchJob(**{**shape, "workers": len(self._below)}, names=names)
        children = [address_of(leaf) for leaf in range(len(self._below))]
        self._switches = {SWITCH: SwitchSide(SWITCH, root, children)}
        for leaf, below in enumerate(self._below):
            parent = (identity["job"], identity["epoch"], identity["incarnation"], leaf)
            own = {**shape, **self._identity_of(leaf), "workers": len(below)}
            machine = protocol.SwitchJob(**own, parent=parent, names=list(below))
            side = self._switches[address_of(leaf)] = SwitchSide(address_of(leaf), machine, list(below), SWITCH)
            side.sender = protocol.ParentSender(protocol.job_slots(self.window))
        return root

    def _make_worker(self, shape: dict[str, int], index: int) -> Any:
        leaf = self._leaf_of[index]
        return protocol.Worker(**{**shape, **self._identity_of(leaf)}, worker=index - self._below[leaf][0])

    def _identity_of(self, leaf: int) -> dict[str, int]:
        return {name: value + 1 + leaf for name, value in self.identity.fields().items()}

    def _reduce(self, operation: Operation, terms: Sequence[values.Array]) -> values.Array:
        sums = [self._sum_of(operation, leaf, terms) for leaf in range(len(self._below))]
        return values.reference_reduce(operation.reduce, operation.wire, sums)

    def _sum_of(self, operation: Operation, leaf: int, terms: Sequence[values.Array]) -> values.Array:
        total = values.reference_reduce(
            operation.reduce, operation.wire, [terms[worker] for worker in self._below[leaf]]
        )
        self._sums[leaf, operation.number] = total.tobytes()
        return total

    @property
    def sums_resent(self) -> int:
        """Sums that all leaves sent to the root again."""
        return sum(side.sender.sent_again for side in self._switches.values() if side.sender is not None)

    def _at_switch(self, packet: Packet) -> Verdict:
        side = self._switches[packet.to]
        if packet.source != side.parent:
            return super()._at_switch(packet)
        before = side.machine.copy() if self._compare else None
        outcome, drop, slot, number, _, _ = side.machine.handle_parent(packet.data)
        header = protocol.Header.parse(packet.data)
        answers: tuple[Packet, ...] = ()
        if outcome == "completed":
            if number in side.received:
                raise InvariantError(f"{side.name} took the result of chunk {number} twice")
            side.received.add(number)
            side.sender.handle_result(slot, header.packet_number)
            answers = side.results(number, slot)
        else:
            self._unchanged(side.name, side.machine, before, f"a packet of its parent that was {outcome}")
            if outcome == "nack" and side.sender.handle_nack(header.chunk, header.elements) == 0:
                return Verdict("dropped", "stale")
        return Verdict(outcome, drop, answers + self._send_to_parent(side))

    def _send_to_parent(self, side: SwitchSide) -> tuple[Packet, ...]:
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
