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
    members.finish()

Safety. A step is applied by all members or by none. Each member votes when it has all that it needs for the step, and
passes the vote when all have voted. At a loss, the members agree on who goes on (agreement.py). A member reports to
that agreement from a thread of its listener, also while its training thread computes; from then on it passes no vote.
So of a step that any member of the next generation has passed, every member knows that it has passed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from netfold.bootstrap import handle, launchers
from netfold.bootstrap.store import PrefixStore, Store
from netfold.bootstrap.tcp_store import outliving_store, process_store
from netfold.communicator.communicator import Communicator
from netfold.elastic import messages
from netfold.elastic.agreement import Decision
from netfold.elastic.change import Change, Lost, TooFewLeft, Vote
from netfold.elastic.heartbeat import Heartbeats
from netfold.elastic.joining import AllEnded, Joining
from netfold.elastic.negotiation import REQUEST_S, Loss
from netfold.elastic.newest import NewestGeneration
from netfold.elastic.service import Service
from netfold.elastic.standing import Standing
from netfold.errors import GroupAborted, Mismatch, RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import parse_endpoint

STORE_VARIABLE = "NETFOLD_STORE"
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
        self.communicator = communicator
        """The same object in all generations; its `group` is the one of now."""
        self.first: Change | None = None
        """The change by which this process came in; None where the job began with it."""
        newest = NewestGeneration(store)
        self._standing = Standing(
            communicator,
            newest,
            min_size=min_size,
            max_size=max_size,
            done=done,
            join_timeout_s=join_timeout_s,
        )
        self._changed = self._standing.changed
        self._joining = Joining(communicator.endpoint, newest, self._changed, join_timeout_s)
        service = Service(self._standing, self._joining)
        communicator.endpoint.handlers.update(dict.fromkeys(messages.REQUESTS, service.handle))
        Heartbeats(self._standing)
        self._fruitless, self._done_at_change = 0, -1

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
        members._begin(1)
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
        for join_timeout_s, or all have ended.
        """
        communicator = Communicator.outside(
            options=options, timeout_s=timeout_s, join_timeout_s=join_timeout_s, store_host=store_host
        )
        try:
            members = cls(
                communicator, store=store, min_size=min_size, max_size=max_size, done=0, join_timeout_s=join_timeout_s
            )
            members._standing.lacks = True
            members.first = members._come_in(0, (), ())
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

        The job begins again, without the members' state, if all of them have ended: once a process of each rank has
        come. Then `first` is None, and `generation` above 1.

        store: one that outlives ranks. Default: the one of `netfold store` that NETFOLD_STORE names; else rank 0's
        process serves one, and when that process has ended, there are no newcomers any more. With NETFOLD_STORE, of a
        launcher's variables only the rank and the number of ranks are needed.
        """
        environment = meeting_at_store(environment)
        place = launchers.placement(environment)
        named = environment.get(STORE_VARIABLE)
        if store is None and named:
            store = outliving_store(named, join_timeout_s)
        elif store is None:
            store = process_store(place, join_timeout_s)
        limits: Any = {"min_size": min_size, "max_size": max_size, "join_timeout_s": join_timeout_s}
        newest, ended = NewestGeneration(store).read(), 0
        if newest is not None and newest.generation > 0:
            try:
                return cls.newcomer(store, options=options, timeout_s=timeout_s, store_host=place.host, **limits)
            except AllEnded as error:
                ended = error.generation
        communicator = Communicator.from_environment(
            environment,
            store=PrefixStore(store, f"elastic/after-{ended}/"),
            options=options,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
        )
        try:
            members = cls(communicator, store=store, done=done, **limits)
            members._begin(ended + 1)
            return members
        except BaseException:
            communicator.close()
            raise

    @property
    def generation(self) -> int:
        """1 for the first; 0 for a newcomer that waits."""
        return self._standing.generation

    @property
    def rank(self) -> int:
        return self._standing.rank

    @property
    def size(self) -> int:
        return self._standing.size

    @property
    def done(self) -> int:
        """The steps whose vote has passed: the number of the step under way, from 0."""
        return self._standing.done

    @property
    def lacks(self) -> bool:
        """Whether this member must still be sent the state."""
        return self._standing.lacks

    @property
    def failed(self) -> bool:
        """Whether the generation has ended and `change` is due."""
        with self._changed:
            return self._standing.has_ended

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
            self._standing.check_going_on()
            self._standing.vote()
            return int(self._standing.wishes)

    def pass_vote(self, wishes: int) -> Vote:
        """End a vote with the reduced value. Raises NetfoldError where this member's report came first."""
        with self._changed:
            self._standing.check_going_on()
            self._standing.passed()
            return Vote(self.done, wishes > 0)

    def leave(self) -> None:
        """Leave the job at the next boundary: the votes say that the generation changes, and `change` returns left."""
        with self._changed:
            self._standing.leaves = True

    def received(self) -> None:
        """This member was sent the state."""
        with self._changed:
            self._standing.lacks = False

    # --- the change ---

    def change(self, error: BaseException | None = None) -> Change:
        """Agree on the next generation and form it. Every member calls this, after a failure or at a boundary.

        error: the failure that this member saw. A generation that fails while it forms is followed by the next.
        A member that the decision excludes comes back as a newcomer within this call, and may wait as a spare.
        Raises TooFewLeft where no quorum, or fewer than min_size members, come within join_timeout_s. Raises `error`
        where it is a Mismatch, after MAX_FRUITLESS failures in a row that no lost member explains, and where this
        member was decided out before and not taken in again.
        """
        if error is not None and (isinstance(error, Mismatch) or self._fruitless >= MAX_FRUITLESS):
            raise error
        if self._standing.negotiation is None:
            raise error or GroupAborted("this process is no member any more, and no member has taken it in again")
        loss = None if error is None else _loss_of(error)
        handles = self._standing.handles
        change = self._go_on(handles, list(range(len(handles))), {}, loss, is_member=True)
        is_fruitless = error is not None and not change.lost and not change.new and change.done == self._done_at_change
        self._fruitless, self._done_at_change = self._fruitless + 1 if is_fruitless else 0, change.done
        return change

    def finish(self) -> None:
        """Say that the job is done, before `close`: a process that comes later gets an error at once.

        Every member may call this once all have done their last step. Without it such a process finds that all members
        have ended, and begins the job again.
        """
        if self.rank == 0:
            self._standing.newest.end(self.generation)

    def close(self) -> None:
        """End without waiting for other members. Idempotent."""
        with self._changed:
            self._standing.closed = self._joining.closed = True
            self._standing.end_negotiation()
            self._changed.notify_all()
        self.communicator.close()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *error: object) -> None:
        self.communicator.__exit__(*error)  # type: ignore[arg-type]
        self.close()

    # --- from one generation to the next ---

    def _begin(self, generation: int) -> None:
        """Begin the job with this generation, whose communicator has formed."""
        with self._changed:
            self._standing.enter(generation, self.communicator.handles)
            self._standing.formed = True
        self._publish(waits=False)

    def _go_on(
        self, before: Sequence[str], origin: list[int], why: dict[int, str], loss: Loss | None, *, is_member: bool
    ) -> Change:
        """Agree, and form, until a generation has formed.

        before: the handles of the generation in which the change began. origin: by present rank, the rank there.
        why: by rank there, the reason of a loss.
        is_member: False: this process has just been taken in, and forms the present generation first.
        """
        standing = self._standing
        deadline = time.monotonic() + standing.join_timeout_s
        applies = False
        reason = "at the boundary of two steps" if loss is None else loss[1]
        decision: Decision | None = None
        while True:
            if is_member:
                decision, states = self._agree(loss, deadline)
                if decision is None:
                    return self._come_back(before, None)
                own = standing.rank
                for rank in set(range(standing.size)) - set(decision.members):
                    if origin[rank] >= 0:
                        why.setdefault(origin[rank], states.get(rank) or "it has left by its own wish")
                if own not in decision.members:
                    return self._leave(decision) if standing.leaves else self._come_back(before, decision)
                applies |= own in decision.applies
                origin = [origin[rank] for rank in decision.members] + [-1] * len(decision.newcomers)
                with self._changed:
                    standing.follow(decision)
            is_member = True
            try:
                self._form(decision, deadline)
            except RendezvousError as error:
                loss = _loss_of(error)
                continue
            with self._changed:
                standing.formed = True
                if not standing.has_reported:
                    break
                loss = None if standing.negotiation is None else standing.negotiation.loss
        lost = [Lost(rank, handle.parse(before[rank]).where, why.get(rank, "")) for rank in range(len(before))]
        return Change(
            generation=standing.generation,
            rank=standing.rank,
            size=standing.size,
            done=standing.done,
            apply=applies,
            former=tuple(origin),
            lost=tuple(each for each in lost if each.rank not in origin),
            new=tuple(rank for rank, former in enumerate(origin) if former < 0),
            lacking=standing.lacking(),
            reason=reason,
        )

    def _agree(self, loss: Loss | None, deadline: float) -> tuple[Decision | None, dict[int, str]]:
        """The decision that ends the present generation, and what is known about members that did not take part.

        None where the job went on without this member, and nobody tells how.
        """
        standing = self._standing
        with self._changed:
            negotiation = standing.negotiation
            assert negotiation is not None
            standing.report(loss, deadline - time.monotonic())
            while negotiation.agreement.decision is None and not negotiation.over and not standing.closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TooFewLeft(negotiation.shortage(standing.join_timeout_s))
                self._changed.wait(left)
            if standing.closed:
                raise GroupAborted("these members were closed")
            decision = negotiation.agreement.decision
            return decision, {} if decision is None else negotiation.states()

    def _form(self, decision: Decision | None, deadline: float) -> None:
        """Form the group of the present generation.

        Raises RendezvousError; TooFewLeft where nobody has the state.

        decision: that began it; None for a process that was just taken in.
        """
        standing = self._standing
        if decision is not None and len(decision.lacking) == len(decision.members):
            raise TooFewLeft(
                f"generation {standing.generation}: none of the {len(decision.members)} members that are left has the "
                "state: those that had it were lost before it was sent. Start the job again from a checkpoint"
            )
        self._publish(waits=decision is not None and bool(decision.newcomers))
        digest = hashlib.sha256("\n".join(standing.handles).encode()).hexdigest()[:16]
        name = f"elastic-{standing.generation}-{digest}"
        # The other half is for the next generation, where a member goes silent once this one has begun to connect.
        timeout_s = max(0.001, (deadline - time.monotonic()) / 2)
        self.communicator.reconfigure(name, standing.handles, timeout_s=timeout_s)

    def _publish(self, *, waits: bool) -> None:
        """At rank 0, say in the store which generation is the newest, before it forms.

        waits: for the store, where newcomers are in it. A member that was decided out, and finds that all other members
        of its generation have ended, then finds the newcomers, and does not go on alone.
        """
        standing = self._standing
        if standing.rank == 0:
            standing.newest.write(standing.generation, standing.handles, waits=waits)

    def _leave(self, decision: Decision) -> Change:
        generation, negotiation = self.generation + 1, self._standing.negotiation
        if negotiation is not None:
            negotiation.told.wait(2 * REQUEST_S)
        self.close()
        return Change(generation, -1, len(decision.members), decision.done, left=True, reason="it left by its own wish")

    def _come_back(self, before: Sequence[str], decision: Decision | None) -> Change:
        """This member was decided out: be a newcomer."""
        standing = self._standing
        with self._changed:
            after, known = standing.generation, list(standing.handles)
            if decision is not None:
                standing.remember(after, decision, standing.size)
                known = [*standing.going_on(decision), *decision.newcomers]
            standing.step_out()
        return self._come_in(after, before, known)

    def _come_in(self, after: int, before: Sequence[str], known: Sequence[str]) -> Change:
        """Wait until a generation has this process, and form it. known: handles of members, beside the store's."""
        standing, welcome = self._standing, self._joining.wait(after, known)
        with self._changed:
            standing.lacks, standing.done = True, welcome.decision.done
            standing.remember(welcome.generation - 1, welcome.decision, welcome.former)
            standing.enter(welcome.generation, welcome.handles)
        # Ranks of generations that this process has not seen cannot be told.
        places = {text: rank for rank, text in enumerate(before)}
        return self._go_on(before, [places.get(each, -1) for each in welcome.handles], {}, None, is_member=False)


def meeting_at_store(environment: Mapping[str, str]) -> Mapping[str, str]:
    """A launcher's variables; where NETFOLD_STORE is set and no MASTER_ADDR, the ranks meet at that store.

    It is reachable from every rank. A node's name in Slurm need not be a host's, and a rank that is started alone does
    not know where rank 0 is. ValueError for no endpoint.
    """
    named = environment.get(STORE_VARIABLE)
    if not named:
        return environment
    host, port = parse_endpoint(named, what=STORE_VARIABLE)
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), **environment}


def _loss_of(error: BaseException) -> Loss:
    rank = getattr(error, "rank", None)
    return -1 if rank is None else int(rank), (str(error) or type(error).__name__)[:_MAX_TEXT]
