"""all_reduces of 16 MB of f32 between the hosts of an emulated rack, as root:

    .venv/bin/python lab/bench/rack_sums.py links      # some three minutes; also: loss, tree, wires

Sides are groups of the same processes and take turns in every round. Times are the slowest rank's. Every element is
checked; a narrow wire format cannot keep the sums, which are exact in f32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import driver
from driver import Network, Place, cell, open_network, take_turns

from netfold_lab.bench.rack_runner import Configuration, Timing, set_loss, start_rack_runner
from netfold_lab.bench.spread import paired_ratios, spread
from netfold_lab.rack.link import parse_link

SIZE = 16 << 20
IN_NETWORK = {"switch": "nearest", "algorithm": "all_reduce=in_network"}
# Rate, hosts: goals of goodput as a part of the rate, and of gloo's time over f32's and over bf16's.
LINKS: dict[tuple[str, int], tuple[float | None, float | None, float | None]] = {
    ("1gbit", 4): (0.92, None, None),
    ("1gbit", 8): (0.80, None, None),
    ("200mbit", 2): (None, None, None),
    ("200mbit", 8): (0.92, 1.65, 3.2),
}
# Time at 8 hosts over time at 2, at 200 Mbit/s; f32's time over bf16's.
FLAT, HALF = 1.05, 1.9
# How many tensors cross an uplink, each way.
CROSSING = {"one switch, at the core": "4", "a leaf in each rack, a root": "1", "no switch: a ring": "1.75"}
WIRES = ("f32", "bf16", "f16", "i32", "i8")


@contextmanager
def summing(network: Network, sides: Mapping[str, Mapping[str, str] | None]) -> Iterator[Callable[[str], Timing]]:
    """Start ranks with a group for each side, and yield one all_reduce by a side.

    sides: options of netfold, or None for gloo.
    """
    assert network.rack is not None
    groups = {side: Configuration(side, network.hosts, options) for side, options in sides.items()}
    numbers = itertools.cycle(range(1000))
    with start_rack_runner(network.rack, driver.DEADLINE_S) as runner:
        runner.open(list(groups.values()))
        yield lambda side: runner.turn(groups[side], SIZE, next(numbers))


def seconds_of(sums: list[Timing]) -> list[float]:
    """Seconds of the slowest rank, by round."""
    return [each.median_s for each in sums]


def end_of_row(sums: list[Timing], hosts: int) -> list[str]:
    """Cells: the part of the packets that was sent again, and wrong elements."""
    chunks = hosts * -(-SIZE // 1408)
    return [f"{sum(each.again for each in sums) / (chunks * len(sums)):.2%}", str(sum(each.wrong for each in sums))]


def links(rounds: int = 15) -> str:
    """Links of an emulated rack."""
    sides = {"f32": IN_NETWORK, "bf16": {**IN_NETWORK, "wire_dtype": "bf16"}, "gloo": None}
    rows, of_hosts = [], {}
    for (rate, hosts), goals in LINKS.items():
        with open_network(Place(hosts, rate, switch=True)) as network, summing(network, sides) as add:
            sums = take_turns(list(sides), rounds, add, warmups=2)
        f32, bf16, gloo = (seconds_of(sums[side]) for side in sides)
        of_hosts[rate, hosts] = spread(f32).median
        ratios = ((f32, bf16, HALF), (gloo, f32, goals[1]), (gloo, bf16, goals[2]))
        rows.append(
            [
                *(rate, hosts, *(cell(seconds, ".0f", 1e3) for seconds in (f32, bf16, gloo))),
                cell([SIZE * 8 / each / parse_link(rate).rate_bits for each in f32], ".3f") + goal(goals[0]),
                *(f"{spread(paired_ratios(a, b)).median:.2f}{goal(least)}" for a, b, least in ratios),
            ]
        )
    flat = of_hosts["200mbit", 8] / of_hosts["200mbit", 2]
    head = "link | hosts | f32, ms | bf16, ms | gloo, ms | goodput / rate | f32 / bf16 | gloo / f32 | gloo / bf16"
    return f"""Through the software switch, links of MTU 1500; medians (5% .. 95%), goals in parentheses.

{driver.table(head, rows)}

Time at 8 hosts over time at 2, 200 Mbit/s, f32: {flat:.3f} (at most {FLAT:g}). Headers leave
{1408 / (1408 + 48 + 28 + 14):.3f} of the rate, and a link lets its first 128 KB pass at once."""


def goal(value: float | None) -> str:
    return "" if value is None else f" ({value:g})"


def loss(rounds: int = 50, hosts: int = 4, rate: str = "200mbit", losses: str = "0.01%,0.1%,1%") -> str:
    """Lost packets."""
    every = ["0%", *losses.split(",")]
    # Lossy from the start: such a link cuts large packets into single ones, and must do so in every round.
    with open_network(Place(hosts, rate, loss=every[-1], switch=True)) as network:
        rack = network.rack
        assert rack is not None
        set_loss(rack, 0)
        with summing(network, {"switch": IN_NETWORK}) as add:

            def lossy(loss: str) -> Timing:
                set_loss(rack, parse_link(rate, loss).loss_ratio)
                return add("switch")

            sums = take_turns(every, rounds, lossy, warmups=2)
    clean = spread(seconds_of(sums["0%"])).median
    rows = []
    for loss, found in sums.items():
        seconds = seconds_of(found)
        of = spread(seconds)
        spread_cells = cell(seconds, ".0f", 1e3, " | ")
        ratios = [f"{of.median / clean:.3f}", f"{max(seconds) / clean:.2f}"]
        rows.append([loss, spread_cells, f"{max(seconds) * 1e3:.0f}", *ratios, *end_of_row(found, hosts)])
    head = (
        "loss of a packet, each way | ms: median | 5% .. 95% | slowest | median / no loss | slowest / no loss "
        "| sent again | wrong"
    )
    return f"""Through the software switch. A loss takes single packets (netfold/rack/link.py). The loss of every link
is set between two calls, so that each loss has its turn in every round.

{driver.table(head, rows)}

Goodput without loss: {SIZE * 8 / clean / 1e6:.0f} Mbit/s."""


def tree(rounds: int = 20, rate: str = "200mbit") -> str:
    """Trees of switches."""
    workers, racks = 8, 2
    with open_network(Place(workers, rate, racks=racks, uplink=rate, switch=True)) as network:
        rack = network.rack
        assert rack is not None
        rack.start_leaves(lambda line: None)
        options = [{**IN_NETWORK, "switch": network.switch_address}, IN_NETWORK]
        options.append({"switch": "", "algorithm": "all_reduce=ring"})
        with summing(network, dict(zip(CROSSING, options, strict=True))) as add:
            sums = take_turns(list(CROSSING), rounds, add, warmups=2)
    one = spread(seconds_of(next(iter(sums.values())))).median
    rows = []
    for shape, found in sums.items():
        seconds = seconds_of(found)
        median = spread(seconds).median
        ratios = [f"{median / one:.3f}", f"{SIZE * 8 / median / 1e6:.0f}", CROSSING[shape]]
        spread_cells = cell(seconds, ".0f", 1e3, " | ")
        rows.append([shape, spread_cells, f"{max(seconds) * 1e3:.0f}", *ratios, *end_of_row(found, workers)])
    head = (
        " | ms: median | 5% .. 95% | slowest | median / one switch | goodput Mbit/s | tensors over an uplink "
        "| sent again | wrong"
    )
    return f"""{workers} workers in {racks} racks; links, and each rack's uplink to the core, of {rate}. Through one
switch at the core four tensors cross an uplink each way. Through a leaf in each rack's switch one sum does. A ring
between hosts crosses the uplink once and sends almost twice as much.

{driver.table(head, rows)}"""


def wires(rounds: int = 10, hosts: int = 4, rate: str = "200mbit") -> str:
    """The time of each wire format between hosts."""
    sides = {wire: {**IN_NETWORK, "wire_dtype": wire} for wire in WIRES}
    with open_network(Place(hosts, rate, switch=True)) as network, summing(network, sides) as add:
        sums = take_turns(WIRES, rounds, add)
    seconds = {wire: seconds_of(found) for wire, found in sums.items()}
    rows = ([wire, cell(of, ".0f", 1e3), cell(paired_ratios(seconds["f32"], of))] for wire, of in seconds.items())
    return f"Through the software switch.\n\n{driver.table(' | ms | time of f32 over it', rows)}"


if __name__ == "__main__":
    driver.run(links, loss, tree, wires)
