"""Networks of many hosts, and an all_reduce between hosts step by step on them, for lab/bench/simulate_scale.py.

A network gives the latency between two hosts, and how many messages of one step share the most crowded link of each.
Routes are minimal. The steps are those of core/native/collective: a host's transfer of a step waits for the host's last
one and for its partner's, so hosts drift apart as they do in a job. The formulas of netfold.tuning.cost know neither
routes nor drift. The reduction of a step follows its transfer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Hosts = np.ndarray[Any, np.dtype[np.int64]]
Seconds = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Latency:
    """stack_s: of both kernels and processes of a message. link_s: of a link and the switch behind it."""

    stack_s: float
    link_s: float
    memory_s: float
    """From one process to another of a host, over a socket."""


class Network(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def latency(self) -> Latency: ...

    def links(self, source: Hosts, to: Hosts) -> Hosts:
        """Links on the route of each message."""
        ...

    def sharing(self, source: Hosts, to: Hosts) -> Seconds:
        """Messages on the most crowded link of each route, at least 1, if all are sent at once."""
        ...


@dataclass(frozen=True)
class FatTree:
    """Three levels of switches, as much capacity above as below. Routes between two hosts are spread perfectly."""

    latency: Latency
    radix: int = 64
    name: str = "fat tree"

    def links(self, source: Hosts, to: Hosts) -> Hosts:
        below = self.radix // 2
        same_edge, same_pod = source // below == to // below, source // below**2 == to // below**2
        return np.where(same_edge, 2, np.where(same_pod, 4, 6))

    def sharing(self, source: Hosts, to: Hosts) -> Seconds:
        return np.ones(len(source))


@dataclass(frozen=True)
class Dragonfly:
    """Groups of routers; all routers of a group are linked, and all groups (Kim, Dally, Scott & Abts, 2008).

    A router has `down` hosts and `out` links to other groups; a group has `routers`. Where there are fewer groups than
    links, several links join two groups.
    """

    latency: Latency
    hosts: int
    down: int = 8
    routers: int = 16
    out: int = 8
    name: str = "dragonfly"

    def links(self, source: Hosts, to: Hosts) -> Hosts:
        a_group = self.down * self.routers
        same_router, same_group = source // self.down == to // self.down, source // a_group == to // a_group
        return np.where(same_router, 2, np.where(same_group, 3, 5))

    def sharing(self, source: Hosts, to: Hosts) -> Seconds:
        a_group = self.down * self.routers
        groups = -(-self.hosts // a_group)
        between = max(1.0, self.routers * self.out // max(1, groups - 1))
        crosses = source // a_group != to // a_group
        by_group = _counts(source // a_group, to // a_group) / between
        by_router = np.where(source // self.down == to // self.down, 1, _counts(source // self.down, to // self.down))
        return np.maximum(1.0, np.where(crosses, by_group, by_router))


def _counts(source: Hosts, to: Hosts) -> Seconds:
    """By message, how many have the same two ends."""
    _, inverse, counts = np.unique(source * (1 << 32) + to, return_inverse=True, return_counts=True)
    return counts[inverse].astype(np.float64)


def between_two(network: Network, source: int, to: int) -> float:
    """Seconds of a small message."""
    if source == to:
        return network.latency.memory_s
    (links,) = network.links(np.array([source]), np.array([to]))
    return network.latency.stack_s + float(links) * network.latency.link_s


@dataclass(frozen=True)
class Between:
    """An all_reduce of n bytes between hosts. Every host begins at 0."""

    network: Network
    hosts: int
    bytes_per_s: float
    """Of tensor, of each host's link."""
    reduce_bytes_per_s: float
    """Of all ranks of a host together, which reduce a part each."""

    def ring(self, size: float) -> float:
        """2(H-1) steps; in each, a host sends a block to the next one."""
        own = np.arange(self.hosts)
        previous = np.roll(own, 1)
        trip = self._trip(previous, own, size / self.hosts)
        at = np.zeros(self.hosts)
        for step in range(2 * (self.hosts - 1)):
            reduced = size / self.hosts / self.reduce_bytes_per_s if step < self.hosts - 1 else 0.0
            at = np.maximum(at, at[previous] + trip) + reduced
        return float(at.max())

    def halving_doubling(self, size: float) -> float:
        """Recursive halving, then doubling, among the largest power of two; the other hosts send before, get after."""
        core = 2 ** int(math.log2(self.hosts))
        at, own = np.zeros(self.hosts), np.arange(core)
        extra = np.arange(core, self.hosts)
        if len(extra):
            arrived = at[extra] + self._trip(extra, extra - core, size)
            at[extra - core] = np.maximum(at[extra - core], arrived) + size / self.reduce_bytes_per_s
        distances = [1 << power for power in range(int(math.log2(core)))]
        part = size
        for distance in reversed(distances):
            part /= 2
            at[:core] = self._exchanged(at[:core], own ^ distance, part) + part / self.reduce_bytes_per_s
        for distance in distances:
            at[:core] = self._exchanged(at[:core], own ^ distance, part)
            part *= 2
        if len(extra):
            at[extra] = np.maximum(at[extra], at[extra - core] + self._trip(extra - core, extra, size))
        return float(at.max())

    def tree(self, size: float) -> float:
        """The binomial tree of small tensors: up, then down. A parent receives from one child after the other."""
        at = np.zeros(self.hosts)
        distances = [1 << power for power in range(math.ceil(math.log2(self.hosts)))]
        for distance in distances:
            child = np.arange(distance, self.hosts, 2 * distance)
            arrived = at[child] + self._trip(child, child - distance, size)
            at[child - distance] = np.maximum(at[child - distance], arrived) + size / self.reduce_bytes_per_s
        for distance in reversed(distances):
            child = np.arange(distance, self.hosts, 2 * distance)
            at[child] = np.maximum(at[child], at[child - distance] + self._trip(child - distance, child, size))
        return float(at.max())

    def _exchanged(self, at: Seconds, partner: Hosts, size: float) -> Seconds:
        own = np.arange(len(at))
        arrived = at[partner] + self._trip(partner, own, size)
        sent = at + self._rate_s(own, partner, size)
        result: Seconds = np.maximum(arrived, sent)
        return result

    def _rate_s(self, source: Hosts, to: Hosts, size: float) -> Seconds:
        return size * self.network.sharing(source, to) / self.bytes_per_s

    def _trip(self, source: Hosts, to: Hosts, size: float) -> Seconds:
        latency = self.network.latency
        return latency.stack_s + self.network.links(source, to) * latency.link_s + self._rate_s(source, to, size)
