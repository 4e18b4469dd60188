"""What a group's ranks do for each other beside its operations: make broken connections again, and tell what they do.

One thread a process sleeps until the engine has news: a connection broke, or an operation waits longer than usual. Each
piece of news is looked into on a thread of its own, by way of the other ranks' listeners:

    broken  the rank that had connected knocks again and both go on from where the other stands; the other pokes it. Who
            finds no such group there, or nobody, or no way in time, gives the connection up, with that as the reason.
    late    those who are waited for, and others, are asked what they do. One that has failed, or made another call in
            this one's place, ends the wait at once; of a long one the log tells.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from netfold._native import engine
from netfold.bootstrap import handshake, rendezvous
from netfold.bootstrap.handshake import CALL, Hello
from netfold.bootstrap.listener import RegisteredGroup, RequestHandler
from netfold.bootstrap.rendezvous import PeerAddresses
from netfold.bootstrap.secure_stream import mesh_secrets
from netfold.errors import RendezvousError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_messages import format_endpoint

log = logging.getLogger("netfold")

# Asking is for people who wait: an answer that takes longer is as good as none.
QUERY_TIMEOUT_S = 1.0
_MOST_ASKED = 16
_LOG_FROM_S = 10.0
_RETRY_S = 0.1
_REQUEST_RECONNECT_S = 2.0
_IDLE_NS = 60_000_000_000
_END_S = 2.0
_FAILURES: tuple[str, ...] = engine.FAILURES


@dataclass
class GroupMonitor:
    """One end of a group, under care."""

    native: Any
    registered_group: RegisteredGroup
    peer_addresses: PeerAddresses
    reconnect_s: float
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # What else other ranks may ask (recovery.py), by type.
    handlers: dict[str, RequestHandler] = field(default_factory=dict)
    reconnecting: set[tuple[int, int, int, int]] = field(default_factory=set)  # lane, peer, rail, mends before
    # Set when this rank closes the group: the failure before that, in a tuple of one.
    _left_with: tuple[Any] | None = None

    def mark_closed(self) -> Any:
        """This rank closes the group, which is no failure. Returns the failure that there was before, if any."""
        self._left_with = (self.native.failure,)
        return self._left_with[0]

    @property
    def failure(self) -> Any:
        """What befell this end of the group; None while it works, and where it was only closed."""
        return self.native.failure if self._left_with is None else self._left_with[0]

    @property
    def rank(self) -> int:
        return self.registered_group.rank

    def call(
        self, peer: int, rail: int, message: control_messages.Message, timeout_s: float
    ) -> tuple[Any, control_messages.Message]:
        """Ask a rank's listener; the connection, and the reply. RendezvousError, TimeoutError, OSError, EOFError."""
        hello = Hello(
            CALL,
            handshake.token_of(self.registered_group.secret),
            self.rank,
            peer,
            self.registered_group.size,
            rail=rail,
            security=self.registered_group.security,
        )
        stream = rendezvous.connect(
            self.peer_addresses, hello, self.registered_group.secret, time.monotonic() + timeout_s
        )
        try:
            stream.settimeout(timeout_s)
            control_messages.send(stream, message)
            return stream, control_messages.receive(stream)
        except BaseException:
            stream.close()
            raise

    def handle_request(self, peer: int, question: control_messages.Message) -> tuple[control_messages.Message, Any]:
        """What this rank says to another's question (listener.RequestHandler)."""
        if question["type"] in self.handlers:
            return self.handlers[question["type"]](peer, question)
        if question["type"] == "query":
            return {
                "type": "status",
                "recent_call": self.native.recent_call(question["sequence"]),
                "activity": self.native.last_seen(),
                "calls": self.native.collectives_submitted,
                "failure": self.failure,
                "expired": self.native.expired,
            }, None
        lane, rail = question["lane"], question["rail"]
        requested = question["type"] == "request_reconnect"
        broken = self.native.disconnect(lane, peer, rail, question["reconnects"] if requested else -1)
        failure = self.failure
        if requested and failure is None:
            _manager.start_task(partial(self.reconnect, lane, peer, rail))
            return {"type": "will_reconnect"}, None
        if requested or broken is None:
            return {"type": "ended", "failure": failure, "expired": self.native.expired}, None

        def go_on(stream: Any) -> None:
            # The listener closes its own end of the descriptor.
            secrets = mesh_secrets(stream)
            end = os.dup(stream.fileno())
            if self.native.reconnect(lane, peer, rail, broken[1], end, question["received"], secrets):
                self._log_reconnected(lane, peer, rail, stream)

        return {"type": "reconnect", "received": broken[0]}, go_on

    def reconnect(self, lane: int, peer: int, rail: int) -> None:
        """Make a connection again that is broken, or give it up."""
        broken = self.native.broken(lane, peer, rail)
        if broken is None:
            return
        received, mends = broken
        place = (lane, peer, rail, mends)
        with self.lock:
            if place in self.reconnecting:
                return
            self.reconnecting.add(place)
        try:
            # Another thread may have come and gone since we looked; from here on only this one changes it.
            if self.native.broken(lane, peer, rail) == broken:
                self._reconnect(lane, peer, rail, received, mends)
        finally:
            with self.lock:
                self.reconnecting.discard(place)

    def _reconnect(self, lane: int, peer: int, rail: int, received: int, mends: int) -> None:
        began = time.monotonic()
        log.warning("rank %d: the connection to rank %d broke (lane %d, rail %d)", self.rank, peer, lane, rail)
        why = ""
        while time.monotonic() < began + self.reconnect_s and not self.ended.is_set():
            left_s = began + self.reconnect_s - time.monotonic()
            try:
                if self.rank < peer:
                    # The other had connected, and may not have noticed.
                    stream, reply = self.call(
                        peer,
                        rail,
                        {**_about("request_reconnect", lane, rail), "reconnects": mends},
                        min(left_s, _REQUEST_RECONNECT_S),
                    )
                    stream.close()
                    if reply["type"] == "will_reconnect":
                        # It has some time for that, then it is asked again: it may have ended meanwhile.
                        until = min(time.monotonic() + _REQUEST_RECONNECT_S, began + self.reconnect_s)
                        while time.monotonic() < until and not self.ended.wait(_RETRY_S):
                            if self.native.broken(lane, peer, rail) != (received, mends):
                                return
                        why = "it did not connect again"
                        continue
                else:
                    message = {**_about("reconnect", lane, rail), "received": received}
                    stream, reply = self.call(peer, rail, message, left_s)
                    if reply["type"] == "reconnect":
                        self._log_reconnected(lane, peer, rail, stream)
                        secrets = mesh_secrets(stream)
                        self.native.reconnect(lane, peer, rail, mends, stream.detach(), reply["received"], secrets)
                        return
                    stream.close()
                if reply["failure"] is not None:
                    return self._hear(peer, reply)
                why = "it closed the group"
                break
            except RendezvousError as error:
                why = str(error)
                break
            except (OSError, EOFError) as error:
                why = f"no new connection came about ({error})"
                self.ended.wait(_RETRY_S)
        waited_s = time.monotonic() - began
        self.native.give_up(lane, peer, rail, mends, f"after {waited_s:.1f} s of trying to make it again: {why}")

    def _hear(self, peer: int, reply: control_messages.Message) -> None:
        """After a failure nobody goes on: what a rank says that befell it."""
        _, fault, why = reply["failure"]
        fault = fault if fault not in (-1, self.rank) else peer
        text = f"rank {peer} gave up on the group: {why}"
        self.native.fail(_FAILURES.index("peer_lost"), fault, text, expired_of(reply))

    def _log_reconnected(self, lane: int, peer: int, rail: int, stream: Any) -> None:
        here, there = (format_endpoint(*end[:2]) for end in (stream.getsockname(), stream.getpeername()))
        where = f"lane {lane}, rail {rail}, {here} to {there}"
        log.warning("rank %d: the connection to rank %d was made again (%s)", self.rank, peer, where)

    def query_status(self, ranks: Iterable[int], sequence: int = 0) -> dict[int, control_messages.Message]:
        """What each of some ranks says it does, within a second; why it says nothing, where it does not."""
        pool = ThreadPoolExecutor(_MOST_ASKED, "netfold asks")
        try:
            asked = {rank: pool.submit(self._ask, rank, sequence) for rank in list(ranks)[:_MOST_ASKED]}
            done, _ = wait(asked.values(), QUERY_TIMEOUT_S + 0.2)
            silent = {"type": "no_reply", "activity": "not answering (stopped, or its host cannot be reached)"}
            return {rank: future.result() if future in done else silent for rank, future in asked.items()}
        finally:
            pool.shutdown(wait=False)

    def _ask(self, peer: int, sequence: int) -> control_messages.Message:
        try:
            stream, reply = self.call(peer, 0, {"type": "query", "sequence": sequence}, QUERY_TIMEOUT_S)
        except RendezvousError:
            return {"type": "gone", "activity": "gone: nobody of this group listens at its address"}
        except (OSError, EOFError):
            return {"type": "no_reply", "activity": "not answering (stopped, or its host cannot be reached)"}
        stream.close()
        if reply["type"] == "ended":
            failure = reply["failure"]
            return {**reply, "activity": "gone: " + ("it closed the group" if failure is None else failure[2])}
        return reply

    def is_healthy(self, rank: int) -> bool:
        """Whether a rank answers, as one of this group that has not failed."""
        reply = self.query_status([rank])[rank]
        return reply["type"] == "status" and reply["failure"] is None

    def check_overdue(self, ranks: list[int], sequence: int, waited_s: float) -> None:
        """An operation waits for some ranks: end it where that is hopeless, tell of it where it takes long.

        The others are asked, too, or of many some: one that has failed is heard of although nothing of it is missing.
        """
        others = [rank for rank in range(self.registered_group.size) if rank != self.rank and rank not in ranks]
        random.shuffle(others)
        seen = self.query_status([*ranks, *others], sequence)
        mine = self.native.recent_call(sequence)
        for rank, reply in seen.items():
            said = reply.get("recent_call")
            if said is not None and mine is not None and said != mine:
                text = (
                    f"rank {rank} is in {said}, this rank {self.rank} in {mine}; every rank must make the same calls "
                    "in the same order with the same sizes"
                )
                self.native.fail(_FAILURES.index("mismatch"), rank, text)
                return
            if reply.get("failure") is not None:
                return self._hear(rank, reply)
        if waited_s >= _LOG_FROM_S:
            awaited = {rank: reply for rank, reply in sorted(seen.items()) if rank in ranks} or seen
            log.warning("rank %d has waited %.0f s in %s: %s", self.rank, waited_s, mine, describe_status(awaited))


def expired_of(reply: control_messages.Message) -> tuple[int, int]:
    """The collective that passed its deadline, and its timeout, where that ended the group of the rank that replied."""
    call, timeout_ns = reply.get("expired") or (0, 0)
    return int(call), int(timeout_ns)


def overdue_ranks(seen: dict[int, control_messages.Message], sequence: int) -> list[int]:
    """Of the ranks that were asked, those that have not made collective `sequence`, or do not answer."""
    return sorted(rank for rank, reply in seen.items() if reply.get("calls", 0) < sequence)


def describe_status(seen: dict[int, control_messages.Message]) -> str:
    return "; ".join(f"rank {rank} is {reply['activity']}" for rank, reply in seen.items())


def _about(kind: str, lane: int, rail: int) -> control_messages.Message:
    return {"type": kind, "lane": lane, "rail": rail}


class _ConnectionManager:
    """The thread, those that look into something, and whom they care for."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._monitors: dict[int, GroupMonitor] = {}
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._pid = os.getpid()

    def add(self, group: int, monitor: GroupMonitor) -> None:
        if self._pid != os.getpid():
            self._reset()  # threads do not survive a fork
        with self._lock:
            self._monitors[group] = monitor
            if not self._threads and not self._stopping:
                self._start(self._run)
        monitor.registered_group.handler = monitor.handle_request

    def remove(self, group: int) -> None:
        with self._lock:
            monitor = self._monitors.pop(group, None)
        if monitor is not None:
            monitor.ended.set()

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="netfold connection manager", daemon=True)
        self._threads.add(thread)
        thread.start()

    def start_task(self, work: Callable[[], None]) -> None:
        with self._lock:
            if not self._stopping:
                self._start(work)

    def _run(self) -> None:
        while not self._stopping:
            news = engine.next_async_event(_IDLE_NS)
            if news is None:
                continue
            broken, group, ranks, lane, rail, sequence, waited_s = news
            with self._lock:
                monitor = self._monitors.get(group)
            if monitor is None:
                continue
            if broken:
                self.start_task(partial(monitor.reconnect, lane, ranks[0], rail))
            else:
                self.start_task(partial(monitor.check_overdue, ranks, sequence, waited_s))

    def stop(self) -> None:
        """At the end of the process: no thread may come back from the native floor when Python is gone."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._stopping = True
            threads = list(self._threads)
            for monitor in self._monitors.values():
                monitor.ended.set()
        engine.interrupt_async_events()
        for thread in threads:
            thread.join(_END_S)


_manager = _ConnectionManager()
atexit.register(_manager.stop)


def watch_group(group: int, monitor: GroupMonitor) -> None:
    """Of a native group, by its id, until `unwatch_group`."""
    _manager.add(group, monitor)


def unwatch_group(group: int) -> None:
    _manager.remove(group)
