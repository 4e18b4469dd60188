"""The agreement on the next membership: single-decree Paxos among the members of a generation (Lamport 1998, 2001).

A value without sockets, clocks and threads; members.py drives it, and lab/src/netfold_lab/model_check searches it.

    lead       begin a ballot          Prepare(ballot) to all -> Promise(report, what was accepted) from each
    propose    choose from promises    Accept(ballot, decision) to all -> Accepted from each
    decided    a quorum has accepted   Decide(decision) to all

Any member may lead; ballots are (round, rank), so two members never have the same. By convention the lowest rank leads
that is not suspected. A member that promised a ballot takes no lower one, and tells which decision it has accepted;
the leader then proposes the one of the highest ballot. So once a quorum has accepted a decision, no other can be made.

The promise carries the member's report: the steps that it has done, and whether it has voted for the next. A report is
final: the caller lets no vote pass afterwards. So the leader knows whether any member has passed the vote of a step.
If one has, all have voted; those that do not know the result apply the step, too. If none has, all repeat it.

A quorum is more than half of the members, or half with rank 0. Where all members are on one host, the end of a process
is certain: the kernel closes its sockets. There all members that have not ended are a quorum, too, however few. This is
sound because a ballot names the members that have ended, and everyone who takes part in it takes nothing from them
any more. Messages that they had sent before cannot arrive behind the ballot. So all that matters of their ballots is
what the living have accepted, and of those all have promised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

# (round, rank of the leader). No ballot is lower than NO_BALLOT.
Ballot = tuple[int, int]
NO_BALLOT: Ballot = (0, -1)
# Newcomers of one change. More wait for the next.
MAX_NEWCOMERS = 64


class Report(NamedTuple):
    """A member's state when it stops to take part in the generation."""

    done: int
    """The steps whose vote this member has passed."""
    voted: bool
    """It has voted for the next step, and does not know the result."""
    clean: bool
    """It holds the state of `done` steps. False for a member that was not sent the state yet."""
    leaves: bool = False
    """It leaves by its own wish."""
    waiting: tuple[str, ...] = ()
    """The handles of newcomers that asked this member."""


class Decision(NamedTuple):
    """The successor of a generation. Ranks are those of the generation that ends."""

    members: tuple[int, ...]
    """The ranks that go on, ascending. They are the first ranks of the next generation, in this order."""
    newcomers: tuple[str, ...]
    """The handles of the next ranks."""
    done: int
    """The steps of the state that all members have after the change."""
    applies: tuple[int, ...]
    """Members that have voted for step done - 1, and apply it now."""
    lacking: tuple[int, ...]
    """Members that must be sent the state. Newcomers must be, too."""


class Prepare(NamedTuple):
    ballot: Ballot
    ended: frozenset[int]


class Promise(NamedTuple):
    ballot: Ballot
    report: Report
    accepted_ballot: Ballot
    accepted: Decision | None


class Accept(NamedTuple):
    ballot: Ballot
    decision: Decision
    ended: frozenset[int]


class Accepted(NamedTuple):
    ballot: Ballot


class Decide(NamedTuple):
    decision: Decision


class Ask(NamedTuple):
    """The sender wants to know the decision, and that there be one."""


class Refused(NamedTuple):
    """The member has promised another ballot."""

    promised: Ballot


class Undecided(NamedTuple):
    """The member knows of no decision."""


Request = Prepare | Accept | Decide | Ask
Reply = Promise | Accepted | Refused | Decide | Undecided


def decide_from(
    reports: dict[int, Report], ended: Collection[int], newcomers: Iterable[str], max_size: int | None
) -> Decision:
    """The decision that these members' reports lead to. reports: at least one, by rank."""
    members = tuple(sorted(rank for rank, report in reports.items() if rank not in ended and not report.leaves))
    # A member that leaves, or has ended since, is as good a witness that a vote has passed.
    done = max((report.done for report in reports.values() if report.clean), default=0)
    applies, lacking = [], []
    for rank in members:
        report = reports[rank]
        if report.clean and report.done == done:
            continue
        if report.clean and report.voted and report.done == done - 1:
            applies.append(rank)
        else:
            lacking.append(rank)
    # As many newcomers as members at most: then newcomers that die at once leave the members a quorum.
    free = len(members) if max_size is None else min(len(members), max_size - len(members))
    taken = tuple(newcomers)[: max(0, min(free, MAX_NEWCOMERS))]
    return Decision(members, taken, done, tuple(applies), tuple(lacking))


class Agreement:
    """One member's part in the agreement that ends a generation. For one thread at a time.

    All fields are values that are never changed in place, so a shallow copy is a copy.
    """

    def __init__(self, rank: int, size: int, *, one_host: bool) -> None:
        """rank, size: of the generation that ends. one_host: the end of every member is certain where it is known."""
        self.rank, self.size, self.one_host = rank, size, one_host
        self.report: Report | None = None
        self.decision: Decision | None = None
        self.promised = NO_BALLOT
        self.accepted_ballot = NO_BALLOT
        self.accepted: Decision | None = None
        self.ended: frozenset[int] = frozenset()
        """Members whose processes have ended for certain. Nothing is taken from them."""
        self.suspects: frozenset[int] = frozenset()
        """Members that do not answer this one."""
        # The ballot that this member leads; NO_BALLOT: none.
        self.ballot = NO_BALLOT
        self.fenced: frozenset[int] = frozenset()  # the ended members that this ballot names
        self.proposal: Decision | None = None
        self.promises: dict[int, Promise] = {}
        self.acceptances: frozenset[int] = frozenset()

    # --- every member ---

    def begin(self, report: Report) -> None:
        """This member reports. The first report counts."""
        if self.report is None:
            self.report = report

    def handle(self, sender: int, request: Request) -> Reply:
        """Reply to another member. This member has begun before it handles Prepare."""
        if isinstance(request, Ask):
            return Undecided() if self.decision is None else Decide(self.decision)
        if sender in self.ended:
            return Refused(self.promised)
        if isinstance(request, Decide):
            self._learn(request.decision)
        if self.decision is not None:
            return Decide(self.decision)
        if isinstance(request, Decide) or request.ballot < self.promised:
            return Refused(self.promised)
        self._ended(request.ended)
        self._promise(request.ballot)
        if isinstance(request, Accept):
            self.accepted_ballot, self.accepted = request.ballot, request.decision
            return Accepted(request.ballot)
        assert self.report is not None
        return Promise(request.ballot, self.report, self.accepted_ballot, self.accepted)

    def take(self, sender: int, reply: Reply) -> None:
        """A reply to one of this member's requests."""
        if sender in self.ended:
            return
        self.suspects -= {sender}
        if isinstance(reply, Decide):
            self._learn(reply.decision)
        elif isinstance(reply, Refused):
            # A higher ballot is under way. Its leader, or a later ballot of this member, will decide.
            if reply.promised > self.ballot != NO_BALLOT:
                self._give_up()
            self.promised = max(self.promised, reply.promised)
        elif isinstance(reply, Promise) and reply.ballot == self.ballot and self.proposal is None:
            self.promises = {**self.promises, sender: reply}
        elif isinstance(reply, Accepted) and reply.ballot == self.ballot:
            self.acceptances |= {sender}
            if self.proposal is not None and self._is_quorum(self.acceptances):
                self._learn(self.proposal)

    def suspect(self, peer: int, *, certain: bool = False) -> None:
        """A member does not answer. certain: its process has ended, on this host."""
        self.suspects |= {peer}
        if certain and self.one_host:
            self._ended(frozenset({peer}))

    @property
    def leader(self) -> int:
        """The member that should lead, as far as this one knows."""
        silent = self.suspects | self.ended
        return next(rank for rank in range(self.size) if rank == self.rank or rank not in silent)

    # --- the leader ---

    def lead(self) -> None:
        """Begin a ballot that is higher than all that this member knows of. It has begun, and knows of no decision."""
        assert self.report is not None and self.decision is None
        self.ballot = (self.promised[0] + 1, self.rank)
        self.fenced, self.proposal, self.promises, self.acceptances = self.ended, None, {}, frozenset()
        self.take(self.rank, self.handle(self.rank, Prepare(self.ballot, self.fenced)))

    @property
    def is_leading(self) -> bool:
        return self.ballot != NO_BALLOT and self.decision is None

    @property
    def may_propose(self) -> bool:
        """A quorum has promised, and all others are silent."""
        if not self.is_leading or self.proposal is not None or not self._is_quorum(self.promises):
            return False
        return not self._awaited(self.promises)

    @property
    def inherited(self) -> Decision | None:
        """The decision that must be proposed, since it may have been made already."""
        latest = max(self.promises.values(), key=lambda promise: promise.accepted_ballot)
        return latest.accepted

    @property
    def reports(self) -> dict[int, Report]:
        """By rank, of the members that have promised."""
        return {rank: promise.report for rank, promise in sorted(self.promises.items())}

    def propose(self, newcomers: Iterable[str] = (), max_size: int | None = None) -> None:
        """Propose a decision, where `may_propose`. newcomers: those of which the leader knows that they live."""
        inherited = self.inherited
        self.proposal = inherited or decide_from(self.reports, self.ended, newcomers, max_size)
        self.take(self.rank, self.handle(self.rank, Accept(self.ballot, self.proposal, self.fenced)))

    @property
    def is_stuck(self) -> bool:
        """The ballot has no quorum of those who answer, and a new one names more members that have ended."""
        if not self.is_leading or self.fenced == self.ended:
            return False
        came = self.promises if self.proposal is None else self.acceptances
        return not self._is_quorum(came) and not self._awaited(came)

    def wanted(self) -> dict[int, Request]:
        """The requests that this member waits to have answered, by peer. They may be sent any number of times."""
        if self.decision is not None or self.report is None:
            return {}
        if self.ballot == NO_BALLOT:
            return {self.leader: Ask()} if self.leader != self.rank else {}
        if self.proposal is None:
            request: Request = Prepare(self.ballot, self.fenced)
            came: Collection[int] = self.promises
        else:
            request, came = Accept(self.ballot, self.proposal, self.fenced), self.acceptances
        return {rank: request for rank in range(self.size) if rank not in came and rank not in self.ended}

    @property
    def rests_on_ends(self) -> bool:
        """The promises are no majority, and count because the other members' processes have ended."""
        return not self._is_majority(self.promises)

    # --- rules ---

    def _is_majority(self, ranks: Collection[int]) -> bool:
        return 2 * len(ranks) > self.size or (2 * len(ranks) == self.size and 0 in ranks)

    def _is_quorum(self, ranks: Collection[int]) -> bool:
        if self._is_majority(ranks):
            return True
        return self.one_host and all(rank in ranks or rank in self.fenced for rank in range(self.size))

    def _awaited(self, came: Collection[int]) -> bool:
        """Whether a member may still answer that has not."""
        silent = self.suspects | self.ended
        return any(rank not in came and rank not in silent for rank in range(self.size))

    def _promise(self, ballot: Ballot) -> None:
        if ballot > self.ballot != NO_BALLOT:
            self._give_up()
        self.promised = ballot

    def _give_up(self) -> None:
        self.ballot, self.proposal, self.promises, self.acceptances = NO_BALLOT, None, {}, frozenset()

    def _ended(self, ranks: frozenset[int]) -> None:
        self.ended |= ranks
        self.suspects |= ranks

    def _learn(self, decision: Decision) -> None:
        if self.decision is None:
            self.decision = decision
