"""Exhaustive search of a leaf's sender: what `ParentSender` (native/protocol) sends to the parent next, in every order.

A state is what has happened to the sums of a few slots, and the machine. In each state a slot may be offered, the first
time or because a worker asks again; the next packet may go, be refused by the socket, or go after seven refusals, which
is how a few packets get numbers that are eight apart; the parent's result of any sum that was sent may come, with a
number that follows the newest, or is so far ahead that one or two count as lost, or with one that was skipped before;
and a NACK may name any of the packets, one, two or all of them, or some that were never sent. So losses, delays and
repeated offers are searched, and more than a parent does: any result may have any new number.

Beside the machine runs the table of its header, as lists (`Table`). Safety. The machine sends the sums that the table
says, in its order, each under a number of its own, and counts them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from netfold._native import protocol

THRESHOLD: int = protocol.REORDER_THRESHOLD

Event = tuple[Any, ...]  # its kind, and what there is to say
# Slot, number of the packet that its sum was sent in, whether the sum had been sent before.
Flight = tuple[int, int, bool]


@dataclass(frozen=True)
class SenderScope:
    """slots: each with one sum at a time, and another after its result. sends: that the socket takes. results: that
    come. NACKs: that come. refusals: packets that the socket refuses, alone or seven in a row."""

    slots: int = 3
    sends: int = 3
    results: int = 1
    nacks: int = 0
    refusals: int = 1


# By `make test`: sums that are passed over and named, among others that are.
QUICK = {
    "passed-over": SenderScope(),
    "named": SenderScope(slots=2, results=2, nacks=1),
}
# By `make model-check`.
LARGE = {
    "sent-often": SenderScope(slots=2, sends=4, results=2, nacks=1),
    "all-three": SenderScope(results=2, nacks=1),
}


class Table(NamedTuple):
    """What the table in parent_sender.hpp comes to, as lists."""

    due: tuple[int, ...] = ()
    flight: tuple[Flight, ...] = ()
    sent: frozenset[int] = frozenset()  # slots whose sum has been sent
    packet_number: int = 0
    answered: int = 0  # the latest packet that the result of a sum came from which was sent once
    numbers: int = 0  # results that came, bit n for number n
    packets: int = 0
    again: int = 0

    def offer(self, slot: int) -> Table:
        if slot in self.due:
            return self
        return self._replace(due=(*self.due, slot), flight=self._flight_without(slot))

    def poll(self) -> Table:
        slot, packet_number = self.due[0], self.packet_number + 1
        again = slot in self.sent
        return self._replace(
            due=self.due[1:],
            flight=(*self.flight, (slot, packet_number, again)),
            sent=self.sent | {slot},
            packet_number=packet_number,
            packets=self.packets + 1,
            again=self.again + again,
        )

    def not_sent(self) -> Table:
        """The packet that was polled last."""
        slot, _, again = self.flight[-1]
        return self._replace(
            due=(*self.due, slot),
            flight=self.flight[:-1],
            sent=self.sent if again else self.sent - {slot},
            packets=self.packets - 1,
            again=self.again - again,
        )

    def result(self, slot: int, number: int, missing: int) -> Table:
        """missing: how many numbers count as lost from this one on."""
        once = [packet_number for each, packet_number, again in self.flight if each == slot and not again]
        answered = max([self.answered, *once])
        flight = self._flight_without(slot)
        passed = [each for each, packet_number, _ in flight if packet_number + THRESHOLD <= answered][:missing]
        return self._replace(
            due=(*(each for each in self.due if each != slot), *passed),
            flight=tuple(each for each in flight if each[0] not in passed),
            sent=self.sent - {slot},
            answered=answered,
            numbers=self.numbers | 1 << number,
        )

    def nack(self, first: int, count: int) -> Table:
        named = [slot for slot, packet_number, _ in self.flight if first <= packet_number < first + count]
        return self._replace(
            due=(*self.due, *named), flight=tuple(each for each in self.flight if each[0] not in named)
        )

    def _flight_without(self, slot: int) -> tuple[Flight, ...]:
        return tuple(each for each in self.flight if each[0] != slot)


class _State(NamedTuple):
    table: Table
    machine: bytes = b""  # its canonical bytes
    results: int = 0
    nacks: int = 0
    refusals: int = 0

    def events(self, scope: SenderScope) -> Iterator[Event]:
        table = self.table
        for slot in range(scope.slots):
            yield "offer", slot
        if table.due and table.packets < scope.sends:
            yield ("send",)
        if table.due and self.refusals < scope.refusals:
            yield ("refuse",)
            if table.packets < scope.sends:
                yield ("send-after", THRESHOLD - 1)
        if self.results < scope.results:
            newest = table.numbers.bit_length() - 1 if table.numbers else 0
            skipped = [number for number in range(1, newest) if not table.numbers >> number & 1]
            # Of a long gap its ends: what lies between comes to the same.
            numbers = [*{*skipped[:1], *skipped[-1:]}, *(newest + ahead for ahead in (1, THRESHOLD + 1, THRESHOLD + 2))]
            for slot in sorted(table.sent):
                for number in numbers:
                    yield "result", slot, number
        if self.nacks < scope.nacks and table.packet_number:
            for packet_number in sorted({each[1] for each in table.flight} | {1}):
                yield "nack", packet_number, 1
                yield "nack", packet_number, 2
            yield "nack", 1, table.packet_number
            yield "nack", table.packet_number + 1, 1 << 31


@dataclass
class SenderReport:
    """trace: the events that break the promise."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    passed_over: int = 0  # transitions in which a result sends sums again
    named: int = 0  # in which a NACK does
    broken: str = ""
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0


def search_parent_sender(
    scope: SenderScope = QUICK["passed-over"], new: Callable[[int], Any] = protocol.ParentSender
) -> SenderReport:
    """Search `scope` breadth first; always to the end. `new` makes a machine of so many slots."""
    began = time.perf_counter()
    report = SenderReport()
    machine = new(scope.slots)
    first = _State(Table(), machine.canonical())
    machines = {first: machine}
    came: dict[_State, tuple[_State, Event]] = {}
    arrivals = {0: protocol.GapDetector()}  # of results, by the numbers that came
    states = [first]
    for state in states:
        for event in state.events(scope):
            machine = machines[state].copy()
            after, broken = _done(state, event, machine, arrivals)
            report.transitions += 1
            if broken:
                report.broken = broken
                report.trace = [*_trace(came, state), _words(event)]
                break
            was_sent = len(after.table.due) - len(state.table.due)
            report.passed_over += event[0] == "result" and was_sent > 0
            report.named += event[0] == "nack" and was_sent > 0
            if after not in machines:
                machines[after] = machine
                came[after] = state, event
                states.append(after)
        if report.broken:
            break
    report.states = len(states)
    report.depth = len(_trace(came, states[-1]))
    report.seconds = time.perf_counter() - began
    return report


def _done(state: _State, event: Event, machine: Any, arrivals: dict[int, Any]) -> tuple[_State, str]:
    """What the event makes of the table, and of the machine, which it changes; and the promise that breaks."""
    table = state.table
    results, nacks, refusals = state.results, state.nacks, state.refusals
    broken = ""
    kind, *about = event
    if kind == "offer":
        table = table.offer(about[0])
        machine.offer(about[0])
    elif kind in ("send", "refuse", "send-after"):
        refused = about[0] if about else int(kind == "refuse")
        refusals += kind != "send"
        for _ in range(refused):
            table, broken = _poll(table, machine, broken)
            machine.not_sent(table.flight[-1][0])
            table = table.not_sent()
        if kind != "refuse":
            table, broken = _poll(table, machine, broken)
    elif kind == "result":
        slot, number = about
        results += 1
        taken = arrivals[table.numbers].copy()
        _, missing = taken.observe(number)
        table = table.result(slot, number, missing)
        arrivals.setdefault(table.numbers, taken)
        machine.handle_result(slot, number)
    else:
        nacks += 1
        before, table = len(table.due), table.nack(*about)
        again = machine.handle_nack(*about)
        if again != len(table.due) - before:
            broken = "a NACK sends other sums again than it names"
    broken = broken or _differs(table, machine)
    return _State(table, machine.canonical(), results, nacks, refusals), broken


def _poll(table: Table, machine: Any, broken: str) -> tuple[Table, str]:
    after = table.poll()
    return after, broken or _other_than(after.flight[-1][:2], machine.poll_send(), table.packet_number)


def _other_than(due: tuple[int, int], send: tuple[int, int] | None, packet_number: int) -> str:
    """What is wrong with what was sent, where that slot and number are next; packet_number: the number before."""
    if send is None:
        return "a sum that is due does not go"
    if send[1] <= packet_number:
        return "a packet has a number that one had before"
    return "" if send == due else "another sum goes than the one that is next"


def _differs(table: Table, machine: Any) -> str:
    """Where the machine is not what the table says, by what it would send now."""
    if machine.in_flight != len(table.flight):
        return "other sums are in flight than the table says"
    if (machine.packets_sent, machine.sent_again) != (table.packets, table.again):
        return "packets are counted otherwise than the table says"
    ahead = machine.copy()
    for packet_number, slot in enumerate(table.due, table.packet_number + 1):
        broken = _other_than((slot, packet_number), ahead.poll_send(), packet_number - 1)
        if broken:
            return broken
    return "" if ahead.poll_send() is None else "a sum goes that nobody misses"


def _trace(came: dict[_State, tuple[_State, Event]], state: _State) -> list[str]:
    trace = []
    while state in came:
        state, event = came[state]
        trace.append(_words(event))
    return trace[::-1]


def _words(event: Event) -> str:
    return " ".join(map(str, event))


def sentence(scope: SenderScope, report: SenderReport) -> str:
    """A report in one line."""
    found = f"BROKEN: {report.broken}: {'; '.join(report.trace)}" if report.broken else "exhausted"
    return (
        f"{scope.slots} slots, {scope.sends} packets, {scope.results} results, {scope.nacks} NACKs, "
        f"{scope.refusals} refusals: {found}; {report.states:,} states, {report.transitions:,} transitions "
        f"({report.passed_over:,} send again what was passed over, {report.named:,} what was named), depth "
        f"{report.depth}, {report.seconds:.2f} s"
    )
