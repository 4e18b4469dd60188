"""In-network all_reduce over a fabric beside the same over UDP.

    .venv/bin/python bench/fabric_switch.py [--rounds 15] [--write]

One switch process serves all; two ranks have a group for each way that packets can go, and the groups are called in
turn, so that in every round all are measured one after another. The figure is the median of the rounds' ratios, with
their p5 and p95. The result of each all_reduce is checked.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold._native import fabric

_SPAWN = multiprocessing.get_context("spawn")
_HERE = "127.0.0.1"
RANKS = 2
UDP = "udp"
PROVIDERS = ("tcp;ofi_rxm", "udp;ofi_rxd", "shm")
# Bytes, and operations a round.
SIZES = ((4, 100), (64 << 10, 30), (1 << 20, 8), (16 << 20, 1))
RESULTS = Path(__file__).parent / "results" / "fabric_switch.md"


def _rank(control: Connection, folder: str, rank: int, endpoint: str) -> None:
    groups = {}
    for number, way in enumerate((UDP, *PROVIDERS)):
        transport = "tcp" if way == UDP else f"fabric:{way}"
        options = Options(
            transport=transport, switch=endpoint, algorithm="in_network", probe="off", interface=_HERE, rejoin_s=0
        )
        groups[way] = Communicator(FileStore(f"{folder}/{number}"), rank, RANKS, options=options, timeout_s=20)
    while (task := control.recv()) is not None:
        way, size, repeats = task
        group = groups[way]
        data = np.full(max(1, size // 4), rank + 1.0, np.float32)
        group.all_reduce(data)
        if not (data == RANKS * (RANKS + 1) / 2).all():
            raise AssertionError(f"a wrong sum over {way}")
        began = time.perf_counter()
        for _ in range(repeats):
            group.all_reduce(data, op="max")
        control.send((time.perf_counter() - began) / repeats)
        if group.group.recoveries[0].state:
            raise AssertionError(group.group.recoveries[0].state)
    for group in groups.values():
        group.close()


def measure(rounds: int) -> dict[int, dict[str, list[float]]]:
    """By bytes and way, seconds an operation: one a round."""
    fabrics = [word for provider in PROVIDERS for word in ("--fabric", provider)]
    switch = subprocess.Popen(
        [sys.executable, "-m", "netfold.cli", "switch", "--listen", f"{_HERE}:0", "--log", "error", *fabrics],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert switch.stdout is not None
    endpoint = switch.stdout.readline().split()[-1]
    found: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        controls, processes = [], []
        for rank in range(RANKS):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_rank, args=(theirs, folder, rank, endpoint), daemon=True)
            process.start()
            theirs.close()
            controls.append(ours)
            processes.append(process)
        for size, repeats in SIZES:
            found[size] = {way: [] for way in (UDP, *PROVIDERS)}
            for turn in range(rounds):
                ways = list(found[size])
                for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    for control in controls:
                        control.send((way, size, repeats))
                    found[size][way].append(max(float(control.recv()) for control in controls))
        for control, process in zip(controls, processes, strict=True):
            control.send(None)
            process.join()
    switch.terminate()
    switch.wait()
    return found


def table(found: dict[int, dict[str, list[float]]], rounds: int) -> list[str]:
    lines = [
        f"All_reduce of f32 through a switch, {RANKS} ranks and the switch on one machine, libfabric "
        f"{fabric.version()}, {rounds} rounds.",
        "",
        "| bytes | UDP ms | "
        + " | ".join(f"{way} ms | its speed against UDP, median (p5..p95)" for way in PROVIDERS)
        + " |",
        "|---" * (2 + 2 * len(PROVIDERS)) + "|",
    ]
    for size, ways in found.items():
        cells = [f"{size:,}", f"{np.median(ways[UDP]) * 1e3:.3f}"]
        for way in PROVIDERS:
            quotients = [udp / own for udp, own in zip(ways[UDP], ways[way], strict=True)]
            low, middle, high = np.percentile(quotients, (5, 50, 95))
            cells += [f"{np.median(ways[way]) * 1e3:.3f}", f"{middle:.2f} ({low:.2f}..{high:.2f})"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="replace bench/results/fabric_switch.md")
    given: Any = parser.parse_args()
    lines = table(measure(given.rounds), given.rounds)
    print("\n".join(lines))
    if given.write:
        RESULTS.write_text(
            "# In-network aggregation over a fabric, beside UDP\n\n`bench/fabric_switch.py`\n\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
