"""Breadth-first search of a machine's states: the harness that the searches in Python share.

A search names a first state, the events that may happen in a state, and what an event makes of it. Production code runs
inside `after`; an event that breaks a promise raises BrokenError there. Because the search is breadth first, the first
broken promise has the shortest trace.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

State = TypeVar("State")
Event = TypeVar("Event")


class BrokenError(Exception):
    """A promise does not hold; the text says which."""


@dataclass
class Report:
    """The result of a search."""

    states: int = 0
    transitions: int = 0
    depth: int = 0  # events from the first state to the state found last
    exhausted: bool = False  # every reachable state was searched
    broken: str = ""  # the promise that is broken, or ""
    trace: list[str] = field(default_factory=list)  # the events that break it
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        return f"BROKEN: {self.broken}" if self.broken else "exhausted" if self.exhausted else "NOT exhausted"


class Search(ABC, Generic[State, Event]):
    """The states and events of a machine; a subclass says what can happen."""

    def __init__(self, first: State) -> None:
        self.states = [first]  # in order of discovery
        self._reached_from: list[tuple[int, Any]] = [
            (-1, None)
        ]  # by state: its predecessor, and the event between them

    @abstractmethod
    def events(self, state: State) -> Iterable[Event]:
        """Return the events that may happen in `state`. Raises BrokenError where the state itself breaks a promise."""

    @abstractmethod
    def after(self, state: State, event: Event) -> State | None:
        """Return the state after `event`; None where no transition is to be followed. Raises BrokenError."""

    def key(self, state: State) -> Hashable:
        """Return a value that is equal for states that count as one."""
        return state

    def text(self, event: Any) -> str:
        """Return `event` as a step of a trace."""
        return " ".join(map(str, event))

    def on_transition(self, source: int, event: Event, target: int) -> None:
        """Called for each transition, with the numbers of both states in order of discovery."""

    def run(self, report: Report, max_states: int = 0) -> None:
        """Search all states, and fill `report`.

        max_states: stop at this many; 0 for no bound.
        """
        began = time.perf_counter()
        states = self.states
        numbers = {self.key(states[0]): 0}
        at = 0
        event: Any = None
        try:
            while at < len(states) and (max_states == 0 or len(states) < max_states):
                for event in self.events(states[at]):
                    new = self.after(states[at], event)
                    if new is not None:
                        report.transitions += 1
                        number = numbers.setdefault(self.key(new), len(states))
                        if number == len(states):
                            states.append(new)
                            self._reached_from.append((at, event))
                        self.on_transition(at, event, number)
                    event = None  # an error that `events` raises from here on is the state's
                at += 1
            report.exhausted = at == len(states)
        except BrokenError as broken:
            report.broken = str(broken)
            report.trace = self.trace(at) + ([] if event is None else [self.text(event)])
        report.states, report.depth = len(states), len(self.trace(len(states) - 1))
        report.seconds = time.perf_counter() - began

    def trace(self, state: int) -> list[str]:
        """Return the events from the first state to the one of that number."""
        steps = []
        while state > 0:
            state, event = self._reached_from[state]
            steps.append(self.text(event))
        return steps[::-1]


class EndingSearch(Search[State, Event]):
    """A search that also finds the first state from which no events without a further fault lead to an end."""

    stuck: str
    """This promise, in words."""

    def __init__(self, first: State) -> None:
        super().__init__(first)
        self._before: defaultdict[int, list[int]] = defaultdict(list)  # by state, without a fault between them

    @abstractmethod
    def has_ended(self, state: State) -> bool: ...

    @abstractmethod
    def is_fault(self, state: State, event: Event) -> bool:
        """Whether `event`, in `state`, is one that need not happen."""

    def on_transition(self, source: int, event: Event, target: int) -> None:
        if not self.is_fault(self.states[source], event):
            self._before[target].append(source)

    def run(self, report: Report, max_states: int = 0) -> None:
        super().run(report, max_states)
        if report.exhausted and (stuck := self._first_stuck()) is not None:
            report.broken, report.trace = self.stuck, self.trace(stuck)

    def _first_stuck(self) -> int | None:
        good = [self.has_ended(state) for state in self.states]
        due = [number for number, is_good in enumerate(good) if is_good]
        while due:
            for source in self._before[due.pop()]:
                if not good[source]:
                    good[source] = True
                    due.append(source)
        return good.index(False) if False in good else None
