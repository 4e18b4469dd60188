"""Virtual time: nanoseconds that pass only when something is due."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Clock(Generic[Event]):
    """What is due when. Events of one instant come in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._due: list[tuple[int, int, Event]] = []
        # Also keeps the heap from ever comparing events.
        self._asked = 0

    def at(self, when_ns: int, event: Event) -> None:
        """Have `event` come at `when_ns`; a time that has passed means now."""
        self._asked += 1
        heapq.heappush(self._due, (max(when_ns, self.now_ns), self._asked, event))

    def next(self) -> Event | None:
        """Let time pass until the next event and hand it out; None when nothing is due any more."""
        if not self._due:
            return None
        self.now_ns, _, event = heapq.heappop(self._due)
        return event
