"""NCCL's choice of algorithm and protocol beside that of netfold's tuner, between emulated hosts:

    .venv/bin/python lab/bench/nccl_choices.py                  # root

The program is compiled from nccl_choices.cpp, which says what is run. NCCL's choice is that of its own model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from math import log2
from pathlib import Path

import driver
import numpy as np
from driver import Place, cell

from netfold.cli.nccl_env import TUNER, plugin
from netfold.tuning.measured_link import measured_link
from netfold.tuning.nccl import PROTOCOLS, table_text
from netfold_lab.bench.network import Network, open_network
from netfold_lab.bench.spread import paired_ratios

HERE = Path(__file__).parent
SIZES = tuple(1 << power for power in range(10, 27, 2))
# GB/s that NCCL's search tries for a channel between hosts (search.cc, speedArrayInter), below a card of 10 Gbit/s.
SPEEDS = (1.2, 0.24, 0.12)
# tuning.cc, treeCorrectionFactor, from 64 bytes on.
CORRECTIONS = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}


def nccl_us(algorithm: str, protocol: str, size: int, hosts: int, mbit: int) -> float:
    """NCCL's estimate of an all_reduce with one GPU of capability 8.0 a host and a card of `mbit` (to 10,000).

    ncclTopoTuneModel and ncclTopoGetAlgoTime (src/graph/tuning.cc); the rate is what ncclTopoCompute finds for the
    card. The plugin names no latency of the network.
    """
    rate = next((speed for speed in SPEEDS if speed <= mbit / 8000), 0.1)
    # On two hosts a tree has the rate that its search found on the host: twice the network's, if one was found.
    if algorithm == "tree" and hosts == 2 and rate > 0.1:
        rate *= 2
    about = PROTOCOLS[protocol]
    if algorithm == "ring":
        rate *= {"LL": 0.5, "LL128": 0.92, "Simple": 1}[protocol] * hosts / (2 * (hosts - 1))
        start, steps = {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}[protocol], 2 * (hosts - 1)
    else:
        rate *= 0.92 * {"LL": 1 / 3.8, "LL128": 120 / 128, "Simple": 1}[protocol] * 0.85 * 0.5
        rate *= CORRECTIONS[protocol][int(log2(size / 64))] if size < 64 << 23 else 1
        start, steps = about.start_us, 2 * int(log2(hosts))
    latency = start + steps * about.tree_us  # with one rank a host NCCL takes the tree's latency for rings, too
    if (algorithm, protocol) == ("ring", "Simple") and size // (2 * hosts) >= 64:
        latency *= 1.4
    return latency + size / (1000 * rate)


def channels(algorithm: str, protocol: str, size: int, hosts: int) -> int:
    """NCCL's channels: two, where the size is above its threshold (enqueue.cc, topoGetAlgoInfo)."""
    threads = {"LL": 512, "LL128": 640, "Simple": 256 if algorithm == "ring" else 512}[protocol]
    each = {"LL": 8 * (hosts if algorithm == "ring" else 1), "LL128": 8, "Simple": 64}[protocol]
    return 2 if size >= 2 * threads * each else 1


def table_here(network: Network, hosts: int) -> tuple[str, str]:
    """The tuner's table of the link that the doctor measures in the rack, and the link in words."""
    assert network.rack is not None
    where = {"WORLD_SIZE": str(hosts), "MASTER_ADDR": str(network.rack.address(0)), "MASTER_PORT": "29500"}
    doctor = [sys.executable, "-m", "netfold.cli", "doctor", "check", "--output", "json"]
    text = "\n".join(driver.outputs(network, [doctor] * hosts, where)[0])
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text[text.index("{") :])
        file.flush()
        link = measured_link(Path(file.name))
    return table_text([(hosts, hosts)], link), link.text()


def chosen(program: str, table: Path, hosts: int, estimates: dict[int, dict[tuple[str, str], float]]) -> list[str]:
    """The choice by the tuner for each size, as the program names it."""
    order = [(how, by) for how in ("tree", "ring") for by in PROTOCOLS]
    rows = [[size, *(f"{of[each]:.6f}" for each in order), *[-1] * 15] for size, of in estimates.items()]
    done = subprocess.run(
        [program, "choose", str(plugin().parent / TUNER), str(hosts), str(hosts)],
        input="\n".join(" ".join(map(str, row)) for row in rows),
        env={**os.environ, "NETFOLD_NCCL_TUNER": str(table)},
        capture_output=True,
        text=True,
        check=True,
    )
    names = []
    for size, line in zip(estimates, done.stdout.splitlines(), strict=True):
        how, by, count = line.split()
        names.append(f"{how}/{by}/{count if count != '0' else channels(how, by, size, hosts)}")
    return names


def nccl_tuner(
    rounds: int = 7, launches: int = 3, hosts: str = "2,4,8", rates: str = "1000,200", most: int = 64 << 20
) -> str:
    """NCCL's choice beside the tuner's, in the network part's time."""
    sizes = [size for size in SIZES if size <= most]
    rows: list[list[str]] = []
    wider: list[list[str]] = []
    same = 0
    include = HERE.parent / "core" / "native" / "nccl" / "include"
    making = driver.compiled([HERE / "nccl_choices.cpp"], [include])
    with making as program, tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        for count in map(int, hosts.split(",")):
            for mbit in map(int, rates.split(",")):
                with open_network(Place(count, rate=f"{mbit}mbit")) as network:
                    measure = Measure(program, Path(folder), network, count, rounds, launches)
                    changed, kept = _choices(measure, mbit, sizes)
                    rows += changed
                    same += kept
                    wider += _channels(measure, mbit, [size for size in sizes if size >= 64 << 10])
    head = "hosts, link, card says | bytes | NCCL's choice | netfold's | NCCL ms | netfold ms | time over NCCL's"
    return f"""all_reduce of f32 between hosts, one rank a host, every element checked: the network part of NCCL's
ring and double binary tree over the plugin, with NCCL's pieces and channels. {rounds} rounds in each of {launches}
launches, the choices in turns. Up to 128 calls follow one another without a pause: a link's burst would carry one small
call. Time runs from the last rank's start to the last rank's end; 5% .. 95%. NCCL's choice is that of its model for a
GPU of compute capability 8.0 and a card of the speed named (Mbit/s). The cost of a protocol on a GPU is not in the
times. Both cores carry all hosts.

Sizes: {", ".join(f"{size:,}" for size in sizes)} bytes.
**In {same} of {same + len(rows)} cases the choice is the same**, and nothing was timed. The others:

{driver.table(head, rows)}

## More channels

A ring with Simple by 1, 2 and 4 channels, each with a connection of its own: time over that with one.

{driver.table("hosts, Mbit/s | bytes | 1, ms | 2 | 4", wider)}"""


@dataclass(frozen=True)
class Measure:
    """The runs of the program between the hosts of a network."""

    program: str
    folder: Path
    network: Network
    hosts: int
    rounds: int
    launches: int

    def times(self, wanted: dict[int, list[str]]) -> dict[tuple[int, str], list[float]]:
        """Seconds of a call by size and choice, one a round; wanted: the choices for each size, taken in turns."""
        took: dict[tuple[int, str], list[float]] = defaultdict(list)
        cases = [f"{size}:{_calls(size)}:{','.join(names)}" for size, names in wanted.items()]
        for _ in range(self.launches if cases else 0):
            meeting = tempfile.mkdtemp(dir=self.folder)
            argvs = [
                [self.program, "run", str(plugin()), meeting, str(rank), str(self.hosts), str(self.rounds), *cases]
                for rank in range(self.hosts)
            ]
            for ranks in zip(*driver.outputs(self.network, argvs, {}), strict=True):
                words = [line.split() for line in ranks]
                size, name = list(wanted)[int(words[0][0])], words[0][2]
                seconds = max(float(each[4]) for each in words) - max(float(each[3]) for each in words)
                took[size, name].append(seconds / _calls(size))
        return took


def _calls(size: int) -> int:
    """Calls one after the other: together more than the emulated link's burst."""
    return min(128, max(1, (2 << 20) // size))


def _choices(measure: Measure, mbit: int, sizes: list[int]) -> tuple[list[list[str]], int]:
    """The rows of the cases in which the choices differ, and how many do not."""
    hosts = measure.hosts
    text, link = table_here(measure.network, hosts)
    table = measure.folder / "table"
    table.write_text(text)
    pairs: dict[tuple[int, int], tuple[str, str]] = {}
    for card in sorted({mbit, 10_000}):
        estimates = {
            size: {(how, by): nccl_us(how, by, size, hosts, card) for how in ("tree", "ring") for by in PROTOCOLS}
            for size in sizes
        }
        ours = chosen(measure.program, table, hosts, estimates)
        for size, choice in zip(sizes, ours, strict=True):
            how, by = min(estimates[size], key=estimates[size].__getitem__)
            pairs[card, size] = (f"{how}/{by}/{channels(how, by, size, hosts)}", choice)
    differ = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    wanted: dict[int, list[str]] = {}
    for (_, size), pair in differ.items():
        wanted[size] = sorted({*wanted.get(size, []), *pair})
    took = measure.times(wanted)
    rows = []
    for (card, size), pair in differ.items():
        times = [took[size, name] for name in pair]
        ms = [f"{np.median(each) * 1e3:.3f}" for each in times]
        rows.append([f"{hosts}, {link}, {card}", f"{size:,}", *pair, *ms, cell(paired_ratios(times[1], times[0]))])
    return rows, len(pairs) - len(differ)


def _channels(measure: Measure, mbit: int, sizes: list[int]) -> list[list[str]]:
    names = [f"ring/Simple/{count}" for count in (1, 2, 4)]
    took = measure.times(dict.fromkeys(sizes, names))
    rows = []
    for size in sizes:
        one, *more = (took[size, name] for name in names)
        ratios = [cell(paired_ratios(times, one)) for times in more]
        rows.append([f"{measure.hosts}, {mbit}", f"{size:,}", f"{np.median(one) * 1e3:.2f}", *ratios])
    return rows


if __name__ == "__main__":
    driver.run(nccl_tuner)
