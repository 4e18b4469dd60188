"""A process of an elastic job, for the search of its generations: production's standing, service and agreement."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from netfold.elastic import agreement, joining, messages, service, standing
from netfold.elastic.newest import Newest

Event = tuple[Any, ...]


@dataclass(frozen=True)
class GenerationsScope:
    members: int = 3
    one_host: bool = False
    deaths: int = 0
    suspicions: int = 0
    newcomers: int = 0
    fresh: int = 0
    """Ranks that come for the first time, and begin the job again where all members have ended."""
    leaves: str = ""
    """The members that want to leave."""
    lacks: str = ""
    """The members that must still be sent the state at the start."""
    steps: int = 1
    generations: int = 3
    """The last generation; how it ends is not searched."""
    rounds: int = 1
    """The highest round of a ballot."""
    cut: tuple[str, ...] = ()
    """Two members each, whose hosts stop to reach each other at any moment. All reach the store."""
    heals: bool = False
    """The cut may end."""
    page: int = 9
    """The number of handles that a value of the store holds."""


@dataclass(frozen=True)
class Parts:
    """Production's code that the search runs, and the rules that the search itself states, of members.py."""

    agreement: Callable[..., Any] = agreement.Agreement
    standing: Any = standing.Standing
    service: Callable[..., Any] = service.Service
    all_have_ended: Callable[..., bool] = joining.all_have_ended
    asks_the_store: bool = True
    """Members that are no majority go on only where the store names no later generation."""
    needs_the_state: bool = True
    """A generation without any holder of the state ends the job."""
    asks_in_order: bool = True
    """A rank that comes for the first time asks members before the newcomers to which they may send the state."""
    publishes_first: bool = True
    """A generation with newcomers is in the store before it forms."""


class _Unlocked(contextlib.nullcontext[None]):
    def notify_all(self) -> None: ...


class _Negotiation:
    """In the place of production's: the search exchanges the messages."""

    loss = None

    def __init__(self, agreement: Any) -> None:
        self.agreement = agreement

    def start(self, *_: Any) -> None: ...

    def close(self) -> None: ...


PRODUCTION = Parts()


def standing_of(parts: Parts, scope: GenerationsScope) -> Any:
    class Modelled(parts.standing):  # type: ignore[misc, name-defined]
        def negotiate(self, generation: int, handles: Any) -> Any:
            rank = list(handles).index(self.own)
            return _Negotiation(parts.agreement(rank, len(handles), one_host=scope.one_host))

        def is_passing(self, done: int) -> bool:
            return False  # that asks a clock, and only delays a report

    return Modelled


class Process:
    """A process: production's standing, and where it is beside it."""

    def __init__(self, parts: Parts, made: Any, own: str) -> None:
        group = SimpleNamespace(failure=None, lose=lambda *_: None)
        endpoint = SimpleNamespace(handle=SimpleNamespace(text=own))
        self.parts, self.own = parts, own
        self.standing = made(
            SimpleNamespace(handle=own, endpoint=endpoint, group=group),
            None, min_size=1, max_size=None, done=0, join_timeout_s=0.0,
        )  # fmt: skip
        self.standing.changed = _Unlocked()
        self.status = "member"  # waits, looks, begins, fresh, gone: it has died or left
        self.after = 0
        self.content = 0
        """The steps that its state has truly made."""
        self.seen: Newest | None = None  # by a rank that looks
        self.ended: frozenset[str] = frozenset()

    @property
    def agreement(self) -> Any:
        return self.standing.negotiation.agreement

    @property
    def awaits_state(self) -> bool:
        """Whether the decision that began the generation names a sender of the state to this member."""
        at = self.standing
        return bool(at.lacks) and at.rank in at.lacking()

    def key(self) -> Any:
        at, negotiation = self.standing, self.standing.negotiation
        fields: Any = None
        if negotiation is not None:
            of = negotiation.agreement
            fields = tuple(dict(vars(of), promises=tuple(sorted(of.promises.items()))).values())
        seen = None if self.seen is None else (self.seen.generation, *self.seen.handles, self.seen.is_whole)
        beside = self.own, self.status, self.after, self.content, seen, self.ended
        flags = at.done, at.lacks, at.leaves, at.voted, at.formed
        return beside, at.generation, at.handles, flags, tuple(at.past.items()), fields

    def copy(self) -> Process:
        new, at = copy(self), copy(self.standing)
        at.past = OrderedDict(at.past)
        if at.negotiation is not None:
            at.negotiation = _Negotiation(copy(at.negotiation.agreement))
        new.standing = at
        return new

    def happen(self, kind: str, *arguments: Any) -> Any:
        at = self.standing
        if kind == "vote":
            at.check_going_on()
            at.vote()
        elif kind == "pass":
            at.check_going_on()
            at.passed()
            self.content += 1
        elif kind in ("report", "lead"):
            if not at.has_reported:
                at.report(None, 0.0)
            if kind == "lead":
                self.agreement.lead()
        elif kind == "propose":
            self.agreement.propose(arguments[0], at.max_size)
        elif kind == "suspect":
            self.agreement.suspect(arguments[0], certain=arguments[1])
        elif kind == "request":
            return self._reply(*arguments)
        elif kind == "reply":
            self._take(*arguments)
        elif kind == "follow":
            self._follow()
        elif kind == "form":
            at.formed = True
        elif kind == "receive":
            at.lacks, self.content = False, arguments[0]
        elif kind == "join":
            reply = self.parts.service(at, None).handle({"type": "join", "handle": arguments[0], "after": arguments[1]})
            welcome = reply["type"] == "welcome"
            return (reply["generation"], at.handles, at.past[reply["generation"] - 1]) if welcome else None
        elif kind == "welcome":
            generation, handles, (decision, former) = arguments
            at.lacks, at.done = True, decision.done
            at.remember(generation - 1, decision, former)
            at.enter(generation, handles)
            self.status = "member"
        elif kind == "gone":
            self._end()
        elif kind == "look":
            self.status, self.seen, self.ended = "looks", arguments[0], frozenset()
        elif kind == "ended":
            self.ended |= {arguments[0]}
        elif kind == "conclude":
            self.status = "begins" if arguments[0] else "fresh"
            self.after = self.seen.generation if arguments[0] and self.seen is not None else 0
            self.seen, self.ended = None, frozenset()
        elif kind == "wait":
            self.status, self.seen, self.ended = "waits", None, frozenset()
        elif kind == "begin":
            at.enter(*arguments)
            at.formed, self.status = True, "member"
        return None

    def _reply(self, generation: int, sender: int, done: int, message: Any) -> Event:
        request = {
            "type": messages.TYPE, "generation": generation, "sender": sender, "done": done, "lost": None,
            "message": messages.pack(message),
        }  # fmt: skip
        reply = self.parts.service(self.standing, None).handle(request)
        return reply["type"], messages.unpack(reply["message"]) if "message" in reply else None

    def _take(self, rank: int, kind: str, message: Any) -> None:
        if kind == messages.TYPE:
            self.agreement.take(rank, message)
            return
        self.agreement.suspects -= {rank}
        if kind == "over":
            self._wait()

    def _follow(self) -> None:
        at, decision = self.standing, self.agreement.decision
        if at.rank not in decision.members:
            if at.leaves:
                return self._end()
            at.remember(at.generation, decision, at.size)
            return self._wait()
        self.content += at.rank in decision.applies
        at.follow(decision)
        if self.parts.needs_the_state and len(decision.lacking) == len(decision.members):
            self._end()

    def _wait(self) -> None:
        self.after, self.status = self.standing.generation, "waits"
        self.standing.step_out()

    def _end(self) -> None:
        """Only the generation matters that it was in last."""
        at = self.standing
        at.step_out()
        at.past, at.handles, at.voted, at.leaves, at.done = OrderedDict(), (), False, False, 0
        self.status, self.content, self.after, self.seen, self.ended = "gone", 0, 0, None, frozenset()
