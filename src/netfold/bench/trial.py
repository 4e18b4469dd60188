"""One backend's buffers for one collective and size on one rank: filled, called, checked."""

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from netfold.bench.backends import Backend, Buffer, RefusedError
from netfold.bench.collectives import COLLECTIVES, expected
from netfold.bench.sizes import DTYPES, parse_dtype
from netfold.bench.start_line import StartLine
from netfold.bench.test_data import MessageData, byte_bound, encode, fill, mismatches

# There is no other way to run these than in the one buffer.
_ALWAYS_IN_PLACE = ("broadcast", "barrier")


class Task(NamedTuple):
    """wire: what the backend was asked to send f32 as; empty: whatever it takes, which loses nothing."""

    collective: str
    size_bytes: int
    dtype: str
    calls: int
    redop: str = "sum"
    wire: str = ""


class Trial:
    """`calls` calls a burst, each on buffers of its own.

    tolerance: by how much an element may be off; 0 for all but wire formats that round at random. Raises RefusedError.
    """

    def __init__(self, backend: Backend, line: StartLine, rank: int, ranks: int, task: Task) -> None:
        self.rank, self.ranks, self.dtype = rank, ranks, task.dtype
        self.collective = COLLECTIVES[task.collective]
        self._line = line
        dtype = parse_dtype(self.dtype)
        self.count = self.collective.whole_count(task.size_bytes, dtype.item_bytes, self.ranks)
        redop = task.redop if self.collective.reduces else "none"
        # Nothing else ever travels as anything but itself (docs/explanation/numbers.md), whatever was asked for.
        wire = task.wire if task.collective == "all_reduce" and self.dtype == "f32" else ""
        self._pattern, self.tolerance = make_message_data(redop, wire, self.dtype, self.ranks)
        self._pieces = expected(self.collective, self.rank, self.ranks, self.count)
        in_place = self.collective.in_place and (backend.in_place or task.collective in _ALWAYS_IN_PLACE)
        self._buffers: list[tuple[Buffer, Buffer]] = []
        for _ in range(task.calls):
            receive = backend.empty(self.collective.receive_count(self.count, self.ranks), self.dtype)
            send = receive
            if not in_place:
                send = backend.empty(self.collective.send_count(self.count, self.ranks), self.dtype)
            self._buffers.append((send, receive))
        self._calls: list[Callable[[], object]] = [
            backend.bind(self.collective, task.redop, send, receive) for send, receive in self._buffers
        ]

    def burst(self, round_index: int) -> list[int]:
        """Nanoseconds of each call, one after the other, from the start line."""
        self.fill(round_index)
        self._line.cross()
        stamps = [time.perf_counter_ns()]
        for call in self._calls:
            call()
            stamps.append(time.perf_counter_ns())
        return [after - before for before, after in itertools.pairwise(stamps)]

    def call_all(self) -> int:
        """Every call once, untimed; how many there were."""
        for call in self._calls:
            call()
        return len(self._calls)

    def fill(self, round_index: int) -> None:
        """Ours into what is sent; zeros where something else is received, so that old results do not pass for new."""
        ours = encode(self._pattern.sent(self.rank, round_index), self.dtype)
        for send, receive in self._buffers:
            if receive is not send:
                receive.values.fill(0)
            fill(send.values, ours)

    def wrong_elements(self, round_index: int) -> int:
        wrong = 0
        for piece in self._pieces:
            numbers = (
                self._pattern.reduced(round_index)
                if piece.source is None
                else self._pattern.sent(piece.source, round_index)
            )
            period = encode(numbers, self.dtype)
            # A rank's parts lie behind each other in the order of their sources.
            offset = piece.count * piece.source if len(self._pieces) > 1 and piece.source is not None else 0
            for _, receive in self._buffers:
                part = receive.values[offset : offset + piece.count]
                wrong += mismatches(part, period, piece.start, self.tolerance)
        return wrong

    def run_once(self) -> None:
        """Every call once, untimed: connections are made, and who cannot do this says so."""
        self.fill(0)
        self.call_all()


def make_message_data(redop: str, wire: str, dtype: str, ranks: int) -> tuple[MessageData, float]:
    """Numbers that the dtype and the wire format keep exactly, and 0; or, of a sum by i8, the bound of its error.

    Raises RefusedError where the dtype is too narrow for so many ranks.
    """
    exact_below = parse_dtype(dtype).exact_below
    if wire in ("bf16", "f16"):
        exact_below = min(exact_below, DTYPES[wire].exact_below)
    try:
        pattern = MessageData.of(redop, ranks, exact_below)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    if wire != "i8" or redop not in ("sum", "avg"):
        return pattern, 0.0
    return pattern, byte_bound(ranks, pattern.largest) / (ranks if redop == "avg" else 1)
