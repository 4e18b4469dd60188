"""Exhaustive search of gap detection: which packets `GapDetector` (core/native/protocol) names as missing.

A switch derives from a worker's packet numbers, and a leaf from its parent's result numbers, which packets are missing.
A state is the set of packets that have arrived and the set of packets that were named as missing. In each state every
packet may arrive, for the first time or again. So the search covers every loss, delay, reordering and duplicate. The
machine's state must depend only on the set of packets that have arrived, and not on their order.

Safety. The machine names only packets that were sent, each at most once, and none before a packet that was sent
kReorderThreshold later has arrived. A gap begins and ends with a missing packet, and holds at most kReorderThreshold
that have arrived. At every moment each missing packet that was sent kReorderThreshold or more before the newest arrived
one has been named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from netfold._native import protocol
from netfold_lab.model_check.breadth_first import BrokenError, Report, Search

THRESHOLD: int = protocol.REORDER_THRESHOLD
# The bound of `make test`: large enough for every kind of jump, and every window of packets that arrived.
PACKETS = THRESHOLD + 5

# Packets as bits, bit n for packet number n: those that arrived, and those that were named.
_State = tuple[int, int]


@dataclass
class ArrivalsReport(Report):
    """trace: the numbers of the packets, in order of arrival."""

    packets: int = 0
    machines: int = 0  # different states of the machine


def search_arrivals(packets: int = PACKETS, new: Callable[[], Any] = protocol.GapDetector) -> ArrivalsReport:
    """Search all orders of packets 1 to `packets`, which is below 64.

    new: makes a machine.
    """
    report = ArrivalsReport(packets=packets)
    search = _Search(packets, new())
    search.run(report)
    report.machines = len(search.machines)
    return report


class _Search(Search[_State, int]):
    def __init__(self, packets: int, machine: Any) -> None:
        super().__init__((0, 0))
        self._packets = packets
        self.machines = {0: machine}  # by the packets that arrived
        self._gaps: dict[tuple[int, int], tuple[int, int]] = {}  # by the packets that arrived, and the next one

    def events(self, state: _State) -> range:
        return range(1, self._packets + 1)

    def after(self, state: _State, event: int) -> _State:
        before, named = state
        arrived = before | 1 << event
        if (before, event) not in self._gaps:
            machine = self.machines[before].copy()
            self._gaps[before, event] = machine.observe(event)
            if self.machines.setdefault(arrived, machine) != machine:
                raise BrokenError("the machine's state depends on the order of the packets")
        first, count = self._gaps[before, event]
        if count > self._packets or (count > 0 and not 1 <= first <= self._packets):
            raise BrokenError("a gap names packets that were never sent")
        gap = (1 << count) - 1 << first
        _check(before, named, arrived, gap)
        return arrived, named | gap

    def text(self, event: int) -> str:
        return str(event)


def _check(before: int, named: int, arrived: int, gap: int) -> None:
    newest = arrived.bit_length() - 1
    # Packet numbers that were sent THRESHOLD or more before the newest arrived one.
    old = (1 << max(1, newest - THRESHOLD + 1)) - 2
    if gap & named:
        raise BrokenError("a packet is named twice")
    if gap & ~old:
        raise BrokenError("a packet is named too early")
    if old & ~arrived & ~(named | gap):
        raise BrokenError("a packet that is missing is not named")
    lowest, highest = gap & -gap, 1 << max(0, gap.bit_length() - 1)
    if gap and (lowest | highest) & arrived:
        raise BrokenError("a gap begins or ends with a packet that has arrived")
    if (gap & before).bit_count() > THRESHOLD:
        raise BrokenError("a gap holds too many packets that have arrived")


def sentence(report: ArrivalsReport) -> str:
    """Return a report in one line."""
    return (
        f"{report.packets} packets of one sender: {report.outcome}; {report.states:,} states ({report.machines:,} of "
        f"the machine), {report.transitions:,} transitions, depth {report.depth}, {report.seconds:.2f} s"
    )
