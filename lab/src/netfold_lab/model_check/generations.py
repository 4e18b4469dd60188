"""Exhaustive search of an elastic job's generations, one after the other: production's standing, service and agreement.

agreement.py searches the agreement about one generation, in every order of its messages. Here requests have their reply
at once, and the job goes on: the members of a decision follow it one by one, form the next generation, send the state,
vote, and agree anew. In any order:

    vote, pass   A member votes for the step; once all have, each may pass, until it reports.
    lead ...     As in agreement.py, where there is a reason: a member is gone or reports, one leaves, one waits. Others
                 report.
    suspect      A member suspects a dead one, or, `suspicions` times, one that lives. So does a heartbeat without an
                 answer, which is a reason to lead or report while nobody is gone.
    tell, ask    A member tells another one of a decision, or asks for it: an ended generation is answered from memory.
    follow       A member enters the generation that was decided, leaves, or waits to be taken in again.
    publish      The first member of a generation writes it into the store: at once where newcomers are in it.
    welcome      A process that waits is told by a member of a generation that has it.
    form         The group of a generation forms at a member, once all members have entered it.
    receive      A member that lacks the state is sent it by a member that has it.
    die          `deaths` times, a process ends.
    cut, heal    The members of each pair of `cut` do not reach each other: no message passes, and a group that has both
                 neither forms nor passes a vote at them. With `heals`, they reach each other again.
    end          A member's deadline passes where those that it reaches are no quorum; that of a process that waits
                 passes where it reaches no member.
    look ...     A rank that comes for the first time reads the store, and asks the members there, by rank. It waits if
                 one answers. Where all have ended, `fresh` such ranks begin the job again together.

Safety, beside agreement.py's for each generation: a member holds the state that the decision says, or is sent it; a
generation forms only where a member has the state, and after a decision of a quorum; newcomers that die at once leave
the members a quorum; who leaves is in no later generation; the job begins again only where no living member has its
state.
Possibility. From every state some events without a further fault lead to one formed generation of all living members,
each with the state, unless they are no quorum or none has it. While a cut lasts, to one of members that reach each
other: each other process has ended, or waits and does not reach all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from netfold.elastic import agreement
from netfold.elastic.newest import Newest
from netfold_lab.model_check.agreement import FALSE_STEP, LOST_STEP, MINORITY, STUCK, TWO, UNEVEN
from netfold_lab.model_check.breadth_first import BrokenError, EndingSearch, Report
from netfold_lab.model_check.generation_process import PRODUCTION, Event, GenerationsScope, Parts, Process, standing_of

NO_STATE = "a generation has formed in which no member has the state"
WITHOUT = "a member goes on without the state"
OUTNUMBERED = "newcomers that die at once leave the members no quorum"
FOREIGN = "a generation ends by the decision of another one"
STAYS = "a member that leaves is in the next generation"
TWO_JOBS = "the job begins again, and a member lives that has its state"
_FIRST, _NEWCOMERS, _FRESH = "abcd", "nm", "xy"

# The numbers of the processes' states; then the votes, the store, and the remaining deaths and suspicions; whether the
# network is whole, cut, or healed; the steps that have passed.
_State = tuple[Any, ...]
_VOTES, _STORE, _DEATHS, _SUSPICIONS, _NETWORK, _PASSED = range(-6, 0)
_WHOLE, _CUT, _HEALED = range(3)


@dataclass
class GenerationsReport(Report):
    process_states: int = 0
    decisions: int = 0
    """Different ones, over all orders and generations."""


class _Search(EndingSearch[_State, Event]):
    stuck = STUCK

    def __init__(self, scope: GenerationsScope, parts: Parts) -> None:
        self.scope, self.parts = scope, parts
        self.processes: list[Process] = []
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, Any]] = {}
        self.names = _FIRST[: scope.members] + _NEWCOMERS[: scope.newcomers] + _FRESH[: scope.fresh]
        self.fresh = self.names[scope.members + scope.newcomers :]
        self.decisions: set[Any] = set()
        made = standing_of(parts, scope)
        first, handles = [], tuple(self.names[: scope.members])
        # So the first generation here may be any one of the job.
        lacking = tuple(map(self.names.index, scope.lacks))
        before = agreement.Decision(tuple(range(scope.members)), (), 0, (), lacking)
        for name in self.names:
            process = Process(parts, made, name)
            process.status = "waits"
            if name in handles:
                process.standing.remember(0, before, scope.members)
                process.standing.enter(1, handles)
                process.standing.formed, process.status = True, "member"
            process.standing.leaves, process.standing.lacks = name in scope.leaves, name in scope.lacks
            if name in self.fresh:
                process.status = "fresh"
            first.append(self._number(process))
        super().__init__((*first, frozenset(), (1, handles), scope.deaths, scope.suspicions, _WHOLE, 0))

    def _newest(self, state: _State) -> Newest:
        generation, handles = state[_STORE]
        page = list(handles[: self.scope.page])
        return Newest(generation, page, len(page) == len(handles))

    def _number(self, process: Process) -> int:
        number = self._numbers.setdefault(process.key(), len(self.processes))
        if number == len(self.processes):
            self.processes.append(process)
        return number

    def _of(self, state: _State) -> dict[str, Process]:
        return {name: self.processes[number] for name, number in zip(self.names, state, strict=False)}

    def _reaches(self, state: _State, name: str, peer: str) -> bool:
        return state[_NETWORK] != _CUT or not any({name, peer} == set(pair) for pair in self.scope.cut)

    def _apart(self, state: _State, name: str, peers: tuple[str, ...]) -> Sequence[str]:
        """Those of the peers that a process does not reach."""
        return () if state[_NETWORK] != _CUT else [peer for peer in peers if not self._reaches(state, name, peer)]

    # --- events ---

    def events(self, state: _State) -> Iterator[Event]:
        every = self._of(state)
        self._check(state, every)
        is_cut = state[_NETWORK] == _CUT
        if self.scope.cut and state[_NETWORK] == _WHOLE:
            yield ("cut",)
        if self.scope.heals and is_cut:
            yield ("heal",)
        for name, process in every.items():
            if process.status == "gone":
                continue
            if is_cut and self._passes_deadline(state, every, name, process):
                yield "end", name
            if state[_DEATHS] and name not in self.fresh:
                yield "die", name
            if process.status == "member":
                yield from self._events_of_member(state, every, name, process)
            elif process.status in ("waits", "looks"):
                for peer, other in every.items():
                    is_member = other.status == "member" and name in other.standing.handles
                    if is_member and self._reaches(state, name, peer):
                        yield "welcome", name, peer
            if process.status == "fresh" or (process.status == "waits" and name in self.fresh):
                yield "look", name
            elif process.status == "looks":
                yield from self._events_of_look(every, name, process)
        begins = [every[name] for name in self.fresh if every[name].status == "begins"]
        if begins and len(begins) == len(self.fresh) and len({each.after for each in begins}) == 1:
            yield ("begin",)

    def _passes_deadline(self, state: _State, every: dict[str, Process], name: str, process: Process) -> bool:
        """Whether the wait of a process is hopeless while the cut lasts."""
        if process.status == "waits":
            return not any(
                other.status == "member" and self._reaches(state, name, peer) for peer, other in every.items()
            )
        at = process.standing
        if process.status != "member" or not at.has_reported or process.agreement.decision is not None:
            return False
        left = [
            rank
            for rank, peer in enumerate(at.handles)
            if every[peer].status in ("member", "waits") and self._reaches(state, name, peer)
        ]
        return not _is_majority(left, at.size)

    def _events_of_look(self, every: dict[str, Process], name: str, process: Process) -> Iterator[Event]:
        assert process.seen is not None
        left = [each for each in process.seen.handles if each not in process.ended and each != name]
        for each in left[:1] if self.parts.asks_in_order else left:
            yield ("wait" if every[each].status == "member" else "ended"), name, each
        yield "conclude", name  # a member that does not answer in time is neither

    def _events_of_member(
        self, state: _State, every: dict[str, Process], name: str, process: Process
    ) -> Iterator[Event]:
        at, scope, agreed = process.standing, self.scope, process.agreement
        peers = [(rank, peer, every[peer]) for rank, peer in enumerate(at.handles) if peer != name]
        apart = self._apart(state, name, at.handles)
        if at.rank == 0 and state[_STORE][0] < at.generation:
            yield "publish", name
        if agreed.decision is not None:
            yield "follow", name
            for rank, peer, other in peers:
                is_there = other.status == "member" and other.standing.generation == at.generation
                if is_there and peer not in apart and other.agreement.decision is None and rank not in agreed.ended:
                    yield "tell", name, peer
            return
        if not at.has_reported:
            if not at.formed and not apart and all(other.standing.generation >= at.generation for _, _, other in peers):
                yield "form", name
            if at.formed and process.awaits_state:
                source = every[at.handles[at.lacking()[at.rank]]]
                of = source.standing
                is_there = source.status == "member" and source.own not in apart
                if is_there and of.generation == at.generation and of.formed and not of.lacks:
                    yield "receive", name, source.own
            elif at.formed and not at.voted and at.done < scope.steps:
                yield "vote", name
            if at.voted and not apart and all((each, at.generation, at.done) in state[_VOTES] for each in at.handles):
                yield "pass", name
        if at.generation >= scope.generations:
            return
        for rank, peer, other in peers:
            is_gone = other.status == "gone"
            is_silent = is_gone or peer in apart or state[_SUSPICIONS]
            if rank not in agreed.suspects and is_silent and (at.has_reported or rank < at.rank):
                yield "suspect", name, peer, False
            if is_gone and scope.one_host and rank not in agreed.ended:
                yield "suspect", name, peer, True
            if not is_gone and peer not in apart and rank in agreed.wanted():
                yield "ask", name, peer
        leads = agreed.leader == at.rank and agreed.ballot == agreement.NO_BALLOT
        if not leads and not at.has_reported and self._has_reason(state, every, process):
            yield "report", name
        if (leads or agreed.is_stuck) and agreed.promised[0] < scope.rounds and self._has_reason(state, every, process):
            yield "lead", name
        late = self.parts.asks_the_store and state[_STORE][0] > at.generation
        if agreed.may_propose and not (agreed.rests_on_ends and late):
            yield "propose", name, ()
            asks = (each for each, other in every.items() if other.status in ("waits", "looks"))
            waiting = tuple(each for each in asks if each not in at.handles)
            if waiting and agreed.inherited is None:
                yield "propose", name, waiting

    def _has_reason(self, state: _State, every: dict[str, Process], process: Process) -> bool:
        at, waits = process.standing, any(each.status == "waits" for each in every.values())
        if at.has_reported or at.leaves or waits or state[_SUSPICIONS]:
            return True
        if self._apart(state, process.own, at.handles):
            return True
        others = [every[peer] for peer in at.handles]
        return any(
            each.status != "member" or each.standing.generation != at.generation or each.standing.has_reported
            or each.standing.leaves
            for each in others
        )  # fmt: skip

    # --- what an event makes of a state ---

    def after(self, state: _State, event: Event) -> _State | None:
        kind, *arguments = event
        new = list(state)
        if kind in ("cut", "heal"):
            new[_NETWORK] = _CUT if kind == "cut" else _HEALED
            return tuple(new)
        if kind == "begin":
            self._begin(new)
            return tuple(new)
        name, *arguments = arguments
        process = self.processes[new[self.names.index(name)]]
        at = process.standing
        if kind in ("tell", "ask"):
            peer = arguments[0]
            rank = at.handles.index(peer)
            tells = kind == "tell"
            message = agreement.Decide(process.agreement.decision) if tells else process.agreement.wanted()[rank]
            reply = self._apply(new, peer, ("request", at.generation, at.rank, at.done, message))
            if not tells:
                self._apply(new, name, ("reply", rank, *reply))
        elif kind == "welcome":
            welcome = self._apply(new, arguments[0], ("join", name, process.after))
            if welcome is not None:
                self._apply(new, name, ("welcome", *welcome))
        elif kind == "publish":
            new[_STORE] = at.generation, at.handles
        elif kind == "suspect":
            peer, certain = arguments
            if self._is_wrong(state, event):
                new[_SUSPICIONS] -= 1
            self._apply(new, name, ("suspect", at.handles.index(peer), certain))
        elif kind == "receive":
            content = self.processes[state[self.names.index(arguments[0])]].content
            self._apply(new, name, ("receive", content))
        elif kind == "look":
            self._apply(new, name, ("look", self._newest(state)))
        elif kind == "conclude":
            ended = self.parts.all_have_ended(process.seen, process.ended | {name}, lambda: self._newest(state))
            self._apply(new, name, ("conclude", bool(ended)))
        elif kind == "die":
            new[_DEATHS] -= 1
            self._apply(new, name, ("gone",))
        elif kind == "end":
            self._apply(new, name, ("gone",))
        else:
            if kind == "follow":
                self._check_decision(state, process)
            self._apply(new, name, (kind, *arguments))
        self._note(state, new, kind, name)
        return None if tuple(new) == state else tuple(new)

    def _note(self, state: _State, new: list[Any], kind: str, name: str) -> None:
        """Record an event of this process for the job as a whole."""
        before, after = (self.processes[each[self.names.index(name)]] for each in (state, new))
        at = after.standing
        if kind == "vote":
            if at.lacks:
                raise BrokenError(WITHOUT)
            new[_VOTES] |= {(name, at.generation, at.done)}
        elif kind == "pass":
            new[_PASSED] = max(new[_PASSED], after.content)
        elif kind == "follow":
            decision = before.agreement.decision
            is_first = after.status == "member" and at.rank == 0 and decision.newcomers
            if is_first and self.parts.publishes_first and new[_STORE][0] < at.generation:
                new[_STORE] = at.generation, at.handles

    def _begin(self, state: list[Any]) -> None:
        every = self._of(tuple(state))
        for name, process in every.items():
            if name not in self.fresh and process.status == "member" and not process.standing.lacks:
                raise BrokenError(TWO_JOBS)
        for name in self.fresh:
            self._apply(state, name, ("begin", every[name].after + 1, tuple(self.fresh)))

    def _apply(self, state: list[Any], name: str, event: Event) -> Any:
        index = self.names.index(name)
        key = (state[index], self._hashable(event))
        found = self._steps.get(key)
        if found is None:
            process = self.processes[state[index]].copy()
            reply = process.happen(*event)
            found = self._steps[key] = self._number(process), reply
        state[index] = found[0]
        return found[1]

    @staticmethod
    def _hashable(event: Event) -> Event:
        return (*event[:-1], str(event[-1])) if event[0] == "look" else event

    # --- promises ---

    def _check(self, state: _State, every: dict[str, Process]) -> None:
        counting: dict[tuple[bool, int], set[Any]] = defaultdict(set)
        formed: dict[tuple[bool, int], list[Process]] = defaultdict(list)
        for name, process in every.items():
            at, is_again = process.standing, name in self.fresh and process.standing.generation > 0
            if process.status == "member":
                if process.agreement.decision is not None:
                    counting[is_again, at.generation].add(process.agreement.decision)
                if at.formed:
                    formed[is_again, at.generation].append(process)
                if not at.lacks and process.content != at.done:
                    raise BrokenError(UNEVEN)
            if process.status in ("member", "waits"):
                for generation, (decision, _) in at.past.items():
                    counting[is_again, generation].add(decision)
        for (_, generation), decisions in counting.items():
            self.decisions |= {(generation, each) for each in decisions}
            if len(decisions) > 1:
                raise BrokenError(TWO)
        for (_, generation), members in formed.items():
            if len({each.standing.handles for each in members}) > 1:
                raise BrokenError(TWO)
            of = members[0].standing
            if generation > 1 and generation - 1 in of.past:
                decision, size = of.past[generation - 1]
                is_certain = self.scope.one_host or self.scope.leaves
                if not is_certain and not _is_majority(decision.members, size):
                    raise BrokenError(MINORITY)
                if len(decision.lacking) == len(decision.members):
                    raise BrokenError(NO_STATE)

    def _check_decision(self, state: _State, process: Process) -> None:
        """Of a decision that a member follows."""
        at, decision = process.standing, process.agreement.decision
        if max(decision.members, default=0) >= at.size:
            raise BrokenError(FOREIGN)
        if decision.done > state[_PASSED]:
            raise BrokenError(FALSE_STEP)
        size = len(decision.members) + len(decision.newcomers)
        if decision.newcomers and 2 * len(decision.members) < size:
            raise BrokenError(OUTNUMBERED)
        if at.rank in decision.members:
            if at.leaves and process.agreement.report is not None and process.agreement.report.leaves:
                raise BrokenError(STAYS)
            if not at.lacks and process.content > decision.done:
                raise BrokenError(LOST_STEP)

    def is_fault(self, state: _State, event: Event) -> bool:
        return event[0] in ("die", "cut", "heal") or (event[0] == "suspect" and self._is_wrong(state, event))

    def _is_wrong(self, state: _State, event: Event) -> bool:
        _, name, peer, _ = event
        return self.processes[state[self.names.index(peer)]].status != "gone" and self._reaches(state, name, peer)

    def has_ended(self, state: _State) -> bool:
        """Whether nothing more has to happen, or need not: the scope's bounds, or a job that cannot go on."""
        every, scope = self._of(state), self.scope
        members = [process for process in every.values() if process.status == "member"]
        if all(process.standing.lacks for process in members):
            return True  # there are none, or none has the state
        newest = max(process.standing.generation for process in members)
        if newest >= scope.generations:
            return True
        if any(each.agreement.decision is None and each.agreement.promised[0] >= scope.rounds for each in members):
            return True
        here = [each for each in members if each.standing.generation == newest]
        ranks = [
            rank for rank, peer in enumerate(here[0].standing.handles) if every[peer].status in ("member", "waits")
        ]
        size = here[0].standing.size
        if not scope.one_host and state[_NETWORK] != _CUT and not _is_majority(ranks, size):
            return True
        if state[_NETWORK] == _CUT and not self._is_apart(state, every, here[0].standing.handles):
            return False
        return len(here) == len(members) == size and all(
            each.standing.formed and not each.standing.has_reported and not each.standing.lacks
            and not each.standing.leaves
            for each in here
        )  # fmt: skip

    def _is_apart(self, state: _State, every: dict[str, Process], handles: tuple[str, ...]) -> bool:
        """Whether these members all reach each other, and no process that waits reaches all of them."""
        waiting = [name for name, process in every.items() if process.status == "waits"]
        reached = [all(self._reaches(state, name, peer) for peer in handles) for name in (*handles, *waiting)]
        return all(reached[: len(handles)]) and not any(reached[len(handles) :])

    def search(self) -> GenerationsReport:
        report = GenerationsReport()
        self.run(report)
        report.process_states, report.decisions = len(self.processes), len(self.decisions)
        return report


def _is_majority(ranks: Collection[int], size: int) -> bool:
    return 2 * len(ranks) > size or (2 * len(ranks) == size and 0 in ranks)


def search_generations(scope: GenerationsScope, parts: Parts = PRODUCTION) -> GenerationsReport:
    """Search all orders of events in `scope`."""
    return _Search(scope, parts).search()


def sentence(scope: GenerationsScope, report: GenerationsReport) -> str:
    """Return a report in one line."""
    counts = {
        "deaths": scope.deaths, "wrong suspicions": scope.suspicions, "newcomers": scope.newcomers,
        "first ranks again": scope.fresh,
    }  # fmt: skip
    where = "one host" if scope.one_host else "several hosts"
    what = "".join(f", {count} {name}" for name, count in counts.items() if count)
    what += f", {', '.join(scope.cut)} cut" + (", then whole again" if scope.heals else "") if scope.cut else ""
    marked = {"leaves": scope.leaves, "lacks the state": scope.lacks}
    what += "".join(f", {', '.join(names)} {verb}" for verb, names in marked.items() if names)
    return (
        f"{scope.members} members on {where}{what}, to generation {scope.generations}: {report.outcome}; "
        f"{report.states:,} states ({report.process_states:,} of a process; {report.decisions:,} decisions), "
        f"{report.transitions:,} transitions, depth {report.depth}, {report.seconds:.2f} s"
    )
