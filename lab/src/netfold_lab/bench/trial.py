"""One backend's buffers for one collective and size on one rank: filled, called, checked."""

import itertools
import time

from netfold_lab.bench.backends import Backend, RefusedError
from netfold_lab.bench.collectives import COLLECTIVES, Collective, expected
from netfold_lab.bench.sizes import DTYPES, parse_dtype
from netfold_lab.bench.start_line import StartLine
from netfold_lab.bench.test_data import MessageData, byte_bound, encode, fill, mismatches

# These collectives have one buffer only.
_ALWAYS_IN_PLACE = ("broadcast", "barrier")


class Call:
    """The buffers of one call of a collective.

    count: elements of the larger buffer.
    start: where the call's values begin in the test message.
    """

    def __init__(
        self, backend: Backend, collective: Collective, count: int, ranks: int, dtype: str, start: int = 0
    ) -> None:
        self.collective, self.count, self.start = collective, count, start
        self.receive = self.send = backend.empty(collective.receive_count(count, ranks), dtype)
        if not (collective.in_place and (backend.in_place or collective.name in _ALWAYS_IN_PLACE)):
            self.send = backend.empty(collective.send_count(count, ranks), dtype)


class CheckedCalls:
    """Calls whose buffers are filled before and checked, in every element, after a round.

    wire: the wire format that the backend was asked for; "": its own choice, which loses nothing.
    tolerance: the largest error of a sum that is not counted as wrong; above 0 only where the wire format is i8.
    """

    def __init__(self, rank: int, ranks: int, dtype: str, redop: str, wire: str) -> None:
        self.rank, self.ranks, self.dtype = rank, ranks, dtype
        self.calls: list[Call] = []
        self._data, self.tolerance = make_message_data(redop, wire, dtype, ranks)

    def fill(self, round_index: int) -> None:
        """Write this rank's values into what it sends, and zeros into separate receive buffers.

        The zeros keep the results of the previous round from passing for new ones.
        """
        period = encode(self._data.sent(self.rank, round_index), self.dtype)
        for call in self.calls:
            if call.receive is not call.send:
                call.receive.values.fill(0)
            fill(call.send.values, period, call.start)

    def wrong_elements(self, round_index: int) -> int:
        """Count the received elements of all calls that are not what the ranks' values make."""
        wrong = 0
        periods = {}
        for call in self.calls:
            at = 0
            for segment in expected(call.collective, self.rank, self.ranks, call.count):
                source = segment.source
                if source not in periods:
                    data = self._data
                    numbers = data.reduced(round_index) if source is None else data.sent(source, round_index)
                    periods[source] = encode(numbers, self.dtype)
                received = call.receive.values[at : at + segment.count]
                tolerance = self.tolerance if source is None else 0.0
                wrong += mismatches(received, periods[source], call.start + segment.start, tolerance)
                at += segment.count
        return wrong


class Trial(CheckedCalls):
    """The calls of a burst, each on buffers of its own, all with the same values. Raises RefusedError."""

    def __init__(
        self,
        backend: Backend,
        line: StartLine,
        rank: int,
        ranks: int,
        *,
        collective: str,
        size_bytes: int,
        dtype: str,
        redop: str,
        wire: str,
        calls: int,
    ) -> None:
        what = COLLECTIVES[collective]
        # Everything else travels unchanged, whatever wire format was asked for (docs/explanation/numbers.md).
        wire = wire if collective == "all_reduce" and dtype == "f32" else ""
        super().__init__(rank, ranks, dtype, redop if what.reduces else "none", wire)
        self.cross = line.cross
        self.count = what.whole_count(size_bytes, parse_dtype(dtype).item_bytes, ranks)
        self.calls = [Call(backend, what, self.count, ranks, dtype) for _ in range(calls)]
        self._bound = [backend.bind(what, redop, call.send, call.receive) for call in self.calls]

    def burst(self, round_index: int) -> list[int]:
        """Make the calls one after the other, from the start line; return the nanoseconds of each."""
        self.fill(round_index)
        self.cross()
        stamps = [time.perf_counter_ns()]
        for call in self._bound:
            call()
            stamps.append(time.perf_counter_ns())
        return [after - before for before, after in itertools.pairwise(stamps)]

    def call_all(self) -> int:
        """Make every call once, untimed; return their number."""
        for call in self._bound:
            call()
        return len(self._bound)

    def run_once(self) -> None:
        """Make every call once, untimed: connections are made, and a backend that cannot do this raises."""
        self.fill(0)
        self.call_all()


def make_message_data(redop: str, wire: str, dtype: str, ranks: int) -> tuple[MessageData, float]:
    """Return numbers that the dtype and the wire format keep exactly, and 0; for a sum in i8, the bound of its error.

    Raises RefusedError where the dtype is too narrow for so many ranks.
    """
    exact_below = parse_dtype(dtype).exact_below
    if wire in ("bf16", "f16"):
        exact_below = min(exact_below, DTYPES[wire].exact_below)
    try:
        data = MessageData.of(redop, ranks, exact_below)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    if wire != "i8" or redop not in ("sum", "avg"):
        return data, 0.0
    return data, byte_bound(ranks, data.largest) / (ranks if redop == "avg" else 1)
