"""What a leaf in each rack saves where racks share an uplink; as root:

    .venv/bin/python bench/tree.py [ROUNDS] [RATE]      # 20 200mbit; some two minutes

Two racks of four hosts, every link of that rate, each rack's uplink to the core too. Through one switch at the core
four tensors cross an uplink each way; through a leaf in each rack's switch, one sum does; a ring between hosts
crosses it once, too, and sends almost twice as much. One group a shape, in the same processes; the shapes take turns
in every round. Times are the slowest rank's; every element is checked. Writes bench/results/tree.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from netfold.bench.machine import spoken
from netfold.bench.rack_runner import Configuration, Timing, start_rack_runner
from netfold.bench.spread import spread
from netfold.rack import Rack
from netfold.rack.processes import exit_on_signals

SIZE = 16 << 20
WORKERS = 8
RACKS = 2
WARMUPS = 2
# And how many tensors cross an uplink, each way.
SHAPES = {"one switch, at the core": "4", "a leaf in each rack, a root": "1", "no switch: a ring": "1.75"}
RESULT = Path(__file__).parent / "results" / "tree.md"
# For a whole run: a rank that is missing must not leave the others waiting for ever.
DEADLINE_S = 600


def measure(rounds: int, rate: str) -> list[list[Timing]]:
    """By shape, a turn a round."""
    rows: list[list[Timing]] = [[] for _ in SHAPES]
    with Rack(WORKERS, rate, racks=RACKS, uplink=rate) as rack:
        rack.start_switch(lambda line: None)
        rack.start_leaves(lambda line: None)
        options = ({"switch": str(rack.switch_address)}, {"switch": "nearest"}, {"algorithm": "all_reduce=ring"})
        ways = [Configuration(shape, WORKERS, each) for shape, each in zip(SHAPES, options, strict=True)]
        with start_rack_runner(rack, DEADLINE_S) as turns:
            turns.open(ways)
            for number in range(-WARMUPS, rounds):
                for place in range(len(SHAPES)):
                    shape = (number + place) % len(SHAPES)
                    turn = turns.turn(ways[shape], SIZE, number + WARMUPS)
                    if number >= 0:
                        rows[shape].append(turn)
    return rows


def render(rows: list[list[Timing]], rate: str, load: tuple[float, float]) -> str:
    one = spread([turn.median_s for turn in rows[0]])
    chunks = WORKERS * -(-SIZE // 1408)
    lines = [
        f"{SIZE >> 20} MB f32 all_reduce of {WORKERS} workers in {RACKS} racks; links and uplinks of {rate}.",
        "",
        "| | ms: median | 5% .. 95% | slowest | median / one switch | goodput Mbit/s | tensors over an uplink "
        "| sent again | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (shape, crossing), taken in zip(SHAPES.items(), rows, strict=True):
        times = [turn.median_s for turn in taken]
        of = spread(times)
        again = sum(turn.again for turn in taken) / (chunks * len(taken))
        lines.append(
            f"| {shape} | {of.median * 1e3:.0f} | {of.p5 * 1e3:.0f} .. {of.p95 * 1e3:.0f} "
            f"| {max(times) * 1e3:.0f} | {of.median / one.median:.3f} | {SIZE * 8 / of.median / 1e6:.0f} "
            f"| {crossing} | {again:.2%} | {sum(turn.wrong for turn in taken)} |"
        )
    lines += [
        "",
        f"{len(rows[0])} interleaved rounds; {spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    given = [*arguments, *("20", "200mbit")[len(arguments) :]]
    rounds, rate = int(given[0]), given[1]
    load = os.getloadavg()[0]
    with exit_on_signals():
        rows = measure(rounds, rate)
    text = render(rows, rate, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
