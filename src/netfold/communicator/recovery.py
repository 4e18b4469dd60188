"""A switch that is lost costs no step: what the ranks say to each other about it, and how they find it again.

The rank that joined first leads. All go by the other ranks' listeners, so it does not matter what a rank is doing:

    lost      a rank tells the leader that the switch is gone, from the membership of that `generation`
    freeze    the leader asks all: from here on a rank takes nothing more from the switch, and says which results it has
    recover   the leader knows what all have, and makes one plan (recovery_plan.py): each fetches what it lacks from
              those who kept it (`fetch`), and goes on by host algorithms with the rest
              (native/collective/switch_path.hpp)
    abort     the leader ends the group, and says why
    path_to_root  the leader's switch, or one above it, listens again: which switches are above each rank now
    rejoin    there is a tree of all: each joins, under a name for this attempt, and lets the membership stand by;
              `rejoined` says so. When all have, the leader's next operation tells the others to go by it.

Why no sum is wrong. Every rank is frozen before any plan is made, so what was said stays true; one plan is made, at one
place; a result that is passed on is the switch's own packet, and goes through the same checks as if it had come from
there; and before a rank goes on it compares what it has with the plan. Whether the switch was really lost does not
matter. A rank that is gone, the leader too, ends the group as ever; one that is late makes the others wait until their
deadline, and no longer.

What a rank decides is a pure state machine, recovery_machine.py, which the search over recovery drives as well
(netfold/model_check/recovery.py). Here are its threads, connections and clock. Each event is one call of the machine,
under one lock; the actions that it returns are carried out in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from netfold._native import engine
from netfold.bootstrap.listener import RequestHandler
from netfold.communicator import recovery_machine as machine
from netfold.communicator.connection_manager import GroupMonitor
from netfold.communicator.membership import Membership
from netfold.communicator.recovery_machine import Action, FrozenState, Message, RecoveryMachine
from netfold.communicator.recovery_plan import chunks_of, pack, unpack
from netfold.communicator.switch_tree import PathToRoot, common_tree
from netfold.errors import RendezvousError, SwitchError
from netfold.switch_protocol import control_messages
from netfold.tuning import ChoiceTable

log = logging.getLogger("netfold")

_CALL_S = 5.0
_AGAIN_S = 0.05
_LOOK_S = 0.5
# What the others should know before this rank goes takes no longer.
_LAST_WORD_S = 1.0
# Results travel in messages of up to so many bytes.
_BATCH_BYTES = control_messages.MAX_MESSAGE_BYTES // 2
# Shorter than a call: the rank that asks waits for the answer.
_WAY_S = 3.0
_JOIN_S = 10.0
_MOST_WORDS = 2000
_FAILURES: tuple[str, ...] = engine.FAILURES
_ACK: control_messages.Message = {"type": "ack"}
# What travels as a message between machines, by the type of its message.
_MESSAGES: dict[str, type[Message]] = {
    "lost": machine.Lost,
    "freeze": machine.Freeze,
    "recover": machine.Recover,
    "rejoin": machine.Rejoin,
    "rejoined": machine.Rejoined,
}
# Actions that may block for a second.
_SLOW = (machine.Leave, machine.Fail)

# The job's digest, the way up to join by, the paths of all workers, seconds.
Join = Callable[[str, PathToRoot, Sequence[Sequence[int]], float], Membership]


class Recovery:
    """Of one rank that joined a switch."""

    def __init__(
        self,
        monitor: GroupMonitor,
        membership: Membership,
        look_up: Callable[[float], PathToRoot],
        join: Join,
        *,
        number: int,
        job: bytes,
        rejoin_s: float,
        table: ChoiceTable,
        capacity: Callable[[], float | None],
    ) -> None:
        """membership: attached, as switch `number`. job: what only this group's ranks know, of this switch alone.
        table: in force while there is no switch. capacity: as in Membership.listen."""
        self._monitor = monitor
        self._native = monitor.native
        self._uplink = monitor.native.shard(number)
        self._number = number
        self._rank = membership.rank
        self._workers = membership.workers
        self._look_up = look_up
        self._join = join
        self._way: PathToRoot | None = None
        self._job = job
        self._rejoin_s = rejoin_s
        self._capacity = capacity
        self._without = f"all_reduce goes by {_spoken(table)}"
        self._lock = threading.Lock()
        self._memberships = {membership.generation: membership}
        self._joined: Membership | None = None  # that does not stand by yet
        self._machine = RecoveryMachine(
            self._rank, self._workers, self, membership.generation, membership.window, rejoin_s=rejoin_s
        )
        self._began: dict[int, tuple[float, str]] = {}  # of losses: when, and what this rank did
        self._pid = os.getpid()
        handlers: dict[str, RequestHandler] = {
            **{kind: partial(self._hear, kind) for kind in _MESSAGES},
            "fetch": self._give,
            "path_to_root": self._tell_path_to_root,
            "abort": self._hear_abort,
            "stragglers": lambda _, __: ({"type": "stragglers", "ranks": self._machine.stragglers()}, None),
        }
        monitor.handlers.update({self._of_switch(kind): answer for kind, answer in handlers.items()})
        membership.listen(self._uplink, self._fail, self.handle_loss, monitor.is_healthy, capacity)

    @property
    def state(self) -> str:
        """Empty while the switch does its work; else a sentence."""
        with self._lock:
            lost = self._machine.lost
            if not lost or self._uplink.traffic()["generation"] != 0:
                return ""
            return f"{list(lost.values())[-1]}: {self._without}"

    def membership(self) -> Membership | None:
        """That by which operations go; None while the switch is gone."""
        with self._lock:
            return self._memberships.get(self._uplink.traffic()["generation"])

    def stragglers(self) -> tuple[list[int], str]:
        """Ranks that this rank waits for at the switch, or that hold up recovery from its loss; and a sentence."""
        membership = self.membership()
        if membership is None:
            ranks = self._stragglers()
            named = f"; rank {', '.join(map(str, ranks))} did not say what it has" if ranks else ""
            return ranks, self.state + named
        ranks = membership.stragglers(self._uplink.traffic()["oldest_outstanding"])
        if ranks:
            return ranks, f"the switch still waits for rank {', '.join(map(str, ranks))}"
        return [], "the switch has every rank's part, or cannot be reached: packets to it may be lost"

    def _stragglers(self) -> list[int]:
        """Ranks that have not said what they have, of a loss that is being recovered from."""
        if self._machine.is_leader:
            return self._machine.stragglers()
        try:
            stream, reply = self._monitor.call(self._workers[0], 0, {"type": self._of_switch("stragglers")}, 1.0)
        except (RendezvousError, OSError, EOFError):
            return [self._workers[0]]
        stream.close()
        return list(reply.get("ranks", ()))

    def leave(self, why: str, fault: int = -1) -> None:
        """Every membership: says goodbye. Idempotent."""
        with self._lock:
            memberships = list(self._memberships.values())
        for membership in memberships:
            membership.leave(why, fault)

    def close(self, why: str, fault: int = -1) -> None:
        self._monitor.ended.set()
        self.leave(why, fault)

    # --- the machine's path to the switch (recovery_machine.SwitchPath); called under the lock ---

    def freeze(self, generation: int) -> tuple[int, int, bytes, bool] | None:
        return self._uplink.freeze(generation)  # type: ignore[no-any-return]

    def accept(self, generation: int, packets: Sequence[bytes]) -> bool:
        return bool(self._uplink.accept(generation, list(packets)))

    def fall_back(self, generation: int, end: int, promised: bool) -> None:
        self._uplink.fall_back(generation, end, promised)

    def stand_by(self, generation: int) -> None:
        membership, self._joined = self._joined, None
        assert membership is not None and membership.generation == generation, "only what was joined last stands by"
        membership.stand_by(self._uplink)
        membership.listen(self._uplink, self._fail, self.handle_loss, self._monitor.is_healthy, self._capacity)

    def promise(self, generation: int) -> bool:
        return bool(self._uplink.promise(generation))

    # --- what happens ---

    def handle_loss(self, generation: int, why: str) -> None:
        """The membership of that generation is of no use any more. From any thread, any number of times."""
        self._happen(lambda: self._handle_loss(generation, why))

    def _handle_loss(self, generation: int, why: str) -> list[Action]:
        self._began.setdefault(generation, (time.monotonic(), self._native.last_seen()))
        return self._machine.handle_loss(generation, why)

    def _happen(self, event: Callable[[], list[Action]]) -> None:
        with self._lock:
            actions = [] if self._over() else event()
        self._carry_out(actions)

    def _hear(self, kind: str, peer: int, question: control_messages.Message) -> tuple[control_messages.Message, None]:
        message = _decoded(kind, question)
        with self._lock:
            if self._over():
                # What the native group had is gone: words about it would be wrong.
                return ({"type": "ended", "failure": self._monitor.failure} if kind == "freeze" else _ACK), None
            if isinstance(message, machine.Lost):
                have, actions = None, self._handle_loss(message.generation, message.why)
            else:
                have, actions = self._machine.handle_message(peer, message)
        self._carry_out(actions)
        if have is None:
            return _ACK, None
        return {"type": "frozen", **vars(have), "held": pack(have.held)}, None

    def _carry_out(self, actions: Sequence[Action]) -> None:
        if any(isinstance(action, _SLOW) for action in actions):
            self._start(lambda: self._do_all(actions))
        else:
            self._do_all(actions)

    def _do_all(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        """Carry out an action; what takes time, on a thread of its own."""
        match action:
            case machine.Send():
                self._start(lambda: self._tell_message(action.peer, action.message))
            case machine.ReportLoss():
                self._start(lambda: self._report(action.generation))
            case machine.Fetch():
                self._start(lambda: self._fetch(action.source, action.generation, action.chunks))
            case machine.Wait():
                self._start(lambda: self._wait(action))
            case machine.FindTree():
                self._start(self._find_tree)
            case machine.Join():
                self._start(lambda: self._join_again(action.attempt, action.paths))
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
                # Before the plan goes out: once it has, the group may be done, and this process gone, at any moment.
                passed_on = sum(bits.bit_count() for shares in plan.fetches.values() for bits in shares.values())
                log.warning(
                    "rank %d: %s. No step is lost: %s%s. This rank was %s; %d results are passed on",
                    self._rank,
                    self._machine.lost[generation],
                    self._without,
                    f", and the switch is asked again in {self._rejoin_s:g} s" if self._rejoin_s else "",
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

    # --- the loss ----------------------------------------------------------------------------------------------------

    def _tell_message(self, peer: int, message: Message) -> None:
        reply = self._tell(peer, _encoded(message))
        if reply is None:
            return
        have = None
        if isinstance(message, machine.Freeze):
            have = FrozenState(reply["base"], reply["end"], unpack(reply["held"]), reply["promised"])
        self._happen(lambda: self._machine.handle_reply(peer, message, have))

    def _report(self, generation: int) -> None:
        """Tell the leader, and look now and then whether there still is one: a rank that waits for it hears nobody."""
        message = _encoded(machine.Lost(generation, self._machine.lost[generation]))
        while not self._over() and self._machine.awaits_plan(generation):
            reply = self._try(self._workers[0], message)
            if reply is not None:
                reply[0].close()
                self._monitor.ended.wait(_LOOK_S)

    def _fetch(self, giver: int, generation: int, chunks: Sequence[int]) -> None:
        """Results that another rank kept, in batches."""
        base = chunks[0]
        bits = sum(1 << (chunk - base) for chunk in chunks)
        question = {"type": "fetch", "generation": generation, "base": base, "chunks": pack(bits)}
        while not self._over():
            reply = self._try(giver, question)
            if reply is None:
                continue
            stream, answer = reply
            packets: list[bytes] | None = None
            try:
                with stream:
                    if answer["type"] == "results":
                        batches = [control_messages.receive(stream)["packets"] for _ in range(answer["batches"])]
                        packets = [packet for batch in batches for packet in batch]
            except (OSError, EOFError):
                continue
            return self._happen(partial(self._machine.handle_fetched, packets))
        return None

    def _give(
        self, _: int, question: control_messages.Message
    ) -> tuple[control_messages.Message, Callable[[socket.socket], None] | None]:
        packets = self._uplink.kept(question["generation"], chunks_of(unpack(question["chunks"]), question["base"]))
        if packets is None:
            return {"type": "unknown"}, None
        each = max(1, _BATCH_BYTES // len(packets[0]))
        batches = [packets[at : at + each] for at in range(0, len(packets), each)]

        def send(stream: socket.socket) -> None:
            for batch in batches:
                control_messages.send(stream, {"type": "packets", "packets": batch})

        return {"type": "results", "batches": len(batches)}, send

    # --- the way back ------------------------------------------------------------------------------------------------

    def _wait(self, action: machine.Wait) -> None:
        if not self._monitor.ended.wait(action.seconds):
            self._happen(lambda: self._machine.handle_timer(action.what, action.attempt))

    def _find_tree(self) -> None:
        paths = self._tree()
        tree = None if paths is None else tuple(map(tuple, paths))
        self._happen(lambda: self._machine.handle_tree(tree))

    def _tell_path_to_root(self, _: int, __: control_messages.Message) -> tuple[control_messages.Message, None]:
        try:
            self._way = self._look_up(_WAY_S)
        except SwitchError as error:
            return {"type": "path_to_root", "refused": str(error)}, None
        return {"type": "path_to_root", **self._way._asdict()}, None

    def _tree(self) -> list[list[int]] | None:
        """The paths of all workers; None where there is no tree of them yet."""
        question: control_messages.Message = {"type": "path_to_root"}
        mine, _ = self._tell_path_to_root(self._rank, question)
        if "refused" in mine:
            return None  # nobody else needs to look
        said = self._tell_all(lambda _: question, said={self._rank: mine})
        if said is None:
            return None
        try:
            for reply in said.values():
                if "refused" in reply:
                    raise SwitchError(str(reply["refused"]))
            ways = [
                PathToRoot(said[rank]["ids"], said[rank]["endpoints"], said[rank]["error"]) for rank in self._workers
            ]
            return common_tree(ways, self._workers)
        except SwitchError as error:
            log.info("rank %d: no switch has the group again: %s", self._rank, error)
            return None

    def _join_again(self, attempt: int, paths: machine.Tree) -> None:
        try:
            assert self._way is not None, "a rank that is asked to join has said by which way"
            digest = hashlib.sha256(b"%d again " % attempt + self._job).hexdigest()[:32]
            membership = self._join(digest, self._way, paths, _JOIN_S)
        except SwitchError as error:
            why = str(error)
            return self._happen(lambda: self._machine.handle_joined(0, 0, why))

        def joined() -> list[Action]:
            self._memberships[membership.generation] = self._joined = membership
            return self._machine.handle_joined(membership.generation, membership.window, "")

        self._happen(joined)
        if self._over():
            membership.leave("the group is over")
        return None

    # --- speaking ----------------------------------------------------------------------------------------------------

    def _tell_all(
        self,
        message_for: Callable[[int], control_messages.Message],
        said: Mapping[int, control_messages.Message] = MappingProxyType({}),
    ) -> dict[int, control_messages.Message] | None:
        """Every rank's reply, this one's among them; None when the group is over before all have replied. `said`: the
        replies of those that need not be asked."""

        replies = dict(said)

        def tell(rank: int) -> None:
            reply = self._tell(rank, message_for(rank))
            if reply is not None:
                replies[rank] = reply

        # Not a pool's: those would hold up the end of the process.
        threads = [self._start(partial(tell, rank)) for rank in self._workers if rank not in said]
        for thread in threads:
            thread.join()
        return replies if len(replies) == len(self._workers) else None

    def _tell(self, peer: int, message: control_messages.Message) -> control_messages.Message | None:
        """A rank's reply, however long it takes; None when the group is over before."""
        if peer == self._rank:
            return self._monitor.handlers[self._of_switch(message["type"])](peer, message)[0]
        while not self._over():
            reply = self._try(peer, message)
            if reply is not None:
                reply[0].close()
                return reply[1]
        return None

    def _try(self, peer: int, message: control_messages.Message) -> tuple[Any, control_messages.Message] | None:
        """One try, and the connection; None where it failed, which ends the group if the rank is gone."""
        try:
            asked = {**message, "type": self._of_switch(message["type"])}
            stream, reply = self._monitor.call(peer, 0, asked, _CALL_S)
        except RendezvousError as error:
            self._fail("peer_lost", peer, f"rank {peer} is gone: {error}")
        except (OSError, EOFError):
            self._monitor.ended.wait(_AGAIN_S)
        else:
            if reply["type"] != "ended":
                return stream, reply
            stream.close()
            failure = reply["failure"]
            fault = peer if failure is None or failure[1] in (-1, self._rank) else failure[1]
            self._fail("peer_lost", fault, f"rank {peer} left the group: {failure[2] if failure else 'it closed it'}")
        return None

    def _of_switch(self, kind: str) -> str:
        """What a question is called that is about this switch, and not another of the group's."""
        return f"{kind} {self._number}"

    def _over(self) -> bool:
        return self._monitor.ended.is_set() or self._native.failure is not None or self._pid != os.getpid()

    def _fail(self, kind: str, rank: int, text: str) -> None:
        """End the group; those who wait for this rank's plan hear why."""
        if self._machine.is_leader:
            message = {"type": self._of_switch("abort"), "kind": kind, "rank": rank, "why": text[:_MOST_WORDS]}
            others = [each for each in self._workers if each not in (self._rank, rank)]
            for thread in [self._start(partial(self._say_last, each, message)) for each in others]:
                thread.join(_LAST_WORD_S)
        self._native.fail(_FAILURES.index(kind), rank, text)

    def _say_last(self, peer: int, message: control_messages.Message) -> None:
        with contextlib.suppress(RendezvousError, OSError, EOFError):
            self._monitor.call(peer, 0, message, _LAST_WORD_S)[0].close()

    def _hear_abort(self, peer: int, question: control_messages.Message) -> tuple[control_messages.Message, None]:
        text = f"rank {peer} gave up on the group: {question['why']}"
        self._native.fail(_FAILURES.index(question["kind"]), question["rank"], text)
        return _ACK, None

    def _start(self, work: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=work, name="netfold recovery", daemon=True)
        thread.start()
        return thread


def _spoken(table: ChoiceTable) -> str:
    rows = [row for row in table.rows if row.operation == "all_reduce"]
    return ", ".join(row.algorithm + (f" from {row.min_bytes} bytes" if row.min_bytes else "") for row in rows)


def _encoded(message: Message) -> control_messages.Message:
    """As it travels."""
    (kind,) = (kind for kind, each in _MESSAGES.items() if isinstance(message, each))
    said: control_messages.Message = {"type": kind, **vars(message)}
    if isinstance(message, machine.Recover):
        said["held"] = pack(message.held)
        said["fetches"] = [(giver, pack(bits)) for giver, bits in message.fetches]
    return said


def _decoded(kind: str, question: control_messages.Message) -> Message:
    said = {name: value for name, value in question.items() if name != "type"}
    if kind == "recover":
        said["held"] = unpack(said["held"])
        said["fetches"] = tuple((giver, unpack(bits)) for giver, bits in said["fetches"])
    if kind == "rejoin":
        said["paths"] = tuple(map(tuple, said["paths"]))
    return _MESSAGES[kind](**said)
