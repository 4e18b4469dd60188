"""Measure the link between pairs of hosts: latency, bandwidth in each direction, difference of the clocks.

One rank of each host takes part, in the rounds of a round-robin tournament. In a round every host has one partner, so
independent links are measured at once, and no host takes part in two measurements. Ranks of one host have no link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from netfold.communicator import Communicator

# The approximate time of a pair's measurements; larger messages that would exceed it are skipped.
PAIR_S = 0.25
# In jobs with more hosts, each host measures only this many others.
MAX_ROUNDS = 31
PINGS = 20
_SIZES = (64 << 10, 512 << 10, 4 << 20, 16 << 20)
# Expected growth of a message's time from one size to the next.
_GROWTH = 8
# The timeout of one message.
_MESSAGE_S = 20.0


@dataclass(frozen=True)
class PairLink:
    """The link between two ranks of different hosts."""

    one: int
    other: int
    latency_s: float
    """Half of the shortest round trip."""
    forward_bytes_per_s: float
    """From `one` to `other`."""
    reverse_bytes_per_s: float
    clock_s: float
    """The wall clock of `other` minus that of `one`; the error is at most `latency_s`."""


def measure_links(communicator: Communicator, players: Sequence[int]) -> list[PairLink]:
    """Measure all pairs of `players`. Collective over the communicator. Returns the pairs that this rank leads.

    players: one rank per host, in ascending order. Cost: PAIR_S a round, players - 1 rounds, at most MAX_ROUNDS.
    """
    links = []
    for number, partners in enumerate(rounds(len(players))):
        if communicator.rank in players:
            partner = partners.get(players.index(communicator.rank))
            if partner is not None:
                other = players[partner]
                if communicator.rank < other:
                    links.append(_lead(communicator, other, number))
                else:
                    _follow(communicator, other, number)
        communicator.barrier(timeout_s=2 * _MESSAGE_S)
    return links


def rounds(players: int) -> list[dict[int, int]]:
    """A round-robin tournament by the circle method: for each round, partners by player. An idle player is absent."""
    seats: list[int | None] = [*range(players)] + ([None] if players % 2 else [])
    plan = []
    for _ in range(min(len(seats) - 1, MAX_ROUNDS)):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        partners = {one: other for one, other in pairs if one is not None and other is not None}
        plan.append({**partners, **{other: one for one, other in partners.items()}})
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return plan


def _lead(communicator: Communicator, other: int, tag: int) -> PairLink:
    stamp = np.zeros(1, np.int64)
    shortest_ns, clock_ns = np.inf, 0.0
    for _ in range(PINGS):
        # In this order, a pause between the two lines lengthens the trip, so half of the trip still bounds the clock's
        # error.
        began = time.perf_counter_ns()
        sent = time.time_ns()
        communicator.send(stamp, other, tag, timeout_s=_MESSAGE_S)
        communicator.receive(stamp, other, tag, timeout_s=_MESSAGE_S)
        trip_ns = time.perf_counter_ns() - began
        if trip_ns < shortest_ns:
            shortest_ns, clock_ns = trip_ns, int(stamp[0]) - (sent + trip_ns / 2)
    there, back = _bandwidths(communicator, other, tag, shortest_ns / 2e9)
    return PairLink(communicator.rank, other, shortest_ns / 2e9, there, back, clock_ns / 1e9)


def _bandwidths(communicator: Communicator, other: int, tag: int, latency_s: float) -> tuple[float, float]:
    """Send growing messages while the next one fits into the time: first forward, then in reverse."""
    plan = np.zeros(2, np.int64)  # bytes, 0 to end; direction, 0: forward, 1: reverse
    reply = np.zeros(1, np.uint8)
    rates = []
    for direction in (0, 1):
        began, last_s, best = time.perf_counter(), 0.0, 0.0
        for size in _SIZES:
            if best and time.perf_counter() - began + _GROWTH * last_s > PAIR_S / 2:
                break
            plan[:] = size, direction
            message = np.zeros(size, np.uint8)
            communicator.send(plan, other, tag, timeout_s=_MESSAGE_S)
            started = time.perf_counter()
            if direction == 0:
                communicator.send(message, other, tag, timeout_s=_MESSAGE_S)
                communicator.receive(reply, other, tag, timeout_s=_MESSAGE_S)
            else:
                communicator.receive(message, other, tag, timeout_s=_MESSAGE_S)
            last_s = time.perf_counter() - started
            best = size / max(last_s - 2 * latency_s, 1e-9) if last_s > 4 * latency_s else size / last_s
        rates.append(best)
    plan[:] = 0
    communicator.send(plan, other, tag, timeout_s=_MESSAGE_S)
    return rates[0], rates[1]


def _follow(communicator: Communicator, other: int, tag: int) -> None:
    stamp, plan, reply = np.zeros(1, np.int64), np.zeros(2, np.int64), np.zeros(1, np.uint8)
    for _ in range(PINGS):
        communicator.receive(stamp, other, tag, timeout_s=_MESSAGE_S)
        stamp[0] = time.time_ns()
        communicator.send(stamp, other, tag, timeout_s=_MESSAGE_S)
    while True:
        communicator.receive(plan, other, tag, timeout_s=_MESSAGE_S)
        size, direction = (int(value) for value in plan)
        if size == 0:
            return
        message = np.zeros(size, np.uint8)
        if direction == 0:
            communicator.receive(message, other, tag, timeout_s=_MESSAGE_S)
            communicator.send(reply, other, tag, timeout_s=_MESSAGE_S)
        else:
            communicator.send(message, other, tag, timeout_s=_MESSAGE_S)
