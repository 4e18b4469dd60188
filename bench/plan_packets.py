"""An all_reduce packet by packet beside the one that was measured in the rack, and with ever more workers:

    .venv/bin/python bench/plan_packets.py [SEEDS]      # 5

What was measured is read from bench/results/loss.md and tree.md (bench/loss.py, bench/tree.py). Writes
bench/results/plan_packets.md.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from netfold.bench.machine import spoken
from netfold.plan.packets import Fabric, all_reduce

RESULTS = Path(__file__).parent / "results"
SIZE = 16 << 20
# The rack's: its rate counts of a frame the Ethernet header and what is in it. At 16 MB a hop's latency hardly counts.
RACK: dict[str, Any] = {"workers": 4, "bytes_per_s": 25e6, "latency_s": 50e-6, "frame_bytes": 14 + 20 + 8}
ALL_PACKETS = 10**9
FLAT = ((16, 1), (256, 1), (1024, 8), (4096, 16), (16_384, 64), (60_000, 240), (102_400, 400))


def measured() -> dict[str, tuple[float, float]]:
    """By loss: the median in ms, and the part that was sent again."""
    found = {}
    for line in (RESULTS / "loss.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[\d.]+%", cells[0]):
            found[cells[0]] = (float(cells[1]), float(cells[6].rstrip("%")) / 100)
    return found


def measured_tree_ms() -> float:
    rows = [line.strip("|").split("|") for line in (RESULTS / "tree.md").read_text().splitlines()]
    return next(float(cells[1]) for cells in rows if cells[0].strip() == "a leaf in each rack, a root")


def render(seeds: int) -> str:
    started = os.getloadavg()[0]
    lines = [
        f"{SIZE >> 20} MB f32 all_reduce, 4 hosts, 200 Mbit/s, through one switch: measured in the rack, and simulated "
        f"packet by packet; medians, of {seeds} seeds.",
        "",
        "| loss, each way | measured: ms | simulated: ms | apart | measured: sent again | simulated | slowest: ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for loss, (measured_ms, again) in measured().items():
        fabric = Fabric(**RACK, loss=float(loss.rstrip("%")) / 100)
        found = [all_reduce(fabric, SIZE, seed=seed, most_packets=ALL_PACKETS) for seed in range(seeds)]
        simulated_ms = 1e3 * median(each.time_s for each in found)
        lines.append(
            f"| {loss} | {measured_ms:.0f} | {simulated_ms:.0f} | {simulated_ms / measured_ms - 1:+.1%} | {again:.2%} "
            f"| {median(each.sent_again for each in found):.2%} | {1e3 * max(each.time_s for each in found):.0f} |"
        )
    tree_ms = measured_tree_ms()
    tree = all_reduce(replace(Fabric(**RACK), workers=8, racks=2), SIZE, most_packets=ALL_PACKETS)
    lines += [
        "",
        f"8 hosts in 2 racks, a switch in each and one above, no losses: measured {tree_ms:.0f} ms, simulated "
        f"{1e3 * tree.time_s:.0f} ms, {1e3 * tree.time_s / tree_ms - 1:+.1%}.",
        "",
        "64 KB, links of 100 Gbit/s and 1 us, no losses: what is simulated stands for the rest.",
        "",
        "| workers | racks | levels of switches | us | the formula: us | simulated | s it took |",
        "|---|---|---|---|---|---|---|",
    ]
    for workers, racks in FLAT:
        fabric = Fabric(workers, 12.5e9, 1e-6, racks)
        began = time.process_time()
        one = all_reduce(fabric, 1 << 16)
        lines.append(
            f"| {workers:,} | {racks} | {fabric.levels} | {1e6 * one.time_s:.2f} | {1e6 * one.closed_s:.2f} "
            f"| {one.said} | {time.process_time() - began:.1f} |"
        )
    lines += ["", spoken((started, os.getloadavg()[0]))]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    table = render(int(arguments[0]) if arguments else 5)
    (RESULTS / "plan_packets.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
