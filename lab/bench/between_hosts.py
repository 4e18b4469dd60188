"""Collectives between hosts against the alpha-beta limit of the link; as root:

    .venv/bin/python lab/bench/between_hosts.py [--cases all_reduce=ring,...]

The limit of a case: what its formula in netfold.tuning gives with the round trip measured here, the link's rate less
its headers, and nothing else. Times are the slowest rank's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import driver
from driver import Place, Rank

from netfold import units
from netfold.tuning import DEFAULT_LINKS, Link, Topology
from netfold.tuning.cost import predict
from netfold_lab.bench.backends.communicator_backend import CommunicatorBackend
from netfold_lab.bench.collectives import COLLECTIVES
from netfold_lab.bench.spread import spread
from netfold_lab.bench.trial import Call
from netfold_lab.rack.link import parse_link

# A packet's 1448 bytes of tensor travel as 1514 in a rack, whose links count Ethernet's own header and no gap.
PAYLOAD_RATIO = 1448 / 1514
ROUNDS = {1 << 20: 15, 16 << 20: 5}
WARMUPS = 3
CASES = (
    "all_reduce=auto,reduce_scatter=auto,all_gather=auto,broadcast=auto,all_to_all=auto,reduce=auto,"
    "all_reduce=halving_doubling,all_reduce=ring,all_reduce=tree,reduce_scatter=direct,reduce_scatter=ring,"
    "all_gather=direct,all_gather=ring,all_gather=bruck,broadcast=chain,broadcast=tree,all_to_all=direct,"
    "all_to_all=pairwise,reduce=tree"
)


def serve(me: Rank) -> None:
    """A rank. An order is a case and a size; a new group serves each."""

    def run(case: str, size: int, rounds: int) -> tuple[list[float], str, Any]:
        operation = case.partition("=")[0]
        # A rack has a switch; this benchmark is about hosts without it.
        with me.communicator(f"{case}-{size}", algorithm=case, switch="") as group:
            backend, collective = CommunicatorBackend(group), COLLECTIVES[operation]
            buffers = Call(backend, collective, size // 4, me.size, "f32")
            buffers.send.values.fill(1)
            call = backend.bind(collective, "max", buffers.send, buffers.receive)
            seconds = [me.time(call)[0] for _ in range(WARMUPS + rounds)][WARMUPS:]
            return seconds, group.group.table.choose(operation, size).algorithm, group.group.links.network

    me.serve(run)


def between_hosts(hosts: int = 4, rate: str = "1gbit", cases: str = CASES) -> str:
    """Collectives between hosts against the limit of the link."""
    rows = []
    with driver.ranks_at(Place(hosts, rate), serve) as ranks:
        for case in cases.split(","):
            for size, rounds in ROUNDS.items():
                answers = ranks.ask(case, size, rounds)
                _, algorithm, measured = answers[0]
                ideal = replace(
                    DEFAULT_LINKS,
                    network=Link(measured.latency_s, parse_link(rate).rate_bits / 8 * PAYLOAD_RATIO),
                    reduce_bytes_per_s=float("inf"),
                    message_s=0.0,
                    crowding=0.0,
                    restarts=0.0,
                )
                limit = predict(case.partition("=")[0], algorithm, size, Topology.apart(hosts), ideal)
                seconds = driver.slowest(answer[0] for answer in answers)
                middle = spread(seconds).median
                around = f"{units.seconds(middle)} ({units.seconds(min(seconds))}..{units.seconds(max(seconds))})"
                off = f"{100 * (middle / limit - 1):+.1f}%"
                rows.append([case, algorithm, size >> 20, around, units.seconds(limit), off, measured.text()])
    return driver.table("case | algorithm | MB | median (least..most) | limit | off | measured link", rows)


if __name__ == "__main__":
    driver.run(between_hosts)
