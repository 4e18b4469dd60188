"""Virtual time in nanoseconds: it moves only from one due event to the next."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Clock(Generic[Event]):
    """The queue of events. Events of one instant come in the order in which they were added."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._due: list[tuple[int, int, Event]] = []
        # Makes entries distinct, so the heap never compares events.
        self._added = 0

    def at(self, when_ns: int, event: Event) -> None:
        """Add `event` at `when_ns`; a time in the past means now."""
        self._added += 1
        heapq.heappush(self._due, (max(when_ns, self.now_ns), self._added, event))

    def next(self) -> Event | None:
        """Advance to the next event and return it; None where no event is due."""
        if not self._due:
            return None
        self.now_ns, _, event = heapq.heappop(self._due)
        return event
