"""Recovery from a lost switch without a lost step: the messages between ranks, and the way back to a switch.

The worker of the lowest rank leads. All messages go to the other ranks' listeners, so a rank answers whatever it does:

    lost          to the leader: the switch of the membership with that `generation` is lost
    freeze        to all: from here on the rank accepts nothing from the switch; its reply says which results it has
    recover       to each rank, its part of the leader's one plan (recovery_plan.py): fetch missing results from ranks
                  that kept them (`fetch`), and do the rest by host algorithms (netfold/collective/switch_path.hpp)
    abort         from the leader: the group has ended, and why
    path_to_root  the leader's switch, or one above it, listens again: which switches are above the rank now
    rejoin        there is a tree of all: each rank joins, under a name for this attempt, and lets the membership stand
                  by. `rejoined` reports that. When all have, the leader's next operation tells all to use it.

Why no sum is wrong. Every rank is frozen before the plan is made, so the replies stay true. One plan is made, at one
place. A result that is passed on is the switch's own packet, and passes the same checks as one from the switch. Before
a rank goes on, it compares its results with the plan. Whether the switch was really lost does not matter. A rank that
is gone, the leader included, ends the group as usual. A slow rank delays the others until their deadline at most.

A rank's decisions are a pure state machine, recovery_machine.py, which the search over recovery also runs
(lab/src/netfold_lab/model_check/recovery.py). This file has its threads, connections and clock. Each event is one call
of the machine, under one lock; the actions that the machine returns are carried out in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from netfold._native import engine
from netfold.bootstrap.listener import RequestHandler
from netfold.communicator import recovery_machine as machine
from netfold.communicator.connection_manager import GroupMonitor
from netfold.communicator.membership import Membership
from netfold.communicator.recovery_machine import Action, FrozenState, RecoveryMachine
from netfold.communicator.recovery_plan import chunks_of, pack, unpack
from netfold.communicator.switch_tree import path_message, trees_of
from netfold.errors import RendezvousError, SwitchError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_client import SwitchAccess
from netfold.switch_protocol.control_messages import Message
from netfold.tuning import ChoiceTable

log = logging.getLogger("netfold")

_CALL_S = 5.0
_RETRY_S = 0.05
_REPORT_S = 0.5
# Requests of a rank that are under way at once. A leader of thousands of ranks would need as many threads.
_MAX_REQUESTS = 64
# In a job of more than _MANY ranks, the time that the leader has for a message of each rank.
_MANY, _REPORT_COST_S = 256, 1e-3
# How long this rank waits, before it fails, for the other ranks to hear the reason.
_ABORT_S = 1.0
# Results travel in messages of up to so many bytes.
_BATCH_BYTES = control_messages.MAX_MESSAGE_BYTES // 2
# Shorter than a call: the leader waits for the reply.
_QUERY_PATH_S = 3.0
_JOIN_S = 10.0
_MAX_REASON = 2000  # characters
_FAILURES: tuple[str, ...] = engine.FAILURES
_ACK: Message = {"type": "ack"}
# What machines send each other, by the type of the control message.
_MESSAGES: dict[str, type[machine.Message]] = {
    "lost": machine.Lost,
    "freeze": machine.Freeze,
    "recover": machine.Recover,
    "rejoin": machine.Rejoin,
    "rejoined": machine.Rejoined,
}
# Actions that may block for a second.
_SLOW = (machine.Leave, machine.Fail)


class Recovery:
    """Of one rank that joined a switch. Thread-safe."""

    def __init__(
        self,
        monitor: GroupMonitor,
        membership: Membership,
        access: SwitchAccess,
        *,
        number: int,
        job: bytes,
        rejoin_s: float,
        table: ChoiceTable,
        capacity: Callable[[], float | None],
    ) -> None:
        """Register the handlers of this switch's messages, and start to listen to the switch.

        membership: attached, as switch `number`.
        access: how to join again.
        job: a secret of this group's ranks, for this switch alone.
        rejoin_s: seconds until the first try to join again; 0 for never.
        table: in force while there is no switch.
        capacity: as in Membership.listen.
        """
        self._monitor = monitor
        self._native = monitor.native
        self._switch_path = monitor.native.shard(number)
        self._number = number
        self._rank = membership.rank
        self._workers = membership.workers
        self._access = access
        self._endpoint: str | None = None  # the first switch of the path that this rank reported last
        self._job = job
        self._rejoin_s = rejoin_s
        self._capacity = capacity
        self._substitute = f"all_reduce goes by {_describe_all_reduce(table)}"
        self._lock = threading.RLock()  # a signal handler may use the group
        self._memberships = {membership.generation: membership}
        self._joined: Membership | None = None  # the one that does not stand by yet
        self._hardware = membership.hardware
        self._machine = RecoveryMachine(
            self._rank, self._workers, self, membership.generation, membership.window, rejoin_s=rejoin_s
        )
        self._sends: deque[tuple[int, machine.Message]] = deque()  # to be sent, by rank; guarded by _send_lock
        self._senders = 0
        self._send_lock = threading.Lock()
        self._began: dict[int, tuple[float, str]] = {}  # by lost generation: when, and what this rank did then
        self._pid = os.getpid()
        handlers: dict[str, RequestHandler] = {
            **{kind: partial(self._handle_message, kind) for kind in _MESSAGES},
            "fetch": self._handle_fetch,
            "path_to_root": self._handle_path_to_root,
            "abort": self._handle_abort,
            "stragglers": lambda _, __: ({"type": "stragglers", "ranks": self._machine.stragglers()}, None),
        }
        monitor.handlers.update({self._type_of(kind): handler for kind, handler in handlers.items()})
        self._listen(membership)

    def _listen(self, membership: Membership) -> None:
        membership.listen(self._switch_path, self._fail, self.handle_loss, self._monitor.is_healthy, self._capacity)

    @property
    def state(self) -> str:
        """Empty while the switch works; else a sentence that says why not, and what runs instead."""
        with self._lock:
            lost = self._machine.lost
            if not lost or self._switch_path.traffic()["generation"] != 0:
                return ""
            return f"{list(lost.values())[-1]}: {self._substitute}"

    def membership(self) -> Membership | None:
        """The membership that operations use; None while the switch is lost."""
        with self._lock:
            return self._memberships.get(self._switch_path.traffic()["generation"])

    def stragglers(self) -> tuple[list[int], str]:
        """Ranks that the switch, or the recovery from its loss, waits for; and a sentence."""
        membership = self.membership()
        if membership is None:
            ranks = self._recovery_stragglers()
            named = f"; rank {', '.join(map(str, ranks))} did not say what it has" if ranks else ""
            return ranks, self.state + named
        ranks = membership.stragglers(self._switch_path.traffic()["oldest_outstanding"])
        if ranks:
            return ranks, f"the switch still waits for rank {', '.join(map(str, ranks))}"
        return [], "the switch has every rank's part, or cannot be reached: packets to it may be lost"

    def _recovery_stragglers(self) -> list[int]:
        """Ranks that the leader waits for in a recovery that is under way."""
        if self._machine.is_leader:
            return self._machine.stragglers()
        try:
            stream, reply = self._monitor.call(self._workers[0], 0, {"type": self._type_of("stragglers")}, 1.0)
        except (RendezvousError, OSError, EOFError):
            return [self._workers[0]]
        stream.close()
        return list(reply.get("ranks", ()))

    def leave(self, why: str, fault: int = -1) -> None:
        """Leave every membership. Idempotent."""
        with self._lock:
            memberships = list(self._memberships.values())
        for membership in memberships:
            membership.leave(why, fault)

    def close(self, why: str, fault: int = -1) -> None:
        self._monitor.ended.set()
        self.leave(why, fault)

    # --- recovery_machine.SwitchPath; called under the lock ---

    def freeze(self, generation: int) -> tuple[int, int, bytes, bool] | None:
        return self._switch_path.freeze(generation)  # type: ignore[no-any-return]

    def accept(self, generation: int, packets: Sequence[bytes]) -> bool:
        return bool(self._switch_path.accept(generation, list(packets)))

    def fall_back(self, generation: int, end: int, promised: bool) -> None:
        self._switch_path.fall_back(generation, end, promised)

    def stand_by(self, generation: int) -> None:
        membership, self._joined = self._joined, None
        assert membership is not None and membership.generation == generation, "only the newest membership stands by"
        membership.stand_by(self._switch_path)
        self._listen(membership)

    def promise(self, generation: int) -> bool:
        return bool(self._switch_path.promise(generation))

    # --- events and actions ---

    def handle_loss(self, generation: int, why: str) -> None:
        """The membership of that generation is lost. Callable from any thread, any number of times."""
        self._run_event(lambda: self._record_loss(generation, why))

    def _record_loss(self, generation: int, why: str) -> list[Action]:
        self._began.setdefault(generation, (time.monotonic(), self._native.last_seen()))
        return self._machine.handle_loss(generation, why)

    def _run_event(self, event: Callable[[], list[Action]]) -> None:
        with self._lock:
            actions = [] if self._has_ended() else event()
        self._carry_out(actions)

    def _handle_message(self, kind: str, peer: int, request: Message) -> tuple[Message, None]:
        message = _decoded(kind, request)
        with self._lock:
            if self._has_ended():
                # The native group's results are gone, so a frozen state would be wrong.
                return ({"type": "ended", "failure": self._monitor.failure} if kind == "freeze" else _ACK), None
            if isinstance(message, machine.Lost):
                frozen, actions = None, self._record_loss(message.generation, message.why)
            else:
                frozen, actions = self._machine.handle_message(peer, message)
        self._carry_out(actions)
        if frozen is None:
            return _ACK, None
        return {"type": "frozen", **vars(frozen), "held": pack(frozen.held)}, None

    def _carry_out(self, actions: Sequence[Action]) -> None:
        def run() -> None:
            for action in actions:
                self._do(action)

        if any(isinstance(action, _SLOW) for action in actions):
            self._start(run)
        else:
            run()

    def _do(self, action: Action) -> None:
        """Carry out an action. Actions that wait for another rank or for time get a thread of their own."""
        match action:
            case machine.Send():
                self._enqueue_send(action.peer, action.message)
            case machine.ReportLoss():
                self._start(lambda: self._report_loss(action.generation))
            case machine.Fetch():
                self._start(lambda: self._fetch(action.source, action.generation, action.chunks))
            case machine.Wait():
                self._start(lambda: self._wait(action))
            case machine.FindTree():
                self._start(self._find_tree)
            case machine.Join():
                self._start(lambda: self._join(action.attempt, action.tree))
            case machine.GiveUp():
                with self._lock:
                    membership = self._memberships.get(action.generation)
                if membership is not None:
                    membership.give_up()
            case machine.Leave():
                with self._lock:
                    membership = self._memberships.pop(action.generation, None)
                if membership is not None:
                    membership.leave(action.why)
            case machine.Fail():
                self._fail(action.kind, action.rank, action.text)
            case _:
                self._log(action)

    def _log(self, action: Action) -> None:
        match action:
            case machine.Planned(generation, plan, True):
                # Before the plan goes out: afterwards the group may be done, and this process end, at any moment.
                passed_on = sum(bits.bit_count() for shares in plan.fetches.values() for bits in shares.values())
                log.warning(
                    "rank %d: %s. No step is lost: %s%s. This rank was %s; %d results are passed on",
                    self._rank,
                    self._machine.lost[generation],
                    self._substitute,
                    f", and the switch is asked again in {self._machine.next_wait_s:g} s" if self._rejoin_s else "",
                    self._began[generation][1],
                    passed_on,
                )
            case machine.PlanDelivered(generation, True):
                log.info(
                    "rank %d: all ranks know how to go on, %.3f s after the loss",
                    self._rank,
                    time.monotonic() - self._began[generation][0],
                )
            case machine.Promised(generation):
                log.warning(
                    "rank %d: the switch at %s has the group again, from the next operation on",
                    self._rank,
                    self._memberships[generation].endpoint,
                )
            case machine.NotJoined(why):
                log.info("rank %d: no switch has the group again: %s", self._rank, why)

    # --- the loss ---

    def _enqueue_send(self, peer: int, message: machine.Message) -> None:
        with self._send_lock:
            self._sends.append((peer, message))
            if self._senders == _MAX_REQUESTS:
                return
            self._senders += 1
        self._start(self._run_sends)

    def _run_sends(self) -> None:
        while True:
            with self._send_lock:
                if not self._sends:
                    self._senders -= 1
                    return
                peer, message = self._sends.popleft()
            if not self._has_ended() and not self._send(peer, message):
                # Behind the others: ranks that hang must not keep the others from being asked.
                self._monitor.ended.wait(_RETRY_S)
                with self._send_lock:
                    self._sends.append((peer, message))

    def _send(self, peer: int, message: machine.Message) -> bool:
        """Send once; False where that must be repeated."""
        reply, again = self._try(peer, self._addressed(_encoded(message)), lambda _, reply: reply)
        if reply is None:
            return not again
        frozen = None
        if isinstance(message, machine.Freeze):
            frozen = FrozenState(reply["base"], reply["end"], unpack(reply["held"]), reply["promised"])
        self._run_event(lambda: self._machine.handle_reply(peer, message, frozen))
        return True

    def _report_loss(self, generation: int) -> None:
        """Report the loss to the leader until the plan is here. This also notices a dead leader.

        In a large job all ranks notice the loss at once, and the leader is busy with all of them: they take turns.
        """
        interval_s = _REPORT_S
        if len(self._workers) > _MANY:
            interval_s = max(interval_s, _REPORT_COST_S * len(self._workers))
            self._monitor.ended.wait(self._workers.index(self._rank) % _MANY * _REPORT_COST_S)
        message = _encoded(machine.Lost(generation, self._machine.lost[generation]))
        while self._request(self._workers[0], message, wanted=lambda: self._machine.awaits_plan(generation)):
            self._monitor.ended.wait(interval_s)

    def _fetch(self, source: int, generation: int, chunks: Sequence[int]) -> None:
        """Get results that rank `source` kept, in batches."""
        base = chunks[0]
        bits = sum(1 << (chunk - base) for chunk in chunks)
        request = {"type": "fetch", "generation": generation, "base": base, "chunks": pack(bits)}

        def read_packets(stream: Any, reply: Message) -> Message:
            batches = [control_messages.receive(stream)["packets"] for _ in range(reply.get("batches", 0))]
            return {**reply, "packets": [packet for batch in batches for packet in batch]}

        reply = self._request(source, request, read_packets)
        if reply is not None:
            packets = reply["packets"] if reply["type"] == "results" else None
            self._run_event(lambda: self._machine.handle_fetched(packets))

    def _handle_fetch(self, _: int, request: Message) -> tuple[Message, Callable[[socket.socket], None] | None]:
        packets = self._switch_path.kept(request["generation"], chunks_of(unpack(request["chunks"]), request["base"]))
        if packets is None:
            return {"type": "unknown"}, None
        per_batch = max(1, _BATCH_BYTES // len(packets[0]))
        batches = [packets[at : at + per_batch] for at in range(0, len(packets), per_batch)]

        def send(stream: socket.socket) -> None:
            for batch in batches:
                control_messages.send(stream, {"type": "packets", "packets": batch})

        return {"type": "results", "batches": len(batches)}, send

    # --- the way back to a switch ---

    def _wait(self, action: machine.Wait) -> None:
        if not self._monitor.ended.wait(action.seconds):
            self._run_event(lambda: self._machine.handle_timer(action.what, action.attempt))

    def _find_tree(self) -> None:
        trees = self._gather_trees()
        self._run_event(lambda: self._machine.handle_tree(trees))

    def _handle_path_to_root(self, _: int, __: Message) -> tuple[Message, None]:
        message = path_message(self._access, _QUERY_PATH_S)
        if "refused" not in message:
            self._endpoint = message["endpoints"][0]
        return message, None

    def _gather_trees(self) -> list[list[Any] | None] | None:
        """By worker, the `tree` of its join; None where there is no tree of all workers yet."""
        request: Message = {"type": "path_to_root"}
        own, _ = self._handle_path_to_root(self._rank, request)
        if "refused" in own:
            return None  # the other ranks need not ask their switches
        replies = {self._rank: own}

        def ask(rank: int) -> None:
            reply = self._request(rank, request)
            if reply is not None:
                replies[rank] = reply

        for thread in self._start_all(ask, [rank for rank in self._workers if rank != self._rank]):
            thread.join()
        if len(replies) < len(self._workers):
            return None  # the group has ended
        try:
            return trees_of(replies, self._workers, self._monitor.rank)
        except SwitchError as error:
            log.info("rank %d: no switch has the group again: %s", self._rank, error)
            return None

    def _join(self, attempt: int, tree: list[Any] | None) -> None:
        try:
            assert self._endpoint is not None, "the leader asks for a path before it asks to join"
            digest = hashlib.sha256(b"%d again " % attempt + self._job).hexdigest()[:32]
            # In a large job the leader takes time to ask them all.
            join_s = _JOIN_S + (2 * _REPORT_COST_S * len(self._workers) if len(self._workers) > _MANY else 0.0)
            membership = Membership.join(self._access, job=digest, tree=tree, timeout_s=join_s, endpoint=self._endpoint)
        except SwitchError as error:
            why = str(error)
            return self._run_event(lambda: self._machine.handle_joined(0, 0, why))
        if membership.hardware != self._hardware:
            # The native group knows the switch's profile from its start: it must not change.
            membership.leave("its group had a switch with another profile")
            profile = "the hardware profile" if membership.hardware else "the full protocol"
            why = f"the switch at {membership.endpoint} now has {profile}, and this group began with the other"
            return self._run_event(lambda: self._machine.handle_joined(0, 0, why))

        def joined() -> list[Action]:
            self._memberships[membership.generation] = self._joined = membership
            return self._machine.handle_joined(membership.generation, membership.window, "")

        self._run_event(joined)
        if self._has_ended():
            membership.leave("the group is over")
        return None

    # --- requests to other ranks ---

    def _request(
        self,
        peer: int,
        message: Message,
        read: Callable[[Any, Message], Message] = lambda _, reply: reply,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Message | None:
        """Ask another rank until it replies. Returns the reply, as `read` completes it from the connection.

        None if the group ends before, or the reply is not `wanted` any more. If the rank is gone, ends the group.
        """
        message = self._addressed(message)
        while not self._has_ended() and wanted():
            found, again = self._try(peer, message, read)
            if not again:
                return found
            self._monitor.ended.wait(_RETRY_S)
        return None

    def _try(self, peer: int, message: Message, read: Callable[[Any, Message], Message]) -> tuple[Message | None, bool]:
        """Ask another rank once: the reply, None where there is none; and whether to ask again."""
        try:
            stream, reply = self._monitor.call(peer, 0, message, _CALL_S)
            with stream:
                if reply["type"] != "ended":
                    return read(stream, reply), False
        except RendezvousError as error:
            self._fail("peer_lost", peer, f"rank {peer} is gone: {error}")
        except (OSError, EOFError):
            return None, True
        else:
            failure = reply["failure"]
            fault = peer if failure is None or failure[1] in (-1, self._rank) else failure[1]
            why = failure[2] if failure else "it closed it"
            self._fail("peer_lost", fault, f"rank {peer} left the group: {why}")
        return None, False

    def _addressed(self, message: Message) -> Message:
        return {**message, "type": self._type_of(message["type"])}

    def _type_of(self, kind: str) -> str:
        """The type of a message about this switch, as distinct from the group's other switches."""
        return f"{kind} {self._number}"

    def _has_ended(self) -> bool:
        return self._monitor.ended.is_set() or self._native.failure is not None or self._pid != os.getpid()

    def _fail(self, kind: str, rank: int, text: str) -> None:
        """End the group. The leader first sends the reason to the ranks that wait for its plan."""
        if self._machine.is_leader:
            message = {"type": self._type_of("abort"), "kind": kind, "rank": rank, "why": text[:_MAX_REASON]}
            others = [each for each in self._workers if each not in (self._rank, rank)]
            until = time.monotonic() + _ABORT_S + _REPORT_COST_S * len(others)
            for thread in self._start_all(lambda each: self._send_abort(each, message), others):
                thread.join(max(0.0, until - time.monotonic()))
        self._native.fail(_FAILURES.index(kind), rank, text)

    def _send_abort(self, peer: int, message: Message) -> None:
        with contextlib.suppress(RendezvousError, OSError, EOFError):
            self._monitor.call(peer, 0, message, _ABORT_S)[0].close()

    def _handle_abort(self, peer: int, request: Message) -> tuple[Message, None]:
        text = f"rank {peer} gave up on the group: {request['why']}"
        self._native.fail(_FAILURES.index(request["kind"]), request["rank"], text)
        return _ACK, None

    def _start_all(self, work: Callable[[int], Any], ranks: Sequence[int]) -> list[threading.Thread]:
        """Do the work for each rank, on up to _MAX_REQUESTS threads."""
        left = deque(ranks)

        def run() -> None:
            while True:
                try:
                    rank = left.popleft()
                except IndexError:
                    return
                work(rank)

        # No thread pool: its threads would delay the end of the process.
        return [self._start(run) for _ in range(min(len(left), _MAX_REQUESTS))]

    def _start(self, work: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=work, name="netfold recovery", daemon=True)
        thread.start()
        return thread


def _describe_all_reduce(table: ChoiceTable) -> str:
    rows = [row for row in table.rows if row.operation == "all_reduce"]
    return ", ".join(row.algorithm + (f" from {row.min_bytes} bytes" if row.min_bytes else "") for row in rows)


def _encoded(message: machine.Message) -> Message:
    """As a control message."""
    (kind,) = (kind for kind, each in _MESSAGES.items() if isinstance(message, each))
    encoded: Message = {"type": kind, **vars(message)}
    if isinstance(message, machine.Recover):
        encoded["held"] = pack(message.held)
        encoded["fetches"] = [(source, pack(bits)) for source, bits in message.fetches]
    return encoded


def _decoded(kind: str, request: Message) -> machine.Message:
    fields = {name: value for name, value in request.items() if name != "type"}
    if kind == "recover":
        fields["held"] = unpack(fields["held"])
        fields["fetches"] = tuple((source, unpack(bits)) for source, bits in fields["fetches"])
    return _MESSAGES[kind](**fields)
