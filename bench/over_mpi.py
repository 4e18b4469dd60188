"""netfold over MPI beside netfold over TCP, on this machine, in one run:

    .venv/bin/python bench/over_mpi.py [ROUNDS]        # MPIs of `make bench-peers`; rewrites bench/results/over_mpi.md

Two ranks under each mpirun have two groups, one by tcp and one by mpi, both by a ring and without shared memory; they
take turns in every round, another first each time. Times are the slower rank's; ratios are taken round by round. The
MPIs are as their wheels have them: they go through the machine's memory, where TCP goes through the kernel.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, Options
from netfold.bench.peers import ORDER, have_peer, launch_mpi
from netfold.bench.spread import paired_ratios, spread

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
WAYS = ("tcp", "mpi")
RESULTS = Path(__file__).parent / "results" / "over_mpi.md"
RANKS = 2


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
            calls = max(1, min(50, (1 << 18) // size))
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


def start(mpi: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    launch = launch_mpi(mpi, RANKS, [sys.executable, __file__, "rank", str(rounds)])
    ended = subprocess.run(
        launch.argv, stdout=subprocess.PIPE, text=True, check=True, timeout=900, env=os.environ | launch.environment
    )
    told: dict[str, dict[str, list[float]]] = json.loads(ended.stdout)
    return told


def table(mpi: str, taken: dict[str, dict[str, list[float]]]) -> list[str]:
    lines = [f"## {mpi}", "", "| size | tcp | mpi | tcp / mpi |", "|---|---|---|---|"]
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
    for mpi in ORDER:
        if have_peer(mpi):
            lines += table(mpi, start(mpi, rounds))
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        told = measure(int(sys.argv[2]))
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
            print(json.dumps(told))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
