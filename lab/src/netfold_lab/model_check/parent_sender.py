"""Exhaustive search of a leaf's sender: what `ParentSender` (core/native/protocol) sends to the parent next.

A state is the machine, and what has happened to the sums of a few slots. In each state:
  offer   a slot is offered, for the first time or because a worker asks again
  send    the next packet is sent, or refused by the socket, or sent after seven refusals, so that a few packets get
          numbers that are eight apart
  result  the parent's result of any sum that was sent arrives. Its number follows the newest, or is so far ahead that
          one or two numbers count as lost, or is a number that was skipped before.
  nack    a NACK names one, two or all of the packets, or packets that were never sent
So the search covers losses, delays and repeated offers. It covers more than a parent does: any result may have any new
number.

The table in the machine's header runs beside the machine, as lists (`Table`). Safety. The machine sends the sums that
the table prescribes, in its order, each under a new number, and counts them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from netfold._native import protocol
from netfold_lab.model_check.breadth_first import BrokenError, Report, Search

THRESHOLD: int = protocol.REORDER_THRESHOLD

Event = tuple[Any, ...]  # its kind and its arguments
# Slot, number of the packet that its sum was sent in, whether the sum had been sent before.
Flight = tuple[int, int, bool]


@dataclass(frozen=True)
class SenderScope:
    """The scope of a search."""

    slots: int = 3  # each has one sum at a time, and another after its result
    sends: int = 3  # packets that the socket takes
    results: int = 1  # results that arrive
    nacks: int = 0  # NACKs that arrive
    refusals: int = 1  # packets that the socket refuses, alone or seven in a row


# Searched by `make test`: a result passes over sums that are then sent again; a NACK names sums among others.
QUICK = {
    "passed-over": SenderScope(),
    "named": SenderScope(slots=2, results=2, nacks=1),
}
# Searched by `make model-check`.
LARGE = {
    "sent-often": SenderScope(slots=2, sends=4, results=2, nacks=1),
    "all-three": SenderScope(results=2, nacks=1),
}


class Table(NamedTuple):
    """The state that the table in parent_sender.hpp prescribes, as lists."""

    due: tuple[int, ...] = ()  # slots whose sum is to be sent, in order
    flight: tuple[Flight, ...] = ()
    sent: frozenset[int] = frozenset()  # slots whose sum has been sent
    packet_number: int = 0  # of the last packet
    answered: int = 0  # the latest packet whose sum was sent once and has its result
    numbers: int = 0  # results that arrived, bit n for number n
    packets: int = 0  # that were sent
    again: int = 0  # of them, those that were sent again

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
        """The socket refused the packet that was polled last."""
        slot, _, again = self.flight[-1]
        return self._replace(
            due=(*self.due, slot),
            flight=self.flight[:-1],
            sent=self.sent if again else self.sent - {slot},
            packets=self.packets - 1,
            again=self.again - again,
        )

    def result(self, slot: int, number: int, missing: int) -> Table:
        """The result of `slot` arrived under `number`, which makes `missing` earlier numbers count as lost."""
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
    machine: bytes  # its canonical bytes
    results: int = 0
    nacks: int = 0
    refusals: int = 0


@dataclass
class SenderReport(Report):
    passed_over: int = 0  # transitions in which a result makes the machine send sums again
    named: int = 0  # transitions in which a NACK does


def search_parent_sender(
    scope: SenderScope = QUICK["passed-over"], new: Callable[[int], Any] = protocol.ParentSender
) -> SenderReport:
    """Search all states of `scope`.

    new: makes a machine with a number of slots.
    """
    report = SenderReport()
    _Search(scope, new(scope.slots), report).run(report)
    return report


class _Search(Search[_State, Event]):
    def __init__(self, scope: SenderScope, machine: Any, report: SenderReport) -> None:
        first = _State(Table(), machine.canonical())
        super().__init__(first)
        self._scope, self._report = scope, report
        self._machines = {first: machine}
        self._gap_detectors = {0: protocol.GapDetector()}  # of results, by the numbers that arrived

    def events(self, state: _State) -> Iterator[Event]:
        scope, table = self._scope, state.table
        for slot in range(scope.slots):
            yield "offer", slot
        if table.due and table.packets < scope.sends:
            yield ("send",)
        if table.due and state.refusals < scope.refusals:
            yield ("refuse",)
            if table.packets < scope.sends:
                yield ("send-after", THRESHOLD - 1)
        if state.results < scope.results:
            newest = table.numbers.bit_length() - 1 if table.numbers else 0
            skipped = [number for number in range(1, newest) if not table.numbers >> number & 1]
            # Of a long gap only its ends: every number between them has the same effect.
            numbers = [*{*skipped[:1], *skipped[-1:]}, *(newest + ahead for ahead in (1, THRESHOLD + 1, THRESHOLD + 2))]
            for slot in sorted(table.sent):
                for number in numbers:
                    yield "result", slot, number
        if state.nacks < scope.nacks and table.packet_number:
            for packet_number in sorted({each[1] for each in table.flight} | {1}):
                yield "nack", packet_number, 1
                yield "nack", packet_number, 2
            yield "nack", 1, table.packet_number
            yield "nack", table.packet_number + 1, 1 << 31

    def after(self, state: _State, event: Event) -> _State:
        machine, table = self._machines[state].copy(), state.table
        results, nacks, refusals = state.results, state.nacks, state.refusals
        kind, *arguments = event
        if kind == "offer":
            table = table.offer(arguments[0])
            machine.offer(arguments[0])
        elif kind == "result":
            slot, number = arguments
            results += 1
            detector = self._gap_detectors[table.numbers].copy()
            _, missing = detector.observe(number)
            table = table.result(slot, number, missing)
            self._gap_detectors.setdefault(table.numbers, detector)
            machine.handle_result(slot, number)
        elif kind == "nack":
            nacks += 1
            table = table.nack(*arguments)
            if machine.handle_nack(*arguments) != len(table.due) - len(state.table.due):
                raise BrokenError("a NACK resends other sums than it names")
        else:
            refusals += kind != "send"
            for _ in range(arguments[0] if arguments else int(kind == "refuse")):
                table = _poll(table, machine)
                machine.not_sent(table.flight[-1][0])
                table = table.not_sent()
            if kind != "refuse":
                table = _poll(table, machine)
        _compare(table, machine)
        sends_again = len(table.due) > len(state.table.due)
        self._report.passed_over += kind == "result" and sends_again
        self._report.named += kind == "nack" and sends_again
        new = _State(table, machine.canonical(), results, nacks, refusals)
        self._machines.setdefault(new, machine)
        return new


def _poll(table: Table, machine: Any) -> Table:
    """Send the next sum."""
    after = table.poll()
    _check_send(after.flight[-1][:2], machine.poll_send(), table.packet_number)
    return after


def _check_send(due: tuple[int, int], send: tuple[int, int] | None, packet_number: int) -> None:
    """Hold what the machine sends against the slot and number that are due; packet_number: of the packet before."""
    if send is None:
        raise BrokenError("a due sum is not sent")
    if send[1] <= packet_number:
        raise BrokenError("a packet number is used twice")
    if send != due:
        raise BrokenError("a sum other than the next one is sent")


def _compare(table: Table, machine: Any) -> None:
    """Hold the machine against the table: its counters, and everything that it would send next."""
    if machine.in_flight != len(table.flight):
        raise BrokenError("the sums in flight differ from the table's")
    if (machine.packets_sent, machine.sent_again) != (table.packets, table.again):
        raise BrokenError("the packet counts differ from the table's")
    ahead = machine.copy()
    for packet_number, slot in enumerate(table.due, table.packet_number + 1):
        _check_send((slot, packet_number), ahead.poll_send(), packet_number - 1)
    if ahead.poll_send() is not None:
        raise BrokenError("a sum is sent that is not due")


def sentence(scope: SenderScope, report: SenderReport) -> str:
    """Return a report in one line."""
    return (
        f"{scope.slots} slots, {scope.sends} packets, {scope.results} results, {scope.nacks} NACKs, "
        f"{scope.refusals} refusals: {report.outcome}; {report.states:,} states, {report.transitions:,} transitions "
        f"({report.passed_over:,} send again what was passed over, {report.named:,} what was named), depth "
        f"{report.depth}, {report.seconds:.2f} s"
    )
