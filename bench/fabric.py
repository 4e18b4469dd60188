"""The fabric against what it goes over: a stream against plain libfabric, a ring against one over connections.

    .venv/bin/python bench/fabric.py [--provider 'tcp;ofi_rxm'] [--rounds 15] [--write]

Paired: in every round both sides are measured one after the other, and the figure is the median of the rounds' ratios,
with their p5 and p95. The ping-pongs are those of fabric_ping_pong.cpp, which this compiles: the plain one has the form
of libfabric's own, fi_pingpong, which gives means, and those are lost where other processes take the cores. The rings
are two groups of the same two processes, called in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold._native import fabric

_SPAWN = multiprocessing.get_context("spawn")
_HERE = "127.0.0.1"
# Bytes, and messages there and back a round.
PING_PONGS = ((64, 100), (1024, 100), (16 << 10, 60), (64 << 10, 60), (1 << 20, 20), (16 << 20, 3), (64 << 20, 1))
RINGS = ((64 << 10, 200), (1 << 20, 40), (16 << 20, 4), (64 << 20, 1))
RESULTS = Path(__file__).parent / "results" / "fabric.md"


def ping_pongs(provider: str, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """By bytes: microseconds one way through a pipe and by plain calls, a round each."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ping_pong"
        native = Path(__file__).parent.parent / "native" / "transport"
        sources = [path for path in (native / "fabric").glob("*.cpp") if path.name != "libfabric_stub.cpp"]
        command = [
            "c++",
            "-std=c++20",
            "-O2",
            f"-I{native / 'include'}",
            str(Path(__file__).with_suffix("")) + "_ping_pong.cpp",
        ]
        command += [*map(str, sources), str(native / "socket.cpp"), "-ldl", "-o", str(program)]
        subprocess.run(command, check=True)
        pairs = [str(number) for pair in PING_PONGS for number in pair]
        run = subprocess.run([program, provider, str(rounds), *pairs], capture_output=True, text=True, check=True)
    found: dict[int, list[tuple[float, float]]] = {}
    for line in run.stdout.splitlines():
        size, pipe_us, plain_us = line.split()
        found.setdefault(int(size), []).append((float(pipe_us), float(plain_us)))
    return found


def _ring_rank(control: Connection, folder: str, rank: int, provider: str) -> None:
    groups = {}
    for transport in ("tcp", f"fabric:{provider}"):
        options = Options(transport=transport, algorithm="ring", probe="off", interface=_HERE)
        groups[transport] = Communicator(FileStore(f"{folder}/{transport}"), rank, 2, options=options)
    while (task := control.recv()) is not None:
        transport, size, rounds = task
        group = groups[transport]
        data = np.ones(size // 4, np.float32)
        group.all_reduce(data, op="max")
        began = time.perf_counter()
        for _ in range(rounds):
            group.all_reduce(data, op="max")
        control.send((time.perf_counter() - began) / rounds)
    for group in groups.values():
        group.close()


class Rings:
    """Two ranks, with a group over connections and one over the fabric."""

    def __init__(self, provider: str, folder: str) -> None:
        self._controls, self._processes = [], []
        for rank in range(2):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_ring_rank, args=(theirs, folder, rank, provider), daemon=True)
            process.start()
            self._controls.append(ours)
            self._processes.append(process)

    def seconds(self, transport: str, size: int, rounds: int) -> float:
        for control in self._controls:
            control.send((transport, size, rounds))
        return max(float(control.recv()) for control in self._controls)

    def close(self) -> None:
        for control, process in zip(self._controls, self._processes, strict=True):
            control.send(None)
            process.join()


def paired(rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float, list[float]]:
    """Medians of both, and the quotients theirs / ours: above 1, ours is the quicker. Who begins takes turns."""
    mine: list[float] = []
    other: list[float] = []
    for turn in range(rounds):
        for side in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
            (mine if side is ours else other).append(side())
    quotients = [b / a for a, b in zip(mine, other, strict=True)]
    return float(np.median(mine)), float(np.median(other)), quotients


def spread(quotients: list[float]) -> str:
    low, middle, high = np.percentile(quotients, (5, 50, 95))
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def measure(provider: str, rounds: int) -> list[str]:
    lines = [
        f"Provider {provider}, libfabric {fabric.version()}, two processes on one machine, {rounds} rounds.",
        "",
        "| ping-pong, one way | pipe us | plain libfabric us | speed against it, median (p5..p95) |",
        "|---|---|---|---|",
    ]
    for size, pairs in ping_pongs(provider, rounds).items():
        mine, other = (float(np.median(side)) for side in zip(*pairs, strict=True))
        quotients = [plain / pipe for pipe, plain in pairs]
        lines.append(f"| {size:,} bytes | {mine:.1f} | {other:.1f} | {spread(quotients)} |")
    lines += [
        "",
        "| all_reduce by a ring, 2 ranks | fabric ms | tcp ms | speed against it, median (p5..p95) |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        rings = Rings(provider, folder)
        for size, repeats in RINGS:

            def ours(size: int = size, repeats: int = repeats) -> float:
                return rings.seconds(f"fabric:{provider}", size, repeats)

            def theirs(size: int = size, repeats: int = repeats) -> float:
                return rings.seconds("tcp", size, repeats)

            mine, other, quotients = paired(rounds, ours, theirs)
            lines.append(f"| {size:,} bytes | {mine * 1e3:.2f} | {other * 1e3:.2f} | {spread(quotients)} |")
            print(lines[-1], file=sys.stderr)
        rings.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="tcp;ofi_rxm")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="replace bench/results/fabric.md")
    given: Any = parser.parse_args()
    lines = measure(given.provider, given.rounds)
    print("\n".join(lines))
    if given.write:
        RESULTS.write_text("# The fabric against what it goes over\n\n`bench/fabric.py`\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
