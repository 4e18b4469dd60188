"""Models of TCP flows that share a queue with a job: the windows of CUBIC and BBR, packet by packet."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from itertools import count

SECOND_NS = 1_000_000_000


class Bottleneck:
    """A link that sends a packet in `packet_ns`, behind a queue of at most `limit` packets that drops the rest."""

    def __init__(self, packet_ns: int, limit: int) -> None:
        self.packet_ns = packet_ns
        self._limit_ns = limit * packet_ns
        self._free_ns = 0

    def enqueue(self, now_ns: int) -> int | None:
        """Return when the packet has left; None: it is dropped."""
        begins_ns = max(self._free_ns, now_ns)
        if begins_ns - now_ns + self.packet_ns > self._limit_ns:
            return None
        self._free_ns = begins_ns + self.packet_ns
        return self._free_ns


class Flow(ABC):
    """One bulk TCP flow, which `advance` runs up to a time. It detects a loss when the next packet is acknowledged."""

    RTT_NS = 200_000  # without the queue

    def __init__(self, link: Bottleneck, start_ns: int = 0, end_ns: int | None = None) -> None:
        self.link = link
        self.window = 10.0
        self.delivered = 0
        self._end_ns = end_ns
        self._in_flight = 0
        self._lost = 0
        self._order = count()
        self._due: list[tuple[int, int, int | None]] = [(start_ns, next(self._order), None)]  # acknowledgements: sent

    def advance(self, now_ns: int) -> None:
        while self._due and self._due[0][0] <= now_ns:
            at_ns, _, sent = heapq.heappop(self._due)
            if sent is not None:
                self._in_flight -= 1
                self.delivered += 1
                if self._lost:
                    self._in_flight -= self._lost
                    self._lost = 0
                    self.lost(at_ns)
                self.acknowledged(at_ns, at_ns - sent)
            if self._end_ns is None or at_ns < self._end_ns:
                self.send(at_ns)

    def send(self, now_ns: int) -> None:
        while self._in_flight < int(self.window):
            self.send_one(now_ns)

    def send_one(self, now_ns: int) -> None:
        self._in_flight += 1
        left_ns = self.link.enqueue(now_ns)
        if left_ns is None:
            self._lost += 1
            if self._in_flight == self._lost:  # no acknowledgement will come: a timeout
                self.wake_at(now_ns + SECOND_NS // 5)
                self._in_flight = self._lost = 0
                self.lost(now_ns)
                self.window = 2.0
        else:
            heapq.heappush(self._due, (left_ns + self.RTT_NS, next(self._order), now_ns))

    def wake_at(self, at_ns: int) -> None:
        heapq.heappush(self._due, (at_ns, next(self._order), None))

    @abstractmethod
    def acknowledged(self, now_ns: int, rtt_ns: int) -> None:
        """Set the window after an acknowledgement."""

    @abstractmethod
    def lost(self, now_ns: int) -> None:
        """Set the window after a loss."""


class Cubic(Flow):
    """RFC 9438, with its Reno-friendly region; slow start until the first loss."""

    C, BETA = 0.4, 0.7

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self._most = self._origin = 0.0
        self._epoch_ns: int | None = None
        self._slow_start = True
        self._reduced_ns = 0
        self._rtt_ns = self.RTT_NS
        self._friendly = 0.0

    def acknowledged(self, now_ns: int, rtt_ns: int) -> None:
        self._rtt_ns = rtt_ns
        if self._slow_start:
            self.window += 1
            return
        if self._epoch_ns is None:
            self._epoch_ns, self._friendly = now_ns, self.window
        after_s = (now_ns - self._epoch_ns + rtt_ns) / SECOND_NS
        recovery_s = (self._most * (1 - self.BETA) / self.C) ** (1 / 3)
        target = min(self.C * (after_s - recovery_s) ** 3 + self._most, 1.5 * self.window)
        self._friendly += 3 * (1 - self.BETA) / (1 + self.BETA) / self.window
        self.window += max(0.01, target - self.window) / self.window
        self.window = max(self.window, self._friendly)

    def lost(self, now_ns: int) -> None:
        if now_ns - self._reduced_ns < self._rtt_ns:
            return
        self._reduced_ns, self._epoch_ns, self._slow_start = now_ns, None, False
        self._most = self.window * (1 + self.BETA) / 2 if self.window < self._most else self.window
        self.window = max(2.0, self.window * self.BETA)


class Bbr(Flow):
    """BBR version 1: paced by the largest rate of ten round trips; its window is twice that rate by the least RTT."""

    GAINS = (1.25, 0.75, 1, 1, 1, 1, 1, 1)

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self._rates: list[tuple[int, float]] = []  # by round trip, packets per ns
        self._rate = 10 / self.RTT_NS / 4
        self._least_ns, self._least_at_ns = 1 << 60, 0
        self._round_ns = self._round_delivered = self._full_rounds = 0
        self._full_rate = 0.0
        self._startup = True
        self._probe_until_ns = 0
        self._next_ns = 0
        self._waking_ns = -1
        self._cycle_ns, self._phase = 0, 2

    def gain(self, now_ns: int) -> float:
        if self._startup:
            return 2.89
        if now_ns - self._cycle_ns > self._least_ns:
            self._cycle_ns, self._phase = now_ns, (self._phase + 1) % 8
        return self.GAINS[self._phase]

    def acknowledged(self, now_ns: int, rtt_ns: int) -> None:
        if rtt_ns <= self._least_ns:
            self._least_ns, self._least_at_ns = rtt_ns, now_ns
        elif now_ns - self._least_at_ns > 10 * SECOND_NS and not self._probe_until_ns:
            self._probe_until_ns = now_ns + max(SECOND_NS // 5, rtt_ns)
            self._least_ns = rtt_ns
        if self._probe_until_ns and now_ns > self._probe_until_ns:
            self._probe_until_ns, self._least_at_ns = 0, now_ns
        if now_ns - self._round_ns >= rtt_ns:
            rate = (self.delivered - self._round_delivered) / (now_ns - self._round_ns)
            self._round_ns, self._round_delivered = now_ns, self.delivered
            if not self._probe_until_ns:
                self._rates = [*self._rates[-9:], (now_ns, rate)]
            self._rate = max(rate for _, rate in self._rates) if self._rates else rate
            if self._startup:
                self._full_rounds = 0 if self._rate > 1.25 * self._full_rate else self._full_rounds + 1
                self._full_rate = max(self._full_rate, self._rate)
                self._startup = self._full_rounds < 3
        gain = 2.89 if self._startup else 2
        self.window = 4 if self._probe_until_ns else max(4, gain * self._rate * self._least_ns)

    def lost(self, now_ns: int) -> None:
        pass

    def send(self, now_ns: int) -> None:
        while self._in_flight < int(self.window) and self._next_ns <= now_ns:
            self.send_one(now_ns)
            self._next_ns = max(self._next_ns, now_ns - 1_000_000) + int(1 / (self._rate * self.gain(now_ns)))
        if self._in_flight < int(self.window) and self._waking_ns <= now_ns:
            self._waking_ns = max(self._next_ns, now_ns + 1)
            self.wake_at(self._waking_ns)
