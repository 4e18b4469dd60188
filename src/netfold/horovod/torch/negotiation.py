"""Agree with the other ranks on which operations run next, and in which order.

Ranks submit named operations in any order and from any thread. A cycle finds the operations that every rank has
submitted, and every rank then runs these in the same order. The scheme is Horovod's (Sergeev and Del Balso 2018, and
its response cache), without a coordinator rank:

    1. An all_reduce (bitwise and) of one bit vector: a bit for each operation that all ranks know from before, set
       where this rank waits for that operation; and one bit that says whether this rank has operations that are new.
    2. Only where some rank has new operations: all ranks exchange the descriptions of these.

A cycle blocks until every rank takes part. A rank takes part while it waits for an operation, or has joined. Where a
cycle finds nothing, all ranks pause for up to 1 ms before the next. One thread at a time drives the cycles: a thread
that waits for its operation, or a background thread for asynchronous operations.

Descriptions that differ under one name end that operation on every rank, with an error that names both; the group
goes on. Torch-free: `execute` says what an operation that is ready means.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import msgpack
import numpy as np

from netfold.communicator import Communicator

log = logging.getLogger("netfold")

# Operations that ranks know each other's descriptions of; past that, an operation is described each time.
MAX_KNOWN = 8192
_PAUSE_S = 0.001
# Horovod's own bound: where ranks wait for different operations for so many seconds, the log names them.
STALL_WARNING_S = 60.0
_NOTHING_NEW = 1
# Operations that an error lists.
_MAX_NAMED = 5
# Descriptions that fit into a slot of this size travel with their length; one message is spared.
_SLOT_BYTES = 512
_LENGTH_BYTES = 8
# The operations that a joined rank can take part in: zeros change no sum, and a barrier has no values.
_WHILE_JOINED = ("allreduce", "barrier")


class HorovodInternalError(RuntimeError):
    """A collective operation failed. `netfold.horovod.torch.elastic.run` takes this as a reason to start over from the
    last commit."""


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
    members: tuple[str, ...] = ()  # what is in a bucket of gradients

    @property
    def key(self) -> str:
        """What the operation is matched by."""
        return f"{self.kind}.{self.name}"

    def packed(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def unpacked(cls, fields: list[Any]) -> Call:
        kind, name, op, dtypes, shapes, prescale, postscale, root, members = fields
        return cls(kind, name, op, tuple(dtypes), tuple(map(tuple, shapes)), prescale, postscale, root, tuple(members))


class Request:
    """One rank's part of an operation, from its submission until all ranks have submitted theirs."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.known: int | None = None  # the bit, where all ranks know this description
        self.negotiated = False
        self.error: Exception | None = None
        self.submitted_s = time.monotonic()


@dataclass(frozen=True)
class Ready:
    """An operation to run now. request: None on a rank that has joined."""

    call: Call
    request: Request | None


class Negotiation:
    """One set of ranks. Thread-safe."""

    def __init__(
        self, control: Communicator, execute: Callable[[list[Ready]], None], abort: Callable[[str], None]
    ) -> None:
        """control: used by nothing else. execute: begins the operations. abort: tells the other ranks that this one
        failed, and why."""
        self._control = control
        self._execute = execute
        self._abort = abort
        self._driving = threading.Lock()
        self._changed = threading.Condition()
        # By key: this rank's requests that are not ready yet, and those not yet described to other ranks.
        self._waiting: dict[str, Request] = {}
        self._new: list[Request] = []
        # What all ranks hold alike: descriptions by bit, bits by key, and by key what ranks have described so far.
        self._known: list[Call | None] = []
        self._bits: dict[str, int] = {}
        self._described: dict[str, dict[int, Call]] = {}
        self._joined: set[int] = set()
        self._last_joined = -1
        self._joining = False  # to be announced
        self._joins = False  # this rank, announced or not
        self._closed = False
        self._failure: Exception | None = None
        self._awake = False
        self._thread: threading.Thread | None = None
        self._warned_s = 0.0

    def submit(self, request: Request, *, background: bool) -> None:
        """Enqueue this rank's part. `background`: nobody waits for it yet, so a thread drives it. ValueError where an
        operation of this name waits already."""
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
            known = self._bits.get(key)
            if known is not None and self._known[known] == request.call:
                request.known = known
            else:
                self._new.append(request)
            self._waiting[key] = request
            if background:
                self._wake()
            else:
                self._changed.notify_all()

    def wait(self, request: Request) -> None:
        """Return when every rank has submitted its part; raises what befell the negotiation."""
        self._drive(lambda: request.negotiated)
        if request.error is not None:
            raise request.error

    def join(self) -> int:
        """Take part with zeros until every rank has joined; the rank that did so last."""
        with self._changed:
            self._check()
            self._joining = self._joins = True
        self._drive(lambda: not self._joins)
        return self._last_joined

    def close(self, reason: str = "shutdown() was called") -> None:
        """End: what still waits fails."""
        with self._changed:
            self._closed = True
            self._end(HorovodInternalError(f"rank {self._control.rank}: {reason}"))
        thread = self._thread
        # The thread may be inside the control group, which its close ends.
        self._control.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)

    # --- who drives ------------------------------------------------------------------------------------------------

    def _drive(self, until: Callable[[], bool]) -> None:
        while not until():
            if self._driving.acquire(blocking=False):
                try:
                    while not until():
                        self._step()
                finally:
                    self._driving.release()
                    with self._changed:
                        self._check_leftovers()
            else:
                # Another thread drives: see to it that one still does when that thread has what it wants.
                with self._changed:
                    if not until():
                        self._wake()
                        self._changed.wait(1.0)
            if self._failure is not None and not until():
                raise self._failure

    def _check_leftovers(self) -> None:
        if self._waiting and not self._closed:
            self._wake()

    def _wake(self) -> None:
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
                    # Every request holds the failure; so does whatever is submitted from now on.
                    log.debug("the thread that negotiates ends", exc_info=True)

    def _step(self) -> None:
        """One cycle, and the pause where it found nothing."""
        self._check()
        try:
            found = self._cycle()
        except BaseException as error:
            # Also on KeyboardInterrupt: the ranks are no longer at the same place.
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
        """End because of `error`: everything under way and to come fails. Returns what it fails with."""
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
        # Tell the other ranks why, so that they do not wait for their deadlines.
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
        """Whether anything was new or became ready, on any rank."""
        with self._changed:
            new, self._new = self._new, []
            joining, self._joining = self._joining, False
            mine = np.zeros(1 + (len(self._known) + 7) // 8, np.uint8)
            if self._joins and not joining:
                mine[1:] = 255
            else:
                bits = [request.known for request in self._waiting.values() if request.known is not None]
                if bits:
                    flags = np.zeros(8 * (len(mine) - 1), np.uint8)
                    flags[bits] = 1
                    mine[1:] = np.packbits(flags, bitorder="little")
            if not new and not joining:
                mine[0] = _NOTHING_NEW
        self._control.all_reduce(mine, op="band")
        everywhere = np.unpackbits(mine[1:], bitorder="little").nonzero()[0]
        # Ascending: the order is the same on every rank.
        ready = [call for bit in everywhere.tolist() if bit < len(self._known) and (call := self._known[bit])]
        if not mine[0] & _NOTHING_NEW:
            self._exchange(new, joining)
            for key in [key for key, by_rank in self._described.items() if self._complete(by_rank)]:
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
        """Tell all ranks what is new here, and hear the same of them."""
        payload = msgpack.packb([joining, [request.call.packed() for request in new]])
        mine = np.zeros(_SLOT_BYTES, np.uint8)
        mine[:_LENGTH_BYTES].view(np.int64)[0] = len(payload)
        if len(payload) <= _SLOT_BYTES - _LENGTH_BYTES:
            mine[_LENGTH_BYTES : _LENGTH_BYTES + len(payload)] = np.frombuffer(payload, np.uint8)
        slots = self._control.all_gather(mine)
        lengths = slots[:, :_LENGTH_BYTES].copy().view(np.int64)[:, 0].tolist()
        theirs = [slot[_LENGTH_BYTES : _LENGTH_BYTES + length] for slot, length in zip(slots, lengths, strict=True)]
        if max(lengths) > _SLOT_BYTES - _LENGTH_BYTES:
            theirs = [np.empty(length, np.uint8) for length in lengths]
            self._control.all_gather(np.frombuffer(payload, np.uint8), theirs)
        for rank, packed in enumerate(theirs):
            joins, calls = msgpack.unpackb(packed.tobytes())
            if joins:
                self._joined.add(rank)
                self._last_joined = rank
            for fields in calls:
                call = Call.unpacked(fields)
                self._forget(call.key)
                self._described.setdefault(call.key, {})[rank] = call

    def _forget(self, key: str) -> None:
        """A rank describes an operation that all know otherwise: everybody describes it anew."""
        bit = self._bits.pop(key, None)
        if bit is None:
            return
        self._known[bit] = None
        with self._changed:
            request = self._waiting.get(key)
            if request is not None and request.known == bit:
                request.known = None
                self._new.append(request)

    def _learn(self, call: Call) -> None:
        if ".noname." in call.key or len(self._bits) >= MAX_KNOWN:
            return
        holes = len(self._known) - len(self._bits)
        bit = self._known.index(None) if holes else len(self._known)
        if not holes:
            self._known.append(None)
        self._known[bit] = call
        self._bits[call.key] = bit

    def _complete(self, by_rank: dict[int, Call]) -> bool:
        return len(by_rank.keys() | self._joined) == self._control.size

    def _agreed(self, by_rank: dict[int, Call]) -> Call | None:
        """The description that all ranks gave; None, with the error at this rank's request, where they differ."""
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
                    f"{call.kind} {call.op} {call.name!r} cannot run while rank {min(self._joined)} has joined: it has "
                    "no values to give; only sums, averages and barriers can",
                )
            else:
                allowed.append(call)
        with self._changed:
            ready = [Ready(call, self._waiting.pop(call.key, None)) for call in allowed]
        if ready:
            self._execute(ready)
        with self._changed:
            for each in ready:
                if each.request is not None:
                    each.request.negotiated = True
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
    """Which fields differ, in words."""
    words = {
        "op": "reduces by {}",
        "dtypes": "sends {}",
        "shapes": "sends shapes {}",
        "prescale": "scales before by {}",
        "postscale": "scales after by {}",
        "root": "names root rank {}",
        "members": "has the parameters {}",
    }
    for field, text in words.items():
        mine, theirs = getattr(one, field), getattr(other, field)
        if mine != theirs:
            if isinstance(mine, tuple):
                mine, theirs = ", ".join(map(str, mine)), ", ".join(map(str, theirs))
            return f"rank {rank} {text.format(mine)}, rank {other_rank} {text.format(theirs)}"
    return f"rank {rank} and rank {other_rank} differ"
