"""One rank's replay of a training step: a timer stands for the accelerator, the transfers are real."""

import statistics
import time

from netfold_lab.bench.backends import Backend, Pending
from netfold_lab.bench.collectives import COLLECTIVES
from netfold_lab.bench.program import Await, Compute, Program, Start
from netfold_lab.bench.start_line import StartLine
from netfold_lab.bench.trial import Call, CheckedCalls
from netfold_plan.model.catalogue import ITEM_BYTES

_DTYPE = "f32"
_ALONE_STEPS = 3


class StepTrial(CheckedCalls):
    """One step a burst, on all ranks from the start line. The gradients are in their buckets before the step begins.

    All transfers are one long test message, so a bucket's values occur in no other bucket.
    late_ns: for every start, how long after its moment it was made: the timer's error, and waiting for a core.
    """

    def __init__(
        self, backend: Backend, line: StartLine, rank: int, ranks: int, program: Program, wire: str = ""
    ) -> None:
        super().__init__(rank, ranks, _DTYPE, "sum", wire)
        self.late_ns: list[int] = []
        self._line = line
        self._program = program
        start = 0
        for transfer in program.transfers:
            collective = COLLECTIVES[transfer.collective]
            # However far a transfer is shrunk, each rank's part keeps one element.
            elements = max(ranks if collective.split else 1, transfer.count)
            count = collective.whole_count(elements * ITEM_BYTES, ITEM_BYTES, ranks)
            self.calls.append(Call(backend, collective, count, ranks, _DTYPE, start))
            start += count
        self._starts = [
            backend.bind(call.collective, "sum", call.send, call.receive, asynchronous=True) for call in self.calls
        ]

    def run_once(self) -> None:
        """Make every transfer once, untimed: connections are made, and a backend that cannot do this raises."""
        self.fill(0)
        self._play(transfers=True)

    def alone(self) -> int:
        """Return the nanoseconds of the step without its transfers: what the timer makes of it."""
        return int(statistics.median(self._play(transfers=False)[0] for _ in range(_ALONE_STEPS)))

    def burst(self, round_index: int) -> list[int]:
        """Play one step; return its nanoseconds."""
        self.fill(round_index)
        self._line.cross()
        step_ns, late_ns = self._play(transfers=True)
        self.late_ns += late_ns
        return [step_ns]

    def _play(self, *, transfers: bool) -> tuple[int, list[int]]:
        """Play a step; return its nanoseconds, and how late each start was.

        The accelerator has its own queue and does not wait for a host that wakes late. So its clock adds up the
        computing times from the step's start, and only a transfer whose result it needs can delay it.
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
                        under_way[index] = self._starts[index]()
                case Await(index) if transfers:
                    under_way.pop(index).wait()
                    clock_ns = max(clock_ns, time.monotonic_ns())
        _sleep_until(clock_ns)
        return time.monotonic_ns() - started_ns, late_ns


def _sleep_until(moment_ns: int) -> int:
    """Sleep, return how late it became. No spinning: a machine may have fewer cores than ranks."""
    while (left_ns := moment_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)
    return -left_ns
