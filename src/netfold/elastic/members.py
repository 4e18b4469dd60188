"""One process's place in a job whose ranks come and go: vote, change, join, leave.

    members = Members.from_environment(store=...)
    while members.done < steps:
        try:
            compute gradients with members.communicator
            vote = members.vote()
        except NetfoldError as error:
            if not members.failed: raise
            change = members.change(error)
            if not change.apply: continue
        apply the step
        if vote.changes: members.change()

Safety. A step is applied by all members or by none. Each member votes when it has all that it needs for the step, and
passes the vote when all have voted. At a loss, the members agree on who goes on (agreement.py). A member reports to
that agreement from a thread of its listener, also while its training thread computes; from then on it passes no vote.
So of a step that any member of the next generation has passed, every member knows that it has passed.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from netfold.bootstrap import handle, launchers
from netfold.bootstrap.store import PrefixStore, Store
from netfold.bootstrap.tcp_store import outliving_store, process_store
from netfold.communicator.communicator import Communicator
from netfold.elastic import messages
from netfold.elastic.agreement import Decide, Decision, Report
from netfold.elastic.change import Change, Lost, TooFewLeft, Vote
from netfold.elastic.joining import Joining
from netfold.elastic.negotiation import REQUEST_S, Loss, Negotiation
from netfold.elastic.newest import NewestGeneration
from netfold.errors import GroupAborted, Mismatch, RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import Message

STORE_VARIABLE = "NETFOLD_STORE"
# Ended generations whose decision a member remembers, for members that come late.
MAX_PAST = 256
# How long a newcomer's last question counts.
_LEASE_S = 3.0
# Newcomers that wait at one member. More are refused.
MAX_WAITING = 1024
# How long a member whose vote has not ended yet lets another one wait that has passed it.
_PASS_S = 1.0
# Changes after failures in a row in which nobody is lost and no step is done. The cause is then no lost member.
MAX_FRUITLESS = 5
# The longest text of a loss.
_MAX_TEXT = 1000


class Members:
    """A member of an elastic job, without torch. Owns its communicator until `close`."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        store: Store | None,
        min_size: int,
        max_size: int | None,
        done: int,
        join_timeout_s: float,
    ) -> None:
        """Use `of`, `newcomer` or `from_environment`."""
        if min_size < 1 or (max_size is not None and max_size < min_size):
            raise ValueError(f"min_size={min_size}, max_size={max_size}: need 1 <= min_size <= max_size")
        self.communicator = communicator
        """The same object in all generations; its `group` is the one of now."""
        self.generation = 0
        """1 for the first generation; 0 for a newcomer that waits."""
        self.done = done
        """The steps whose vote has passed: the number of the step under way, from 0."""
        self.lacks = False
        """This member has not been sent the state yet."""
        self.first: Change | None = None
        """The change by which this process came in; None in the first generation."""
        self._newest = NewestGeneration(store)
        self._min_size, self._max_size = min_size, max_size
        self._join_timeout_s = join_timeout_s
        self._handles: tuple[str, ...] = ()
        self._past: OrderedDict[int, tuple[Decision, int]] = OrderedDict()  # and the size; by the generation that ended
        self._waiting: OrderedDict[str, float] = OrderedDict()  # newcomers, and when they asked last
        self._changed = threading.Condition()
        self._negotiation: Negotiation | None = None  # None for a newcomer that waits
        self._voted = self._leaves = self._formed = False
        self._late_since: float | None = None
        self._fruitless, self._done_at_change = 0, -1
        self._closed = False
        self._joining = Joining(communicator.endpoint, self._newest, self._changed, join_timeout_s)
        communicator.endpoint.handlers.update(dict.fromkeys(messages.REQUESTS, self._handle))

    @classmethod
    def of(
        cls,
        communicator: Communicator,
        *,
        store: Store | None = None,
        min_size: int = 1,
        max_size: int | None = None,
        done: int = 0,
        join_timeout_s: float = 60.0,
    ) -> Members:
        """Begin with a communicator that has formed, as generation 1. All its ranks call this.

        store: one that outlives ranks, for newcomers; None: there are none.
        min_size, max_size: the fewest members that go on, and the most that take part; more newcomers wait as spares.
        done: the steps of this process's state, the same on all ranks.
        join_timeout_s: the longest time of a change.
        """
        members = cls(
            communicator, store=store, min_size=min_size, max_size=max_size, done=done, join_timeout_s=join_timeout_s
        )
        with members._changed:
            members._enter(1, communicator.handles)
            members._formed = True
        members._publish(waits=False)
        return members

    @classmethod
    def newcomer(
        cls,
        store: Store,
        *,
        options: Options | None = None,
        min_size: int = 1,
        max_size: int | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
        store_host: str | None = None,
    ) -> Members:
        """Join a job that has begun. Waits, as a spare where need be, as long as a member answers.

        Afterwards `lacks` is set, and `first` says who sends the state. Raises RendezvousError where no member answers
        for join_timeout_s.
        """
        communicator = Communicator.outside(
            options=options, timeout_s=timeout_s, join_timeout_s=join_timeout_s, store_host=store_host
        )
        try:
            members = cls(
                communicator, store=store, min_size=min_size, max_size=max_size, done=0, join_timeout_s=join_timeout_s
            )
            members.lacks = True
            members.first = members._come_in(0, (), (), None)
        except BaseException:
            communicator.close()
            raise
        return members

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        store: Store | None = None,
        options: Options | None = None,
        min_size: int = 1,
        max_size: int | None = None,
        done: int = 0,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
    ) -> Members:
        """The members of a launcher's job: all ranks of the first start, or a newcomer where the job has begun.

        store: one that outlives ranks. Default: the one of `netfold store` that NETFOLD_STORE names; else rank 0's
        process serves one, and when that process has ended, there are no newcomers any more.
        """
        place = launchers.placement(environment)
        named = environment.get(STORE_VARIABLE)
        if store is None and named:
            store = outliving_store(named, join_timeout_s)
        elif store is None:
            store = process_store(place.host, place.port, place.job, rank=place.rank, timeout_s=join_timeout_s)
        limits: Any = {"min_size": min_size, "max_size": max_size, "join_timeout_s": join_timeout_s}
        newest = NewestGeneration(store).read()
        if newest is not None and newest.generation > 0:
            return cls.newcomer(store, options=options, timeout_s=timeout_s, store_host=place.host, **limits)
        communicator = Communicator(
            PrefixStore(store, "elastic/first/"),
            place.rank,
            place.size,
            options=options,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            store_host=place.host,
        )
        try:
            # Rank 0's process, and a store in it, may end once all ranks have connected.
            communicator.barrier(timeout_s=join_timeout_s)
            return cls.of(communicator, store=store, done=done, **limits)
        except BaseException:
            communicator.close()
            raise

    @property
    def rank(self) -> int:
        return self._handles.index(self.communicator.handle)

    @property
    def size(self) -> int:
        return len(self._handles)

    @property
    def failed(self) -> bool:
        """Whether the generation has ended and `change` is due."""
        with self._changed:
            return self._has_ended()

    # --- the vote ---

    def vote(self, *, timeout_s: float | None = None) -> Vote:
        """Vote that this member can apply the step. Returns when all members have voted.

        Every member calls this once a step, before it changes its state. Cost: an all_reduce of 24 bytes.
        Raises NetfoldError where the generation has ended: call `change`. Mismatch where members vote for different
        steps.
        """
        wish = self.begin_vote()
        votes = np.array([wish, self.done, -self.done], np.int64)
        self.communicator.all_reduce(votes, op="max", timeout_s=timeout_s)
        wishes, last, first = votes.tolist()
        if last != -first:
            raise Mismatch(
                f"members vote for different steps, {-first} to {last}; this one, rank {self.rank}, for {self.done}"
            )
        return self.pass_vote(wishes)

    def begin_vote(self) -> int:
        """Begin a vote of the caller's own: it reduces the value that this returns, 0 or 1, by sum or max over all.

        No other operation may come between this and the reduction. Raises NetfoldError as `vote`.
        """
        with self._changed:
            self._check_going_on()
            self._voted = True
            full = self._max_size is not None and self.size >= self._max_size
            return int(self._leaves or (not full and bool(self._fresh())))

    def pass_vote(self, wishes: int) -> Vote:
        """End a vote with the reduced value. Raises NetfoldError where this member's report came first."""
        with self._changed:
            self._check_going_on()
            self._voted, self._late_since = False, None
            self.done += 1
            self._changed.notify_all()
            return Vote(self.done, wishes > 0)

    def leave(self) -> None:
        """Leave the job at the next boundary: the votes say that the generation changes, and `change` returns left."""
        with self._changed:
            self._leaves = True

    def received(self) -> None:
        """This member was sent the state."""
        with self._changed:
            self.lacks = False

    # --- the change ---

    def change(self, error: BaseException | None = None) -> Change:
        """Agree on the next generation and form it. Every member calls this, after a failure or at a boundary.

        error: the failure that this member saw. A generation that fails while it forms is followed by the next.
        A member that the decision excludes comes back as a newcomer within this call, and may wait as a spare.
        Raises TooFewLeft where no quorum, or fewer than min_size members, come within join_timeout_s. Raises `error`
        where it is a Mismatch, and after MAX_FRUITLESS failures in a row that no lost member explains.
        """
        if error is not None and (isinstance(error, Mismatch) or self._fruitless >= MAX_FRUITLESS):
            raise error
        with self._changed:
            loss = None if error is None else (getattr(error, "rank", None), str(error) or type(error).__name__)
            before, origin = self._handles, list(range(len(self._handles)))
            verdict: Loss | None = (
                None if loss is None else (-1 if loss[0] is None else int(loss[0]), loss[1][:_MAX_TEXT])
            )
        change = self._go_on(before, origin, {}, verdict, is_member=True)
        is_fruitless = error is not None and not change.lost and not change.new and change.done == self._done_at_change
        self._fruitless, self._done_at_change = self._fruitless + 1 if is_fruitless else 0, change.done
        return change

    def close(self) -> None:
        """End without waiting for other members. Idempotent."""
        with self._changed:
            self._closed = self._joining.closed = True
            if self._negotiation is not None:
                self._negotiation.close()
            self._changed.notify_all()
        self.communicator.close()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *error: object) -> None:
        self.communicator.__exit__(*error)  # type: ignore[arg-type]
        self.close()

    # --- from one generation to the next ---

    def _go_on(
        self, before: Sequence[str], origin: list[int], why: dict[int, str], loss: Loss | None, *, is_member: bool
    ) -> Change:
        """Agree, and form, until a generation has formed.

        before: the handles of the generation in which the change began. origin: by present rank, the rank there.
        why: by rank there, the reason of a loss.
        is_member: False: this process has just been taken in, and forms the present generation first.
        """
        deadline = time.monotonic() + self._join_timeout_s
        applies = False
        reason = "at the boundary of two steps" if loss is None else loss[1]
        decision: Decision | None = None
        while True:
            if is_member:
                decision, states = self._agree(loss, deadline)
                if decision is None:
                    return self._come_back(before, origin, None)
                own = self.rank
                for rank in set(range(self.size)) - set(decision.members):
                    if origin[rank] >= 0:
                        why.setdefault(origin[rank], states.get(rank) or "it has left by its own wish")
                if own not in decision.members:
                    return self._leave(before, decision) if self._leaves else self._come_back(before, origin, decision)
                applies |= own in decision.applies
                origin = [origin[rank] for rank in decision.members] + [-1] * len(decision.newcomers)
                with self._changed:
                    self._follow(decision, own)
            is_member = True
            self._check_state(decision)
            self._publish(waits=decision is not None and bool(decision.newcomers))
            try:
                self._form(deadline)
            except RendezvousError as error:
                loss = (-1 if error.rank is None else error.rank, str(error)[:_MAX_TEXT])
                continue
            with self._changed:
                self._formed = True
                if not self._has_reported():
                    break
                loss = self._negotiation.loss if self._negotiation is not None else None
        lost = [Lost(rank, handle.parse(before[rank]).where, why.get(rank, "")) for rank in range(len(before))]
        return Change(
            generation=self.generation,
            rank=self.rank,
            size=self.size,
            done=self.done,
            apply=applies,
            former=tuple(origin),
            lost=tuple(each for each in lost if each.rank not in origin),
            new=tuple(rank for rank, former in enumerate(origin) if former < 0),
            lacking=self._lacking(),
            reason=reason,
        )

    def _agree(self, loss: Loss | None, deadline: float) -> tuple[Decision | None, dict[int, str]]:
        """The decision that ends the present generation, and what is known about members that did not take part.

        None where the job went on without this member, and nobody tells how.
        """
        with self._changed:
            negotiation = self._negotiation
            assert negotiation is not None
            agreement = negotiation.agreement
            self._report(loss, deadline - time.monotonic())
            while agreement.decision is None and not negotiation.over and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TooFewLeft(negotiation.shortage(self._join_timeout_s))
                self._changed.wait(left)
            if agreement.decision is not None:
                return agreement.decision, negotiation.states()
            if self._closed:
                raise GroupAborted("these members were closed")
            return None, {}

    def _follow(self, decision: Decision, own: int) -> None:
        """Enter the generation that was decided, of which this member is one. Under the lock."""
        self._remember(self.generation, decision, self.size)
        self.lacks |= own in decision.lacking
        self.done = decision.done
        handles = [self._handles[rank] for rank in decision.members]
        self._enter(self.generation + 1, (*handles, *decision.newcomers))

    def _enter(self, generation: int, handles: Sequence[str]) -> None:
        """Be a member of a generation that may form. Under the lock."""
        self.generation, self._handles = generation, tuple(handles)
        self._voted, self._formed, self._late_since = False, False, None
        for each in handles:
            self._waiting.pop(each, None)
        if self._negotiation is not None:
            # Its thread still tells other members of the decision.
            self._negotiation.close()
        self._negotiation = Negotiation(
            generation,
            handles,
            self.communicator.handle,
            self.communicator.endpoint.interfaces,
            self._changed,
            min_size=self._min_size,
            max_size=self._max_size,
            waiting=self._fresh,
            newest=self._newest,
        )
        self._changed.notify_all()

    def _form(self, deadline: float) -> None:
        """Form the group of the present generation. Raises RendezvousError."""
        digest = hashlib.sha256("\n".join(self._handles).encode()).hexdigest()[:16]
        left = max(0.001, deadline - time.monotonic())
        self.communicator.reconfigure(f"elastic-{self.generation}-{digest}", self._handles, timeout_s=left)

    def _check_state(self, decision: Decision | None) -> None:
        if decision is not None and len(decision.lacking) == len(decision.members):
            raise TooFewLeft(
                f"generation {self.generation}: none of the {len(decision.members)} members that are left has the "
                "state: those that had it were lost before it was sent. Start the job again from a checkpoint"
            )

    def _lacking(self) -> dict[int, int]:
        """By rank that lacks the state, the rank that sends it. Every member of the generation computes the same."""
        decision, _ = self._past[self.generation - 1]
        lacking = [new for new, former in enumerate(decision.members) if former in decision.lacking]
        lacking += range(len(decision.members), self.size)
        holders = [rank for rank in range(self.size) if rank not in lacking]
        return {rank: holders[number % len(holders)] for number, rank in enumerate(lacking)}

    def _leave(self, before: Sequence[str], decision: Decision) -> Change:
        negotiation = self._negotiation
        if negotiation is not None:
            negotiation.told.wait(2 * REQUEST_S)
        generation = self.generation + 1
        self.close()
        return Change(generation, -1, len(decision.members), decision.done, left=True, reason="it left by its own wish")

    def _come_back(self, before: Sequence[str], origin: Sequence[int], decision: Decision | None) -> Change:
        """This member was decided out: be a newcomer."""
        with self._changed:
            after, known = self.generation, list(self._handles)
            if decision is not None:
                self._remember(after, decision, self.size)
                known = [self._handles[rank] for rank in decision.members] + list(decision.newcomers)
            if self._negotiation is not None:
                self._negotiation.close()
            self._negotiation, self.lacks, self._formed = None, True, False
        return self._come_in(after, before, known, origin)

    # --- newcomers ---

    def _come_in(self, after: int, before: Sequence[str], known: Sequence[str], origin: Sequence[int] | None) -> Change:
        """Wait until a generation has this process, and form it. known: handles of members, beside the store's."""
        welcome = self._joining.wait(after, known)
        with self._changed:
            self.lacks, self.done = True, welcome.decision.done
            self._remember(welcome.generation - 1, welcome.decision, welcome.former)
            self._enter(welcome.generation, welcome.handles)
        # Ranks of generations that this process has not seen cannot be told.
        places = {text: rank for rank, text in enumerate(before)}
        return self._go_on(before, [places.get(each, -1) for each in welcome.handles], {}, None, is_member=False)

    def _publish(self, *, waits: bool) -> None:
        """At rank 0, say in the store which generation is the newest, before it forms.

        waits: for the store, where newcomers are in it. A member that was decided out, and finds that all other members
        of its generation have ended, then finds the newcomers, and does not go on alone.
        """
        if self.rank == 0:
            self._newest.write(self.generation, self._handles, waits=waits)

    # --- under the lock ---

    def _has_reported(self) -> bool:
        agreement = None if self._negotiation is None else self._negotiation.agreement
        return agreement is None or agreement.report is not None or agreement.decision is not None

    def _has_ended(self) -> bool:
        return self._has_reported() or self.communicator.group.failure is not None

    def _check_going_on(self) -> None:
        if self._has_reported():
            loss = None if self._negotiation is None else self._negotiation.loss
            text = "its members agree on the next one" if loss is None else loss[1]
            raise GroupAborted(f"generation {self.generation} has ended: {text}")

    def _report(self, loss: Loss | None, timeout_s: float) -> None:
        negotiation = self._negotiation
        assert negotiation is not None
        waiting = tuple(messages.page(self._fresh(), 0))
        negotiation.agreement.begin(Report(self.done, self._voted, not self.lacks, self._leaves, waiting))
        negotiation.start(loss, timeout_s)

    def _remember(self, generation: int, decision: Decision, size: int) -> None:
        self._past[generation] = decision, size
        while len(self._past) > MAX_PAST:
            self._past.popitem(last=False)

    def _fresh(self) -> list[str]:
        """The newcomers that have asked lately, first come, first served."""
        since = time.monotonic() - _LEASE_S
        for each in [each for each, asked_at in self._waiting.items() if asked_at < since]:
            del self._waiting[each]
        return list(self._waiting)

    # --- requests of other processes, on threads of the listener ---

    def _handle(self, request: Message) -> Message:
        kind = request["type"]
        if kind == messages.TYPE:
            return self._handle_agreement(request)
        with self._changed:
            if kind == "alive":
                waits = self._negotiation is None and not self._closed
                return {"type": "alive"} if waits else {"type": "unknown", "text": "it does not wait to join"}
            if kind == "taken":
                self._joining.hint = str(request["handle"])
                self._changed.notify_all()
                return {"type": "alive"}
            if self._negotiation is None or self._closed:
                return {"type": "unknown", "text": "it is no member"}
            if kind == "members":
                if request["generation"] != self.generation:
                    return {"type": "unknown", "text": "that generation has ended"}
                return {
                    "type": "members",
                    "generation": self.generation,
                    "handles": messages.page(self._handles, int(request["start"])),
                }
            return self._handle_join(str(request["handle"]), int(request["after"]))

    def _handle_join(self, newcomer: str, after: int) -> Message:
        own = self.communicator.endpoint.handle
        if newcomer in self._handles and self.generation > max(after, 1):
            decision, former = self._past[self.generation - 1]
            return {
                "type": "welcome",
                "generation": self.generation,
                "size": self.size,
                "decision": messages.pack(Decide(decision)),
                "former": former,
            }
        try:
            handle.check_members(own, [own.text, newcomer])
        except ValueError as error:
            return {"type": "refused", "text": f"the job cannot take this process: {error}"}
        if newcomer in self._waiting or len(self._waiting) < MAX_WAITING:
            self._waiting[newcomer] = time.monotonic()
        return {"type": "waiting", "generation": self.generation, "size": self.size}

    def _handle_agreement(self, request: Message) -> Message:
        message, generation, group = messages.unpack(request["message"]), request["generation"], None
        with self._changed:
            if generation in self._past:
                return {"type": messages.TYPE, "message": messages.pack(Decide(self._past[generation][0]))}
            if generation < self.generation:
                return {"type": "over"}
            negotiation = self._negotiation
            if generation > self.generation or negotiation is None or self._closed:
                return {"type": "behind"}
            loss = request["lost"]
            if not self._has_reported() and not isinstance(message, Decide):
                if self._is_passing(int(request["done"])):
                    return {"type": "later"}
                self._report(None if loss is None else (int(loss[0]), str(loss[1])), self._join_timeout_s)
                group = self.communicator.group if self._formed and loss is not None else None
            reply = negotiation.agreement.handle(int(request["sender"]), message)
            self._changed.notify_all()
        if group is not None:
            group.lose(int(loss[0]), str(loss[1]))
        return {"type": messages.TYPE, "message": messages.pack(reply)}

    def _is_passing(self, done: int) -> bool:
        """Whether this member is about to pass a vote that the sender of a request has passed."""
        if not self._voted or done <= self.done or self.communicator.group.failure is not None:
            return False
        now = time.monotonic()
        self._late_since = now if self._late_since is None else self._late_since
        return now < self._late_since + _PASS_S
