"""Links that flows share: each gets an equal part of what its narrowest link has, as long as all of them last.

Fluid: no packets. A flow is work in seconds, were it alone; its rate is 1 at most, and less where a link that it uses
is asked for more than it can carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What a flow uses: links, each with how much of it the flow takes at its full rate.
Uses = tuple[tuple[int, float], ...]


class SharedLinks:
    """capacity: by link, what can be taken of it at once. due: told when a flow would end, whenever that changes."""

    def __init__(self, capacity: Sequence[float], due: Callable[[float, int, int], None]) -> None:
        self._capacity = list(capacity)
        self._load = [0.0] * len(self._capacity)
        self._members: list[set[int]] = [set() for _ in self._capacity]
        self._due = due
        self._uses: list[Uses] = []
        self._left_s: list[float] = []
        self._rate: list[float] = []
        self._since_s: list[float] = []
        self._version: list[int] = []

    def start(self, now_s: float, work_s: float, uses: Uses) -> int:
        """A flow of its own number, from now on."""
        flow = len(self._uses)
        self._uses.append(uses)
        self._left_s.append(work_s)
        self._rate.append(0.0)
        self._since_s.append(now_s)
        self._version.append(0)
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
            members[link].add(flow)
        self._go(now_s, flow, rate)
        for other, share in sorted(slower.items()):
            if share < self._rate[other]:
                self._go(now_s, other, share)
        return flow

    def ended(self, now_s: float, flow: int, version: int) -> bool:
        """What was due has come: True where the flow has really ended, False where that was told anew meanwhile."""
        if version != self._version[flow]:
            return False
        load, members = self._load, self._members
        faster: set[int] = set()
        for link, part in self._uses[flow]:
            members[link].discard(flow)
            if load[link] > self._capacity[link]:
                faster |= members[link]
            # Not by subtraction alone: what is left of rounding would be a load.
            load[link] = load[link] - part if members[link] else 0.0
        for other in sorted(faster):
            rate = self._risen(other)
            if rate > self._rate[other]:
                self._go(now_s, other, rate)
        return True

    def _risen(self, flow: int) -> float:
        """The rate of a flow after links became freer; no further link is looked at once one holds it where it is."""
        capacity, load, rate, now = self._capacity, self._load, 1.0, self._rate[flow]
        for link, _ in self._uses[flow]:
            if capacity[link] < rate * load[link]:
                rate = capacity[link] / load[link]
                if rate <= now:
                    break
        return rate

    def _go(self, now_s: float, flow: int, rate: float) -> None:
        """At another rate from now on."""
        self._left_s[flow] -= self._rate[flow] * (now_s - self._since_s[flow])
        self._rate[flow], self._since_s[flow] = rate, now_s
        self._version[flow] += 1
        self._due(now_s + max(0.0, self._left_s[flow]) / rate, flow, self._version[flow])
