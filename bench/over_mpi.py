"""netfold over MPI beside netfold over TCP, in one run:

    .venv/bin/python bench/over_mpi.py [ROUNDS]     # root; MPIs of `make bench-peers`; rewrites results/over_mpi.md

Two ranks under each mpirun have two groups, one by tcp and one by mpi, both by a ring and without netfold's shared
memory; they take turns in every round, another first each time. Times are the slower rank's; ratios are taken round by
round. First on this machine, where the MPIs are as their wheels have them: they go through its memory, TCP through the
kernel. Then on two hosts of a rack, where both go over the same link: the MPIs by TCP, as the bench has them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, Options
from netfold.bench.launch import start_mpi
from netfold.bench.mpi_peers import ORDER, have_peer, launch_mpi
from netfold.bench.spread import paired_ratios, spread
from netfold.bootstrap.launchers import placement
from netfold.rack import Rack

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
WAYS = ("tcp", "mpi")
RESULTS = Path(__file__).parent / "results" / "over_mpi.md"
RANKS = 2
RATE = "1gbit"


def measure(rounds: int) -> dict[str, Any]:
    """As a rank."""
    base = Options(transport="tcp", probe="off")
    with Communicator.from_environment(options=base) as whole:
        groups = {
            way: whole.split(0, whole.rank, options=Options(transport=way, probe="off", algorithm="ring"))
            for way in WAYS
        }
        taken: dict[str, dict[int, list[float]]] = {way: {size: [] for size in SIZES} for way in WAYS}
        for size in SIZES:
            given = np.random.default_rng(whole.rank).standard_normal(size // 4).astype(np.float32)
            calls = max(2, min(200, (8 << 20) // size))
            for turn in range(-2, rounds):
                for way in WAYS[:: 1 if turn % 2 == 0 else -1]:
                    group = groups[way]
                    assert group is not None
                    tensor = given.copy()
                    whole.barrier()
                    began = time.perf_counter()
                    for _ in range(calls):
                        group.all_reduce(tensor, op="max")
                    mine = np.array([(time.perf_counter() - began) / calls])
                    if turn >= 0:
                        taken[way][size].append(float(whole.all_reduce(mine, op="max")[0]))
                    else:
                        whole.barrier()
        for group in groups.values():
            assert group is not None
            group.close()
    return taken


Taken = dict[str, dict[str, list[float]]]


def on_this_machine(mpi: str, rounds: int) -> Taken:
    with tempfile.TemporaryDirectory() as folder:
        launch = launch_mpi(mpi, RANKS, [*_command(rounds), folder])
        subprocess.run(launch.argv, check=True, timeout=900, env=os.environ | launch.environment)
        return _told(folder)


def between_hosts(mpi: str, rounds: int) -> Taken:
    with tempfile.TemporaryDirectory() as folder, Rack(RANKS, RATE, "0%", delay="0us") as rack:
        # The rack says who each host is; here the launcher does.
        without = [word for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") for word in ("-u", name)]
        process = start_mpi(rack, mpi, Path(folder), ["env", *without, *_command(rounds), folder])
        assert process.wait(900) == 0
        return _told(folder)


def _command(rounds: int) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "rank", str(rounds)]


def _told(folder: str) -> Taken:
    told: Taken = json.loads(Path(folder, "taken.json").read_text())
    return told


def table(title: str, taken: Taken) -> list[str]:
    lines = [f"## {title}", "", "| size | tcp | mpi | tcp / mpi |", "|---|---|---|---|"]
    for size in SIZES:
        tcp, over = taken["tcp"][str(size)], taken["mpi"][str(size)]
        ratio = spread(paired_ratios(tcp, over))
        cells = [f"{spread(each).median * 1e6:.0f} us" for each in (tcp, over)]
        lines.append(f"| {_say(size)} | {' | '.join(cells)} | {ratio.median:.2f} ({ratio.p5:.2f}..{ratio.p95:.2f}) |")
    return [*lines, ""]


def _say(size: int) -> str:
    return f"{size >> 20} MB" if size >> 20 else f"{size >> 10} KB" if size >> 10 else f"{size} B"


def main(rounds: int) -> None:
    load = os.getloadavg()[0]
    lines = [
        "# netfold over MPI beside netfold over TCP",
        "",
        f"`bench/over_mpi.py {rounds}`: all_reduce (max) of f32 by a ring, {RANKS} ranks on one machine of "
        f"{os.cpu_count()} cores ({platform.machine()}, load {load:.1f} when it began), both without netfold's shared "
        "memory. Medians of the slower rank; ratios round by round (p5..p95), above 1 where MPI is quicker.",
        "",
    ]
    here = [mpi for mpi in ORDER if have_peer(mpi)]
    for mpi in here:
        lines += table(f"{mpi}, on one machine", on_this_machine(mpi, rounds))
    for mpi in here:
        lines += table(f"{mpi}, over a link of {RATE}", between_hosts(mpi, rounds))
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        taken = measure(int(sys.argv[2]))
        if placement().rank == 0:
            Path(sys.argv[3], "taken.json").write_text(json.dumps(taken))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
