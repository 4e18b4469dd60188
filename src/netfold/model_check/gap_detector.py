"""Exhaustive search of gap detection: what `GapDetector` (native/protocol) says of a sender's packets, in every order.

The switch reads from a worker's packet numbers, and a leaf from its parent's result numbers, which packets are
missing. A state is the set of packets that have come and the set that was named as missing. In each state every packet
may come, the first time or again, at any time: so every loss, delay, reordering and duplicate is searched. What the
machine keeps must depend on the packets that have come alone, and not on their order.

Safety. Only packets that were sent are named, each once at most, and never before one that was sent kReorderThreshold
later is here. A gap begins and ends with a packet that has not come, and has at most kReorderThreshold that have. At
every moment each packet that is not here, and was sent kReorderThreshold or more before the newest, has been named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from netfold._native import protocol

THRESHOLD: int = protocol.REORDER_THRESHOLD
# By `make test`; each jump, and each window of packets that came, is in it.
PACKETS = THRESHOLD + 5


@dataclass
class ArrivalsReport:
    """trace: the counters of the packets, as they come, that break the promise."""

    packets: int
    states: int = 0
    transitions: int = 0
    depth: int = 0
    machines: int = 0  # different states of the machine
    broken: str = ""
    trace: list[int] = field(default_factory=list)
    seconds: float = 0.0


def search_arrivals(packets: int = PACKETS, new: Callable[[], Any] = protocol.GapDetector) -> ArrivalsReport:
    """Search all orders of packets 1 to `packets`, below 64; always to the end. `new` makes a machine."""
    began = time.perf_counter()
    report = ArrivalsReport(packets)
    machines = {0: new()}  # by the packets that have come, bit c for packet_number c
    taken: dict[tuple[int, int], tuple[int, int]] = {}  # the gap, by what had come and what comes
    came: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    states = [(0, 0)]
    known = {(0, 0)}
    for state in states:
        here, named = state
        for packet_number in range(1, packets + 1):
            after = here | 1 << packet_number
            if (here, packet_number) not in taken:
                machine = machines[here].copy()
                taken[here, packet_number] = machine.observe(packet_number)
                if machines.setdefault(after, machine) != machine:
                    report.broken = "what is kept depends on the order of the packets"
            first, count = taken[here, packet_number]
            gap = 0
            if count > packets or (count > 0 and not 1 <= first <= packets):
                report.broken = "a gap names packets that were never sent"
            else:
                gap = (1 << count) - 1 << first
            report.broken = report.broken or _broken(here, named, after, gap)
            report.transitions += 1
            new_state = after, named | gap
            if report.broken or new_state not in known:
                came.setdefault(new_state, (state, packet_number))
            if report.broken:
                report.trace = [*_trace(came, state), packet_number]
                break
            if new_state not in known:
                known.add(new_state)
                states.append(new_state)
        if report.broken:
            break
    report.states, report.machines = len(states), len(machines)
    report.depth = len(_trace(came, states[-1]))
    report.seconds = time.perf_counter() - began
    return report


def _broken(here: int, named: int, after: int, gap: int) -> str:
    newest = after.bit_length() - 1
    # Counters from 1 on that were sent THRESHOLD or more before the newest.
    old = (1 << max(1, newest - THRESHOLD + 1)) - 2
    missing = old & ~after
    if gap & named:
        return "a packet is named twice"
    if gap & ~old:
        return "a packet is named too early"
    if missing & ~(named | gap):
        return "a packet that is missing is not named"
    lowest, highest = gap & -gap, 1 << max(0, gap.bit_length() - 1)
    if gap and (lowest | highest) & after:
        return "a gap begins or ends with a packet that has come"
    if (gap & here).bit_count() > THRESHOLD:
        return "a gap has too many packets that have come"
    return ""


def _trace(came: dict[tuple[int, int], tuple[tuple[int, int], int]], state: tuple[int, int]) -> list[int]:
    trace = []
    while state != (0, 0):
        state, packet_number = came[state]
        trace.append(packet_number)
    return trace[::-1]


def sentence(report: ArrivalsReport) -> str:
    """A report in one line."""
    found = f"BROKEN: {report.broken}: {report.trace}" if report.broken else "exhausted"
    return (
        f"{report.packets} packets of one sender: {found}; {report.states:,} states ({report.machines:,} of the "
        f"machine), {report.transitions:,} transitions, depth {report.depth}, {report.seconds:.2f} s"
    )
