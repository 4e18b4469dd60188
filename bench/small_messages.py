"""What a small all_reduce and a barrier take through the switch, beside gloo, on one machine's loopback:

    .venv/bin/python bench/small_messages.py [ROUNDS] [CALLS] [RANKS ...]      # 12 25 2 4 8 16

Both sides are groups of the same processes, called through torch.distributed; netfold's was told to take the switch for
everything it does. Cases and sides take turns, round by round, the sides in the other order each time; before each turn
all ranks leave one start line. A call's time is the slowest rank's, and every result is checked. Writes
bench/results/small_messages.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from own_ranks import run_own_ranks

from netfold.bench.machine import spoken
from netfold.bench.start_line import StartLine

# Bytes of f32 that are summed; 0: a barrier.
CASES = (0, 8, 64, 512, 4096)
SIDES = ("netfold", "gloo")
RESULT = Path(__file__).parent / "results" / "small_messages.md"
DEADLINE_S = 900
Times = dict[tuple[int, str, int], "np.ndarray[Any, Any]"]  # by ranks, side and case: seconds of each call


def serve(rank: int, size: int, folder: str, rounds: int, calls: int) -> None:
    """A rank: every case on both sides; the seconds of each call into a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("netfold", store=store, rank=rank, world_size=size)
    groups = {"netfold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    line = StartLine(Path(folder, "line"), rank, size)
    seconds = np.zeros((len(SIDES), len(CASES), rounds + 1, calls))
    due = float(size * (size + 1) // 2)
    for turn in range(rounds + 1):  # the first is not counted
        for place, nbytes in enumerate(CASES):
            tensor = torch.empty(nbytes // 4)
            for side in SIDES if turn % 2 else SIDES[::-1]:
                group = groups[side]
                took = seconds[SIDES.index(side), place, turn]
                line.cross()
                for call in range(calls):
                    tensor.fill_(rank + 1)
                    began = time.perf_counter()
                    if nbytes == 0:
                        dist.barrier(group=group)
                    else:
                        dist.all_reduce(tensor, group=group)
                    took[call] = time.perf_counter() - began
                    assert (tensor == due).all(), f"{side}, {nbytes} bytes: {tensor}"
    np.save(f"{folder}/{rank}.npy", seconds[:, :, 1:])
    line.cross()
    dist.destroy_process_group()


def measure(size: int, rounds: int, calls: int, endpoint: str) -> Times:
    """All cases among `size` ranks."""
    with tempfile.TemporaryDirectory(prefix="netfold-small-") as folder:
        StartLine.draw(Path(folder, "line"), size)
        env = {"NETFOLD_SWITCH": endpoint, "NETFOLD_ALGORITHM": "in_network", "NETFOLD_PROBE": "off"}
        run_own_ranks(__file__, size, size, folder, rounds, calls, deadline_s=DEADLINE_S, env=env)
        slowest = np.max([np.load(f"{folder}/{rank}.npy") for rank in range(size)], axis=0)
    return {
        (size, side, nbytes): slowest[index, place].ravel()
        for index, side in enumerate(SIDES)
        for place, nbytes in enumerate(CASES)
    }


def render(times: Times, rounds: int, calls: int, load: tuple[float, float]) -> str:
    lines = [
        "Small operations through the software switch on loopback, beside gloo; the slowest rank's time in a call.",
        "",
        "| ranks | operation | netfold us: median | p99 | gloo us: median | p99 | gloo / netfold: medians | by round |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in sorted({size for size, _, _ in times}):
        for nbytes in CASES:
            ours, theirs = times[size, "netfold", nbytes] * 1e6, times[size, "gloo", nbytes] * 1e6
            a_round = np.median(theirs.reshape(rounds, calls), axis=1) / np.median(ours.reshape(rounds, calls), axis=1)
            low, high = np.percentile(a_round, (5, 95))
            lines.append(
                f"| {size} | {f'all_reduce, {nbytes} B' if nbytes else 'barrier'} "
                f"| {np.median(ours):.0f} | {np.percentile(ours, 99):.0f} "
                f"| {np.median(theirs):.0f} | {np.percentile(theirs, 99):.0f} "
                f"| {np.median(theirs) / np.median(ours):.2f} | {low:.2f} .. {high:.2f} |"
            )
    lines += [
        "",
        f"{rounds} interleaved rounds of {calls} calls each; the last column: medians of rounds, 5% to 95%. "
        f"torch {version('torch')}; {spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        folder = arguments.pop(3)
        rank, size, rounds, calls = map(int, arguments[1:])
        return serve(rank, size, folder, rounds, calls)
    rounds, calls = (int(each) for each in [*arguments[:2], *("12", "25")[len(arguments[:2]) :]])
    sizes = [int(size) for size in arguments[2:]] or [2, 4, 8, 16]
    load = os.getloadavg()[0]
    switch = subprocess.Popen(
        [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", "--drain-s", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert switch.stdout is not None
        found = re.search(r"\S+:\d+$", switch.stdout.readline().strip())
        assert found, "the switch did not start"
        times: Times = {}
        for size in sizes:
            times |= measure(size, rounds, calls, found[0])
    finally:
        switch.terminate()
        switch.wait(10)
    text = render(times, rounds, calls, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
