"""One rank of the search over recovery (recovery.py): production's machines, and a model of what surrounds them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import netfold.communicator.recovery_machine as production
from netfold._native import failover as native
from netfold_lab.model_check.breadth_first import BrokenError

LEADER = 0
# Modes of an operation, and what `Failover` returns (netfold/collective/failover.hpp).
CHANNEL, UNDECIDED, HOST = range(3)
STANDING, ADOPTED, UNKNOWN = 2, 2, 3
LIVING, FAILED, DEAD = range(3)

Event = tuple[Any, ...]  # its kind, the rank that it happens to, and its arguments


@dataclass(frozen=True)
class RecoveryScope:
    """The scope of a search."""

    ranks: int = 2
    window: int = 1
    operations: str = "2"  # chunks of each, as "2,1"
    losses: int = 1  # switches that are lost
    attempts: int = 0  # how often the ranks join again
    refusals: int = 0  # joins that fail or time out
    deaths: int = 0  # ranks that stop
    max_states: int = 0  # stop at this many; 0 for no bound

    @property
    def chunks(self) -> list[int]:
        return [int(chunks) for chunks in self.operations.split(",")]


@dataclass(frozen=True)
class Machines:
    """Production's machines, or mutants of them (lab/tests/model_check/recovery_mutants.py)."""

    failover: Callable[[int], Any] = native.Failover
    recovery: Callable[..., production.RecoveryMachine] = production.RecoveryMachine


@dataclass
class Channel:
    """A membership at this rank. Sets of chunks are bits, bit c for chunk c."""

    line: tuple[tuple[int, int], ...] = ()  # by chunk: its operation, and its place in the operation
    answered: int = 0  # chunks with a result
    contributed: int = 0  # chunks that this rank has contributed to
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


class Path:
    """A SwitchPath (core/native/collective/switch_path.cpp), without payload: the machine's path to the switch."""

    def __init__(self, scope: RecoveryScope, failover: Any) -> None:
        self.chunks = scope.chunks
        self.window = scope.window
        self.failover = failover
        self.channels = {failover.generation: Channel()}
        self.delivered = [0] * len(self.chunks)  # by operation: chunks with a result
        self.rest: dict[int, int] = {}  # by operation that all ranks had begun: chunks without a result
        self.whole: set[int] = set()  # operations that go by the host algorithm from their start
        self.under_way: frozenset[int] = frozenset()  # operations that were called and have not finished

    # --- what the recovery machine calls ---

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
        by_channel = self.by_channel()
        which = self.failover.fall_back(generation, end, promised)
        if which == STANDING:
            del self.channels[generation]
        elif which:
            for operation in by_channel:
                if self.failover.mode(operation) == HOST:
                    self.rest[operation] = (1 << self.chunks[operation]) - 1 & ~self.delivered[operation]

    def stand_by(self, generation: int) -> None:
        self._drop_other_channels()
        self.channels[generation] = Channel()
        self.failover.stand_by(generation)

    def promise(self, generation: int) -> bool:
        return bool(self.failover.promise(generation))

    # --- what operations do ---

    def by_channel(self) -> list[int]:
        """The running operations that use the switch."""
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

    def follow(self, operation: int, announced: int) -> bool:
        """Follow the leader's announcement of a generation; False where this rank has no such membership."""
        followed = self.failover.follow(operation, announced)
        if followed == ADOPTED:
            self._drop_other_channels()
            for each in self.by_channel():
                self.enter(each)
        elif followed == UNKNOWN:
            return False
        elif self.failover.mode(operation) == HOST:
            self.whole.add(operation)
        return True

    def _drop_other_channels(self) -> None:
        current = self.failover.generation
        self.channels = {generation: each for generation, each in self.channels.items() if generation == current}


class Rank:
    """A rank: production's machines, and the state of their driver."""

    def __init__(self, scope: RecoveryScope, rank: int, machines: Machines) -> None:
        self.rank = rank
        self.path = Path(scope, machines.failover(1))
        self.machine: production.RecoveryMachine = machines.recovery(
            rank, range(scope.ranks), self.path, 1, scope.window, rejoin_s=1.0 if scope.attempts else 0.0
        )
        self.status = LIVING
        self.called = 0  # operations
        self.posted: tuple[Event, ...] = ()  # steps on the spare connections
        self.ended = 0  # posted steps that have ended
        self.unanswered: frozenset[tuple[int, Any]] = frozenset()  # (peer, message) whose reply counts
        self.reports: frozenset[int] = frozenset()  # generations reported to the leader until it has a plan
        self.fetch: Any = None
        self.join: Any = None
        self.finds_tree = False
        self.waits: frozenset[tuple[str, int]] = frozenset()  # timers: what for, attempt
        self.joined: frozenset[int] = frozenset({1})  # generations
        self.left: frozenset[int] = frozenset()  # generations
        self.failure = ""
        self.sent: list[tuple[int, Any]] = []  # (peer, message) that the last event sent
        self.reply: Any = None  # to the message that was the last event

    def copy(self) -> Rank:
        new: Rank = _copy(self, {})
        new.sent, new.reply = [], None
        return new

    def happen(self, event: Event) -> None:
        """An event happens to this rank; its driver carries out what follows."""
        kind, _, *arguments = event
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
            generation, chunk = arguments
            self.path.deliver(self.path.channels[generation], chunk)
        elif kind == "step":
            self._end_step(arguments[0])
        else:
            self._do(self._decide(kind, arguments))
        if self.status == LIVING:
            self._go_on()

    def _decide(self, kind: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Give the event to the recovery machine; return the actions that it wants."""
        machine = self.machine
        if kind == "lose":
            return machine.handle_loss(arguments[0], "lost")
        if kind == "hear":
            self.reply, actions = machine.handle_message(arguments[0], arguments[1])
            return actions
        if kind == "reply":
            self.unanswered -= {(arguments[0], arguments[1])}
            return machine.handle_reply(arguments[0], arguments[1], arguments[2])
        if kind == "fetched":
            self.fetch = None
            return machine.handle_fetched(arguments[0])
        if kind == "joined":
            self.join = None
            if arguments[0]:
                self.joined |= {arguments[0]}
            return machine.handle_joined(arguments[0], self.path.window, "" if arguments[0] else "refused")
        if kind == "waited":
            self.waits -= {(arguments[0], arguments[1])}
            return machine.handle_timer(arguments[0], arguments[1])
        self.finds_tree = False
        return machine.handle_tree([None] * len(machine.workers))

    def _do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            if isinstance(action, production.Send):
                self.sent.append((action.peer, action.message))
                if isinstance(action.message, production.Freeze | production.Recover | production.Rejoin):
                    self.unanswered |= {(action.peer, action.message)}
            elif isinstance(action, production.ReportLoss):
                self.reports |= {action.generation}
                self.sent.append((LEADER, production.Lost(action.generation, "lost")))
            elif isinstance(action, production.Fetch):
                self.fetch = action
            elif isinstance(action, production.Join):
                self.join = action
            elif isinstance(action, production.FindTree):
                self.finds_tree = True
            elif isinstance(action, production.Wait):
                if action.what != "good":  # that changes only how long a later wait is
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

    def _end_step(self, announced: int) -> None:
        kind, operation, *_ = self.posted[self.ended]
        self.ended += 1
        if kind == "announcement":
            if not self.path.follow(operation, announced):
                self.fail("the leader goes on by a membership of the switch that this rank has not joined")
            return
        if kind == "whole" and self.path.delivered[operation]:
            raise BrokenError("a result is taken for a contribution")
        self.path.delivered[operation] = (1 << self.path.chunks[operation]) - 1
        self.path.finish(operation)

    def _go_on(self) -> None:
        """The steps of operations by themselves: finish, begin a step, contribute."""
        path = self.path
        for operation in path.by_channel():
            if path.delivered[operation] == (1 << path.chunks[operation]) - 1:
                path.finish(operation)
        while len(self.posted) == self.ended and (operation := path.failover.host_operation()) is not None:
            if path.failover.mode(operation) == UNDECIDED:
                if path.delivered[operation]:
                    raise BrokenError("a result is taken for a contribution")
                announced = path.failover.announce() if self.rank == LEADER else 0
                self.posted += (("announcement", operation, announced),)
            elif operation in path.whole:
                self.posted += (("whole", operation),)
            elif path.rest[operation]:
                self.posted += (("rest", operation, path.rest[operation]),)
            else:
                path.finish(operation)
        path.channels[path.failover.generation].contribute(path.window)

    def has_finished(self) -> bool:
        """Whether nothing is left to do: all operations have finished, or the rank failed or died."""
        return self.status != LIVING or (self.called == len(self.path.chunks) and not self.path.under_way)

    def key(self) -> Any:
        """Return a hashable value that is equal for equal states."""
        return _key(self)


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """Copy a rank as `copy.deepcopy` does, but only the types that ranks are made of.

    copies: of objects, by id; a rank and its machine share one path.
    """
    if isinstance(value, dict):
        return {key: _copy(each, copies) for key, each in value.items()}
    if isinstance(value, list | set | deque):
        return type(value)(value)
    if hasattr(value, "canonical"):
        return value.copy()
    if not hasattr(value, "__dict__") or _is_frozen(value):
        return value
    if id(value) not in copies:
        new = copies[id(value)] = object.__new__(type(value))
        for name, each in vars(value).items():
            setattr(new, name, _copy(each, copies))
    return copies[id(value)]


def _is_frozen(value: Any) -> bool:
    return is_dataclass(value) and bool(getattr(value, "__dataclass_params__").frozen)  # noqa: B009


def _key(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((key, _key(each)) for key, each in value.items()))
    if isinstance(value, list | deque):
        return tuple(map(_key, value))
    if isinstance(value, set):
        return frozenset(value)
    if hasattr(value, "canonical"):
        return value.canonical()
    if hasattr(value, "__dict__") and not _is_frozen(value):
        return tuple(_key(each) for name, each in sorted(vars(value).items()) if name not in ("_path", "sent", "reply"))
    return value
