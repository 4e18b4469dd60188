"""What a switch behind a link of its own is worth: all_reduce by `auto`, by a ring, through the switch alone.

Racks whose switch is a host at the core, behind a link of c times a worker's; c = P: in the switch's place, with a port
a worker. The backends take turns in the same processes, round by round, after as many rounds as the split has to find
its parts; its trials (docs/explanation/algorithms.md) count. Times are the slowest rank's; every element is checked.
The switch
alone is left out where it would take more than four times a ring. The bound is n/b (x + R (1-x)), with R = 2 (P-1)/P, b
a link's rate less headers, and x where the switch, x P/c, ends when the links do: n/b R / (1 + (R-1) c/P).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from netfold.bench.spread import paired_ratios, spread
from netfold.rack import Rack, RackError
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.link import parse_link
from netfold.rack.names import HOST_INTERFACE, SWITCH_PORT, host_address
from netfold.rack.processes import supervise

WARM_ROUNDS = 4
# Of auto's time: over the better of the other two, and over the bound.
MOST_OVER_BETTER, MOST_OVER_BOUND = 1.05, 1.10
# A rack's rounds, all backends together.
DEADLINE_S = 900.0
# Of the aggregation protocol at an MTU of 1500: bytes of tensor in a packet, and what it takes on the link.
PAYLOAD, PACKET = 1408, 1498
_SLOW = 4  # times a ring: not measured


@dataclass(frozen=True)
class LinkSetup:
    """c: the switch's link over a worker's; `hosts` or more: a port a worker; 0: the first worker's host is the switch.

    loss: as `0.1%`, on every link.
    """

    rate: str
    hosts: int
    c: float
    size: int = 16 << 20
    loss: str = "0%"

    @property
    def has_ports(self) -> bool:
        return self.c >= self.hosts

    @property
    def name(self) -> str:
        return "P" if self.has_ports else f"{self.c:g}" if self.c else "a worker's"

    @property
    def bound_s(self) -> float:
        link = parse_link(self.rate, self.loss).rate_bits / 8 * PAYLOAD / PACKET
        return self.size / link * self._ring / (1 + (self._ring - 1) * min(1.0, self.c / self.hosts))

    @property
    def backends(self) -> tuple[str, ...]:
        slow = self.hosts > _SLOW * self._ring * self.c
        return ("auto", "ring") if slow else ("auto", "ring", "in_network")

    @property
    def _ring(self) -> float:
        return 2 * (self.hosts - 1) / self.hosts


@dataclass(frozen=True)
class LinkResult:
    """Seconds of each round, by backend; `row`: what auto chose, `part` of it through the switch."""

    seconds: dict[str, list[float]]
    row: str
    part: float

    def over(self, backend: str) -> float:
        """auto's time over the backend's, paired by round."""
        return spread(paired_ratios(self.seconds["auto"], self.seconds[backend])).median

    def met(self, place: LinkSetup) -> bool:
        others = [backend for backend in self.seconds if backend != "auto"]
        bound = spread(self.seconds["auto"]).median / place.bound_s
        return max(map(self.over, others)) <= MOST_OVER_BETTER and bound <= MOST_OVER_BOUND


def measure(place: LinkSetup, rounds: int) -> LinkResult:
    """In a rack of its own. RackError, with what the ranks said, where one fails."""
    behind = place.c > 0 and not place.has_ports
    switch_rate = f"{parse_link(place.rate, '0%').rate_bits * place.c / 1e6:g}mbit" if behind else None
    with (
        tempfile.TemporaryDirectory(prefix="netfold-links-") as folder,
        Rack(place.hosts, place.rate, place.loss, switch_rate=switch_rate) as rack,
    ):
        if place.c > 0:
            rack.start_switch(lambda line: None)
        else:
            argv = aggregator_argv(f"{host_address(0)}:{SWITCH_PORT}")
            rack.switch_address = start_aggregator(
                lambda argv: rack.popen(0, argv, {}), argv, lambda line: None
            ).address
        for backend in place.backends:
            Path(folder, backend).mkdir()
        argv = [sys.executable, "-m", "netfold.bench.links", folder, str(rounds), str(place.size), *place.backends]
        ranks = [rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE}) for host in range(place.hosts)]
        if supervise(ranks, DEADLINE_S).exit_code != 0:
            raise RackError("\n".join(rank.communicate()[0] for rank in ranks))
        return LinkResult(**json.loads(Path(folder, "taken").read_text()))


def rank_main(folder: str, rounds: int, size: int, backends: Sequence[str]) -> None:
    """One rank of all backends."""
    from netfold import Communicator, FileStore, Options

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pattern = (np.arange(size // 4) % 16).astype(np.float32)
    tensor = np.empty_like(pattern)
    groups = {
        backend: Communicator(
            FileStore(f"{folder}/{backend}"), rank, ranks, options=Options(interface=HOST_INTERFACE, algorithm=backend)
        )
        for backend in backends
    }
    auto, ring = groups["auto"], groups["ring"]
    seconds: dict[str, list[float]] = {backend: [] for backend in groups}
    for turn in range(-WARM_ROUNDS, rounds):
        for place in range(len(groups)):
            backend = list(groups)[(turn + place) % len(groups)]
            np.copyto(tensor, pattern)
            ring.barrier()
            began = time.perf_counter()
            groups[backend].all_reduce(tensor)
            slowest = ring.all_reduce(np.array([time.perf_counter() - began]), op="max")
            if not (tensor == pattern * ranks).all():
                raise SystemExit(f"rank {rank}: {backend} of {size} bytes gave wrong sums")
            if turn >= 0:
                seconds[backend].append(float(slowest[0]))
    row = auto.group.table.choose("all_reduce", size).algorithm
    shares = auto.group.shares
    part = 1 - shares.balanced[-1] / sum(shares.balanced) if row == "split" else float(row == "in_network")
    for group in groups.values():
        group.barrier()
        group.close()
    if rank == 0:
        Path(folder, "taken").write_text(json.dumps({"seconds": seconds, "row": row, "part": part}))


def table(found: dict[LinkSetup, LinkResult]) -> list[str]:
    """As Markdown."""
    lines = [
        "c: the switch's link over a worker's. Milliseconds are the slowest rank's: median, 5% .. 95%. Ratios are of "
        "times in one round. Goals: auto over the better of the other two at most "
        f"{MOST_OVER_BETTER}, over the bound at most {MOST_OVER_BOUND:.2f}.",
        "",
        "| link | hosts | c | MB | auto, ms | through the switch | ring, ms | switch alone, ms | auto / ring "
        "| auto / switch | auto / bound | met |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for place, taken in found.items():
        ms = {backend: spread([each * 1e3 for each in seconds]) for backend, seconds in taken.seconds.items()}
        words = {backend: f"{each.median:.0f}, {each.p5:.0f} .. {each.p95:.0f}" for backend, each in ms.items()}
        over = {backend: f"{taken.over(backend):.2f}" for backend in words if backend != "auto"}
        link = place.rate if place.loss == "0%" else f"{place.rate}, {place.loss} lost"
        lines.append(
            f"| {link} | {place.hosts} | {place.name} | {place.size >> 20} "
            f"| {words['auto']} | {taken.row}, {taken.part:.0%} | {words['ring']} | {words.get('in_network', '-')} "
            f"| {over['ring']} | {over.get('in_network', '-')} | {ms['auto'].median / 1e3 / place.bound_s:.2f} "
            f"| {'yes' if taken.met(place) else '**no**'} |"
        )
    return lines


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
