"""Links that flows share: every flow has an equal part of its narrowest link.

The model is fluid, without packets. A flow is a number of seconds of work at its full rate. Its rate is at most 1, and
less where one of its links has more flows than it can carry. What a flow leaves free on a link is not given to other
flows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from netfold.plan.events.event_queue import EventQueue

# The links of a flow, each with the capacity that the flow takes of the link at its full rate.
Uses = tuple[tuple[int, float], ...]


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
