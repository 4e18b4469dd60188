"""Cores that all hosts share, as in an emulated rack: round robin with one time slice each, as fair schedulers do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from netfold.plan.events.event_queue import EventQueue

# Linux' fair scheduler ends a slice at a tick; most kernels have 250 ticks per second.
SLICE_S = 4e-3


class Cores:
    """crowded: by how much a slice takes longer that begins on the last free core: the work shares the memory's
    rate."""

    def __init__(self, events: EventQueue, count: int, crowded: float = 1.0) -> None:
        self._events = events
        self._free = count
        self._crowded = crowded
        # Seconds of work left, and what to call at its end.
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()

    def run(self, work_s: float, on_end: Callable[[], None]) -> None:
        """Queue `work_s` seconds of work on one core, and call `on_end` when it is done."""
        self._queue.append((work_s, on_end))
        self._begin_slices()

    def _begin_slices(self) -> None:
        while self._free and self._queue:
            left_s, on_end = self._queue.popleft()
            self._free -= 1
            slice_s = min(SLICE_S, left_s)
            took_s = slice_s if self._free else self._crowded * slice_s
            self._events.at(self._events.now_s + took_s, self._slice_ended, left_s - slice_s, on_end)

    def _slice_ended(self, left_s: float, on_end: Callable[[], None]) -> None:
        self._free += 1
        if left_s > 0:
            self._queue.append((left_s, on_end))
        self._begin_slices()
        if left_s <= 0:
            on_end()
