"""Hosts that aggregate gradients (`netfold switch`): the link of each, and the rate of its cores. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from netfold.tuning.cost import beside_a_worker_bytes_per_s, given_back_bytes_per_s

# Contributions that one core receives and adds per second, including the kernel's work: 8.4 Gbit/s (5% .. 95%: 6.3 ..
# 9.4) with GRO on and results cut by the link (lab/bench/results/switch_cost.md); rounded down.
CORE_BYTES_PER_S = 7e9 / 8
# A small server aggregates with at most so many cores.
MOST_CORES = 16


@dataclass(frozen=True)
class Aggregator:
    """`hosts` equal hosts, each with `netfold switch`.

    c: the rate of its link over the rate of a worker host's link; 0 where bytes_per_s or ports give the rate.
    bytes_per_s: of its link, per direction; 0 where c or ports give the rate.
    ports: it has one port per worker host, as a Linux box that is itself the switch of the hosts (c = P).
    cores: that aggregate, one thread of `netfold switch` each; 0: as many as the link needs, at most MOST_CORES.
    core_bytes_per_s: contributions that one of these cores adds.
    worker: it is the host of a worker, whose own traffic uses the same link.
    """

    hosts: int = 1
    c: float = 0.0
    bytes_per_s: float = 0.0
    ports: bool = False
    cores: int = 1
    core_bytes_per_s: float = CORE_BYTES_PER_S
    worker: bool = False

    def link_bytes_per_s(self, worker_bytes_per_s: float, workers: int) -> float:
        """Of one of the hosts. worker_bytes_per_s: of one of `workers` worker hosts."""
        if self.ports:
            return workers * worker_bytes_per_s
        return self.bytes_per_s or self.c * worker_bytes_per_s

    def needed_cores(self, worker_bytes_per_s: float, workers: int) -> int:
        """`cores`, or as many as the link needs where it is 0."""
        needed = math.ceil(self.link_bytes_per_s(worker_bytes_per_s, workers) / self.core_bytes_per_s)
        return self.cores or min(MOST_CORES, needed)

    def gives(self, worker_bytes_per_s: float, workers: int) -> float:
        """Tensor bytes per second that all of the hosts return, while all worker hosts send at once."""
        link = self.link_bytes_per_s(worker_bytes_per_s, workers)
        added = self.needed_cores(worker_bytes_per_s, workers) * self.core_bytes_per_s
        if self.worker:
            return self.hosts * beside_a_worker_bytes_per_s(workers, worker_bytes_per_s, link, added)
        return self.hosts * given_back_bytes_per_s(workers, link, added)

    def text(self) -> str:
        """`2 aggregators, each with a link of 1x a worker's and 1 core`."""
        link = f"a link of {self.c:g}x a worker's" if self.c else f"a link of {8 * self.bytes_per_s / 1e9:g} Gbit/s"
        link = "a port per worker" if self.ports else link
        count = "an aggregator" if self.hosts == 1 else f"{self.hosts} aggregators, each"
        where = " on a worker's own host" if self.worker else ""
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}" if self.cores else "as many cores as its link needs"
        return f"{count} with {link} and {cores}{where}"


# A spare host with a link like a worker's, and a Linux box with one port per worker in place of the hosts' switch.
SPARE_HOST = Aggregator(c=1.0)
BOX = Aggregator(ports=True)
