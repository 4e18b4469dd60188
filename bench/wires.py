"""What each wire format takes between hosts; run by every host of a rack, as root:

    netfold rack run --hosts 4 --rate 200mbit -- .venv/bin/python bench/wires.py FOLDER [ROUNDS]

FOLDER is fresh and seen by all hosts. An all_reduce of 16 MB of f32, every format in turn in every round; times are the
slowest rank's. Ratios to f32 are taken round by round.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold.bench.spread import paired_ratios, spread
from netfold.rack.names import HOST_INTERFACE

SIZE = 16 << 20
WIRES = ("f32", "bf16", "f16", "i32", "i8")


def main(folder: str, rounds: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = Options(interface=HOST_INTERFACE)
    given = np.random.default_rng(rank).standard_normal(SIZE // 4).astype(np.float32)
    with Communicator(FileStore(folder), rank, size, options=options) as whole:
        groups = {wire: whole.split(0, rank, options=replace(options, wire_dtype=wire)) for wire in WIRES}
        taken: dict[str, list[float]] = {wire: [] for wire in WIRES}
        for turn in range(-1, rounds):
            for wire, group in groups.items():
                assert group is not None
                tensor = given.copy()
                whole.barrier()
                began = time.perf_counter()
                group.all_reduce(tensor)
                slowest = whole.all_reduce(np.array([time.perf_counter() - began]), op="max")
                if turn >= 0:
                    taken[wire].append(float(slowest[0]))
        for group in groups.values():
            assert group is not None
            group.close()
    if rank == 0:
        for wire, times in taken.items():
            of, ratio = spread(times), spread(paired_ratios(taken["f32"], times))
            print(
                f"{wire:5} {of.median * 1e3:6.0f} ms ({of.p5 * 1e3:.0f} .. {of.p95 * 1e3:.0f})   f32 over it "
                f"{ratio.median:.2f} ({ratio.p5:.2f} .. {ratio.p95:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
