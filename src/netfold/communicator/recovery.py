"""A switch that is lost costs no step: what the ranks say to each other about it, and how they find it again.

The rank that joined first leads. All go by the other ranks' doors, so it does not matter what a rank is doing:

    lost      a rank tells the leader that the switch is gone, from the membership of that `life`
    freeze    the leader asks all: from here on a rank takes nothing more from the switch, and says which results it has
    recover   the leader knows what all have, and makes one plan (recovery_plan.py): each fetches what it lacks from
              those who kept it (`kept`), and goes on by host algorithms with the rest (native/collective/uplink.hpp)
    over      the leader ends the group, and says why
    way up    the leader's switch, or one above it, listens again: which switches are above each rank now
    rejoin    there is a tree of all: each joins, under a name for this attempt, and lets the membership stand by;
              `rejoined` says so. When all have, the leader's next operation tells the others to go by it.

Why no sum is wrong. Every rank is frozen before any plan is made, so what was said stays true; one plan is made, at one
place; a result that is passed on is the switch's own packet, and goes through the same checks as if it had come from
there; and before a rank goes on it compares what it has with the plan. Whether the switch was really lost does not
matter. A rank that is gone, the leader too, ends the group as ever; one that is late makes the others wait until their
deadline, and no longer.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from netfold import control
from netfold._native import engine
from netfold.communicator.caretaker import Ward
from netfold.communicator.door import Answer
from netfold.communicator.errors import RendezvousError, SwitchError
from netfold.communicator.membership import Membership
from netfold.communicator.recovery_plan import Plan, Words, chunks_of, make_plan, pack, unpack
from netfold.communicator.way_up import WayUp, common_tree
from netfold.plan import ChoiceTable

log = logging.getLogger("netfold")

_CALL_S = 5.0
_AGAIN_S = 0.05
_LOOK_S = 0.5
# What the others should know before this rank goes takes no longer.
_LAST_WORD_S = 1.0
# Results travel in messages of up to so many bytes.
_PARCEL_BYTES = control.MAX_MESSAGE_BYTES // 2
# Shorter than a call: the rank that asks waits for the answer.
_WAY_S = 3.0
_JOIN_S = 10.0
_LONGEST_WAIT = 16  # times rejoin_s
_MOST_WORDS = 2000
_FAILURES: tuple[str, ...] = engine.FAILURES
_HEARD: control.Message = {"type": "heard"}

# The job's digest, the way up to join by, the paths of all workers, seconds.
Join = Callable[[str, WayUp, Sequence[Sequence[int]], float], Membership]


class Recovery:
    """Of one rank that joined a switch."""

    def __init__(
        self,
        ward: Ward,
        membership: Membership,
        look_up: Callable[[float], WayUp],
        join: Join,
        *,
        number: int,
        job: bytes,
        rejoin_s: float,
        table: ChoiceTable,
    ) -> None:
        """membership: attached, as switch `number`. job: what only this group's ranks know, of this switch alone.
        table: in force while there is no switch."""
        self._ward = ward
        self._native = ward.native
        self._uplink = ward.native.shard(number)
        self._number = number
        self._rank = membership.rank
        self._workers = membership.workers
        self._look_up = look_up
        self._join = join
        self._way: WayUp | None = None
        self._job = job
        self._rejoin_s = rejoin_s
        self._without = f"all_reduce goes by {_spoken(table)}"
        self._lock = threading.Lock()
        self._memberships = {membership.life: membership}
        self._windows = {membership.life: membership.window}
        self._lost: dict[int, str] = {}
        self._silent: set[int] = set()
        self._recovering: set[int] = set()
        self._rejoining = False
        self._attempt = 0
        self._joined: dict[int, tuple[int, str]] = {}  # in this attempt: the life, or 0 and why not
        self._changed = threading.Condition(self._lock)
        # What takes time and must keep its order; a thread is there from the first of it on.
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._pid = os.getpid()
        questions: dict[str, Answer] = {
            "lost": self._hear_lost,
            "freeze": self._freeze,
            "recover": self._hear_plan,
            "kept": self._give,
            "rejoin": self._hear_rejoin,
            "rejoined": self._hear_rejoined,
            "way up": self._say_way_up,
            "over": self._hear_over,
            "silent": lambda _, __: ({"type": "silent", "ranks": sorted(self._silent)}, None),
        }
        ward.questions.update({self._of_switch(kind): answer for kind, answer in questions.items()})
        membership.listen(self._uplink, self._fail, self.lose, ward.is_well)

    @property
    def leads(self) -> bool:
        return self._rank == self._workers[0]

    @property
    def state(self) -> str:
        """Empty while the switch does its work; else a sentence."""
        with self._lock:
            if not self._lost or self._uplink.traffic()["life"] != 0:
                return ""
            return f"{list(self._lost.values())[-1]}: {self._without}"

    def membership(self) -> Membership | None:
        """That by which operations go; None while the switch is gone."""
        with self._lock:
            return self._memberships.get(self._uplink.traffic()["life"])

    def waits_for(self) -> tuple[list[int], str]:
        """Ranks that this rank waits for at the switch, or that hold up recovery from its loss; and a sentence."""
        membership = self.membership()
        if membership is None:
            ranks = self._silent_ranks()
            named = f"; rank {', '.join(map(str, ranks))} did not say what it has" if ranks else ""
            return ranks, self.state + named
        ranks = membership.missing(self._uplink.traffic()["oldest_unanswered"])
        if ranks:
            return ranks, f"the switch still waits for rank {', '.join(map(str, ranks))}"
        return [], "the switch has every rank's part, or cannot be reached: packets to it may be lost"

    def _silent_ranks(self) -> list[int]:
        """Ranks that have not said what they have, of a loss that is being recovered from."""
        if self.leads:
            return sorted(self._silent)
        try:
            stream, reply = self._ward.call(self._workers[0], 0, {"type": self._of_switch("silent")}, 1.0)
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
        self._ward.over.set()
        self._work.put(lambda: None)
        with self._changed:
            self._changed.notify_all()
        self.leave(why, fault)

    # --- the loss ----------------------------------------------------------------------------------------------------

    def lose(self, life: int, why: str) -> None:
        """The membership of that life is of no use any more. From any thread, any number of times."""
        with self._lock:
            if life in self._lost or self._over():
                return
            self._lost[life] = why
        self._uplink.freeze(life)
        if self.leads:
            self._start(lambda: self._lead(life, why))
        else:
            self._start(lambda: self._await_plan(life, why))

    def _hear_lost(self, _: int, question: control.Message) -> tuple[control.Message, None]:
        self.lose(question["life"], question["why"])
        return _HEARD, None

    def _freeze(self, _: int, question: control.Message) -> tuple[control.Message, None]:
        life, why = question["life"], question["why"]
        with self._lock:
            is_news = life not in self._lost
            self._lost[life] = why
            membership = self._memberships.get(life)
        if membership is not None:
            membership.give_up()
        if is_news:
            self._start(lambda: self._await_plan(life, why))
        words = self._uplink.freeze(life)
        base, end, held, promised = words if words is not None else (0, 0, b"", False)
        return {"type": "words", "base": base, "end": end, "held": held, "promised": promised}, None

    def _await_plan(self, life: int, why: str) -> None:
        """Tell the leader, and look now and then whether there still is one: a rank that waits for it hears nobody."""
        while not self._over() and life not in self._recovering:
            reply = self._try(self._workers[0], {"type": "lost", "life": life, "why": why})
            if reply is not None:
                reply[0].close()
                self._ward.over.wait(_LOOK_S)

    def _lead(self, life: int, why: str) -> None:
        began = time.monotonic()
        doing = self._native.last_seen()
        self._silent = set(self._workers)
        question = {"type": "freeze", "life": life, "why": why}
        said = self._tell_all(lambda _: question, heard=self._silent.discard)
        if said is None:
            return
        words = {rank: Words(each["base"], each["end"], unpack(each["held"])) for rank, each in said.items()}
        try:
            plan = make_plan(words, self._windows.get(life, 0))
        except ValueError as error:
            return self._fail(
                "switch_lost",
                -1,
                f"{why}, and the ranks' words do not fit together: {error}",
            )
        promised = said[self._rank]["promised"]
        if promised:
            # Before the plan goes out: once it has, the group may be done, and this process gone, at any moment.
            passed_on = sum(bits.bit_count() for shares in plan.gives.values() for bits in shares.values())
            log.warning(
                "rank %d: %s. No step is lost: %s%s. This rank was %s; %d results are passed on",
                self._rank,
                why,
                self._without,
                f", and the switch is asked again in {self._rejoin_s:g} s" if self._rejoin_s else "",
                doing,
                passed_on,
            )
        if self._tell_all(lambda rank: _plan_for(rank, plan, life, promised)) is None:
            return
        if promised:
            log.info(
                "rank %d: all ranks know how to go on, %.3f s after the loss", self._rank, time.monotonic() - began
            )
        with self._lock:
            starts = self._rejoin_s != 0 and not self._rejoining
            self._rejoining |= starts
        if starts:
            self._start(self._find_again)

    def _hear_plan(self, _: int, question: control.Message) -> tuple[control.Message, None]:
        with self._lock:
            is_new = question["life"] not in self._recovering
            self._recovering.add(question["life"])
        if is_new:
            self._enqueue(lambda: self._recover(question))
        return _HEARD, None

    def _recover(self, plan: control.Message) -> None:
        life = plan["life"]
        for giver, bits in plan["gets"]:
            for packets in self._fetch(giver, life, plan["base"], bits):
                if not self._uplink.accept(life, packets):
                    return self._fail(
                        "switch_lost", giver, f"rank {giver} passed on a result that is not one of this job"
                    )
        words = self._uplink.freeze(life)
        has = Words(words[0], words[1], unpack(words[2])).from_chunk(plan["base"]) if words is not None else 0
        if has != unpack(plan["held"]):
            return self._fail("switch_lost", -1, "this rank has other results than the plan of recovery says")
        self._uplink.fall_back(life, plan["end"], plan["promised"])
        with self._lock:
            membership = self._memberships.pop(life, None)
        if membership is not None:
            membership.leave("the group goes on without this switch")

    def _fetch(self, giver: int, life: int, base: int, bits: bytes) -> list[list[bytes]]:
        """Results that another rank kept, in parcels; nothing when the group is over."""
        question = {"type": "kept", "life": life, "base": base, "chunks": bits}
        while not self._over():
            reply = self._try(giver, question)
            if reply is None:
                continue
            stream, answer = reply
            try:
                with stream:
                    if answer["type"] != "kept":
                        self._fail("switch_lost", giver, f"rank {giver} does not have the results that it said it has")
                        break
                    return [control.receive(stream)["packets"] for _ in range(answer["parcels"])]
            except (OSError, EOFError):
                continue
        return []

    def _give(
        self, _: int, question: control.Message
    ) -> tuple[control.Message, Callable[[socket.socket], None] | None]:
        packets = self._uplink.kept(question["life"], chunks_of(unpack(question["chunks"]), question["base"]))
        if packets is None:
            return {"type": "unknown"}, None
        each = max(1, _PARCEL_BYTES // len(packets[0]))
        parcels = [packets[at : at + each] for at in range(0, len(packets), each)]

        def send(stream: socket.socket) -> None:
            for parcel in parcels:
                control.send(stream, {"type": "packets", "packets": parcel})

        return {"type": "kept", "parcels": len(parcels)}, send

    # --- the way back ------------------------------------------------------------------------------------------------

    def _find_again(self) -> None:
        """At the leader, until the switch has the group again."""
        wait_s = self._rejoin_s
        while not self._ward.over.wait(wait_s) and not self._over():
            wait_s = min(2 * wait_s, _LONGEST_WAIT * self._rejoin_s)
            life = self._join_all()
            with self._lock:
                # One that was lost at once is still ours to find.
                if life != 0 and life not in self._lost:
                    self._rejoining = False
                    return

    def _say_way_up(self, _: int, __: control.Message) -> tuple[control.Message, None]:
        try:
            self._way = self._look_up(_WAY_S)
        except SwitchError as error:
            return {"type": "way up", "refused": str(error)}, None
        return {"type": "way up", **self._way._asdict()}, None

    def _tree(self) -> list[list[int]] | None:
        """The paths of all workers; None where there is no tree of them yet."""
        question: control.Message = {"type": "way up"}
        mine, _ = self._say_way_up(self._rank, question)
        if "refused" in mine:
            return None  # nobody else needs to look
        said = self._tell_all(lambda _: question, said={self._rank: mine})
        if said is None:
            return None
        try:
            for reply in said.values():
                if "refused" in reply:
                    raise SwitchError(str(reply["refused"]))
            ways = [WayUp(said[rank]["ids"], said[rank]["endpoints"], said[rank]["broken"]) for rank in self._workers]
            return common_tree(ways, self._workers)
        except SwitchError as error:
            log.info("rank %d: no switch has the group again: %s", self._rank, error)
            return None

    def _join_all(self) -> int:
        """The life that the group has at a switch now; 0 where not all ranks came into it."""
        paths = self._tree()
        if paths is None:
            return 0
        with self._lock:
            self._attempt += 1
            attempt = self._attempt
            self._joined = {}
        if self._tell_all(lambda _: {"type": "rejoin", "attempt": attempt, "paths": paths}) is None:
            return 0
        with self._changed:
            self._changed.wait_for(lambda: len(self._joined) == len(self._workers) or self._over(), 2 * _JOIN_S)
            joined = dict(self._joined)
        lives = {life for life, _ in joined.values()}
        if len(joined) < len(self._workers) or len(lives) != 1 or 0 in lives:
            said = "; ".join(dict.fromkeys(why for _, why in joined.values() if why)) or "not every rank joined in time"
            log.info("rank %d: no switch has the group again: %s", self._rank, said)
            return 0
        (life,) = lives
        if not self._uplink.promise(life):
            return 0
        log.warning(
            "rank %d: the switch at %s has the group again, from the next operation on",
            self._rank,
            self._memberships[life].endpoint,
        )
        return life

    def _hear_rejoin(self, _: int, question: control.Message) -> tuple[control.Message, None]:
        self._enqueue(lambda: self._join_again(question["attempt"], question["paths"]))
        return _HEARD, None

    def _join_again(self, attempt: int, paths: list[list[int]]) -> None:
        with self._lock:
            if attempt <= self._attempt and not self.leads:
                return  # asked twice
            self._attempt = attempt
            in_vain = [each for life, each in self._memberships.items() if life != self._uplink.traffic()["life"]]
        for membership in in_vain:
            membership.give_up()
            membership.leave("it tries again")
        life, why = 0, ""
        try:
            assert self._way is not None, "a rank that is asked to join has said by which way"
            digest = hashlib.sha256(b"%d again " % attempt + self._job).hexdigest()[:32]
            membership = self._join(digest, self._way, paths, _JOIN_S)
        except SwitchError as error:
            why = str(error)
        else:
            life = membership.life
            with self._lock:
                self._memberships = {life: membership}
                self._windows[life] = membership.window
            membership.stand_by(self._uplink)
            membership.listen(self._uplink, self._fail, self.lose, self._ward.is_well)
            if self._ward.over.is_set():
                membership.leave("the group is over")
                return
        self._start(
            lambda: self._tell(self._workers[0], {"type": "rejoined", "attempt": attempt, "life": life, "why": why})
        )

    def _hear_rejoined(self, peer: int, question: control.Message) -> tuple[control.Message, None]:
        with self._changed:
            if question["attempt"] == self._attempt:
                self._joined[peer] = question["life"], question["why"]
                self._changed.notify_all()
        return _HEARD, None

    # --- speaking ----------------------------------------------------------------------------------------------------

    def _tell_all(
        self,
        message_for: Callable[[int], control.Message],
        heard: Callable[[int], None] = lambda _: None,
        said: Mapping[int, control.Message] = MappingProxyType({}),
    ) -> dict[int, control.Message] | None:
        """Every rank's reply, this one's among them; None when the group is over before all have replied. `said`: the
        replies of those that need not be asked."""

        replies = dict(said)

        def tell(rank: int) -> None:
            reply = self._tell(rank, message_for(rank))
            if reply is not None:
                replies[rank] = reply
                heard(rank)

        # Not a pool's: those would hold up the end of the process.
        threads = [self._start(partial(tell, rank)) for rank in self._workers if rank not in said]
        for thread in threads:
            thread.join()
        return replies if len(replies) == len(self._workers) else None

    def _tell(self, peer: int, message: control.Message) -> control.Message | None:
        """A rank's reply, however long it takes; None when the group is over before."""
        if peer == self._rank:
            return self._ward.questions[self._of_switch(message["type"])](peer, message)[0]
        while not self._over():
            reply = self._try(peer, message)
            if reply is not None:
                reply[0].close()
                return reply[1]
        return None

    def _try(self, peer: int, message: control.Message) -> tuple[Any, control.Message] | None:
        """One try, and the connection; None where it failed, which ends the group if the rank is gone."""
        try:
            asked = {**message, "type": self._of_switch(message["type"])}
            stream, reply = self._ward.call(peer, 0, asked, _CALL_S)
        except RendezvousError as error:
            self._fail("peer_lost", peer, f"rank {peer} is gone: {error}")
        except (OSError, EOFError):
            self._ward.over.wait(_AGAIN_S)
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
        return self._ward.over.is_set() or self._native.failure is not None or self._pid != os.getpid()

    def _fail(self, kind: str, rank: int, text: str) -> None:
        """End the group; those who wait for this rank's plan hear why."""
        if self.leads:
            message = {"type": self._of_switch("over"), "kind": kind, "rank": rank, "why": text[:_MOST_WORDS]}
            others = [each for each in self._workers if each not in (self._rank, rank)]
            for thread in [self._start(partial(self._say_last, each, message)) for each in others]:
                thread.join(_LAST_WORD_S)
        self._native.fail(_FAILURES.index(kind), rank, text)

    def _say_last(self, peer: int, message: control.Message) -> None:
        with contextlib.suppress(RendezvousError, OSError, EOFError):
            self._ward.call(peer, 0, message, _LAST_WORD_S)[0].close()

    def _hear_over(self, peer: int, question: control.Message) -> tuple[control.Message, None]:
        text = f"rank {peer} gave up on the group: {question['why']}"
        self._native.fail(_FAILURES.index(question["kind"]), question["rank"], text)
        return _HEARD, None

    def _start(self, work: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=work, name="netfold recovery", daemon=True)
        thread.start()
        return thread

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        with self._lock:
            if self._worker is None:
                self._worker = self._start(self._run)

    def _run(self) -> None:
        while not self._ward.over.is_set():
            self._work.get()()


def _spoken(table: ChoiceTable) -> str:
    rows = [row for row in table.rows if row.operation == "all_reduce"]
    return ", ".join(row.algorithm + (f" from {row.min_bytes} bytes" if row.min_bytes else "") for row in rows)


def _plan_for(rank: int, plan: Plan, life: int, promised: bool) -> control.Message:
    return {
        "type": "recover",
        "life": life,
        "base": plan.base,
        "end": plan.end,
        "held": pack(plan.held),
        "gets": [(giver, pack(bits)) for giver, bits in plan.gives.get(rank, {}).items()],
        "promised": promised,
    }
