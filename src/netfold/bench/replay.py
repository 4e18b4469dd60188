"""A training step replayed on one rank: the accelerator is a timer, the transfers are real."""

import statistics
import time
from collections.abc import Callable

from netfold.bench.backends import Backend, Buffer, Pending
from netfold.bench.collectives import COLLECTIVES, Collective, expected
from netfold.bench.program import Await, Compute, Program, Start
from netfold.bench.start_line import StartLine
from netfold.bench.test_data import encode, fill, mismatches
from netfold.bench.trial import make_message_data
from netfold.plan.model.catalogue import ITEM_BYTES

_DTYPE = "f32"
_ALONE_STEPS = 3


class StepTrial:
    """One step a burst, all ranks from the start line; gradients are in their buckets before it begins.

    wire: what the backend was asked to send f32 as, as in Trial; late_ns: of every start, how long after its moment it
    was made; the timer of a machine with more ranks than cores.
    """

    def __init__(
        self, backend: Backend, line: StartLine, rank: int, ranks: int, program: Program, wire: str = ""
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.late_ns: list[int] = []
        self._line = line
        self._program = program
        self._pattern, self._tolerance = make_message_data("sum", wire, _DTYPE, ranks)
        self._transfers = [_Moved(backend, one.collective, one.count, ranks) for one in program.transfers]

    def run_once(self) -> None:
        """Every transfer once, untimed: connections are made, and who cannot do this says so."""
        self.fill(0)
        self._play(transfers=True)

    def alone(self) -> int:
        """Nanoseconds of the step without its transfers: what the timer makes of it."""
        return int(statistics.median(self._play(transfers=False)[0] for _ in range(_ALONE_STEPS)))

    def burst(self, round_index: int) -> list[int]:
        """Nanoseconds of one step."""
        self.fill(round_index)
        self._line.cross()
        step_ns, late_ns = self._play(transfers=True)
        self.late_ns += late_ns
        return [step_ns]

    def fill(self, round_index: int) -> None:
        """Ours into what is sent; zeros where something else is received. All transfers are one long message, so that
        a bucket's values are found in no other."""
        ours = encode(self._pattern.sent(self.rank, round_index), _DTYPE)
        start = 0
        for moved in self._transfers:
            if moved.receive is not moved.send:
                moved.receive.values.fill(0)
            fill(moved.send.values, ours, start)
            start += moved.count

    def wrong_elements(self, round_index: int) -> int:
        wrong = start = 0
        for moved in self._transfers:
            pieces = expected(moved.collective, self.rank, self.ranks, moved.count)
            at = 0
            for piece in pieces:
                numbers = (
                    self._pattern.reduced(round_index)
                    if piece.source is None
                    else self._pattern.sent(piece.source, round_index)
                )
                received = moved.receive.values[at : at + piece.count]
                tolerance = self._tolerance if piece.source is None else 0.0
                wrong += mismatches(received, encode(numbers, _DTYPE), start + piece.start, tolerance)
                at += piece.count
            start += moved.count
        return wrong

    def _play(self, *, transfers: bool) -> tuple[int, list[int]]:
        """[ns] of a step, and how late each start was.

        The accelerator has its own queue: it does not wait for a host that wakes late, so its clock adds up what it
        computes from the step's start, and only a transfer that it needs can hold it up.
        """
        clock_ns = started_ns = time.monotonic_ns()
        under_way: dict[int, Pending] = {}
        late_ns = []
        for act in self._program.acts:
            match act:
                case Compute(duration_ns):
                    clock_ns += duration_ns
                case Start(index):
                    late_ns.append(_sleep_until(clock_ns))
                    if transfers:
                        under_way[index] = self._transfers[index].start()
                case Await(index) if transfers:
                    under_way.pop(index).wait()
                    clock_ns = max(clock_ns, time.monotonic_ns())
        _sleep_until(clock_ns)
        return time.monotonic_ns() - started_ns, late_ns


class _Moved:
    """One transfer: its buffers, and the call that starts it."""

    def __init__(self, backend: Backend, name: str, count: int, ranks: int) -> None:
        self.collective: Collective = COLLECTIVES[name]
        # Shrunk to nothing, a part of each rank is still an element.
        least = ranks if self.collective.split else 1
        self.count = self.collective.whole_count(max(least, count) * ITEM_BYTES, ITEM_BYTES, ranks)
        self.receive: Buffer = backend.empty(self.collective.receive_count(self.count, ranks), _DTYPE)
        self.send = self.receive
        if not self.collective.in_place:
            self.send = backend.empty(self.collective.send_count(self.count, ranks), _DTYPE)
        self.start: Callable[[], Pending] = backend.start(self.collective, self.send, self.receive)


def _sleep_until(moment_ns: int) -> int:
    """How late it became. A sleep, and no spinning: the ranks have fewer cores than there are ranks."""
    while (left_ns := moment_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)
    return -left_ns
