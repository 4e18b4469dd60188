"""Exhaustive search of recovery from a lost switch: every order of events at a few ranks, with production's decisions.

What runs is production's: `RecoveryMachine` (what ranks say to each other), `Failover` (native/collective: by which way
each operation goes) and the plan's arithmetic. The search stands for what they need around them:

    switch     rank r contributes to chunk c of its line when it has all results up to c - W. A chunk has a result when
               all ranks have contributed, and then reaches each rank that is not frozen, at any time, in any order, or
               never. `tests/model_check/test_recovery.py` holds this (`Channel`) against the protocol's own machines,
               whose sums native/dev/model_check searches.
    loss       Any rank may believe at any time that its switch is gone, rightly or not; `losses` times. From then on
               any other rank with that membership may believe it too. No way to the end may count on the results of
               such a switch; a rank for which one is due finds out that the switch is gone: that `SwitchWatch` does so
               in time, whatever its questions and answers do, is searched by `switch_watch.py`, and what it believes
               wrongly is among what is searched here. A leaf of a tree that never comes back is such a loss too: no
               result reaches its ranks any more, while those that are there reach the others, or not.
    messages   A message between ranks may arrive at any time, late, twice or in any order. An answer that counts is
               here at once: while it is on its way the rank that gave it is frozen, or has a task more, and what it
               does meanwhile it may as well do before or after.
    spare      What ranks do without a switch: a stream of steps on connections of their own. A step ends when all ranks
               have begun the same step; an announcement, when the leader has.
    join       All ranks that joined as one attempt have one membership; each hears so at any time, or, `refusals`
               times, hears a refusal instead. The leader's wait for the others may end early, counted likewise.
    death      `deaths` times, a rank stops for good. Who waits for it notices.

Safety. Each operation's result is every rank's contribution to it, once, and the same on all ranks: a result of the
switch or another rank's kept one is of the same chunk of the same operation everywhere; ranks reduce the same elements
of the same operation together; no contribution is read where a result has been written. Nobody leaves a membership
that operations go by. While all ranks live, none fails.
Possibility. From every state there is a way, without a further fault, to where every living rank has finished all
operations or has been told of a failure.

A rank's state is kept once and has a number; what an event makes of it is found out once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import netfold.communicator.recovery_machine as production
from netfold._native import failover as native

LEADER = 0
CHANNEL, UNDECIDED, HOST = range(3)
STANDING, ADOPTED, UNKNOWN = 2, 2, 3
LIVING, FAILED, DEAD = range(3)
STUCK = "from here no way leads to where every living rank has finished or knows of a failure"

Event = tuple[Any, ...]  # its kind, the rank that it happens to, and what else there is to say


@dataclass(frozen=True)
class RecoveryScope:
    """What is searched.

    operations: chunks of each, as "2,1". losses: switches that are lost. attempts: how often the ranks join again.
    refusals: joins that fail, or whose time runs out. deaths: ranks that stop. max_states: stop there; 0 for never.
    """

    ranks: int = 2
    window: int = 1
    operations: str = "2"
    losses: int = 1
    attempts: int = 0
    refusals: int = 0
    deaths: int = 0
    max_states: int = 0

    @property
    def chunks(self) -> list[int]:
        return [int(chunks) for chunks in self.operations.split(",")]


@dataclass
class RecoveryReport:
    """states, transitions: searched; those that change nothing are no transitions. depth: of the state found last.

    returned: states in which every rank goes by a switch again. trace: the events that break the promise.
    """

    states: int = 0
    transitions: int = 0
    depth: int = 0
    ranks: int = 0  # different states of a rank
    returned: int = 0
    exhausted: bool = False
    broken: str = ""
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0


class BrokenError(Exception):
    """A promise."""


# --- one rank -----------------------------------------------------------------------------------------------------


@dataclass
class Channel:
    """A membership at this rank: its line of chunks, each as (operation, place in it)."""

    line: tuple[tuple[int, int], ...] = ()
    answered: int = 0
    contributed: int = 0
    frozen: bool = False

    @property
    def base(self) -> int:
        """The lowest chunk without a result."""
        base = 0
        while self.answered >> base & 1:
            base += 1
        return base

    def contribute(self, window: int) -> None:
        if not self.frozen:
            self.contributed = (1 << min(len(self.line), self.base + window)) - 1


class _Path:
    """What a SwitchPath does (native/collective/switch_path.cpp), without payload: the machine's way to the switch."""

    def __init__(self, scope: RecoveryScope, failover: Any) -> None:
        self.chunks = scope.chunks
        self.window = scope.window
        self.failover = failover
        self.channels = {failover.generation: Channel()}
        self.delivered = [0] * len(self.chunks)  # by operation, chunks with a result
        self.rest: dict[int, int] = {}  # of operations that all had begun: chunks without a result
        self.whole: set[int] = set()
        self.under_way: frozenset[int] = frozenset()  # operations that were called and have not finished

    def freeze(self, generation: int) -> tuple[int, int, bytes, bool] | None:
        which, promised = self.failover.freeze(generation)
        if not which:
            return None
        channel = self.channels[generation]
        channel.frozen = True
        held = channel.answered >> channel.base
        if held >> self.window:
            raise BrokenError("a rank has results that are further apart than its window")
        return channel.base, len(channel.line), held.to_bytes((held.bit_length() + 7) // 8, "little"), promised

    def kept(self, generation: int, chunks: Sequence[int]) -> tuple[Any, ...] | None:
        channel = self.channels.get(generation)
        if channel is None or not self.failover.offers_results(generation):
            return None
        newest = channel.answered.bit_length() - 1
        if not all(channel.answered >> chunk & 1 and chunk > newest - self.window for chunk in chunks):
            return None
        return tuple((chunk, channel.line[chunk]) for chunk in chunks)

    def accept(self, generation: int, packets: Sequence[Any]) -> bool:
        if not self.failover.accepts_results(generation):
            return False
        channel = self.channels[generation]
        for chunk, content in packets:
            if chunk >= len(channel.line) or channel.answered >> chunk & 1:
                return False
            if channel.line[chunk] != content:
                raise BrokenError("a kept result is taken for another operation's")
            self.deliver(channel, chunk)
        return True

    def deliver(self, channel: Channel, chunk: int) -> None:
        channel.answered |= 1 << chunk
        operation, place = channel.line[chunk]
        if self.delivered[operation] >> place & 1 or operation in self.whole:
            raise BrokenError("an element has two results")
        self.delivered[operation] |= 1 << place

    def fall_back(self, generation: int, end: int, promised: bool) -> None:
        going = self.going_by_channel()
        which = self.failover.fall_back(generation, end, promised)
        if which == STANDING:
            del self.channels[generation]
        elif which:
            for operation in going:
                if self.failover.mode(operation) == HOST:
                    self.rest[operation] = (1 << self.chunks[operation]) - 1 & ~self.delivered[operation]

    def stand_by(self, generation: int) -> None:
        self.channels = {each: channel for each, channel in self.channels.items() if each == self.failover.generation}
        self.channels[generation] = Channel()
        self.failover.stand_by(generation)

    def promise(self, generation: int) -> bool:
        return bool(self.failover.promise(generation))

    # --- what operations do ---

    def going_by_channel(self) -> list[int]:
        return [operation for operation in sorted(self.under_way) if self.failover.mode(operation) == CHANNEL]

    def start(self, operation: int) -> None:
        self.under_way |= {operation}
        if self.failover.start(operation) == CHANNEL:
            self.enter(operation)

    def enter(self, operation: int) -> None:
        channel = self.channels[self.failover.generation]
        self.failover.entered(operation, len(channel.line))
        channel.line += tuple((operation, place) for place in range(self.chunks[operation]))

    def finish(self, operation: int) -> None:
        self.under_way -= {operation}
        self.failover.finish(operation)

    def follow(self, operation: int, word: int) -> bool:
        """False: this rank has no such membership."""
        followed = self.failover.follow(operation, word)
        if followed == ADOPTED:
            self.channels = {
                generation: each for generation, each in self.channels.items() if generation == self.failover.generation
            }
            for each in self.going_by_channel():
                self.enter(each)
        elif followed == UNKNOWN:
            return False
        elif self.failover.mode(operation) == HOST:
            self.whole.add(operation)
        return True


class _Rank:
    """A rank: production's machines, and what its driver has under way."""

    def __init__(self, scope: RecoveryScope, rank: int, machines: Machines) -> None:
        self.rank = rank
        self.path = _Path(scope, machines.failover(1))
        self.machine: production.RecoveryMachine = machines.recovery(
            rank, range(scope.ranks), self.path, 1, scope.window, rejoin_s=1.0 if scope.attempts else 0.0
        )
        self.status = LIVING
        self.called = 0
        self.posted: tuple[Event, ...] = ()  # steps on the spare connections
        self.ended = 0  # of them
        self.told: frozenset[tuple[int, Any]] = frozenset()  # messages whose reply counts
        self.reports: frozenset[int] = frozenset()  # generations that the leader is told of until it has a plan
        self.fetch: Any = None
        self.join: Any = None
        self.finds = False
        self.waits: frozenset[tuple[str, int]] = frozenset()
        self.joined: frozenset[int] = frozenset({1})  # generations
        self.left: frozenset[int] = frozenset()
        self.failure = ""
        self.out: list[tuple[int, Any]] = []  # messages that the event made this rank send
        self.reply: Any = None

    def copy(self) -> _Rank:
        new: _Rank = _copied(self)
        new.out, new.reply = [], None
        return new

    def happen(self, event: Event) -> None:
        """A thing happens to this rank; its driver carries out what follows."""
        kind, _, *about = event
        if kind == "die":
            self.status = DEAD
            return
        if kind == "fail":
            self.fail("a rank is gone")
            return
        if kind == "call":
            self.path.start(self.called)
            self.called += 1
        elif kind == "result":
            generation, chunk = about
            self.path.deliver(self.path.channels[generation], chunk)
        elif kind == "step":
            self._end_step(about[0])
        else:
            self._do(self._decide(kind, about))
        if self.status == LIVING:
            self._go_on()

    def _decide(self, kind: str, about: Sequence[Any]) -> Sequence[Any]:
        machine = self.machine
        if kind == "lose":
            return machine.handle_loss(about[0], "lost")
        if kind == "hear":
            self.reply, actions = machine.handle_message(about[0], about[1])
            return actions
        if kind == "reply":
            self.told -= {(about[0], about[1])}
            return machine.handle_reply(about[0], about[1], about[2])
        if kind == "fetched":
            self.fetch = None
            return machine.handle_fetched(about[0])
        if kind == "joined":
            self.join = None
            if about[0]:
                self.joined |= {about[0]}
            return machine.handle_joined(about[0], self.path.window, "" if about[0] else "refused")
        if kind == "waited":
            self.waits -= {(about[0], about[1])}
            return machine.handle_timer(about[0], about[1])
        self.finds = False
        return machine.handle_tree(())

    def _do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            if isinstance(action, production.Send):
                self.out.append((action.peer, action.message))
                if isinstance(action.message, production.Freeze | production.Recover | production.Rejoin):
                    self.told |= {(action.peer, action.message)}
            elif isinstance(action, production.ReportLoss):
                self.reports |= {action.generation}
                self.out.append((LEADER, production.Lost(action.generation, "lost")))
            elif isinstance(action, production.Fetch):
                self.fetch = action
            elif isinstance(action, production.Join):
                self.join = action
            elif isinstance(action, production.FindTree):
                self.finds = True
            elif isinstance(action, production.Wait):
                self.waits |= {(action.what, action.attempt)}
            elif isinstance(action, production.Leave):
                if self.path.failover.generation == action.generation and self.path.failover.is_up:
                    raise BrokenError("a rank leaves the membership that operations go by")
                self.left |= {action.generation}
            elif isinstance(action, production.Fail):
                self.fail(action.text)
                return

    def fail(self, text: str) -> None:
        self.status = FAILED
        self.failure = text

    def _end_step(self, word: int) -> None:
        kind, operation, *_ = self.posted[self.ended]
        self.ended += 1
        if kind == "word":
            if not self.path.follow(operation, word):
                self.fail("the leader goes on by a membership of the switch that this rank has not joined")
            return
        if kind == "whole" and self.path.delivered[operation]:
            raise BrokenError("a result is taken for a contribution")
        self.path.delivered[operation] = (1 << self.path.chunks[operation]) - 1
        self.path.finish(operation)

    def _go_on(self) -> None:
        """Whatever operations do by themselves: finish, begin a step, contribute."""
        path = self.path
        for operation in path.going_by_channel():
            if path.delivered[operation] == (1 << path.chunks[operation]) - 1:
                path.finish(operation)
        while len(self.posted) == self.ended and (operation := path.failover.host_operation()) is not None:
            if path.failover.mode(operation) == UNDECIDED:
                if path.delivered[operation]:
                    raise BrokenError("a result is taken for a contribution")
                word = path.failover.announce() if self.rank == LEADER else 0
                self.posted += (("word", operation, word),)
            elif operation in path.whole:
                self.posted += (("whole", operation),)
            elif path.rest[operation]:
                self.posted += (("rest", operation, path.rest[operation]),)
            else:
                path.finish(operation)
        channel = path.channels[path.failover.generation]
        channel.contribute(path.window)

    def has_finished(self) -> bool:
        if self.status != LIVING:
            return True
        return self.called == len(self.path.chunks) and not self.path.under_way


@dataclass(frozen=True)
class Machines:
    """Production's, or mutants of them (tests/model_check/recovery_mutants.py)."""

    failover: Callable[[int], Any] = native.Failover
    recovery: Callable[..., production.RecoveryMachine] = production.RecoveryMachine


def _copied(value: Any) -> Any:
    """As `copy.deepcopy` of what ranks are made of, where two parts may share a path."""
    return _copy(value, {})


def _copy(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each, seen) for key, each in value.items()}
    if isinstance(value, list):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, deque):
        return deque(value)
    if hasattr(value, "canonical"):
        return value.copy()
    if not hasattr(value, "__dict__") or _is_frozen(value):
        return value
    if id(value) not in seen:
        new = seen[id(value)] = object.__new__(type(value))
        for name, each in vars(value).items():
            setattr(new, name, _copy(each, seen))
    return seen[id(value)]


def _is_frozen(value: Any) -> bool:
    return is_dataclass(value) and bool(getattr(value, "__dataclass_params__").frozen)  # noqa: B009


def _key(value: Any) -> Any:
    """A hashable value that is equal for equal states."""
    if isinstance(value, dict):
        return tuple(sorted((key, _key(each)) for key, each in value.items()))
    if isinstance(value, list | deque):
        return tuple(map(_key, value))
    if isinstance(value, set):
        return frozenset(value)
    if hasattr(value, "canonical"):
        return value.canonical()
    if hasattr(value, "__dict__") and not _is_frozen(value):
        return tuple(_key(each) for name, each in sorted(vars(value).items()) if name not in ("_path", "out", "reply"))
    return value


# --- all ranks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """What the others must know of a rank's state, and what may happen to it."""

    status: int
    finished: bool
    is_up: bool
    generation: int
    events: tuple[Event, ...]  # that depend on nobody else
    timers: tuple[Event, ...]  # likewise, that are faults
    wants: tuple[tuple[int, int], ...]  # (generation, chunk) without a result, while it is not frozen
    contributed: Mapping[int, int]  # by generation
    lines: Mapping[int, tuple[tuple[int, int], ...]]
    posted: tuple[Event, ...]
    ended: int
    told: frozenset[tuple[int, Any]]
    awaits_plan: bool
    fetch: Any
    join: Any
    losable: tuple[int, ...]
    doomed: int  # generations that it lost or left, a bit each
    failure: str


@dataclass(frozen=True)
class _Step:
    """What an event makes of a rank's state."""

    rank: int  # the number of the new state
    sent: int  # messages, a bit each
    reply: Any
    broken: str


# The numbers of the ranks' states; then, a bit each: messages that were sent, (rank, attempt) pairs that joined,
# generations that somebody lost or left; then how many losses, refusals and deaths are left. All flat, since it is
# hashed often.
_State = tuple[int, ...]
_SENT, _ASKED, _DOOMED, _LOSSES, _REFUSALS, _DEATHS = range(-6, 0)


class _Search:
    def __init__(self, scope: RecoveryScope, machines: Machines) -> None:
        self.scope = scope
        self.ranks: list[_Rank] = []
        self.views: list[_View] = []
        self.messages: list[tuple[int, int, Any]] = []  # from, to, message
        self._message_numbers: dict[tuple[int, int, Any], int] = {}
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple[int, Event], _Step] = {}
        first = tuple(self._number(_Rank(scope, rank, machines)) for rank in range(scope.ranks))
        self.first: _State = (*first, 0, 0, 0, scope.losses, scope.refusals, scope.deaths)

    def _number(self, rank: _Rank) -> int:
        key = _key(rank)
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

    def _view(self, rank: _Rank) -> _View:
        path, machine, number = rank.path, rank.machine, rank.rank
        events: list[Event] = []
        if rank.called < len(path.chunks):
            events.append(("call", number))
        if rank.finds:
            events.append(("tree", number))
        waits: list[Event] = []
        for what, attempt in sorted(rank.waits):
            if what == "join":
                waits.append(("waited", number, what, attempt))
            elif machine._attempts < self.scope.attempts:
                events.append(("waited", number, what, attempt))
        generation, is_up = path.failover.generation, path.failover.is_up
        channel = path.channels[generation]
        is_waiting = is_up and bool(path.going_by_channel())
        wants = tuple((generation, chunk) for chunk in range(len(channel.line)) if not channel.answered >> chunk & 1)
        return _View(
            status=rank.status,
            finished=rank.has_finished(),
            is_up=is_up,
            generation=generation,
            events=tuple(events),
            timers=tuple(waits),
            wants=wants if is_waiting else (),
            contributed={each: channel.contributed for each, channel in path.channels.items()},
            lines={each: channel.line for each, channel in path.channels.items()},
            posted=rank.posted,
            ended=rank.ended,
            told=rank.told,
            awaits_plan=any(map(machine.awaits_plan, rank.reports)),
            fetch=rank.fetch,
            join=rank.join,
            losable=tuple(sorted(rank.joined - set(machine.lost) - rank.left)),
            doomed=sum(1 << generation for generation in {*machine.lost, *rank.left}),
            failure=rank.failure,
        )

    def step(self, rank: int, event: Event) -> _Step:
        """What an event makes of the rank whose state has that number."""
        key = (rank, event)
        found = self._steps.get(key)
        if found is None:
            new = self.ranks[rank].copy()
            try:
                kind, number, *about = event
                if kind in ("hear", "reply"):
                    # The message travels as its number.
                    source, to, message = self.messages[about[0]]
                    about = [source, message] if kind == "hear" else [to, message, about[1]]
                new.happen((kind, number, *about))
                sent = 0
                for to, message in new.out:
                    sent |= self._bit(new.rank, to, message)
                found = _Step(self._number(new), sent, new.reply, "")
            except BrokenError as broken:
                found = _Step(rank, 0, None, str(broken))
            self._steps[key] = found
        return found

    def events(self, state: _State) -> Iterator[tuple[Event, bool]]:
        """What may happen, and whether it is a fault: what no way to the end may count on."""
        views = [self.views[number] for number in state[: self.scope.ranks]]
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
                word = views[LEADER].posted[view.ended][2] if view.posted[view.ended][0] == "word" else 0
                yield ("step", rank, word), False
            if view.fetch is not None and view.fetch.source not in gone:
                giver = self.ranks[state[view.fetch.source]]
                yield ("fetched", rank, giver.path.kept(view.fetch.generation, view.fetch.chunks)), False
            if view.join is not None:
                asked = state[_ASKED] >> (view.join.attempt * len(views))
                if asked & (1 << len(views)) - 1 == (1 << len(views)) - 1:
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
        """Whether all ranks that it takes have begun the step; they must have begun the same."""
        at = view.ended
        for other in views:
            if len(other.posted) > at and not _same(other.posted[at], view.posted[at]):
                raise BrokenError(f"a rank's {view.posted[at]} meets another's {other.posted[at]}")
        if view.posted[at][0] == "word":
            return len(views[LEADER].posted) > at
        return all(len(other.posted) > at for other in views)

    @staticmethod
    def _notices(view: _View, gone: set[int], views: Sequence[_View]) -> bool:
        if view.ended < len(view.posted) or (view.awaits_plan and LEADER in gone):
            return True
        if view.fetch is not None and view.fetch.source in gone:
            return True
        if any(peer in gone for peer, _ in view.told):
            return True
        return any(
            not views[rank].contributed.get(generation, 0) >> chunk & 1
            for generation, chunk in view.wants
            for rank in gone
        )

    def after(self, state: _State, event: Event) -> _State:
        """Raises BrokenError."""
        kind, rank, *about = event
        if kind == "result":
            lines = [self.views[number].lines for number in state[: self.scope.ranks]]
            if len({line[about[0]][about[1]] for line in lines}) > 1:
                raise BrokenError("a chunk's result adds up different operations")
        new = list(state)
        self._apply(new, rank, event)
        if kind == "hear":
            asker, _, message = self.messages[about[0]]
            view = self.views[new[asker]]
            if view.status == LIVING and (rank, message) in view.told:
                reply = self.step(state[rank], event).reply
                self._apply(new, asker, ("reply", asker, about[0], reply))
        elif kind == "lose":
            new[_LOSSES] -= not state[_DOOMED] >> about[0] & 1
        elif kind == "waited":
            new[_REFUSALS] -= about[0] == "join"
        elif kind == "joined":
            new[_REFUSALS] -= not about[0]
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
            state[_ASKED] |= 1 << (view.join.attempt * self.scope.ranks + rank)
        if view.status == FAILED:
            others = (self.views[number].status for number in state[: self.scope.ranks])
            if DEAD not in others:
                raise BrokenError(f"a rank fails while all live: {view.failure}")

    def run(self) -> RecoveryReport:
        began = time.perf_counter()
        report = RecoveryReport()
        numbers = {self.first: 0}
        states = [self.first]
        came: list[tuple[int, Event]] = [(-1, ())]
        ways: list[list[int]] = []  # without a fault, from each state
        most = self.scope.max_states or 1 << 62
        at = 0
        event: Event = ()
        try:
            while at < len(states) and len(states) < most:
                state = states[at]
                ways.append([])
                event = ()
                for event, is_fault in self.events(state):
                    new = self.after(state, event)
                    if new == state:
                        event = ()
                        continue
                    report.transitions += 1
                    number = numbers.setdefault(new, len(states))
                    if number == len(states):
                        states.append(new)
                        came.append((at, event))
                    if not is_fault:
                        ways[at].append(number)
                    event = ()  # what breaks from here on is the state itself
                at += 1
            report.exhausted = at == len(states)
        except BrokenError as broken:
            report.broken = str(broken)
            report.trace = [*self._trace(came, at), *([self._words(event)] if event else [])]
        report.states, report.ranks = len(states), len(self.ranks)
        report.depth = len(self._trace(came, len(states) - 1))
        report.returned = sum(map(self._has_returned, states))
        if report.exhausted:
            stuck = self._first_stuck(states, ways)
            if stuck is not None:
                report.broken = STUCK
                report.trace = self._trace(came, stuck)
        report.seconds = time.perf_counter() - began
        return report

    def _has_returned(self, state: _State) -> bool:
        views = [self.views[number] for number in state[: self.scope.ranks]]
        return all(view.is_up and view.generation > 1 for view in views)

    def _first_stuck(self, states: Sequence[_State], ways: Sequence[Sequence[int]]) -> int | None:
        back: list[list[int]] = [[] for _ in states]
        for source, targets in enumerate(ways):
            for target in targets:
                back[target].append(source)
        good = [all(self.views[number].finished for number in state[: self.scope.ranks]) for state in states]
        due = [number for number, is_good in enumerate(good) if is_good]
        while due:
            for source in back[due.pop()]:
                if not good[source]:
                    good[source] = True
                    due.append(source)
        return good.index(False) if False in good else None

    def _trace(self, came: Sequence[tuple[int, Event]], at: int) -> list[str]:
        trace = []
        while at > 0:
            at, event = came[at]
            trace.append(self._words(event))
        return trace[::-1]

    def _words(self, event: Event) -> str:
        """An event as a step of a trace."""
        if event[0] == "hear":
            source, _, message = self.messages[event[2]]
            event = ("hear", event[1], source, message)
        return " ".join(map(_word, event))

    def replay(self, steps: Sequence[str]) -> str:
        state = self.first
        for number, step in enumerate(steps, 1):
            try:
                found = [event for event, _ in self.events(state) if self._words(event) == step]
                if not found:
                    raise ValueError(f"step {number}, {step}, cannot happen then")
                state = self.after(state, found[0])
            except BrokenError as broken:
                return str(broken)
        try:
            list(self.events(state))
        except BrokenError as broken:
            return str(broken)
        return ""


def _same(one: Event, other: Event) -> bool:
    return one[:2] == other[:2] and (one[0] == "word" or one == other)


def _word(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        said = [_word(getattr(value, each.name)) for each in fields(value) if each.name not in ("why", "paths")]
        return f"{type(value).__name__}({','.join(said)})"
    if isinstance(value, tuple):
        return f"[{','.join(map(_word, value))}]"
    return str(value)


def search_recovery(scope: RecoveryScope, machines: Machines | None = None) -> RecoveryReport:
    """Search `scope`, breadth first: the first broken promise has the shortest trace there is."""
    return _Search(scope, machines or Machines()).run()


def replay_recovery(scope: RecoveryScope, steps: Sequence[str], machines: Machines | None = None) -> str:
    """Do the steps of a trace once more: which promise breaks, or nothing. ValueError at one that cannot happen."""
    return _Search(scope, machines or Machines()).replay(steps)


def sentence(scope: RecoveryScope, report: RecoveryReport) -> str:
    """A report in one line."""
    found = f"BROKEN: {report.broken}" if report.broken else "exhausted" if report.exhausted else "NOT exhausted"
    return (
        f"{scope.ranks} ranks, window {scope.window}, chunks {scope.operations}, {scope.losses} losses, "
        f"{scope.attempts} attempts to join again, {scope.refusals} refusals, {scope.deaths} deaths: {found}; "
        f"{report.states:,} states ({report.ranks:,} of a rank; {report.returned:,} with a switch again), "
        f"{report.transitions:,} transitions, depth {report.depth}, {report.seconds:.2f} s"
    )
