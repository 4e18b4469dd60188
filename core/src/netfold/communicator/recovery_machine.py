"""One rank's part in the recovery from a lost switch: a pure state machine, without clock, thread or socket.

Its owner calls a method for each event, one at a time, and carries out the returned actions in order. The owner is
recovery.py; for the search, lab/src/netfold_lab/model_check/recovery.py. recovery.py explains the messages.

    event                          effect
    handle_loss                    the membership is frozen; the leader asks all, another rank reports to the leader
    message Freeze                 the membership is frozen; the reply is this rank's FrozenState
    replies to Freeze, of all      the leader makes one plan and sends each rank its part
    message Recover                a task: fetch what this rank lacks, compare with the plan, fall back
    replies to Recover, of all     the leader begins to look for a switch, unless it already does
    handle_timer, handle_tree      the leader asks all to join, as attempt n
    message Rejoin                 a task: leave every older membership, join, let the new one stand by
    message Rejoined, of all       the leader promises the new membership, if all have the same one and none lost it

Invariants. Tasks run one after another, in order of arrival. A message that comes twice changes nothing. A membership
that was lost before it could stand by never stands by. The leader promises no membership that it knows to be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from netfold.communicator.recovery_plan import ReceiveState, ResendPlan, chunks_of, make_plan, unpack

# For all ranks to join, from when the last of them has been asked.
JOIN_S = 20.0
_MAX_WAIT = 16  # times rejoin_s

# By worker, the switches from its own to the root (switch_tree.trees_of), which the machine only passes on.
Trees = Sequence[Any]


# --- messages between ranks ---


@dataclass(frozen=True)
class Lost:
    """To the leader: the switch of this membership is lost."""

    generation: int
    why: str


@dataclass(frozen=True)
class Freeze:
    """To all: accept nothing more from this membership. The reply is a `FrozenState`."""

    generation: int
    why: str


@dataclass(frozen=True)
class FrozenState(ReceiveState):
    """The chunks that a rank has. promised: the leader has promised this membership."""

    promised: bool


@dataclass(frozen=True)
class Recover:
    """To one rank: its part of the plan.

    fetches: pairs of a rank and the chunks to fetch from that rank, bit i for chunk base + i.
    """

    generation: int
    base: int
    end: int
    held: int
    fetches: tuple[tuple[int, int], ...]
    promised: bool


@dataclass(frozen=True)
class Rejoin:
    """To all: join a switch again."""

    attempt: int
    tree: Any  # the receiver's


@dataclass(frozen=True)
class Rejoined:
    """To the leader: the membership of that generation stands by here. Generation 0: none does, and why."""

    attempt: int
    generation: int
    why: str


Message = Lost | Freeze | Recover | Rejoin | Rejoined


# --- actions ---


@dataclass(frozen=True)
class Send:
    """Send until the peer replies, then call `handle_reply`. End the group if the peer is gone."""

    peer: int
    message: Message


@dataclass(frozen=True)
class ReportLoss:
    """Tell the leader of the loss repeatedly while `awaits_plan` is true, so that a dead leader is noticed."""

    generation: int


@dataclass(frozen=True)
class Fetch:
    """Ask a rank for results that it kept, then call `handle_fetched`."""

    source: int
    generation: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """Call `handle_timer(what, attempt)` after so many seconds."""

    seconds: float
    what: str
    attempt: int


@dataclass(frozen=True)
class FindTree:
    """Ask which switches are above each rank, then call `handle_tree`."""


@dataclass(frozen=True)
class Join:
    """Join, as that attempt, then call `handle_joined`."""

    attempt: int
    tree: Any


@dataclass(frozen=True)
class GiveUp:
    """Ignore everything that the switch sends for this membership from here on."""

    generation: int


@dataclass(frozen=True)
class Leave:
    """Tell the switch why this rank leaves, and close the membership."""

    generation: int
    why: str


@dataclass(frozen=True)
class Fail:
    """End the group."""

    kind: str
    rank: int
    text: str


@dataclass(frozen=True)
class Planned:
    """For the log: the plan goes out now."""

    generation: int
    plan: ResendPlan
    promised: bool


@dataclass(frozen=True)
class PlanDelivered:
    """For the log: every rank has its part of the plan."""

    generation: int
    promised: bool


@dataclass(frozen=True)
class Promised:
    """For the log: operations use this membership as soon as the leader announces it."""

    generation: int


@dataclass(frozen=True)
class NotJoined:
    """For the log: an attempt failed."""

    why: str


Action = (
    Send | ReportLoss | Fetch | Wait | FindTree | Join | GiveUp | Leave | Fail | Planned | PlanDelivered | Promised |
    NotJoined
)  # fmt: skip


class SwitchPath(Protocol):
    """This rank's path to the switch (netfold/collective/switch_path.hpp)."""

    def freeze(self, generation: int) -> tuple[int, int, bytes, bool] | None:
        """Stop it; base, end, held and promised. None: no such membership."""

    def accept(self, generation: int, packets: Sequence[bytes]) -> bool:
        """Take results that another rank kept. False: one is not of this job."""

    def fall_back(self, generation: int, end: int, promised: bool) -> None:
        """Go on without the switch."""

    def stand_by(self, generation: int) -> None:
        """Have the newest membership ready."""

    def promise(self, generation: int) -> bool:
        """At the leader: use it from the next operation on. False: it is frozen, or does not stand by."""


@dataclass
class _Round:
    """At the leader: one loss whose recovery is under way."""

    states: dict[int, FrozenState] = field(default_factory=dict)  # by rank that replied
    promised: bool = False
    without_plan: set[int] = field(default_factory=set)  # ranks that do not have the plan yet


@dataclass
class _Attempt:
    """At the leader: one try of all ranks to join again."""

    number: int
    unasked: set[int]
    joined: dict[int, tuple[int, str]] = field(default_factory=dict)  # by rank: generation, or 0 and why


class RecoveryMachine:
    """Of one rank at one switch."""

    def __init__(
        self, rank: int, workers: Sequence[int], path: SwitchPath, generation: int, window: int, *, rejoin_s: float
    ) -> None:
        """generation, window: of the membership in use.

        rejoin_s: seconds until the first try to join again; 0 for never.
        """
        self.rank = rank
        self.workers = tuple(workers)
        self.leader = self.workers[0]
        self.lost: dict[int, str] = {}  # why, by generation
        self._path = path
        self._rejoin_s = rejoin_s
        self._windows = {generation: window}
        self._members = {generation}  # generations of memberships that were joined and not left
        self._planned: set[int] = set()  # generations whose plan has come
        self._tasks: deque[Recover | Rejoin] = deque()  # the first one is running
        self._fetched = 0  # finished fetches of the running task
        self._attempt = 0  # of the newest Rejoin that has come
        # At the leader:
        self._rounds: dict[int, _Round] = {}
        self._search = ""  # for a switch: "", waits, finds, joins
        self._wait_s = rejoin_s
        self._attempts = 0
        self._joins: _Attempt | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.workers if rank != self.rank]

    def awaits_plan(self, generation: int) -> bool:
        return generation in self.lost and generation not in self._planned

    @property
    def next_wait_s(self) -> float:
        """Seconds from a loss to the next try to join; 0 for never."""
        return self._wait_s

    def stragglers(self) -> list[int]:
        """At the leader: ranks that have not sent their FrozenState."""
        return sorted({rank for round_ in self._rounds.values() for rank in self.workers if rank not in round_.states})

    # --- the loss ---

    def handle_loss(self, generation: int, why: str) -> list[Action]:
        """The membership of that generation is lost. Callable any number of times."""
        if generation in self.lost:
            return []
        self.lost[generation] = why
        state = self._freeze(generation)
        if not self.is_leader:
            return [GiveUp(generation), ReportLoss(generation)]
        self._rounds[generation] = _Round({self.rank: state})
        freezes = [Send(rank, Freeze(generation, why)) for rank in self._others]
        return [GiveUp(generation), *freezes, *self._plan(generation)]

    def _freeze(self, generation: int) -> FrozenState:
        state = self._path.freeze(generation)
        if state is None:
            return FrozenState(0, 0, 0, False)
        base, end, held, promised = state
        return FrozenState(base, end, unpack(held), promised)

    def handle_message(self, peer: int, message: Message) -> tuple[FrozenState | None, list[Action]]:
        """A message of another rank: the reply to a Freeze, None for an acknowledgement; and the actions."""
        if isinstance(message, Lost):
            return None, self.handle_loss(message.generation, message.why)
        if isinstance(message, Freeze):
            is_new = message.generation not in self.lost
            self.lost.setdefault(message.generation, message.why)
            state = self._freeze(message.generation)
            return state, [GiveUp(message.generation), *([ReportLoss(message.generation)] if is_new else [])]
        if isinstance(message, Recover):
            return None, self._handle_plan(message)
        if isinstance(message, Rejoin):
            return None, self._handle_rejoin(message)
        return None, self._handle_rejoined(peer, message)

    def _plan(self, generation: int) -> list[Action]:
        round_ = self._rounds[generation]
        if len(round_.states) < len(self.workers):
            return []
        try:
            plan = make_plan(round_.states, self._windows.get(generation, 0))
        except ValueError as error:
            text = f"{self.lost[generation]}, and the ranks' states contradict each other: {error}"
            return [Fail("switch_lost", -1, text)]
        round_.promised = round_.states[self.rank].promised
        round_.without_plan = set(self._others)
        parts = {
            rank: Recover(
                generation, plan.base, plan.end, plan.held, tuple(plan.fetches.get(rank, {}).items()), round_.promised
            )
            for rank in self.workers
        }
        return [
            Planned(generation, plan, round_.promised),
            *(Send(rank, parts[rank]) for rank in sorted(round_.without_plan)),
            *self._handle_plan(parts[self.rank]),
            *self._end_round(generation),
        ]

    def _end_round(self, generation: int) -> list[Action]:
        """End a round whose plan all ranks have."""
        round_ = self._rounds[generation]
        if round_.without_plan:
            return []
        del self._rounds[generation]
        actions: list[Action] = [PlanDelivered(generation, round_.promised)]
        if self._rejoin_s != 0 and not self._search:
            actions += self._wait_again()
        return actions

    def handle_reply(self, peer: int, message: Message, reply: FrozenState | None) -> list[Action]:
        """The peer has the message."""
        if isinstance(message, Freeze):
            assert reply is not None, "the reply to a Freeze is a FrozenState"
            round_ = self._rounds.get(message.generation)
            if round_ is None or peer in round_.states:
                return []
            round_.states[peer] = reply
            return self._plan(message.generation)
        if isinstance(message, Recover) and message.generation in self._rounds:
            self._rounds[message.generation].without_plan.discard(peer)
            return self._end_round(message.generation)
        if isinstance(message, Rejoin) and self._joins is not None and self._joins.number == message.attempt:
            self._joins.unasked.discard(peer)
            if not self._joins.unasked:
                return [Wait(JOIN_S, "join", message.attempt), *self._conclude()]
        return []

    # --- tasks ---

    def _handle_plan(self, plan: Recover) -> list[Action]:
        if plan.generation in self._planned:
            return []
        self._planned.add(plan.generation)
        return self._enqueue(plan)

    def _handle_rejoin(self, message: Rejoin) -> list[Action]:
        if message.attempt <= self._attempt:
            return []  # a duplicate, or an attempt that the leader has given up
        self._attempt = message.attempt
        return self._enqueue(message)

    def _enqueue(self, task: Recover | Rejoin) -> list[Action]:
        self._tasks.append(task)
        return self._proceed() if len(self._tasks) == 1 else []

    def _proceed(self) -> list[Action]:
        """Run the first task until it must wait for an event, then the tasks behind it."""
        actions: list[Action] = []
        while self._tasks:
            task = self._tasks[0]
            more, is_done = self._recover(task) if isinstance(task, Recover) else self._join(task)
            actions += more
            if not is_done:
                break
            self._end_task()
        return actions

    def _end_task(self) -> None:
        self._tasks.popleft()
        self._fetched = 0

    def _recover(self, task: Recover) -> tuple[list[Action], bool]:
        if self._fetched < len(task.fetches):
            source, bits = task.fetches[self._fetched]
            return [Fetch(source, task.generation, tuple(chunks_of(bits, task.base)))], False
        if self._freeze(task.generation).from_chunk(task.base) != task.held:
            return [Fail("switch_lost", -1, "this rank has other results than the plan of recovery says")], False
        self._path.fall_back(task.generation, task.end, task.promised)
        self._members.discard(task.generation)
        return [Leave(task.generation, "the group goes on without this switch")], True

    def handle_fetched(self, packets: Sequence[bytes] | None) -> list[Action]:
        """The results of the open `Fetch`. None: the source does not have them."""
        task = self._tasks[0]
        assert isinstance(task, Recover), "only a task of recovery fetches"
        source = task.fetches[self._fetched][0]
        if packets is None:
            return [Fail("switch_lost", source, f"rank {source} does not have the results that it said it has")]
        if not self._path.accept(task.generation, packets):
            return [Fail("switch_lost", source, f"rank {source} passed on a result that is not one of this job")]
        self._fetched += 1
        return self._proceed()

    def _join(self, task: Rejoin) -> tuple[list[Action], bool]:
        older = sorted(self._members)
        self._members.clear()
        left = [action for generation in older for action in (GiveUp(generation), Leave(generation, "it tries again"))]
        return [*left, Join(task.attempt, task.tree)], False

    def handle_joined(self, generation: int, window: int, why: str) -> list[Action]:
        """The outcome of the open `Join`. generation 0: it failed, and why."""
        task = self._tasks[0]
        assert isinstance(task, Rejoin), "only a task that joins joins"
        actions: list[Action] = []
        if generation in self.lost:
            # Another rank lost it before this rank had joined: all ranks have gone on without it.
            actions.append(Leave(generation, "another rank lost this switch"))
            generation, why = 0, self.lost[generation]
        if generation != 0:
            self._members.add(generation)
            self._windows[generation] = window
            self._path.stand_by(generation)
        rejoined = Rejoined(task.attempt, generation, why)
        if self.is_leader:
            actions += self._handle_rejoined(self.rank, rejoined)
        else:
            actions.append(Send(self.leader, rejoined))
        self._end_task()
        return [*actions, *self._proceed()]

    # --- the way back to a switch, at the leader ---

    def _wait_again(self) -> list[Action]:
        seconds = self._wait_s
        self._search = "waits"
        self._wait_s = min(2 * seconds, _MAX_WAIT * self._rejoin_s)
        return [Wait(seconds, "again", self._attempts)]

    def handle_timer(self, what: str, attempt: int) -> list[Action]:
        """A `Wait` has ended."""
        if what == "good":
            # A switch over a bad path is joined and lost for ever. Only one that stays makes the next wait short again.
            if not self._search and attempt == self._attempts:
                self._wait_s = self._rejoin_s
            return []
        if what == "again":
            if self._search != "waits" or attempt != self._attempts:
                return []
            self._search = "finds"
            return [FindTree()]
        return self._end_attempt() if self._joins is not None and self._joins.number == attempt else []

    def handle_tree(self, trees: Trees | None) -> list[Action]:
        """The tree of all ranks' switches. None: there is none yet."""
        if self._search != "finds":
            return []
        if trees is None:
            return self._wait_again()
        self._search = "joins"
        self._attempts += 1
        rejoins = {rank: Rejoin(self._attempts, tree) for rank, tree in zip(self.workers, trees, strict=True)}
        self._joins = _Attempt(self._attempts, set(self._others))
        sends: list[Action] = [Send(rank, rejoins[rank]) for rank in sorted(self._others)]
        wait: list[Action] = [] if sends else [Wait(JOIN_S, "join", self._attempts)]
        return [*sends, *wait, *self._handle_rejoin(rejoins[self.rank])]

    def _handle_rejoined(self, peer: int, message: Rejoined) -> list[Action]:
        if self._joins is None or self._joins.number != message.attempt:
            return []
        self._joins.joined[peer] = message.generation, message.why
        return self._conclude()

    def _conclude(self) -> list[Action]:
        attempt = self._joins
        if attempt is None or attempt.unasked or len(attempt.joined) < len(self.workers):
            return []
        return self._end_attempt()

    def _end_attempt(self) -> list[Action]:
        attempt, self._joins = self._joins, None
        assert attempt is not None, "an attempt ends once"
        generations = {generation for generation, _ in attempt.joined.values()}
        if len(attempt.joined) == len(self.workers) and len(generations) == 1:
            (generation,) = generations
            if generation != 0 and generation not in self.lost and self._path.promise(generation):
                self._search = ""
                return [Promised(generation), Wait(_MAX_WAIT * self._rejoin_s, "good", self._attempts)]
        reasons = dict.fromkeys(why for _, why in attempt.joined.values() if why)
        return [NotJoined("; ".join(reasons) or "not every rank joined in time"), *self._wait_again()]
