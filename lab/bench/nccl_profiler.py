"""The cost of recording NCCL's events (docs/reference/profile.md):

    .venv/bin/python lab/bench/nccl_profiler.py

The program is compiled from nccl_profiler.cpp, which calls the plugin as NCCL does.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import driver
import numpy as np
from driver import cell

from netfold.cli.nccl_env import plugin
from netfold.profile.nccl import OPERATION

HERE = Path(__file__).parent
# Calls a second of all threads together, and threads.
CASES = ((10_000, 1), (10_000, 8), (100_000, 8))


def nccl_profiler(rounds: int = 10, seconds: float = 3) -> str:
    """The CPU time of NCCL's profiler in the plugin."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        program = f"{folder}/nccl_profiler"
        include = HERE.parent / "core" / "native" / "nccl" / "include"
        command = ["c++", "-std=c++20", "-O2", f"-I{include}", str(HERE / "nccl_profiler.cpp"), "-ldl", "-pthread"]
        subprocess.run([*command, "-o", program], check=True)
        for calls, threads in CASES:
            argv = [program, str(plugin()), str(calls), str(seconds), str(threads)]
            cost, burst, size, dropped = [], [], [], 0
            for number in range(rounds):
                run = Path(folder, f"{calls}-{threads}-{number}")
                off = measured([*argv, "off"], {})
                on = measured(argv, {"NETFOLD_PROFILE": str(run)})
                cost.append(100 * (on[0] / on[1] - off[0] / off[1]))
                burst.append(on[3])
                (written,) = run.glob("nccl-*")
                about = json.loads((written / "metadata.json").read_text())
                dropped += about["dropped_events"]
                operations = (written / "operations").stat().st_size // OPERATION.itemsize
                size.append(sum(each.stat().st_size for each in written.iterdir()) / operations)
            rows.append([f"{calls:,}", str(threads), cell(cost), cell(burst), f"{np.median(size):,.0f}", str(dropped)])
    head = "calls a second | threads | % of a core | ns a call in a burst | bytes an operation | events dropped"
    return f"""Calls of start, stop and state, 45 for each collective: of the API, the submission, a kernel, a send and
a receive of four steps. % of a core: CPU time of the whole process, with the thread that writes, over wall time, less
that of the same program without the calls; {rounds} pairs of {seconds} s. A burst is 40 collectives without a pause.
5% .. 95%. What NCCL itself does for its profiler is not in it.

{driver.table(head, rows)}"""


def measured(argv: list[str], environment: dict[str, str]) -> list[float]:
    env = {name: value for name, value in os.environ.items() if name != "NETFOLD_PROFILE"} | environment
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=120)
    return [float(word) for word in done.stdout.split()]


if __name__ == "__main__":
    driver.run(nccl_profiler)
