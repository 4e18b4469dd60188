"""A simulated clock: actions in the order of their times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventQueue:
    """now_s: the time of the action that runs. Actions of equal times run in the order in which they were added."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._added = 0

    def at(self, when_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` with the arguments at a time that is not before now."""
        self._added += 1
        heappush(self._heap, (when_s, self._added, action, arguments))

    def run(self) -> None:
        """Run all actions, and those that they add."""
        while self._heap:
            self.now_s, _, action, arguments = heappop(self._heap)
            action(*arguments)
