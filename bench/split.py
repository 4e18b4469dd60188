"""What a switch behind a link of its own is worth: all_reduce by `auto`, by a ring, through the switch alone; as root:

    .venv/bin/python bench/split.py [ROUNDS [RATE [HOSTS ...]]]      # 10 200mbit 4 8; some four minutes

Racks whose switch is a host at the core, behind a link of c times a worker's; c = P: in the switch's place, with a port
a worker. 16 MB of f32, links of MTU 1500. The sides take turns in the same processes, round by round, after as many
rounds as the split has to find its parts; trials (docs/algorithms.md) count. Times are the slowest rank's; every
element is checked. The switch alone is left out where it would take more than four times a ring. The bound is n/b (x +
2 (P-1)/P (1-x)), b a link's rate less headers. Writes bench/results/split.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from netfold.bench.machine import spoken
from netfold.bench.spread import paired_ratios, spread
from netfold.rack import Rack
from netfold.rack.link import parse_link
from netfold.rack.names import HOST_INTERFACE
from netfold.rack.processes import exit_on_signals, supervise

SIZE = 16 << 20
RESULT = Path(__file__).parent / "results" / "split.md"
DEADLINE_S = 500
WARM_ROUNDS = 4
C = (0.25, 0.5, 1, 2, 4, 8)
PAYLOAD, PACKET = 1408, 1498  # of the aggregation protocol: tensor bytes, and what they take on the link


def serve(folder: str, rounds: int, sides: str, result: str) -> None:
    """A rank of all sides."""
    from netfold import Communicator, FileStore, Options

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pattern = (np.arange(SIZE // 4) % 16).astype(np.float32)
    tensor = np.empty_like(pattern)
    groups = {
        side: Communicator(
            FileStore(f"{folder}/{side}"), rank, size, options=Options(interface=HOST_INTERFACE, algorithm=side)
        )
        for side in sides.split(",")
    }
    auto = groups["auto"]
    taken: dict[str, list[float]] = {side: [] for side in groups}
    for turn in range(-WARM_ROUNDS, rounds):
        for place in range(len(groups)):
            side = list(groups)[(turn + place) % len(groups)]
            np.copyto(tensor, pattern)
            groups["ring"].barrier()
            began = time.perf_counter()
            groups[side].all_reduce(tensor)
            slowest = groups["ring"].all_reduce(np.array([time.perf_counter() - began]), op="max")
            assert (tensor == pattern * size).all(), side
            if turn >= 0:
                taken[side].append(float(slowest[0]))
    shares = auto.group.shares
    row = auto.group.table.choose("all_reduce", SIZE).algorithm
    part = 1 - shares.balanced[-1] / sum(shares.balanced) if row == "split" else float(row == "in_network")
    for group in groups.values():
        group.barrier()
        group.close()
    if rank == 0:
        Path(result).write_text(json.dumps({"taken": taken, "row": row, "part": part}))


def measure(rate: str, hosts: int, c: float, rounds: int) -> Any:
    of_switch = None if c == hosts else f"{parse_link(rate, '0%').rate_bits * c / 1e6:g}mbit"
    alone = hosts / c <= 4 * 2 * (hosts - 1) / hosts
    sides = "auto,ring" + (",in_network" if alone else "")
    with (
        tempfile.TemporaryDirectory(prefix="netfold-split-") as folder,
        Rack(hosts, rate, switch_rate=of_switch) as rack,
    ):
        rack.start_switch(lambda line: None)
        result = Path(folder, "result.json")
        argv = [sys.executable, str(Path(__file__).resolve()), "rank", folder, str(rounds), sides, str(result)]
        for side in sides.split(","):
            Path(folder, side).mkdir()
        ranks = [rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE}) for host in range(hosts)]
        outcome = supervise(ranks, DEADLINE_S)
        if outcome.exit_code != 0:
            raise SystemExit("\n".join(rank.communicate()[0] for rank in ranks))
        return json.loads(result.read_text())


def bound_s(rate: str, hosts: int, c: float) -> float:
    link = parse_link(rate, "0%").rate_bits / 8 * PAYLOAD / PACKET
    ring = 2 * (hosts - 1) / hosts
    through = min(1.0, c / hosts)
    return SIZE / link / (through + (1 - through) / ring)


def render(found: dict[tuple[str, int, float], Any], rounds: int, load: tuple[float, float]) -> str:
    lines = [
        "# A switch behind a link of its own",
        "",
        f"`bench/split.py`: all_reduce of {SIZE >> 20} MB of f32; c: the switch's link over a worker's; medians and "
        "5% .. 95% of the slowest rank's milliseconds. Ratios are of times in one round. Goals: auto over the better "
        "of the other two at most 1.05, over the bound at most 1.10.",
        "",
        "| link | hosts | c | auto, ms | through the switch | ring, ms | switch alone, ms | auto / ring "
        "| auto / switch | auto / bound | met |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (rate, hosts, c), of in found.items():
        taken = of["taken"]
        ms = {side: spread([each * 1e3 for each in times]) for side, times in taken.items()}
        words = {side: f"{each.median:.0f}, {each.p5:.0f} .. {each.p95:.0f}" for side, each in ms.items()}
        over = {
            side: spread(paired_ratios(taken["auto"], taken[side])).median
            for side in ("ring", "in_network")
            if side in taken
        }
        over_bound = ms["auto"].median / 1e3 / bound_s(rate, hosts, c)
        met = max(over.values()) <= 1.05 and over_bound <= 1.10
        through = f"{over['in_network']:.2f}" if "in_network" in over else "-"
        lines.append(
            f"| {rate} | {hosts} | {'P' if c == hosts else f'{c:g}'} | {words['auto']} | {of['row']}, {of['part']:.0%} "
            f"| {words['ring']} | {words.get('in_network', '-')} | {over['ring']:.2f} | {through} | {over_bound:.2f} "
            f"| {'yes' if met else '**no**'} |"
        )
    lines += ["", f"{rounds} rounds a rack after {WARM_ROUNDS}; {spoken(load)}"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(arguments[1], int(arguments[2]), arguments[3], arguments[4])
    rounds = int(arguments[0]) if arguments else 10
    rate = arguments[1] if len(arguments) > 1 else "200mbit"
    load = os.getloadavg()[0]
    found: dict[tuple[str, int, float], Any] = {}
    with exit_on_signals():
        for hosts in map(int, arguments[2:] or ("4", "8")):
            for c in C:
                if c <= hosts:
                    found[rate, hosts, c] = measure(rate, hosts, c, rounds)
                    print(f"{rate}, {hosts} hosts, c = {c:g}: {found[rate, hosts, c]}", flush=True)
    text = render(found, rounds, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
