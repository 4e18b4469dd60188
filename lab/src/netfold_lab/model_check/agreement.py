"""Exhaustive search of the agreement on the next members: production's `Agreement`, every order of events.

The members of one generation have voted for a step, or not all of them yet. Then, in any order:

    vote       A member votes; once all have, each may pass, until it reports.
    lead       A member that thinks that it should leads a ballot, `rounds` times at most; it reports first.
    propose    A leader that may propose does, with the newcomer that waits or without.
    messages   A request arrives at any time, late, twice, in any order or never, also after its sender died. Its reply
               arrives with it, or never: the sender asks again, and a promise of one ballot is the same at any time.
               With `late_replies`, a reply may also arrive later, and after its sender's death. On one host that
               matters: nothing may be taken from a member that has ended.
    ask        A member asks another one for the decision.
    suspect    A member suspects a dead one, one beyond the cut, or, `suspicions` times, one that lives.
    death      `deaths` times, a member stops for good. On one host, others may find out for certain.
    cut        With `cut`, no message passes between the first `cut` members and the rest.
    form       The members of a decision that all know it form the next generation, and say so in the store.

Safety. Two different decisions never both count: a decision counts while a living member knows it, or a newcomer is in
the generation that formed by it. A decision says that the step is applied if, and only if, a member of the next
generation has passed its vote; only members that have voted apply it; afterwards all have done as many steps. Members
that do not live on one host decide as a majority only.
Possibility. From every state some events without a further fault lead to one where every living member knows the
decision, unless the members that still reach each other are no quorum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from netfold.elastic import agreement as production
from netfold_lab.model_check.breadth_first import BrokenError, EndingSearch, Report

STUCK = "no events lead from here to a state where every living member knows the decision"
TWO = "two decisions count"
LOST_STEP = "a member of the next generation has passed the step, and the decision repeats it"
FALSE_STEP = "the decision applies a step that nobody has passed"
UNEVEN = "members of the next generation have done different steps"
MINORITY = "a minority has decided"
_NEWCOMER = "newcomer"

# An event that may happen next: its name, the member, and more.
Event = tuple[Any, ...]
# The numbers of the members' states; then, a bit each: messages that were sent, dead members, members that have
# passed; the number of the decision that has formed, or -1; and the remaining deaths and suspicions.
_State = tuple[int, ...]
_SENT, _DEAD, _PASSED, _FORMED, _DEATHS, _SUSPICIONS = range(-6, 0)


@dataclass(frozen=True)
class AgreementScope:
    members: int = 3
    one_host: bool = False
    deaths: int = 0
    suspicions: int = 0
    rounds: int = 2
    """The highest round of a ballot."""
    voted: int = -1
    """The number of members that have voted at the start; -1: all."""
    newcomer: bool = False
    cut: int = 0
    late_replies: bool = False


@dataclass
class AgreementReport(Report):
    member_states: int = 0
    decisions: int = 0
    """Different ones, over all orders."""


class _Member:
    """A member: production's agreement, and the state of its vote."""

    def __init__(self, agreement: Any, *, voted: bool) -> None:
        self.agreement, self.voted, self.done = agreement, voted, 0
        self.sent: list[tuple[int, Any]] = []  # to, request
        self.reply: Any = None

    def key(self) -> Any:
        fields = dict(vars(self.agreement), promises=tuple(sorted(self.agreement.promises.items())))
        return tuple(fields.values()), self.voted, self.done

    def copy(self) -> _Member:
        new = _Member(copy(self.agreement), voted=self.voted)
        new.done = self.done
        return new

    def happen(self, kind: str, *arguments: Any) -> None:
        agreement = self.agreement
        if kind == "vote":
            self.voted = True
        elif kind == "pass":
            self.voted, self.done = False, 1
        elif kind == "lead":
            self._report()
            agreement.lead()
        elif kind == "propose":
            agreement.propose(arguments[0])
        elif kind == "suspect":
            peer, certain = arguments
            agreement.suspect(peer, certain=certain)
        elif kind == "request":
            sender, message = arguments
            if isinstance(message, (production.Prepare, production.Accept)):
                self._report()
            self.reply = agreement.handle(sender, message)
        elif kind == "reply":
            agreement.take(*arguments)
        if kind in ("lead", "propose", "reply"):
            self.sent += [(peer, request) for peer, request in agreement.wanted().items()]
        if kind in ("propose", "reply") and agreement.decision is not None and agreement.ballot != production.NO_BALLOT:
            decide = production.Decide(agreement.decision)
            others = set(range(agreement.size)) - {agreement.rank} - agreement.ended
            self.sent += [(peer, decide) for peer in sorted(others)]

    def _report(self) -> None:
        self.agreement.begin(production.Report(self.done, self.voted, True))


class _Search(EndingSearch[_State, Event]):
    stuck = STUCK

    def __init__(self, scope: AgreementScope, new: Callable[..., Any]) -> None:
        self.scope = scope
        self.members: list[_Member] = []
        self.messages: list[tuple[int, int, bool, Any]] = []  # from, to, whether it is a reply, message
        self.decisions: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._message_numbers: dict[Any, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, int, Any]] = {}
        voted = scope.members if scope.voted < 0 else scope.voted
        first = (
            self._number(_Member(new(rank, scope.members, one_host=scope.one_host), voted=rank < voted))
            for rank in range(scope.members)
        )
        super().__init__((*first, 0, 0, 0, -1, scope.deaths, scope.suspicions))

    def _number(self, member: _Member) -> int:
        number = self._numbers.setdefault(member.key(), len(self.members))
        if number == len(self.members):
            self.members.append(member)
        return number

    def _of(self, state: _State) -> list[_Member]:
        return [self.members[number] for number in state[: self.scope.members]]

    def _decision(self, decision: Any) -> int:
        if decision not in self.decisions:
            self.decisions.append(decision)
        return self.decisions.index(decision)

    def events(self, state: _State) -> Iterator[Event]:
        members, dead, scope = self._of(state), state[_DEAD], self.scope
        living = [rank for rank in range(scope.members) if not dead >> rank & 1]
        self._check(state, members, living)
        all_voted = all(member.voted or member.done for member in members)
        for rank in living:
            member, agreement = members[rank], members[rank].agreement
            undecided = agreement.decision is None
            if undecided and agreement.report is None:
                if not member.voted and not member.done:
                    yield "vote", rank
                if member.voted and all_voted:
                    yield "pass", rank
            if state[_DEATHS]:
                yield "die", rank
            if not undecided:
                if state[_FORMED] < 0 and self._may_form(members, agreement.decision, dead):
                    yield "form", self._decision(agreement.decision)
                continue
            for peer in set(range(scope.members)) - {rank}:
                is_dead = bool(dead >> peer & 1)
                if peer not in agreement.suspects and (is_dead or self._is_cut(rank, peer) or state[_SUSPICIONS]):
                    yield "suspect", rank, peer, False
                if scope.one_host and is_dead and peer not in agreement.ended:
                    yield "suspect", rank, peer, True
                if not is_dead and not self._is_cut(rank, peer) and members[peer].agreement.decision is not None:
                    yield "ask", rank, peer
            leads = agreement.leader == rank and agreement.ballot == production.NO_BALLOT
            if (leads or agreement.is_stuck) and agreement.promised[0] < scope.rounds:
                yield "lead", rank
            # A job with newcomers has a store, and members look into it first.
            late = self.scope.newcomer and state[_FORMED] >= 0
            if agreement.may_propose and not (agreement.rests_on_ends and late):
                yield "propose", rank, ()
                if scope.newcomer:
                    yield "propose", rank, (_NEWCOMER,)
        sent, number = state[_SENT], 0
        while sent:
            if sent & 1:
                to = self.messages[number][1]
                if not dead >> to & 1:
                    yield "deliver", to, number, False
                    if scope.late_replies and not self.messages[number][2]:
                        yield "deliver", to, number, True
            sent >>= 1
            number += 1

    def _is_cut(self, one: int, other: int) -> bool:
        return self.scope.cut > 0 and (one < self.scope.cut) != (other < self.scope.cut)

    @staticmethod
    def _may_form(members: Sequence[_Member], decision: Any, dead: int) -> bool:
        return all(members[rank].agreement.decision == decision and not dead >> rank & 1 for rank in decision.members)

    def after(self, state: _State, event: Event) -> _State | None:
        kind, rank, *arguments = event
        new = list(state)
        if kind == "die":
            new[_DEAD] |= 1 << rank
            new[_DEATHS] -= 1
        elif kind == "form":
            new[_FORMED] = rank
        elif kind == "ask":
            self._request(new, rank, arguments[0], production.Ask(), is_late=False)
        elif kind == "deliver":
            sender, _, is_reply, message = self.messages[arguments[0]]
            if is_reply:
                self._apply(new, rank, ("reply", sender, message))
            else:
                self._request(new, sender, rank, message, is_late=arguments[1])
        else:
            if kind == "suspect" and not state[_DEAD] >> arguments[0] & 1 and not self._is_cut(rank, arguments[0]):
                new[_SUSPICIONS] -= 1
            if kind == "pass":
                new[_PASSED] |= 1 << rank
            self._apply(new, rank, (kind, *arguments))
        return None if tuple(new) == state else tuple(new)

    def _request(self, state: list[int], sender: int, to: int, message: Any, *, is_late: bool) -> None:
        reply = self._apply(state, to, ("request", sender, message))
        if is_late:
            state[_SENT] |= self._bit(to, sender, True, reply)
        elif not state[_DEAD] >> sender & 1:
            self._apply(state, sender, ("reply", to, reply))

    def _bit(self, sender: int, to: int, is_reply: bool, message: Any) -> int:
        about = (sender, to, is_reply, message)
        number = self._message_numbers.setdefault(about, len(self.messages))
        if number == len(self.messages):
            self.messages.append(about)
        return 0 if self._is_cut(sender, to) else 1 << number

    def _apply(self, state: list[int], rank: int, event: Event) -> Any:
        """Change the state by an event of a member; returns its reply to a request."""
        key = (state[rank], event)
        found = self._steps.get(key)
        if found is None:
            member = self.members[state[rank]].copy()
            member.happen(*event)
            bits = 0
            for to, message in member.sent:
                bits |= self._bit(rank, to, False, message)
            reply, member.sent, member.reply = member.reply, [], None
            found = self._steps[key] = self._number(member), bits, reply
        state[rank] = found[0]
        state[_SENT] |= found[1]
        return found[2]

    def _check(self, state: _State, members: Sequence[_Member], living: Sequence[int]) -> None:
        counting = {members[rank].agreement.decision for rank in living} - {None}
        if state[_FORMED] >= 0 and self.decisions[state[_FORMED]].newcomers:
            counting.add(self.decisions[state[_FORMED]])
        if len(counting) > 1:
            raise BrokenError(TWO)
        for decision in counting:
            self._decision(decision)
            passed = [rank for rank in decision.members if state[_PASSED] >> rank & 1]
            if passed and decision.done == 0:
                raise BrokenError(LOST_STEP)
            if decision.done == 1 and not state[_PASSED]:
                raise BrokenError(FALSE_STEP)
            for rank in decision.members:
                member = members[rank]
                done = member.done + (rank in decision.applies)
                if done != decision.done or (rank in decision.applies and not member.voted) or decision.lacking:
                    raise BrokenError(UNEVEN)
            size, left = self.scope.members, len(decision.members)
            if not self.scope.one_host and not (2 * left > size or (2 * left == size and 0 in decision.members)):
                raise BrokenError(MINORITY)

    def is_fault(self, state: _State, event: Event) -> bool:
        return event[0] == "die" or (event[0] == "suspect" and self._is_wrong(state, event))

    def _is_wrong(self, state: _State, event: Event) -> bool:
        return not state[_DEAD] >> event[2] & 1 and not self._is_cut(event[1], event[2])

    def search(self) -> AgreementReport:
        report = AgreementReport()
        self.run(report)
        report.member_states, report.decisions = len(self.members), len(self.decisions)
        return report

    def has_ended(self, state: _State) -> bool:
        members, size = self._of(state), self.scope.members
        if self.scope.newcomer and state[_FORMED] >= 0:
            return True  # a member that does not know the decision finds the next generation in the store
        living = [rank for rank in range(size) if not state[_DEAD] >> rank & 1]
        for side in (range(self.scope.cut), range(self.scope.cut, size)):
            near = [rank for rank in living if rank in side]
            waiting = [rank for rank in near if members[rank].agreement.decision is None]
            is_quorum = 2 * len(near) > size or (2 * len(near) == size and 0 in near)
            if (is_quorum or (self.scope.one_host and not self.scope.cut)) and waiting:
                # The search ends at its last round; production goes on.
                return any(members[rank].agreement.promised[0] >= self.scope.rounds for rank in near)
        return True

    def text(self, event: Event) -> str:
        if event[0] == "deliver":
            sender, to, is_reply, message = self.messages[event[2]]
            return f"{'reply' if is_reply else 'request'} {sender} to {to}: {message}"
        return super().text(event)


def search_agreement(scope: AgreementScope, new: Callable[..., Any] = production.Agreement) -> AgreementReport:
    """Search all orders of events in `scope`.

    new: makes a member's agreement, of rank and size.
    """
    return _Search(scope, new).search()


def sentence(scope: AgreementScope, report: AgreementReport) -> str:
    """Return a report in one line."""
    where = "one host" if scope.one_host else f"cut behind {scope.cut}" if scope.cut else "several hosts"
    return (
        f"{scope.members} members on {where}, {scope.deaths} deaths, {scope.suspicions} wrong suspicions, "
        f"{scope.rounds} rounds{', a newcomer' if scope.newcomer else ''}"
        f"{', late replies' if scope.late_replies else ''}: {report.outcome}; {report.states:,} states "
        f"({report.member_states:,} of a member; {report.decisions:,} decisions), {report.transitions:,} transitions, "
        f"depth {report.depth}, {report.seconds:.2f} s"
    )
