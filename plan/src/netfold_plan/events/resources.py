"""The simulated clock, and what lanes share: the links of flows, and the cores of hosts.

Links are a fluid model, without packets. A flow is a number of seconds of work at its full rate. Every flow has an
equal part of its narrowest link: its rate is at most 1, and less where one of its links has more flows than it can
carry. What a flow leaves free on a link is not given to other flows.

Cores that all hosts share, as in an emulated rack, work round robin with one time slice each, as fair schedulers do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

# The links of a flow, each with the capacity that the flow takes of the link at its full rate.
Uses = tuple[tuple[int, float], ...]
# Linux' fair scheduler ends a slice at a tick; most kernels have 250 ticks per second.
SLICE_S = 4e-3


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


@dataclass
class _Flow:
    """version: of the end that is scheduled; an end of an older version is void."""

    uses: Uses
    on_end: Callable[[], None]
    left_s: float
    since_s: float
    rate: float = 0.0
    version: int = 0


class SharedLinks:
    """capacity: by link."""

    def __init__(self, events: EventQueue, capacity: Sequence[float]) -> None:
        self._events = events
        self._capacity = list(capacity)
        self._load = [0.0] * len(self._capacity)
        self._members: list[set[int]] = [set() for _ in self._capacity]
        self._flows: dict[int, _Flow] = {}
        self._started = 0

    def start(self, work_s: float, uses: Uses, on_end: Callable[[], None]) -> None:
        """Start a flow now, and call `on_end` when its work is done."""
        number = self._started
        self._started += 1
        self._flows[number] = _Flow(uses, on_end, work_s, self._events.now_s)
        load, members, capacity = self._load, self._members, self._capacity
        slower: dict[int, float] = {}
        rate = 1.0
        for link, part in uses:
            load[link] += part
            if load[link] > capacity[link]:
                share = capacity[link] / load[link]
                rate = min(rate, share)
                for other in members[link]:
                    slower[other] = min(share, slower.get(other, 1.0))
            members[link].add(number)
        self._set_rate(number, rate)
        for other, share in sorted(slower.items()):
            if share < self._flows[other].rate:
                self._set_rate(other, share)

    def _ended(self, number: int, version: int) -> None:
        flow = self._flows.get(number)
        if flow is None or version != flow.version:
            return
        del self._flows[number]
        load, members = self._load, self._members
        faster: set[int] = set()
        for link, part in flow.uses:
            members[link].discard(number)
            if load[link] > self._capacity[link]:
                faster |= members[link]
            # An empty link has load 0: subtraction alone would leave rounding errors as a load.
            load[link] = load[link] - part if members[link] else 0.0
        for other in sorted(faster):
            rate = self._possible_rate(self._flows[other])
            if rate > self._flows[other].rate:
                self._set_rate(other, rate)
        flow.on_end()

    def _possible_rate(self, flow: _Flow) -> float:
        """The rate of a flow after links became freer, or any rate that is not above its present one."""
        rate = 1.0
        for link, _ in flow.uses:
            if self._capacity[link] < rate * self._load[link]:
                rate = self._capacity[link] / self._load[link]
                if rate <= flow.rate:
                    break
        return rate

    def _set_rate(self, number: int, rate: float) -> None:
        flow, now_s = self._flows[number], self._events.now_s
        flow.left_s -= flow.rate * (now_s - flow.since_s)
        flow.rate, flow.since_s = rate, now_s
        flow.version += 1
        self._events.at(now_s + max(0.0, flow.left_s) / rate, self._ended, number, flow.version)


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
