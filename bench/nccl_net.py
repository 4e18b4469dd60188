"""The plugin for NCCL against plain sockets, between emulated hosts and on one machine:

    .venv/bin/python bench/nccl_net.py nccl                  # root, for the hosts
    .venv/bin/python bench/nccl_net.py algorithms            # the same; ring against tree, and the model of both

The programs are compiled from nccl_net.cpp, which says what both sides do.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import driver
import numpy as np
from driver import Place, cell

from netfold.bench.network import open_network
from netfold.bench.spread import paired_ratios
from netfold.cli.nccl_env import plugin
from netfold.rack.processes import follow, supervise
from netfold.tuning.cost import FORMULAS, Case
from netfold.tuning.fit import fit_link
from netfold.tuning.topology import DEFAULT_LINKS, Topology

HERE = Path(__file__).parent
# Mode, bytes, calls a round.
TO_ONE = (("there-and-back", 8, 300), ("there-and-back", 64 << 10, 30), ("there-and-back", 16 << 20, 1))
PAIR = ((8, 100), (512 << 10, 5), (4 << 20, 1))
RING = (("ring", 16 << 20, 1),)
PLACES: tuple[tuple[str, Place, dict[str, str], Sequence[tuple[str, int, int]]], ...] = (
    ("one machine", Place(2), {}, TO_ONE),
    ("2 hosts, 1 Gbit/s", Place(2, rate="1gbit"), {}, TO_ONE),
    ("the same, NETFOLD_SECURITY=encrypt", Place(2, rate="1gbit"), {"NETFOLD_SECURITY": "encrypt"}, TO_ONE),
    ("the same, NETFOLD_TRANSPORT=fabric:tcp", Place(2, rate="1gbit"), {"NETFOLD_TRANSPORT": "fabric:tcp"}, TO_ONE),
    ("4 hosts, 1 Gbit/s", Place(4, rate="1gbit"), {}, RING),
    ("8 hosts, 1 Gbit/s", Place(8, rate="1gbit"), {}, RING),
    ("8 hosts, 1 Gbit/s, 0.1% lost", Place(8, rate="1gbit", loss="0.1%"), {}, RING),
)


def nccl(rounds: int = 10, launches: int = 3) -> str:
    """NCCL's plugin beside plain sockets."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        program = compiled(folder)
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


# One rank a host; bytes and calls a round.
LINKS = (("4 hosts, 1 Gbit/s", Place(4, rate="1gbit")), ("8 hosts, 1 Gbit/s", Place(8, rate="1gbit")))
TWO_WAYS = ((4 << 10, 20), (64 << 10, 10), (512 << 10, 5), (4 << 20, 1))


def algorithms(rounds: int = 10, launches: int = 3) -> str:
    """Ring against tree over NCCL's plugin, and by the model."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        program = compiled(folder)
        for name, place in LINKS:
            took: dict[tuple[str, int], list[float]] = {}
            measures = [("there-and-back", size, calls) for size, calls in PAIR]
            pair = lines_of(program, Place(2, rate=place.rate), {}, measures, rounds)
            link = fit_link([(int(words[1]), float(words[3]) / 2) for words in pair if words[2] == "plugin"])
            measures = [(mode, size, calls) for size, calls in TWO_WAYS for mode in ("ring", "tree")]
            for _ in range(launches):
                for words in lines_of(program, place, {}, measures, rounds):
                    if words[2] == "plugin":
                        took.setdefault((words[0], int(words[1])), []).append(float(words[3]))
            links = replace(DEFAULT_LINKS, network=link)
            for size, _ in TWO_WAYS:
                ring, tree = took["ring", size], took["tree", size]
                case = Case(size, Topology.apart(place.ranks), links)
                by_model = [FORMULAS["all_reduce", how].seconds(case) for how in ("ring", "tree")]
                times = [f"{each * 1e6:,.0f}" for each in (np.median(ring), np.median(tree), *by_model)]
                ratio = f"{by_model[0] / by_model[1]:.2f}"
                rows.append([name, link.text(), f"{size:,}", *times, cell(paired_ratios(ring, tree)), ratio])
    head = "place | link, fitted | bytes | ring us | tree us | ring us by the model | tree us by the model"
    return f"""all_reduce of f32 by a ring and by two trees over the plugin, every element checked, and the cost model's
times of both over the link, which is fitted to messages there and back between two hosts. The time of rank 0. {rounds}
rounds in each of {launches} launches; 5% .. 95%. The last two columns are the ring's time over the tree's: measured,
and by the model. There is no GPU in it.

{driver.table(f"{head} | ring over tree | by the model", rows)}"""


def compiled(folder: str) -> str:
    program = f"{folder}/nccl_net"
    include = HERE.parent / "native" / "nccl" / "include"
    command = ["c++", "-std=c++20", "-O2", f"-I{include}", str(HERE / "nccl_net.cpp"), "-ldl", "-o", program]
    subprocess.run(command, check=True)
    return program


def lines_of(
    program: str, place: Place, environment: dict[str, str], measures: Sequence[tuple[str, int, int]], rounds: int
) -> list[list[str]]:
    """The words of each line that rank 0 prints."""
    words = [str(word) for measure in measures for word in measure]
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder, open_network(place) as network:
        processes = []
        for rank in range(place.ranks):
            address = "127.0.0.1" if network.rack is None else network.rack.address(rank)
            argv = [program, str(plugin()), folder, str(rank), str(place.ranks), address, str(rounds), *words]
            here = {"NETFOLD_INTERFACE": "lo"} if network.rack is None else {}
            processes.append(network.spawn(rank, argv, {**os.environ, **here, **environment}))
        readers = [follow(process, lines.append if rank == 0 else print) for rank, process in enumerate(processes)]
        outcome = supervise(processes, 120 + 10 * rounds)
        for reader in readers:
            reader.join(1)
    assert outcome.exit_code == 0, f"rank {outcome.first_failed} ended with {outcome.exit_code}: {lines[-5:]}"
    return [line.split() for line in lines]


if __name__ == "__main__":
    driver.run(nccl, algorithms)
