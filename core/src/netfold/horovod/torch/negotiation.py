"""Agree with the other ranks on the operations to run next, and on their order.

Ranks submit named operations in any order and from any thread. A cycle finds the operations that every rank has
submitted. Every rank then runs these operations in the same order. The scheme is Horovod's (Sergeev and Del Balso 2018,
and its response cache), without a coordinator rank:

    1. An all_reduce (bitwise and) of one bit vector. The vector has a bit for each operation that all ranks know, set
       if this rank waits for that operation. One more bit is set if this rank has no new operation.
    2. Only if some rank has a new operation: all ranks exchange the descriptions of their new operations.

A cycle blocks until every rank takes part. A rank takes part while it waits for an operation, or has joined. After a
cycle that finds nothing, all ranks pause for up to 1 ms. One thread at a time drives the cycles: a thread that waits
for its operation, or a background thread for asynchronous operations.

Descriptions that differ under one name end that operation on every rank, with an error that names both ranks. Later
operations proceed. This module does not use torch: its caller passes `execute`, which runs the operations.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import msgpack
import numpy as np

from netfold.communicator import Communicator

log = logging.getLogger("netfold")

# The most operations whose descriptions ranks remember. Ranks describe further operations each time.
MAX_KNOWN = 8192
_PAUSE_S = 0.001
# Horovod's own bound: after this time, the log names operations that wait for other ranks.
STALL_WARNING_S = 60.0
# The most operations that an error lists.
_MAX_NAMED = 5
# The bit vector's first byte has the bit for "nothing new". The operations' bits follow.
_FIRST_BIT = 8
# Descriptions that fit into a slot of this size travel with their length, which saves a message.
_SLOT_BYTES = 512
_LENGTH_BYTES = 8
# The operations that a joined rank can take part in: zeros change no sum, and a barrier has no values.
_WHILE_JOINED = ("allreduce", "barrier")


class HorovodInternalError(RuntimeError):
    """A collective operation failed. `netfold.horovod.torch.elastic.run` then restarts from the last commit."""


@dataclass(frozen=True)
class Call:
    """The part of an operation on which all ranks must agree."""

    kind: str  # allreduce, allgather, broadcast, alltoall, reducescatter, barrier
    name: str
    op: str = ""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()  # without the first dimension where that may differ between ranks
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    members: tuple[str, ...] = ()  # the names of the parameters in a bucket of gradients

    @property
    def key(self) -> str:
        """Ranks match operations by this key."""
        return f"{self.kind}.{self.name}"


class Request:
    """One rank's part of an operation, from its submission until all ranks have submitted their parts."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.bit: int | None = None  # in the bit vector, if all ranks know this description
        self.negotiated = False
        self.error: Exception | None = None
        self.submitted_s = time.monotonic()


# An operation to run now; without a request on a rank that has joined.
Ready = tuple[Call, Request | None]


class Negotiation:
    """The negotiation of one set of ranks. Thread-safe."""

    def __init__(
        self, control: Communicator, execute: Callable[[list[Ready]], None], abort: Callable[[str], None]
    ) -> None:
        """Begin with no operation known.

        control: a group for the cycles. `execute` may use it, no other code.
        execute: begins operations.
        abort: sends the other ranks the reason of this rank's failure.
        """
        self._control = control
        self._execute = execute
        self._abort = abort
        self._driving = threading.Lock()
        self._changed = threading.Condition()
        # This rank's requests that are not ready, by key, and those that other ranks have no description of.
        self._waiting: dict[str, Request] = {}
        self._new: list[Request] = []
        # The same on all ranks: descriptions by bit, bits by key, and the ranks' new descriptions by key and rank.
        self._known: list[Call | None] = []
        self._bits: dict[str, int] = {}
        self._described: dict[str, dict[int, Call]] = {}
        self._joined: set[int] = set()
        self._last_joined = -1
        self._joining = False  # this rank has joined, and the next cycle announces that
        self._joins = False  # this rank has joined
        self._closed = False
        self._failure: Exception | None = None
        self._awake = False
        self._thread: threading.Thread | None = None
        self._warned_s = 0.0

    def submit(self, request: Request, *, background: bool) -> None:
        """Enqueue this rank's part of an operation. ValueError if an operation of this name waits already.

        background: no thread waits for the operation yet, so the background thread drives the cycles.
        """
        with self._changed:
            self._check()
            if self._joins:
                raise ValueError(f"rank {self._control.rank} has joined: it submits nothing until all ranks have")
            key = request.call.key
            if key in self._waiting:
                raise ValueError(
                    f"{request.call.kind}: an operation named {request.call.name!r} waits for other ranks already; "
                    "give each operation under way a name of its own, or synchronize the first one"
                )
            bit = self._bits.get(key)
            if bit is not None and self._known[bit] == request.call:
                request.bit = bit
            else:
                self._new.append(request)
            self._waiting[key] = request
            if background:
                self._wake()
            else:
                self._changed.notify_all()

    def wait(self, request: Request) -> None:
        """Return when every rank has submitted its part. Raises the error of the operation or of the negotiation."""
        self._drive(lambda: request.negotiated)
        if request.error is not None:
            raise request.error

    def join(self) -> int:
        """Take part with zeros until every rank has joined. Returns the last rank to join."""
        with self._changed:
            self._check()
            self._joining = self._joins = True
        self._drive(lambda: not self._joins)
        return self._last_joined

    def close(self, reason: str = "shutdown() was called") -> None:
        """End the negotiation. Waiting operations fail."""
        with self._changed:
            self._closed = True
            self._end(HorovodInternalError(f"rank {self._control.rank}: {reason}"))
        thread = self._thread
        # The thread may wait inside the control group. Closing the group ends the wait.
        self._control.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)

    # --- driving the cycles ----------------------------------------------------------------------------------------

    def _drive(self, until: Callable[[], bool]) -> None:
        while not until():
            if self._driving.acquire(blocking=False):
                try:
                    while not until():
                        self._step()
                finally:
                    self._driving.release()
                    with self._changed:
                        if self._waiting and not self._closed:
                            self._wake()
            else:
                # Another thread drives, and stops once its own operation is negotiated. Have the background thread
                # drive from then on.
                with self._changed:
                    if not until():
                        self._wake()
                        self._changed.wait(1.0)
            if self._failure is not None and not until():
                raise self._failure

    def _wake(self) -> None:
        """Have the background thread drive the cycles. The caller holds `_changed`."""
        self._awake = True
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="netfold horovod", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._awake or self._closed)
                if self._closed:
                    return
                self._awake = False
            with self._driving:
                try:
                    while (self._waiting or self._joins) and not self._closed:
                        self._step()
                except Exception:
                    # Every request holds the failure, and later requests get it, too.
                    log.debug("the negotiation failed", exc_info=True)

    def _step(self) -> None:
        """Run one cycle, and pause if it found nothing."""
        self._check()
        try:
            found = self._cycle()
        except BaseException as error:
            # Also on KeyboardInterrupt: the ranks are no longer in the same cycle.
            failure = self.fail(error)
            if isinstance(error, Exception):
                raise failure from error
            raise
        if not found:
            with self._changed:
                self._warn_of_stalls()
                if not self._new:
                    self._changed.wait(_PAUSE_S)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> Exception:
        """End the negotiation because of `error`. Returns the failure of all operations under way and later."""
        with self._changed:
            if self._failure is not None:
                return self._failure
            text = f"{type(error).__name__}: {error}"
            if self._waiting:
                keys = list(self._waiting)
                more = "" if len(keys) <= _MAX_NAMED else f" and {len(keys) - _MAX_NAMED} more"
                text += f"; under way here: {', '.join(keys[:_MAX_NAMED])}{more}"
            failure = HorovodInternalError(text)
            self._end(failure)
        # Send the other ranks the reason, so that they do not wait for their deadlines.
        self._abort(text)
        return failure

    def _end(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        for request in self._waiting.values():
            request.error = self._failure
            request.negotiated = True
        self._waiting.clear()
        self._new.clear()
        self._changed.notify_all()

    # --- a cycle ---------------------------------------------------------------------------------------------------

    def _cycle(self) -> bool:
        """Run one cycle. Returns whether any rank had a new operation, or an operation became ready."""
        with self._changed:
            new, self._new = self._new, []
            joining, self._joining = self._joining, False
            flags = np.zeros(_FIRST_BIT + len(self._known), np.uint8)
            flags[0] = not new and not joining
            if self._joins and not joining:
                flags[_FIRST_BIT:] = 1
            else:
                flags[[_FIRST_BIT + request.bit for request in self._waiting.values() if request.bit is not None]] = 1
        vector = np.packbits(flags, bitorder="little")
        self._control.all_reduce(vector, op="band")
        flags = np.unpackbits(vector, count=len(flags), bitorder="little")
        # Ascending: the order is the same on every rank.
        ready = [call for bit in flags[_FIRST_BIT:].nonzero()[0].tolist() if (call := self._known[bit])]
        if not flags[0]:
            self._exchange(new, joining)
            size, joined = self._control.size, self._joined
            for key in [key for key, by_rank in self._described.items() if len(by_rank.keys() | joined) == size]:
                call = self._agreed(self._described.pop(key))
                if call is not None:
                    ready.append(call)
                    self._learn(call)
        elif not ready:
            return False
        self._begin(ready)
        if len(self._joined) == self._control.size:
            with self._changed:
                self._joined.clear()
                self._joins = False
                self._changed.notify_all()
        return True

    def _exchange(self, new: list[Request], joining: bool) -> None:
        """Exchange the descriptions of new operations with all ranks."""
        payload = msgpack.packb([joining, [astuple(request.call) for request in new]])
        own = np.zeros(_SLOT_BYTES, np.uint8)
        own[:_LENGTH_BYTES].view(np.int64)[0] = len(payload)
        if len(payload) <= _SLOT_BYTES - _LENGTH_BYTES:
            own[_LENGTH_BYTES : _LENGTH_BYTES + len(payload)] = np.frombuffer(payload, np.uint8)
        slots = self._control.all_gather(own)
        lengths = slots[:, :_LENGTH_BYTES].copy().view(np.int64)[:, 0].tolist()
        payloads = [slot[_LENGTH_BYTES : _LENGTH_BYTES + length] for slot, length in zip(slots, lengths, strict=True)]
        if max(lengths) > _SLOT_BYTES - _LENGTH_BYTES:
            payloads = [np.empty(length, np.uint8) for length in lengths]
            self._control.all_gather(np.frombuffer(payload, np.uint8), payloads)
        for rank, packed in enumerate(payloads):
            joins, calls = msgpack.unpackb(packed.tobytes(), use_list=False)
            if joins:
                self._joined.add(rank)
                self._last_joined = rank
            for fields in calls:
                call = Call(*fields)
                self._forget(call.key)
                self._described.setdefault(call.key, {})[rank] = call

    def _forget(self, key: str) -> None:
        """Forget an operation, after a rank has described it differently. All ranks describe it again."""
        bit = self._bits.pop(key, None)
        if bit is None:
            return
        self._known[bit] = None
        with self._changed:
            request = self._waiting.get(key)
            if request is not None and request.bit == bit:
                request.bit = None
                self._new.append(request)

    def _learn(self, call: Call) -> None:
        """Give an operation a bit; not an unnamed operation, whose name never comes again."""
        if ".noname." in call.key or len(self._bits) >= MAX_KNOWN:
            return
        holes = len(self._known) - len(self._bits)
        bit = self._known.index(None) if holes else len(self._known)
        if not holes:
            self._known.append(None)
        self._known[bit] = call
        self._bits[call.key] = bit

    def _agreed(self, by_rank: dict[int, Call]) -> Call | None:
        """Return the description that all ranks gave. If they differ, end this rank's request and return None."""
        first = min(by_rank)
        call = by_rank[first]
        for rank in sorted(by_rank):
            if by_rank[rank] != call:
                self._refuse(call.key, f"{call.kind} {call.name!r}: {_difference(first, call, rank, by_rank[rank])}")
                return None
        return call

    def _refuse(self, key: str, text: str) -> None:
        with self._changed:
            request = self._waiting.pop(key, None)
            if request is not None:
                request.error = HorovodInternalError(text)
                request.negotiated = True
                self._changed.notify_all()

    def _begin(self, calls: list[Call]) -> None:
        allowed = []
        for call in calls:
            if self._joined and (call.kind not in _WHILE_JOINED or call.op not in ("", "avg", "sum")):
                self._refuse(
                    call.key,
                    f"{call.kind} {call.op} {call.name!r} cannot run while rank {min(self._joined)} has joined, since "
                    "that rank has no values for it; only sums, averages and barriers can",
                )
            else:
                allowed.append(call)
        with self._changed:
            ready = [(call, self._waiting.pop(call.key, None)) for call in allowed]
        if ready:
            self._execute(ready)
        with self._changed:
            for _, request in ready:
                if request is not None:
                    request.negotiated = True
            self._changed.notify_all()

    def _warn_of_stalls(self) -> None:
        now = time.monotonic()
        if now - self._warned_s < STALL_WARNING_S:
            return
        overdue = {key: r for key, r in self._waiting.items() if now - r.submitted_s > STALL_WARNING_S}
        if overdue:
            self._warned_s = now
            for key in overdue:
                absent = sorted(set(range(self._control.size)) - self._described.get(key, {}).keys() - self._joined)
                log.warning(
                    "rank %d: %s waits for more than %.0f s%s",
                    self._control.rank,
                    key,
                    STALL_WARNING_S,
                    f"; ranks {absent} have not submitted it" if key in self._described else "",
                )


def _difference(rank: int, one: Call, other_rank: int, other: Call) -> str:
    """Describe the first field that differs."""
    texts = {
        "op": "reduces by {}",
        "dtypes": "sends {}",
        "shapes": "sends shapes {}",
        "prescale": "scales before by {}",
        "postscale": "scales after by {}",
        "root": "names root rank {}",
        "members": "has the parameters {}",
    }
    for field, text in texts.items():
        value, other_value = getattr(one, field), getattr(other, field)
        if value != other_value:
            if isinstance(value, tuple):
                value, other_value = ", ".join(map(str, value)), ", ".join(map(str, other_value))
            return f"rank {rank} {text.format(value)}, rank {other_rank} {text.format(other_value)}"
    return f"rank {rank} and rank {other_rank} differ"
