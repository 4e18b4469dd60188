"""Exhaustive search of recovery from a lost switch: every order of events at a few ranks, with production's decisions.

Three things are production's: `RecoveryMachine` (the messages between ranks), `Failover` (core/native/collective: the
path of each operation), and the arithmetic of plans. The search models what surrounds them:

    switch     Rank r contributes to chunk c of its sequence space when it has all results up to c - W. A chunk has a
               result when all ranks have contributed. The result then reaches each rank that is not frozen at any time,
               in any order, or never. `lab/tests/model_check/test_recovery.py` compares this model (`Channel`) with the
               protocol's own machines, whose sums core/native/dev/model_check searches.
    loss       Any rank may believe at any time that its switch is lost, rightly or not; `losses` times. From then on
               any other rank with that membership may believe so too. Progress may not depend on results of such a
               switch. A rank for which one is due notices the loss: switch_watch.py searches that `SwitchWatch` does
               so in time, for all replies. Its wrong beliefs are among those searched here. A leaf of a tree that never
               comes back is such a loss too: no result reaches its ranks any more, while results that exist may reach
               other ranks. So is a pipeline whose control plane ended: it adds and answers on.
    messages   A message between ranks may arrive at any time, late, twice or in any order. A reply that counts arrives
               at once: while a real reply is in flight, the rank that gave it is frozen, or has one more task, and may
               as well do before or after the reply what it does meanwhile.
    spare      What ranks do without a switch: a stream of steps on connections of their own. A step ends when all ranks
               have begun the same step; an announcement ends when the leader has begun it.
    join       All ranks that join in one attempt have one membership. Each is admitted at any time, or, `refusals`
               times, is refused instead. The leader's wait for the other ranks may end early, counted likewise.
    death      `deaths` times, a rank stops for good. A rank that waits for it notices.

Safety. Each operation's result holds every rank's contribution once, and is the same on all ranks. A result of the
switch, or one that another rank kept, belongs to the same chunk of the same operation everywhere. Ranks reduce the same
elements of the same operation together. No contribution is read where a result has been written. No rank leaves a
membership that operations use. While all ranks live, none fails.
Possibility. From every state some sequence of events without a further fault leads to a state where every living rank
has finished all operations or knows of a failure.

A rank's state is stored once and has a number; the effect of an event on it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from netfold_lab.model_check.breadth_first import BrokenError, EndingSearch, Report
from netfold_lab.model_check.recovery_rank import DEAD, FAILED, LEADER, LIVING, Event, Machines, Rank, RecoveryScope

STUCK = "no events lead from here to a state where every living rank has finished or knows of a failure"


@dataclass
class RecoveryReport(Report):
    """transitions: those that change the state."""

    ranks: int = 0  # different states of a rank
    returned: int = 0  # states in which every rank uses a switch again


@dataclass(frozen=True)
class _View:
    """The part of a rank's state that the search needs: other ranks' view of it, and the events that it may get."""

    status: int
    finished: bool
    is_up: bool
    generation: int
    events: tuple[Event, ...]  # that depend on no other rank
    timers: tuple[Event, ...]  # likewise, those that are faults
    wants: tuple[tuple[int, int], ...]  # (generation, chunk) without a result, while the rank is not frozen
    contributed: Mapping[int, int]  # by generation
    lines: Mapping[int, tuple[tuple[int, int], ...]]
    posted: tuple[Event, ...]
    ended: int
    unanswered: frozenset[tuple[int, Any]]
    awaits_plan: bool
    fetch: Any
    join: Any
    losable: tuple[int, ...]  # generations
    doomed: int  # generations that the rank lost or left, a bit each
    failure: str


@dataclass(frozen=True)
class _Step:
    """The effect of an event on a rank's state."""

    rank: int  # the number of the new state
    sent: int  # messages, a bit each
    reply: Any
    broken: str


# The numbers of the ranks' states; then, a bit each: messages that were sent, (rank, attempt) pairs that joined,
# generations that a rank lost or left; then the remaining losses, refusals and deaths. Flat, since it is hashed often.
_State = tuple[int, ...]
_SENT, _JOINING, _DOOMED, _LOSSES, _REFUSALS, _DEATHS = range(-6, 0)


# What may happen in a state, and whether it is a fault, on which progress may not depend.
_Move = tuple[Event, bool]


class _Search(EndingSearch[_State, _Move]):
    stuck = STUCK

    def __init__(self, scope: RecoveryScope, machines: Machines) -> None:
        self.scope = scope
        self.ranks: list[Rank] = []
        self.views: list[_View] = []
        self.messages: list[tuple[int, int, Any]] = []  # from, to, message
        self._message_numbers: dict[tuple[int, int, Any], int] = {}
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple[int, Event], _Step] = {}
        first = tuple(self._number(Rank(scope, rank, machines)) for rank in range(scope.ranks))
        super().__init__((*first, 0, 0, 0, scope.losses, scope.refusals, scope.deaths))

    def _number(self, rank: Rank) -> int:
        key = rank.key()
        if key not in self._numbers:
            self._numbers[key] = len(self.ranks)
            self.ranks.append(rank)
            self.views.append(self._view(rank))
        return self._numbers[key]

    def _bit(self, source: int, to: int, message: Any) -> int:
        key = (source, to, message)
        if key not in self._message_numbers:
            self._message_numbers[key] = len(self.messages)
            self.messages.append(key)
        return 1 << self._message_numbers[key]

    def _view(self, rank: Rank) -> _View:
        path, machine, number = rank.path, rank.machine, rank.rank
        events: list[Event] = []
        if rank.called < len(path.chunks):
            events.append(("call", number))
        if rank.finds_tree:
            events.append(("tree", number))
        timers: list[Event] = []
        for what, attempt in sorted(rank.waits):
            if what == "join":
                timers.append(("waited", number, what, attempt))
            elif machine._attempts < self.scope.attempts:
                events.append(("waited", number, what, attempt))
        generation, is_up = path.failover.generation, path.failover.is_up
        channel = path.channels[generation]
        is_waiting = is_up and bool(path.by_channel())
        wants = tuple((generation, chunk) for chunk in range(len(channel.line)) if not channel.answered >> chunk & 1)
        return _View(
            status=rank.status,
            finished=rank.has_finished(),
            is_up=is_up,
            generation=generation,
            events=tuple(events),
            timers=tuple(timers),
            wants=wants if is_waiting else (),
            contributed={each: channel.contributed for each, channel in path.channels.items()},
            lines={each: channel.line for each, channel in path.channels.items()},
            posted=rank.posted,
            ended=rank.ended,
            unanswered=rank.unanswered,
            awaits_plan=any(map(machine.awaits_plan, rank.reports)),
            fetch=rank.fetch,
            join=rank.join,
            losable=tuple(sorted(rank.joined - set(machine.lost) - rank.left)),
            doomed=sum(1 << generation for generation in {*machine.lost, *rank.left}),
            failure=rank.failure,
        )

    def step(self, rank: int, event: Event) -> _Step:
        """Return the effect of `event` on the rank whose state has the number `rank`."""
        key = (rank, event)
        found = self._steps.get(key)
        if found is None:
            new = self.ranks[rank].copy()
            try:
                kind, number, *arguments = event
                if kind in ("hear", "reply"):
                    # The event names the message by its number.
                    source, to, message = self.messages[arguments[0]]
                    arguments = [source, message] if kind == "hear" else [to, message, arguments[1]]
                new.happen((kind, number, *arguments))
                sent = 0
                for to, message in new.sent:
                    sent |= self._bit(new.rank, to, message)
                found = _Step(self._number(new), sent, new.reply, "")
            except BrokenError as broken:
                found = _Step(rank, 0, None, str(broken))
            self._steps[key] = found
        return found

    def events(self, state: _State) -> Iterator[_Move]:
        views = self._views_of(state)
        gone = {rank for rank, view in enumerate(views) if view.status != LIVING}
        doomed, losses, refusals, deaths = state[_DOOMED], state[_LOSSES], state[_REFUSALS], state[_DEATHS]
        for rank, view in enumerate(views):
            if view.status != LIVING:
                continue
            for event in view.events:
                yield event, False
            if refusals:
                for event in view.timers:
                    yield event, True
            silent = 0  # generations of which a result is due
            for generation, chunk in view.wants:
                if all(each.contributed.get(generation, 0) >> chunk & 1 for each in views):
                    silent |= 1 << generation
                    yield ("result", rank, generation, chunk), bool(doomed >> generation & 1)
            if view.ended < len(view.posted) and self._may_end(views, view):
                is_announcement = view.posted[view.ended][0] == "announcement"
                yield ("step", rank, views[LEADER].posted[view.ended][2] if is_announcement else 0), False
            if view.fetch is not None and view.fetch.source not in gone:
                source = self.ranks[state[view.fetch.source]]
                yield ("fetched", rank, source.path.kept(view.fetch.generation, view.fetch.chunks)), False
            if view.join is not None:
                joining = state[_JOINING] >> (view.join.attempt * len(views))
                if joining & (1 << len(views)) - 1 == (1 << len(views)) - 1:
                    yield ("joined", rank, view.join.attempt + 1), False
                if refusals:
                    yield ("joined", rank, 0), True
            for generation in view.losable:
                if losses or doomed >> generation & 1:
                    yield ("lose", rank, generation), not (doomed & silent) >> generation & 1
            if deaths:
                yield ("die", rank), True
            if gone and self._notices(view, gone, views):
                yield ("fail", rank), False
        sent, number = state[_SENT], 0
        while sent:
            if sent & 1:
                to = self.messages[number][1]
                if views[to].status == LIVING:
                    yield ("hear", to, number), False
            sent >>= 1
            number += 1

    def _may_end(self, views: Sequence[_View], view: _View) -> bool:
        """Whether all ranks that a step needs have begun it. Raises BrokenError where they began different steps."""
        at = view.ended
        for other in views:
            if len(other.posted) > at and not _same(other.posted[at], view.posted[at]):
                raise BrokenError(f"a rank's {view.posted[at]} meets another's {other.posted[at]}")
        if view.posted[at][0] == "announcement":
            return len(views[LEADER].posted) > at
        return all(len(other.posted) > at for other in views)

    @staticmethod
    def _notices(view: _View, gone: set[int], views: Sequence[_View]) -> bool:
        if view.ended < len(view.posted) or (view.awaits_plan and LEADER in gone):
            return True
        if view.fetch is not None and view.fetch.source in gone:
            return True
        if any(peer in gone for peer, _ in view.unanswered):
            return True
        return any(
            not views[rank].contributed.get(generation, 0) >> chunk & 1
            for generation, chunk in view.wants
            for rank in gone
        )

    def after(self, state: _State, move: _Move) -> _State | None:
        new = self.apply(state, move[0])
        return None if new == state else new

    def apply(self, state: _State, event: Event) -> _State:
        """Return the state after `event`. Raises BrokenError."""
        kind, rank, *arguments = event
        if kind == "result":
            lines = [view.lines for view in self._views_of(state)]
            if len({line[arguments[0]][arguments[1]] for line in lines}) > 1:
                raise BrokenError("a chunk's result adds up different operations")
        new = list(state)
        self._apply(new, rank, event)
        if kind == "hear":
            sender, _, message = self.messages[arguments[0]]
            view = self.views[new[sender]]
            if view.status == LIVING and (rank, message) in view.unanswered:
                reply = self.step(state[rank], event).reply
                self._apply(new, sender, ("reply", sender, arguments[0], reply))
        elif kind == "lose":
            new[_LOSSES] -= not state[_DOOMED] >> arguments[0] & 1
        elif kind == "waited":
            new[_REFUSALS] -= arguments[0] == "join"
        elif kind == "joined":
            new[_REFUSALS] -= not arguments[0]
        elif kind == "die":
            new[_DEATHS] -= 1
        return tuple(new)

    def _apply(self, state: list[int], rank: int, event: Event) -> None:
        step = self.step(state[rank], event)
        if step.broken:
            raise BrokenError(step.broken)
        view = self.views[step.rank]
        state[rank] = step.rank
        state[_SENT] |= step.sent
        state[_DOOMED] |= view.doomed
        if view.join is not None:
            state[_JOINING] |= 1 << (view.join.attempt * self.scope.ranks + rank)
        if view.status == FAILED:
            others = (self.views[number].status for number in state[: self.scope.ranks])
            if DEAD not in others:
                raise BrokenError(f"a rank fails while all live: {view.failure}")

    def is_fault(self, state: _State, move: _Move) -> bool:
        return move[1]

    def search(self) -> RecoveryReport:
        report = RecoveryReport()
        self.run(report, self.scope.max_states)
        report.ranks = len(self.ranks)
        report.returned = sum(map(self._has_returned, self.states))
        return report

    def _views_of(self, state: _State) -> list[_View]:
        return [self.views[number] for number in state[: self.scope.ranks]]

    def _has_returned(self, state: _State) -> bool:
        return all(view.is_up and view.generation > 1 for view in self._views_of(state))

    def has_ended(self, state: _State) -> bool:
        return all(view.finished for view in self._views_of(state))

    def text(self, move: _Move) -> str:
        event = move[0]
        if event[0] == "hear":
            source, _, message = self.messages[event[2]]
            event = ("hear", event[1], source, message)
        return " ".join(map(_text, event))

    def replay(self, steps: Sequence[str]) -> str:
        """Do the steps of a trace again; return the promise that breaks, or ""."""
        state = self.states[0]
        try:
            for number, step in enumerate(steps, 1):
                events = [move[0] for move in self.events(state) if self.text(move) == step]
                if not events:
                    raise ValueError(f"step {number}, {step}, cannot happen then")
                state = self.apply(state, events[0])
            list(self.events(state))
        except BrokenError as broken:
            return str(broken)
        return ""


def _same(one: Event, other: Event) -> bool:
    return one[:2] == other[:2] and (one[0] == "announcement" or one == other)


def _text(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        values = [_text(getattr(value, each.name)) for each in fields(value) if each.name not in ("why", "tree")]
        return f"{type(value).__name__}({','.join(values)})"
    if isinstance(value, tuple):
        return f"[{','.join(map(_text, value))}]"
    return str(value)


def search_recovery(scope: RecoveryScope, machines: Machines | None = None) -> RecoveryReport:
    """Search `scope`; a broken promise comes with its shortest trace."""
    return _Search(scope, machines or Machines()).search()


def replay_recovery(scope: RecoveryScope, steps: Sequence[str], machines: Machines | None = None) -> str:
    """Do the steps of a trace again; return the promise that breaks, or "". Raises ValueError at an impossible step."""
    return _Search(scope, machines or Machines()).replay(steps)


def sentence(scope: RecoveryScope, report: RecoveryReport) -> str:
    """Return a report in one line."""
    return (
        f"{scope.ranks} ranks, window {scope.window}, chunks {scope.operations}, {scope.losses} losses, "
        f"{scope.attempts} attempts to join again, {scope.refusals} refusals, {scope.deaths} deaths: {report.outcome}; "
        f"{report.states:,} states ({report.ranks:,} of a rank; {report.returned:,} with a switch again), "
        f"{report.transitions:,} transitions, depth {report.depth}, {report.seconds:.2f} s"
    )
