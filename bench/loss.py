"""What lost packets cost an all_reduce through the switch; as root:

    .venv/bin/python bench/loss.py [ROUNDS] [HOSTS] [RATE] [LOSS ...]      # 50 4 200mbit 0.01% 0.1% 1%

One rack and one group for all of it. Between rounds the loss of every link is set anew, and every loss has its turn in
every round, none among them: whatever else the machine does meets them alike. A loss takes single packets, each way
(netfold/rack/link.py). Times are the slowest rank's; every element is checked. Writes bench/results/loss.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from netfold.bench.machine import spoken
from netfold.bench.rack_runner import Configuration, Timing, set_loss, start_rack_runner
from netfold.bench.spread import spread
from netfold.rack import Rack
from netfold.rack.link import parse_link
from netfold.rack.processes import exit_on_signals

SIZE = 16 << 20
WARMUPS = 2
RESULT = Path(__file__).parent / "results" / "loss.md"
# For a whole run: a rank that is missing must not leave the others waiting for ever.
DEADLINE_S = 900


def measure(rounds: int, hosts: int, rate: str, losses: list[str]) -> dict[str, list[Timing]]:
    """For each loss a turn a round."""
    rows: dict[str, list[Timing]] = {loss: [] for loss in losses}
    way = Configuration("in the network", hosts, {"switch": "nearest"})
    # Lossy from the start: such a link cuts packets first, and must do so in every round.
    with Rack(hosts, rate, losses[-1]) as rack:
        set_loss(rack, 0)
        rack.start_switch(lambda line: None)
        with start_rack_runner(rack, DEADLINE_S) as turns:
            turns.open([way])
            for number in range(-WARMUPS, rounds):
                for place in range(len(losses)):
                    loss = losses[(number + place) % len(losses)]
                    set_loss(rack, parse_link(rate, loss).loss_ratio)
                    turn = turns.turn(way, SIZE, number + WARMUPS)
                    if number >= 0:
                        rows[loss].append(turn)
    return rows


def render(rows: dict[str, list[Timing]], hosts: int, rate: str, load: tuple[float, float]) -> str:
    chunks = hosts * -(-SIZE // 1408)
    clean = spread([turn.median_s for turn in rows["0%"]])
    lines = [
        f"{SIZE >> 20} MB f32 all_reduce through the software switch, {hosts} hosts, {rate} links.",
        "",
        "| loss of a packet, each way | ms: median | 5% .. 95% | slowest | median / no loss | slowest / no loss "
        "| sent again | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for loss, taken in rows.items():
        times = [turn.median_s for turn in taken]
        of = spread(times)
        again = sum(turn.again for turn in taken) / (chunks * len(taken))
        lines.append(
            f"| {loss} | {of.median * 1e3:.0f} | {of.p5 * 1e3:.0f} .. {of.p95 * 1e3:.0f} | {max(times) * 1e3:.0f} "
            f"| {of.median / clean.median:.3f} | {max(times) / clean.median:.2f} | {again:.2%} "
            f"| {sum(turn.wrong for turn in taken)} |"
        )
    lines += [
        "",
        f"{len(rows['0%'])} interleaved rounds; goodput without loss {SIZE * 8 / clean.median / 1e6:.0f} Mbit/s; "
        f"{spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    given = [*arguments, *("50", "4", "200mbit")[len(arguments) :]]
    rounds, hosts, rate = int(given[0]), int(given[1]), given[2]
    losses = ["0%", *(given[3:] or ["0.01%", "0.1%", "1%"])]
    load = os.getloadavg()[0]
    with exit_on_signals():
        rows = measure(rounds, hosts, rate, losses)
    text = render(rows, hosts, rate, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
