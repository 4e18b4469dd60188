"""Cores that all hosts share, as those of an emulated rack do: they take turns at what is asked of them.

Round robin, a slice each, as fair schedulers do among equals: who asks for less than a slice waits for his turn once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# Linux' fair scheduler looks at a tick whether a slice is over; there are 250 a second in most kernels.
SLICE_S = 4e-3


class Cores:
    """due: told when a slice of which piece of work ends; `ended` must then be called. crowded: how many times as long
    a slice takes that begins when no core is left: work that moves memory shares its rate.
    """

    def __init__(self, count: int, due: Callable[[float, int], None], crowded: float = 1.0) -> None:
        self._free = count
        self._due = due
        self._crowded = crowded
        self._left_s: list[float] = []
        self._queue: deque[int] = deque()

    def ask(self, now_s: float, work_s: float) -> int:
        """The number of this piece of work."""
        number = len(self._left_s)
        self._left_s.append(work_s)
        self._queue.append(number)
        self._go_on(now_s)
        return number

    def ended(self, now_s: float, number: int) -> bool:
        """A slice is over: True where nothing is left of that work."""
        self._free += 1
        self._left_s[number] -= min(SLICE_S, self._left_s[number])
        is_done = self._left_s[number] <= 0
        if not is_done:
            self._queue.append(number)
        self._go_on(now_s)
        return is_done

    def _go_on(self, now_s: float) -> None:
        while self._free and self._queue:
            number = self._queue.popleft()
            self._free -= 1
            pace = 1.0 if self._free else self._crowded
            self._due(now_s + pace * min(SLICE_S, self._left_s[number]), number)
