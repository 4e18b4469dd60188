"""How much of shaped links an all_reduce through the switch uses, beside gloo over the same links; as root:

    .venv/bin/python bench/links.py [ROUNDS]      # 15; some three minutes

Racks of 2 to 8 hosts, links of MTU 1500, 16 MB of f32. In each rack the sides take turns in the same processes, round
by round: through the switch as f32 and as bf16, and gloo. Times are the slowest rank's; every element is checked.
Goodput is the tensor's bits in that time, against the link's rate. Writes bench/results/links.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
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
RESULT = Path(__file__).parent / "results" / "links.md"
DEADLINE_S = 300
SIDES = ("f32", "bf16", "gloo")
# Rate, hosts: goals of goodput as a part of the rate, and of gloo's time over f32's and over bf16's.
PLACES: dict[tuple[str, int], tuple[float | None, float | None, float | None]] = {
    ("1gbit", 4): (0.92, None, None),
    ("1gbit", 8): (0.80, None, None),
    ("200mbit", 2): (None, None, None),
    ("200mbit", 8): (0.92, 1.65, 3.2),
}
# Time at 8 hosts over time at 2, at 200 Mbit/s; f32's time over bf16's.
FLAT, HALF = 1.05, 1.9


def serve(folder: str, rounds: int, result: str) -> None:
    """A rank of all sides."""
    import torch
    import torch.distributed as dist

    from netfold import Communicator, FileStore, Options

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    # Whole numbers that bf16 keeps exactly, sums included.
    pattern = (np.arange(SIZE // 4) % 16).astype(np.float32)
    tensor = np.empty_like(pattern)
    options = Options(interface=HOST_INTERFACE, algorithm="all_reduce=in_network")
    with Communicator(FileStore(folder), rank, size, options=options) as f32:
        bf16 = f32.split(0, rank, options=replace(options, wire_dtype="bf16"))
        assert bf16 is not None

        def by_gloo(array: Any) -> None:
            dist.all_reduce(torch.from_numpy(array))

        sides: dict[str, Callable[[Any], Any]] = {"f32": f32.all_reduce, "bf16": bf16.all_reduce, "gloo": by_gloo}
        taken: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(-2, rounds):
            for place in range(len(SIDES)):
                side = SIDES[(turn + place) % len(SIDES)]
                np.copyto(tensor, pattern)
                f32.barrier()
                began = time.perf_counter()
                sides[side](tensor)
                slowest = f32.all_reduce(np.array([time.perf_counter() - began]), op="max")
                assert (tensor == pattern * size).all(), side
                if turn >= 0:
                    taken[side].append(float(slowest[0]))
        bf16.close()
    dist.destroy_process_group()
    if rank == 0:
        Path(result).write_text(json.dumps(taken))


def measure(rate: str, hosts: int, rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="netfold-links-") as folder, Rack(hosts, rate) as rack:
        rack.start_switch(lambda line: None)
        result = Path(folder, "result.json")
        argv = [sys.executable, str(Path(__file__).resolve()), "rank", f"{folder}/store", str(rounds), str(result)]
        Path(folder, "store").mkdir()
        ranks = [rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE}) for host in range(hosts)]
        outcome = supervise(ranks, DEADLINE_S)
        if outcome.exit_code != 0:
            raise SystemExit("\n".join(rank.communicate()[0] for rank in ranks))
        taken: dict[str, list[float]] = json.loads(result.read_text())
        return taken


def render(found: dict[tuple[str, int], dict[str, list[float]]], load: tuple[float, float]) -> str:
    lines = [
        f"all_reduce of {SIZE >> 20} MB of f32 through the software switch, links of MTU 1500; medians and 5% .. 95%, "
        "goals in parentheses.",
        "",
        "| link | hosts | f32, ms | goodput / rate | bf16, ms | f32 / bf16 | gloo, ms | gloo / f32 | gloo / bf16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def goal(value: float | None, sign: str = "") -> str:
        return "" if value is None else f" ({sign}{value:g})"

    for (rate, hosts), taken in found.items():
        least, over_f32, over_bf16 = PLACES[rate, hosts]
        ms = {side: spread([each * 1e3 for each in taken[side]]) for side in SIDES}
        words = [f"{ms[side].median:.0f}, {ms[side].p5:.0f} .. {ms[side].p95:.0f}" for side in SIDES]
        part = spread([SIZE * 8 / each / parse_link(rate, "0%").rate_bits for each in taken["f32"]])
        halved, f32, bf16 = (
            spread(paired_ratios(taken[one], taken[other]))
            for one, other in (("f32", "bf16"), ("gloo", "f32"), ("gloo", "bf16"))
        )
        lines.append(
            f"| {rate} | {hosts} | {words[0]} | {part.median:.3f}, {part.p5:.3f} .. {part.p95:.3f}{goal(least)} "
            f"| {words[1]} | {halved.median:.2f}{goal(HALF)} | {words[2]} | {f32.median:.2f}{goal(over_f32)} "
            f"| {bf16.median:.2f}{goal(over_bf16)} |"
        )
    times = [spread(found["200mbit", hosts]["f32"]).median for hosts in (8, 2)]
    rounds = len(next(iter(found.values()))["f32"])
    lines += [
        "",
        f"Time at 8 hosts over time at 2, 200 Mbit/s, f32: {times[0] / times[1]:.3f} (at most {FLAT:g}). Headers leave "
        f"{1408 / (1408 + 48 + 28 + 14):.3f} of the rate, and a link lets its first 128 KB pass at once. {rounds} "
        f"rounds a rack; {spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(arguments[1], int(arguments[2]), arguments[3])
    rounds = int(arguments[0]) if arguments else 15
    load = os.getloadavg()[0]
    with exit_on_signals():
        found = {(rate, hosts): measure(rate, hosts, rounds) for rate, hosts in PLACES}
    text = render(found, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
