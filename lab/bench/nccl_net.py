"""The plugin for NCCL against plain sockets, between emulated hosts and on one machine; its collective network
(CollNet), through a switch, against a ring over the plugin:

    .venv/bin/python lab/bench/nccl_net.py nccl                  # root, for the hosts
    .venv/bin/python lab/bench/nccl_net.py collnet

The programs are compiled from nccl_net.cpp, which says what both sides do.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import driver
import numpy as np
from driver import Place, cell

from netfold.cli.nccl_env import plugin
from netfold_lab.bench.network import open_network
from netfold_lab.bench.spread import paired_ratios

HERE = Path(__file__).parent
# Mode, bytes, calls a round.
TO_ONE = (("there-and-back", 8, 300), ("there-and-back", 64 << 10, 30), ("there-and-back", 16 << 20, 1))
RING = (("ring", 16 << 20, 1),)
PLACES: tuple[tuple[str, Place, dict[str, str], Sequence[tuple[str, int, int]]], ...] = (
    ("one machine", Place(2), {}, (*TO_ONE, *RING)),
    ("the same, as between hosts (NETFOLD_TRANSPORT=tcp)", Place(2), {"NETFOLD_TRANSPORT": "tcp"}, (*TO_ONE, *RING)),
    ("2 hosts, 1 Gbit/s", Place(2, rate="1gbit"), {}, TO_ONE),
    ("the same, NETFOLD_SECURITY=encrypt", Place(2, rate="1gbit"), {"NETFOLD_SECURITY": "encrypt"}, TO_ONE),
    ("the same, NETFOLD_TRANSPORT=fabric:tcp", Place(2, rate="1gbit"), {"NETFOLD_TRANSPORT": "fabric:tcp"}, TO_ONE),
    ("4 hosts, 1 Gbit/s", Place(4, rate="1gbit"), {}, RING),
    ("8 hosts, 1 Gbit/s", Place(8, rate="1gbit"), {}, RING),
    ("8 hosts, 1 Gbit/s, 0.1% lost", Place(8, rate="1gbit", loss="0.1%"), {}, RING),
)
# Hosts, their links' rate, whether the switch's link is as wide as all of theirs (c = P) or as one (c = 1). Goals of
# CollNet's time and bytes over the ring's.
COLLNET: tuple[tuple[int, str, bool, float | None, float | None], ...] = (
    (4, "1gbit", True, None, None),
    (8, "1gbit", True, 0.62, 0.60),
    (8, "500mbit", True, 0.62, 0.60),
    (4, "1gbit", False, 1.05, None),
    (8, "1gbit", False, 1.05, None),
)


def compiled() -> AbstractContextManager[str]:
    return driver.compiled([HERE / "nccl_net.cpp"], [HERE.parent / "core" / "native" / "nccl" / "include"])


def nccl(rounds: int = 10, launches: int = 3) -> str:
    """NCCL's plugin beside plain sockets."""
    rows = []
    with compiled() as program:
        for name, place, environment, measures in PLACES:
            took: dict[tuple[str, int, str], list[float]] = {}
            for _ in range(launches):
                for words in lines_of(program, place, environment, measures, rounds):
                    took.setdefault((words[0], int(words[1]), words[2]), []).append(float(words[3]))
            for mode, size, _ in measures:
                ours, sockets = took[mode, size, "plugin"], took[mode, size, "sockets"]
                times = [f"{np.median(each) * 1e6:,.1f}" for each in (ours, sockets)]
                rows.append([name, mode, f"{size:,}", *times, cell(paired_ratios(sockets, ours))])
    head = "place | what | bytes | plugin us | sockets us | speed against sockets"
    return f"""Messages there and back, the median of a round's calls; all_reduce of f32 by a ring, every element
checked. The time of rank 0. {rounds} rounds in each of {launches} launches, the sides in turns; 5% .. 95%. One stream a
direction.

{driver.table(head, rows)}"""


def collnet(rounds: int = 10, launches: int = 3, size: int = 16 << 20) -> str:
    """NCCL's CollNet through the switch beside a ring over the plugin."""
    rows = []
    with compiled() as program:
        for hosts, rate, is_wide, time_goal, bytes_goal in COLLNET:
            place = Place(hosts, rate=rate, switch=True, switch_rate=None if is_wide else rate)
            took: dict[str, list[float]] = {}
            sent: dict[str, list[float]] = {}
            for _ in range(launches):
                for words in lines_of(program, place, {}, [("collnet", size, 1)], rounds):
                    took.setdefault(words[2], []).append(float(words[3]))
                    sent.setdefault(words[2], []).append(float(words[4]))
            rows.append(
                [
                    f"{hosts}, {rate}, {'c = P' if is_wide else 'c = 1'}",
                    *(f"{np.median(took[side]) * 1e3:.1f}" for side in ("collnet", "ring")),
                    cell(paired_ratios(took["collnet"], took["ring"])) + goal(time_goal),
                    f"{np.median(sent['collnet']) / 1e6:.1f}",
                    cell(paired_ratios(sent["collnet"], sent["ring"])) + goal(bytes_goal),
                ]
            )
    head = "hosts, rate, switch's link | CollNet ms | ring ms | time over ring's | MB a host sends | bytes over ring's"
    return f"""all_reduce of {size >> 20} MB of f32 between hosts, every element checked: CollNet in pieces of 1 MB, 8
under way, as NCCL gives memory that it did not register; the ring over the plugin in pieces of 512 KB. Time of rank 0,
bytes that its eth0 sent. c = P: the switch's link is as wide as those of all hosts; c = 1: as that of one. {rounds}
rounds in each of {launches} launches, the sides in turns; 5% .. 95%, goals in parentheses. {os.cpu_count()} cores
carry all hosts and the switch.

{driver.table(head, rows)}"""


def goal(most: float | None) -> str:
    return "" if most is None else f" (at most {most:g})"


def lines_of(
    program: str, place: Place, environment: dict[str, str], measures: Sequence[tuple[str, int, int]], rounds: int
) -> list[list[str]]:
    """The words of each line that rank 0 prints."""
    words = [str(word) for measure in measures for word in measure]
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder, open_network(place) as network:
        addresses = ["127.0.0.1" if network.rack is None else network.rack.address(rank) for rank in range(place.ranks)]
        argvs = [
            [program, str(plugin()), folder, str(rank), str(place.ranks), str(address), str(rounds), *words]
            for rank, address in enumerate(addresses)
        ]
        here = {"NETFOLD_INTERFACE": "lo"} if network.rack is None else {}
        lines = driver.outputs(network, argvs, {**here, **environment}, 120 + 10 * rounds)[0]
    return [line.split() for line in lines]


if __name__ == "__main__":
    driver.run(nccl, collnet)
