"""The service of a group's ranks to each other beside operations: make connections, report status.

One thread per process sleeps until the engine has an event. Each event but the first is handled on a thread of its own,
through the other ranks' listeners:

    unused   a connection is used that was not made yet (first_connections.py). Where no first connection comes about,
             it counts as broken.
    broken   a connection is used that broke. The higher of the two ranks connects, and the other one asks for that.
             Both ends resume where the other stands. The connection is given up, with the reason, if there is no such
             group any more, if nobody answers, or if no attempt succeeds in time.
    short    a first connection takes one of the last descriptors. The connections that were idle longest are closed at
             both ends. They are broken, and made again when they are used.
    overdue  the oldest operation under way takes longer than usual. The awaited ranks, and others, are asked for their
             status, by one question of a group at a time. A rank that has failed, or made another call in this one's
             place, ends the wait at once. A long wait is logged.
    unconnected  a receive from any rank waits, and connections were closed since they were idle. Nothing shows the end
             of their ranks, so these are asked for their status, 16 each second in turn.

Each _LOOK_NS it also looks for connections to hosts that confirm nothing any more (resumable_socket.hpp), and breaks
them. So the rank of a host that goes silent is lost within 20 s and `reconnect_s`, whatever the operation's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import resource
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
from netfold.bootstrap.listener import ConnectionKey, RegisteredGroup, RequestHandler
from netfold.bootstrap.rendezvous import PeerAddresses
from netfold.bootstrap.secure_stream import mesh_secrets
from netfold.communicator.first_connections import FirstConnections
from netfold.errors import RendezvousError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_messages import Message, format_endpoint

log = logging.getLogger("netfold")

# A caller waits for these replies: one that takes longer counts as none.
QUERY_TIMEOUT_S = 1.0
_MAX_QUERIES = 16
# Most ranks of a job are late together, often for the same one, and share their queries: to ranks that they wait for,
# and to others. In a job of more ranks than the second number, so many of them ask, by chance, one rank of each kind.
_QUERIES_OF_AWAITED, _QUERIES_OF_OTHERS = 256, 64
_LOG_FROM_S = 10.0
_RETRY_S = 0.1
_LEAST_PAUSE_S = 0.001
_REQUEST_RECONNECT_S = 2.0
# The least time to make a first connection. `reconnect_s` may be shorter: it is for connections that break.
_CONNECT_S = 30.0
# Idle connections are closed where a descriptor's number is beyond the first part of the soft limit, as many as bring
# the process below the second part. Numbers are given lowest first.
_SHORT_FROM, _SHORT_TO = 7 / 8, 3 / 4
_IDLE_LEAST_S = 1.0
_NEVER = -1  # the number of reconnects of a connection that was not made yet
_ANY = -2
_LOOK_NS = 5_000_000_000
_END_S = 2.0
_FAILURES: tuple[str, ...] = engine.FAILURES
_NO_REPLY = {"type": "no_reply", "activity": "not answering (stopped, or its host cannot be reached)"}


@dataclass
class GroupMonitor:
    """One end of a group, as the connection manager and other ranks see it."""

    native: Any
    registered_group: RegisteredGroup
    peer_addresses: PeerAddresses
    reconnect_s: float
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Handlers of further requests of other ranks (recovery.py), by type.
    handlers: dict[str, RequestHandler] = field(default_factory=dict)
    reconnecting: set[tuple[int, int, int, int]] = field(default_factory=set)  # lane, peer, rail, former reconnects
    is_asking: bool = False  # whether a `check_overdue` is under way; set by the thread that reads the events
    # Connections that one of their ends closed since they were idle: their reconnect is nothing to warn of.
    released: set[ConnectionKey] = field(default_factory=set)
    # The collective that this rank's last refused call would have been, and why it was refused.
    refused: tuple[int, str] = (0, "")
    # Set when this rank closes the group: in a tuple of one, the failure before that, or None.
    _failure_at_close: tuple[Any] | None = None
    first_connections: FirstConnections = field(init=False)

    def __post_init__(self) -> None:
        self.first_connections = FirstConnections(
            self.native,
            self.registered_group,
            self.peer_addresses,
            max(self.reconnect_s, _CONNECT_S),
            on_made=self._note_first,
            on_failure=self._give_up_first,
        )

    def begin(self) -> None:
        """Serve the other ranks' requests and connections from now on."""
        self.registered_group.handler = self.handle_request
        self.native.serve_connections()
        self.on_listener(self.first_connections.begin)

    def on_listener(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call on the listener's thread, without waiting."""
        assert self.registered_group.listener is not None
        self.registered_group.listener.call_soon(call, *arguments)

    def mark_closed(self) -> Any:
        """This rank closes the group, which is no failure. Returns the failure that there was before, if any."""
        self._failure_at_close = (self.native.failure,)
        return self._failure_at_close[0]

    @property
    def failure(self) -> Any:
        """The failure of this end of the group. None while it works, and where it was only closed."""
        return self.native.failure if self._failure_at_close is None else self._failure_at_close[0]

    @property
    def rank(self) -> int:
        return self.registered_group.rank

    def call(self, peer: int, rail: int, message: Message, timeout_s: float) -> tuple[Any, Message]:
        """Send a request to a rank's listener; returns the open connection and the reply.

        Raises RendezvousError, TimeoutError, OSError, EOFError.
        """
        group = self.registered_group
        token = handshake.token_of(group.secret)
        hello = Hello(CALL, token, self.rank, peer, group.size, rail=rail, security=group.security)
        stream = group.run(rendezvous.connect(self.peer_addresses, hello, group.secret, time.monotonic() + timeout_s))
        try:
            stream.settimeout(timeout_s)
            control_messages.send(stream, message)
            return stream, control_messages.receive(stream)
        except BaseException:
            stream.close()
            raise

    def refused_call(self, sequence: int) -> str | None:
        """The reason why this rank refused its next collective, in or behind which a rank waits in `sequence`."""
        refused, reason = self.refused
        return reason if refused == self.native.collectives_submitted + 1 <= sequence else None

    def handle_request(self, peer: int, request: Message) -> tuple[Message, Any]:
        """Reply to another rank's request (listener.RequestHandler)."""
        if request["type"] in self.handlers:
            return self.handlers[request["type"]](peer, request)
        if request["type"] == "query":
            return {
                "type": "status",
                "recent_call": self.native.recent_call(request["sequence"]),
                "activity": self.native.last_seen(),
                "calls": self.native.collectives_submitted,
                "failure": self.failure,
                "expired": self.native.expired,
                "refused": self.refused_call(request["sequence"]),
            }, None
        lane, rail = request["lane"], request["rail"]
        if request["type"] == "release":
            self._set_released((peer, lane, rail), True)
            # Both ends know of it before either of them disconnects.
            manager.start_task(partial(self.native.disconnect, lane, peer, rail, _ANY))
            return {"type": "will_release"}, None
        is_requested = request["type"] == "request_reconnect"
        broken = self.native.disconnect(lane, peer, rail, request["reconnects"] if is_requested else _ANY)
        failure = self.failure
        if is_requested and failure is None:
            manager.start_task(partial(self.reconnect, lane, peer, rail))
            return {"type": "will_reconnect"}, None
        if is_requested or broken is None or failure is not None:
            return {"type": "ended", "failure": failure, "expired": self.native.expired}, None

        def resume(stream: Any) -> None:
            # The listener closes its own end of the descriptor.
            secrets = mesh_secrets(stream)
            end = os.dup(stream.fileno())
            is_up = self.native.reconnect(lane, peer, rail, broken[1], end, request["received"], secrets)
            if is_up:
                self._note_connected(lane, peer, rail, stream, is_first=broken[1] == _NEVER)

        return {"type": "reconnect", "received": broken[0]}, resume

    def release(self, lane: int, peer: int, rail: int) -> None:
        """Close an idle connection until one of its ends uses it again. Both ends close it, so that no byte is lost."""
        key = (peer, lane, rail)
        self._set_released(key, True)
        is_agreed = False
        try:
            stream, reply = self.call(peer, rail, {"type": "release", "lane": lane, "rail": rail}, QUERY_TIMEOUT_S)
            stream.close()
            is_agreed = reply["type"] == "will_release"
        finally:
            if not is_agreed:
                self._set_released(key, False)
        if is_agreed:
            self.native.disconnect(lane, peer, rail, _ANY)

    def _set_released(self, key: ConnectionKey, is_released: bool) -> None:
        peer, lane, rail = key
        (self.released.add if is_released else self.released.discard)(key)
        self.native.set_released(lane, peer, rail, is_released)

    def _give_up_first(self, key: ConnectionKey, began: float, error: BaseException) -> None:
        """No first connection came about. The peer's listener is asked for the reason, unless the time is over."""
        peer, lane, rail = key
        if isinstance(error, TimeoutError):
            waited_s = time.monotonic() - began
            text = f"after {waited_s:.1f} s of trying to connect: no new connection came about ({error})"
            manager.start_task(partial(self.native.give_up, lane, peer, rail, _NEVER, text))
        else:
            manager.start_task(partial(self.reconnect, lane, peer, rail))

    def reconnect_silent(self, lane: int, peer: int, rail: int) -> None:
        """Break a connection to a host that confirms nothing any more, and make it again or give it up."""
        self.native.disconnect(lane, peer, rail, _ANY)
        self.reconnect(lane, peer, rail)

    def reconnect(self, lane: int, peer: int, rail: int) -> None:
        """Make a connection, or make a broken one again; or give it up."""
        broken = self.native.broken(lane, peer, rail)
        if broken is None:
            return
        received, reconnects = broken
        key = (lane, peer, rail, reconnects)
        with self.lock:
            if key in self.reconnecting:
                return
            self.reconnecting.add(key)
        try:
            # Another thread may have finished in between. From here on only this thread changes the connection.
            if self.native.broken(lane, peer, rail) == broken:
                self._reconnect(lane, peer, rail, received, reconnects)
        finally:
            with self.lock:
                self.reconnecting.discard(key)

    def _reconnect(self, lane: int, peer: int, rail: int, received: int, reconnects: int) -> None:
        began = time.monotonic()
        is_first = reconnects == _NEVER
        limit_s = max(self.reconnect_s, _CONNECT_S) if is_first else self.reconnect_s
        about = {"lane": lane, "rail": rail}
        why, is_orderly = "", False
        if not is_first and (peer, lane, rail) not in self.released:
            log.warning("rank %d: the connection to rank %d broke (lane %d, rail %d)", self.rank, peer, lane, rail)
        while time.monotonic() < began + limit_s and not self.ended.is_set():
            left_s = began + limit_s - time.monotonic()
            try:
                if self.rank < peer:
                    # The peer had connected, and may not have noticed the break.
                    request = {"type": "request_reconnect", **about, "reconnects": reconnects}
                    stream, reply = self.call(
                        peer, rail, request, left_s if is_first else min(left_s, _REQUEST_RECONNECT_S)
                    )
                    stream.close()
                    if reply["type"] == "will_reconnect":
                        # The peer may end meanwhile, so it is asked again after _REQUEST_RECONNECT_S.
                        until = min(time.monotonic() + _REQUEST_RECONNECT_S, began + limit_s)
                        if self._waits_for_socket(lane, peer, rail, (received, reconnects), until):
                            return
                        why = "it did not connect again"
                        continue
                else:
                    stream, reply = self.call(peer, rail, {"type": "reconnect", **about, "received": received}, left_s)
                    if reply["type"] == "reconnect":
                        self._note_connected(lane, peer, rail, stream, is_first=is_first)
                        secrets = mesh_secrets(stream)
                        fd = stream.detach()
                        self.native.reconnect(lane, peer, rail, reconnects, fd, reply["received"], secrets)
                        return
                    stream.close()
                if reply["failure"] is not None:
                    return self._fail_as(peer, reply)
                why, is_orderly = "it closed the group", True
                break
            except RendezvousError as error:
                why = str(error)
                break
            except (OSError, EOFError) as error:
                why = f"no new connection came about ({error})"
                self.ended.wait(_RETRY_S)
        waited_s = time.monotonic() - began
        tried = "to connect" if is_first else "to make it again"
        text = f"after {waited_s:.1f} s of trying {tried}: {why}"
        self.native.give_up(lane, peer, rail, reconnects, text, is_orderly)

    def _waits_for_socket(self, lane: int, peer: int, rail: int, broken: tuple[int, int], until: float) -> bool:
        """Wait until another thread has given the connection a socket, or the time has come. False: it has none."""
        pause_s = _LEAST_PAUSE_S
        while time.monotonic() < until and not self.ended.wait(pause_s):
            if self.native.broken(lane, peer, rail) != broken:
                return True
            pause_s = min(2 * pause_s, _RETRY_S)
        return False

    def _fail_as(self, peer: int, reply: Message) -> None:
        """Fail with the reason of a rank that has failed: the whole group ends with it."""
        _, fault, why = reply["failure"]
        fault = fault if fault not in (-1, self.rank) else peer
        text = f"rank {peer} gave up on the group: {why}"
        self.native.fail(_FAILURES.index("peer_lost"), fault, text, expired_of(reply))

    def _note_first(self, key: ConnectionKey, stream: Any) -> None:
        peer, lane, rail = key
        self._note_connected(lane, peer, rail, stream, is_first=True)

    def _note_connected(self, lane: int, peer: int, rail: int, stream: Any, *, is_first: bool) -> None:
        manager.look_at_files(stream.fileno())
        was_released = (peer, lane, rail) in self.released
        self.released.discard((peer, lane, rail))
        level = logging.DEBUG if is_first or was_released else logging.WARNING
        if not log.isEnabledFor(level):
            return
        own, other = (format_endpoint(*end[:2]) for end in (stream.getsockname(), stream.getpeername()))
        what = "connected with rank %d" if is_first else "the connection to rank %d was made again"
        where = f"lane {lane}, rail {rail}, {own} to {other}"
        failed = "".join(f"; not used: {each}" for each in list(self.peer_addresses.failed)) if is_first else ""
        log.log(level, f"rank %d: {what} (%s)%s", self.rank, peer, where, failed)

    def query_status(self, ranks: Iterable[int], sequence: int = 0) -> dict[int, Message]:
        """The status of some ranks, or why a rank does not reply. Takes a good second at most.

        Of more than 16 ranks, the first 16.
        """
        pool = ThreadPoolExecutor(_MAX_QUERIES, "netfold status query")
        try:
            queries = {rank: pool.submit(self._query, rank, sequence) for rank in list(ranks)[:_MAX_QUERIES]}
            done, _ = wait(queries.values(), QUERY_TIMEOUT_S + 0.2)
            return {rank: future.result() if future in done else _NO_REPLY for rank, future in queries.items()}
        finally:
            pool.shutdown(wait=False)

    def _query(self, peer: int, sequence: int) -> Message:
        try:
            stream, reply = self.call(peer, 0, {"type": "query", "sequence": sequence}, QUERY_TIMEOUT_S)
        except RendezvousError:
            return {"type": "gone", "activity": "gone: nobody of this group listens at its address"}
        except (OSError, EOFError):
            return _NO_REPLY
        stream.close()
        if reply["type"] == "ended":
            failure = reply["failure"]
            return {**reply, "activity": "gone: " + ("it closed the group" if failure is None else failure[2])}
        return reply

    def is_healthy(self, rank: int) -> bool:
        """Whether a rank replies, as one of this group that has not failed."""
        reply = self.query_status([rank])[rank]
        return reply["type"] == "status" and reply["failure"] is None

    def check_overdue(self, ranks: list[int], sequence: int, waited_s: float) -> None:
        """An operation waits for `ranks`: end the group if the wait is hopeless, log it if it is long.

        Other ranks are queried too: the reason may be a failed rank that nobody waits for. Of many, a random choice.
        """
        try:
            self._check_overdue(ranks, sequence, waited_s)
        finally:
            self.is_asking = False

    def _check_overdue(self, ranks: list[int], sequence: int, waited_s: float) -> None:
        size = self.registered_group.size
        if random.random() * size > _QUERIES_OF_OTHERS:
            return
        known = {self.rank, *ranks}
        most = min(size - len(known), max(1, _QUERIES_OF_OTHERS // size))
        others = [rank for rank in random.sample(range(size), most + len(known)) if rank not in known][:most]
        most = min(len(ranks), max(1, min(_MAX_QUERIES - len(others), _QUERIES_OF_AWAITED // size)))
        replies = self.query_status([*random.sample(ranks, most), *others], sequence)
        own_call = self.native.recent_call(sequence)
        for rank in ranks:
            # Its connection may not have been made yet: the attempt then ends the wait.
            if replies.get(rank, {}).get("type") == "gone":
                manager.start_task(partial(self.reconnect, 0, rank, 0))
        for rank, reply in replies.items():
            call = reply.get("recent_call")
            if call is not None and own_call is not None and call != own_call:
                text = (
                    f"rank {rank} is in {call}, this rank {self.rank} in {own_call}; every rank must make the same "
                    "calls in the same order with the same sizes"
                )
                self.native.fail(_FAILURES.index("mismatch"), rank, text)
                return
            refused = reply.get("refused")
            if refused is not None:
                text = f"rank {rank} refused its call: {refused}; rank {self.rank} waits for it in {own_call}"
                self.native.fail(_FAILURES.index("mismatch"), rank, text)
                return
            if reply.get("failure") is not None:
                return self._fail_as(rank, reply)
        if waited_s >= _LOG_FROM_S:
            awaited = {rank: reply for rank, reply in sorted(replies.items()) if rank in ranks} or replies
            log.warning("rank %d has waited %.0f s in %s: %s", self.rank, waited_s, own_call, describe_status(awaited))

    def check_unconnected(self, ranks: list[int], lane: int) -> None:
        """A receive from any rank waits: end the group if one of `ranks` has ended. A closed connection stays closed.

        The connection to a rank that is gone, or does not reply, is made again or given up, as a receive from it does.
        """
        for rank, reply in self.query_status(ranks).items():
            if reply.get("failure") is not None:
                return self._fail_as(rank, reply)
            if reply["type"] != "status":
                for rail in range(self.registered_group.rails):
                    manager.start_task(partial(self.reconnect, lane, rank, rail))


def expired_of(reply: Message) -> tuple[int, int]:
    """The collective whose passed deadline ended the replying rank's group, and its timeout in ns; else (0, 0)."""
    call, timeout_ns = reply.get("expired") or (0, 0)
    return int(call), int(timeout_ns)


def overdue_ranks(replies: dict[int, Message], sequence: int) -> list[int]:
    """Of the queried ranks, those that have not made collective `sequence`, or do not reply."""
    return sorted(rank for rank, reply in replies.items() if reply.get("calls", 0) < sequence)


def describe_status(replies: dict[int, Message]) -> str:
    return "; ".join(f"rank {rank} is {reply['activity']}" for rank, reply in replies.items())


class _ConnectionManager:
    """The thread that waits for events, the threads that handle them, and the groups that they are for."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._releasing = self._is_due = self._looks = False
        self._highest = 0  # of the descriptors since they were last counted
        self._lock = threading.RLock()  # a signal handler may use the group
        self._monitors: dict[int, GroupMonitor] = {}
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._pid = os.getpid()

    def add(self, group: int, monitor: GroupMonitor) -> None:
        """Handle the events of a native group, by its id, until `remove`."""
        if self._pid != os.getpid():
            self._reset()  # threads do not survive a fork
        with self._lock:
            self._monitors[group] = monitor
            if not self._threads and not self._stopping:
                self._start(self._run)
        monitor.begin()

    def remove(self, group: int) -> None:
        with self._lock:
            monitor = self._monitors.pop(group, None)
        if monitor is not None:
            monitor.ended.set()
            monitor.on_listener(monitor.first_connections.end)

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

    def look_at_files(self, newest: int) -> None:
        """Close idle connections where the process is short of descriptors. newest: a descriptor that was just made."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with self._lock:
            # Closed descriptors' numbers are given again: there may be too many although the newest one is low.
            self._highest = max(self._highest, newest)
            if soft == resource.RLIM_INFINITY or self._highest < _SHORT_FROM * soft:
                return
            self._is_due = True
            if self._releasing:
                return
            self._releasing = True
        self.start_task(partial(self._release_until_enough, soft))

    def _release_until_enough(self, soft: int) -> None:
        try:
            while not self._stopping:
                with self._lock:
                    self._is_due = False
                files = [int(name) for name in os.listdir("/proc/self/fd")]
                if len(files) >= _SHORT_FROM * soft:
                    self._release_idle(len(files) - int(_SHORT_TO * soft))
                    # Connections that are in use now may be idle later.
                    time.sleep(_IDLE_LEAST_S)
                    continue
                with self._lock:
                    if not self._is_due:  # else another connection was made since the count
                        self._highest, self._releasing = max(files), False
                        return
        except BaseException:
            self._releasing = False
            raise

    def _release_idle(self, most: int) -> None:
        with self._lock:
            monitors = list(self._monitors.values())
        latest = time.monotonic() - _IDLE_LEAST_S
        idle = sorted(
            (since, number, connection)
            for number, monitor in enumerate(monitors)
            for since, *connection in monitor.native.idle_connections()
            if since < latest
        )
        for _, number, connection in idle[:most]:
            with contextlib.suppress(RendezvousError, OSError, EOFError):
                monitors[number].release(*connection)

    def _run(self) -> None:
        look_at_ns = time.monotonic_ns() + _LOOK_NS
        while not self._stopping:
            event = engine.next_async_event(max(0, look_at_ns - time.monotonic_ns()))
            if event is not None:
                self._handle(*event)
            if time.monotonic_ns() >= look_at_ns:
                look_at_ns = time.monotonic_ns() + _LOOK_NS
                if not self._looks:  # else a group's driver is busy
                    self._looks = True
                    self.start_task(self._break_silent)

    def _break_silent(self) -> None:
        with self._lock:
            monitors = list(self._monitors.values())
        try:
            for monitor in monitors:
                for connection in monitor.native.silent_connections():
                    self.start_task(partial(monitor.reconnect_silent, *connection))
        finally:
            self._looks = False

    # A method, so that the thread keeps no group alive while it sleeps.
    def _handle(
        self, kind: str, group: int, ranks: list[int], lane: int, rail: int, sequence: int, waited_s: float
    ) -> None:
        with self._lock:
            monitor = self._monitors.get(group)
        if monitor is None:
            return
        if kind == "unused":
            monitor.on_listener(monitor.first_connections.use, (ranks[0], lane, rail))
        elif kind == "broken":
            self.start_task(partial(monitor.reconnect, lane, ranks[0], rail))
        elif kind == "unconnected":
            self.start_task(partial(monitor.check_unconnected, ranks, lane))
        elif not monitor.is_asking:
            # The engine repeats the event while the operation waits, so a question that is left out is asked later.
            monitor.is_asking = True
            self.start_task(partial(monitor.check_overdue, ranks, sequence, waited_s))

    def stop(self) -> None:
        """At the end of the process: no thread may return from native code after the interpreter is gone."""
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


manager = _ConnectionManager()
atexit.register(manager.stop)
