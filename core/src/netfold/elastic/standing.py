"""A process's standing in its job: its generation, its vote, and what it remembers. Everything under one lock.

The training thread changes it (members.py), threads of the listener read it and report (service.py).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from netfold.communicator.communicator import Communicator
from netfold.elastic import messages
from netfold.elastic.agreement import Decision, Report
from netfold.elastic.negotiation import Loss, Negotiation
from netfold.elastic.newest import NewestGeneration
from netfold.errors import GroupAborted, RendezvousError
from netfold.options import timeout_seconds

# Ended generations whose decision a member remembers, for members that come late.
MAX_PAST = 256
# Newcomers that wait at one member. More are not noted.
MAX_WAITING = 1024
# How long a newcomer's last question counts.
_LEASE_S = 3.0
# How long a member whose vote has not ended yet lets another one wait that has passed it.
_PASS_S = 1.0


class Standing:
    """Methods are called under `changed`, but for those that say otherwise."""

    def __init__(
        self,
        communicator: Communicator,
        newest: NewestGeneration,
        *,
        min_size: int,
        max_size: int | None,
        done: int,
        join_timeout_s: float,
    ) -> None:
        if min_size < 1 or (max_size is not None and max_size < min_size):
            raise ValueError(f"min_size={min_size}, max_size={max_size}: need 1 <= min_size <= max_size")
        self.communicator, self.newest = communicator, newest
        self.min_size, self.max_size, self.join_timeout_s = min_size, max_size, timeout_seconds(join_timeout_s)
        self.changed = threading.Condition()
        self.generation = 0
        self.handles: tuple[str, ...] = ()
        """Of the members of this generation."""
        self.done = done
        self.lacks = False
        self.leaves = False
        self.voted = False
        self.formed = False
        """The group of this generation has formed."""
        self.closed = False
        self.negotiation: Negotiation | None = None
        """About the end of this generation; None for a newcomer that waits."""
        # By the generation that ended: the decision, and how many members there were.
        self.past: OrderedDict[int, tuple[Decision, int]] = OrderedDict()
        self._waiting: OrderedDict[str, float] = OrderedDict()  # newcomers, and when they asked last
        self._late_since: float | None = None

    @property
    def own(self) -> str:
        """This process's handle. Needs no lock."""
        return self.communicator.handle

    @property
    def rank(self) -> int:
        return self.handles.index(self.own)

    @property
    def size(self) -> int:
        return len(self.handles)

    @property
    def has_reported(self) -> bool:
        agreement = None if self.negotiation is None else self.negotiation.agreement
        return agreement is None or agreement.report is not None or agreement.decision is not None

    @property
    def has_ended(self) -> bool:
        return self.has_reported or self.communicator.group.failure is not None

    def check_going_on(self) -> None:
        """GroupAborted where this member has reported: it passes no vote any more."""
        if self.has_reported:
            loss = None if self.negotiation is None else self.negotiation.loss
            text = "its members agree on the next one" if loss is None else loss[1]
            raise GroupAborted(f"generation {self.generation} has ended: {text}")

    @property
    def wishes(self) -> bool:
        """Whether the generation should change at the next boundary."""
        is_full = self.max_size is not None and self.size >= self.max_size
        return self.leaves or (not is_full and bool(self.waiting()))

    def vote(self) -> None:
        self.voted = True

    def passed(self) -> None:
        self.voted, self._late_since = False, None
        self.done += 1
        self.changed.notify_all()

    def is_passing(self, done: int) -> bool:
        """Whether this member is about to pass a vote that a member with so many steps has passed."""
        if not self.voted or done <= self.done or self.communicator.group.failure is not None:
            return False
        now = time.monotonic()
        self._late_since = now if self._late_since is None else self._late_since
        return now < self._late_since + _PASS_S

    def report(self, loss: Loss | None, timeout_s: float) -> None:
        """Report, and agree on the next generation in the background. loss: None at a boundary."""
        assert self.negotiation is not None
        waiting = tuple(messages.page(self.waiting(), 0))
        self.negotiation.agreement.begin(Report(self.done, self.voted, not self.lacks, self.leaves, waiting))
        self.negotiation.start(loss, timeout_s)

    def lose(self, generation: int, member: str, text: str, since: float) -> None:
        """End a generation whose member, by its handle, sends nothing any more. Takes the lock itself.

        since: when this member's silence began. The agreement counts it from then.
        """
        with self.changed:
            if self.closed or generation != self.generation or self.has_reported:
                return
            assert self.negotiation is not None
            rank = self.handles.index(member)
            loss = rank, f"rank {rank} ({text})"
            self.report(loss, self.join_timeout_s)
            self.negotiation.note_silence(rank, since)
            group = self.communicator.group if self.formed else None
        # The training thread may wait for that member.
        if group is not None:
            group.lose(*loss)
        else:
            self.communicator.endpoint.give_up(RendezvousError(loss[1], rank=rank))

    # --- from one generation to the next ---

    def follow(self, decision: Decision) -> None:
        """Enter the generation that was decided, of which this process is a member."""
        self.lacks |= self.rank in decision.lacking
        self.remember(self.generation, decision, self.size)
        self.done = decision.done
        self.enter(self.generation + 1, [*self.going_on(decision), *decision.newcomers])

    def going_on(self, decision: Decision) -> list[str]:
        """The handles of this generation's members that go on."""
        return [self.handles[rank] for rank in decision.members]

    def enter(self, generation: int, handles: Sequence[str]) -> None:
        """Be a member of a generation, whose group may form."""
        self.generation, self.handles = generation, tuple(handles)
        self.voted, self.formed, self._late_since = False, False, None
        for each in handles:
            self._waiting.pop(each, None)
        self.end_negotiation()
        self.negotiation = self.negotiate(generation, handles)
        self.changed.notify_all()

    def negotiate(self, generation: int, handles: Sequence[str]) -> Negotiation:
        """The negotiation about the end of a generation. The search puts one without a network in its place."""
        return Negotiation(
            generation,
            handles,
            self.own,
            self.communicator.endpoint,
            self.changed,
            min_size=self.min_size,
            max_size=self.max_size,
            waiting=self.waiting,
            newest=self.newest,
        )

    def step_out(self) -> None:
        """Be a member no more: wait as a newcomer."""
        self.end_negotiation()
        self.negotiation, self.lacks, self.formed = None, True, False

    def end_negotiation(self) -> None:
        """Its thread still tells other members of a decision."""
        if self.negotiation is not None:
            self.negotiation.close()

    def remember(self, generation: int, decision: Decision, size: int) -> None:
        self.past[generation] = decision, size
        while len(self.past) > MAX_PAST:
            self.past.popitem(last=False)

    def lacking(self) -> dict[int, int]:
        """By rank that lacks the state, the rank that sends it. Every member of the generation computes the same."""
        decision, _ = self.past[self.generation - 1]
        lacking = [new for new, former in enumerate(decision.members) if former in decision.lacking]
        lacking += range(len(decision.members), self.size)
        holders = [rank for rank in range(self.size) if rank not in lacking]
        return {rank: holders[number % len(holders)] for number, rank in enumerate(lacking)}

    # --- newcomers that ask this member ---

    def note(self, newcomer: str) -> None:
        if newcomer in self._waiting or len(self._waiting) < MAX_WAITING:
            self._waiting[newcomer] = time.monotonic()

    def waiting(self) -> list[str]:
        """The handles of those that have asked lately, first come, first served."""
        since = time.monotonic() - _LEASE_S
        for each in [each for each, asked_at in self._waiting.items() if asked_at < since]:
            del self._waiting[each]
        return list(self._waiting)
