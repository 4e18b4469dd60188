"""Measure what packets of few values cost on the wire, by the headers' bytes and in an emulated rack, as root:

    .venv/bin/python lab/bench/packet_values.py      # some six minutes; also draws docs/packet-values.svg

The hardware profile's packets hold 32 to 256 values, a full MTU 352. The software switch adds packets of each length.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import driver
from driver import Place, cell, open_network, take_turns

from netfold._native import protocol
from netfold_lab.bench.rack_runner import Configuration, start_rack_runner
from netfold_lab.bench.spread import Spread, paired_ratios, spread
from netfold_lab.rack.link import parse_link
from netfold_lab.rack.names import SWITCH_ADDRESS, SWITCH_PORT

# The hardware profile's sizes, and behind them a full MTU of 1500 without a MAC.
VALUES = (32, 64, 128, 256, protocol.ETHERNET_PAYLOAD_BYTES // 4)
FULL = VALUES[-1]
VALUE_BYTES = 4
# Around a packet's own header: Ethernet 14, IPv4 20, UDP 8; on a cable also preamble 8, gap 12 and frame check 4. The
# rate of an emulated link counts the former alone.
RACK_BYTES, CABLE_BYTES = 42, 66
# The talk's expectation of full MTU packets over its own of 32 values.
TALK_GAIN = 1.31
# By rate, the bytes of a call, for calls of some tenths of a second.
SIZES = {"200mbit": 4 << 20, "1gbit": 16 << 20}
IN_NETWORK = {"switch": "nearest", "algorithm": "all_reduce=in_network"}
DRAWING = Path(__file__).parents[2] / "docs" / "packet-values.svg"
DATA = driver.RESULTS / "packet_values.json"
# The daemon refuses packets as short as a pipeline's, since no path is so narrow.
SWITCH = (
    "from netfold.switch import job_lifecycle; from netfold.cli import main; "
    f"job_lifecycle.MIN_PAYLOAD_BYTES = {VALUE_BYTES * VALUES[0]}; main()"
)

# Seconds of each launch's rounds, by rate and by values.
Found = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]


def efficiency(values: int, outer_bytes: int) -> float:
    """The values' part of a packet on a link."""
    payload = VALUE_BYTES * values
    return payload / (payload + protocol.HEADER_BYTES + outer_bytes)


def packet_values(launches: int = 3, rounds: int = 7, hosts: int = 4) -> str:
    """Values in a packet: what headers take, and what a rack reaches."""
    found: dict[str, dict[str, list[list[float]]]] = {rate: {str(values): [] for values in VALUES} for rate in SIZES}
    wrong = 0
    for _ in range(launches):
        for rate, size_bytes in SIZES.items():
            with open_network(Place(hosts, rate)) as network:
                assert network.rack is not None
                listen = f"{SWITCH_ADDRESS}:{SWITCH_PORT}"
                argv = [sys.executable, "-c", SWITCH, "switch", "--listen", listen, "--open"]
                network.rack.start_switch(network.switch_lines.append, argv)
                with start_rack_runner(network.rack, driver.DEADLINE_S) as runner:
                    cases = {
                        values: Configuration(str(values), hosts, IN_NETWORK, VALUE_BYTES * values) for values in VALUES
                    }
                    runner.open(list(cases.values()))
                    sums = take_turns(VALUES, rounds, lambda values: runner.turn(cases[values], size_bytes, 1))  # noqa: B023
            for values, timings in sums.items():
                found[rate][str(values)].append([each.median_s for each in timings])
                wrong += sum(each.wrong for each in timings)
    driver.keep(DATA, found, indent=None)
    DRAWING.write_text(draw(found))
    return page(found, launches, rounds, hosts, wrong)


def page(found: Found, launches: int, rounds: int, hosts: int, wrong: int) -> str:
    rows = [
        [
            f"{values} (full MTU)" if values == FULL else values,
            VALUE_BYTES * values,
            f"{efficiency(values, CABLE_BYTES):.1%}",
            f"{efficiency(FULL, CABLE_BYTES) / efficiency(values, CABLE_BYTES):.3f}",
            f"{efficiency(values, RACK_BYTES):.3f}",
            f"{efficiency(FULL, RACK_BYTES) / efficiency(values, RACK_BYTES):.3f}",
            *(cell(goodputs(found, rate, values), ".3f") for rate in SIZES),
            *(cell(gains(found, rate, values), ".3f") for rate in SIZES),
        ]
        for values in VALUES
    ]
    head = "values | bytes of values | part of a cable | full MTU over it | part of a rack's link | full MTU over it"
    head += "".join(f" | goodput / rate, {rate}" for rate in SIZES) + "".join(
        f" | full MTU over it, {rate}" for rate in SIZES
    )
    sizes = ", ".join(f"{size >> 20} MB at {rate}" for rate, size in SIZES.items())
    return f"""![The values' part of a link, by the values in a packet](../../../docs/packet-values.svg)

all_reduce of f32 through the software switch between {hosts} hosts, links of MTU 1500 ({sizes}); {launches} launches of
rack, switch and ranks with {rounds} rounds each, in which all lengths take turns. Medians (5% .. 95%) over all rounds;
`full MTU over it` is paired by round, and is how much less time packets of {FULL} values take. On a cable a packet has
{protocol.HEADER_BYTES + CABLE_BYTES} bytes beside its values. The rate of a rack's link counts
{protocol.HEADER_BYTES + RACK_BYTES}, without preamble, gap and frame check. The switch takes packets of less than 512
bytes of values in this benchmark alone. {wrong} elements of all sums were wrong.

{driver.table(head, rows)}

The rack reaches these parts of what its headers leave: {reached(found)}. {os.cpu_count()} cores carry all hosts and the
switch. A link lets a first burst through at once, so a little over 100% is possible.

{verdict()}"""


def reached(found: Found) -> str:
    """Say for each rate which part of the limit by headers the fewest and the most values reach."""
    parts = []
    for rate in SIZES:
        of = [spread(goodputs(found, rate, each)).median / efficiency(each, RACK_BYTES) for each in (VALUES[0], FULL)]
        parts.append(f"at {rate} {of[0]:.0%} with {VALUES[0]} values and {of[1]:.0%} with {FULL}")
    return "; ".join(parts)


def verdict() -> str:
    """Compare the talk's expectation with what the headers here leave."""
    gained = {values: efficiency(FULL, CABLE_BYTES) / efficiency(values, CABLE_BYTES) - 1 for values in VALUES[:-1]}
    parts = ", ".join(f"{gain:.0%} over {values}" for values, gain in gained.items())
    # e / TALK_GAIN = 4n / (4n + b), solved for n
    part = efficiency(FULL, CABLE_BYTES) / TALK_GAIN
    same = part * (protocol.HEADER_BYTES + CABLE_BYTES) / VALUE_BYTES / (1 - part)
    return f"""The talk (SwitchML) expects some {TALK_GAIN - 1:.0%} from full MTU packets over its own of 32 values. By
headers alone full MTU packets bring {parts} here. So with headers of {protocol.HEADER_BYTES} bytes packets of 32
values lose more than the talk's, and packets of {same:.0f} values as much as the talk says. Packets of 128 values have
{1 / (1 + gained[128]):.0%} of a full MTU's goodput, and packets of 256 values {1 / (1 + gained[256]):.0%}."""


def goodputs(found: Found, rate: str, values: int) -> list[float]:
    bits = SIZES[rate] * 8 / parse_link(rate).rate_bits
    return [bits / seconds for launch in found[rate][str(values)] for seconds in launch]


def gains(found: Found, rate: str, values: int) -> list[float]:
    both = (found[rate][str(each)] for each in (values, FULL))
    return [ratio for slow, quick in zip(*both, strict=True) for ratio in paired_ratios(slow, quick)]


# --- the drawing ---

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 60, 20, 70, 64
INKS = {"200mbit": "#2da44e", "1gbit": "#bf3989"}


def draw(found: Found) -> str:
    """The values' part of a cable as bars, and the goodput in a rack as points with their spread."""
    across, up = (WIDTH - LEFT - RIGHT) / len(VALUES), HEIGHT - TOP - BOTTOM

    def y_of(part: float) -> float:
        return round(HEIGHT - BOTTOM - part * up, 1)

    marks = []
    for tick in range(0, 101, 20):
        y = y_of(tick / 100)
        marks.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        marks.append(_text(LEFT - 8, y + 4, f"{tick}%", "end"))
    for at, values in enumerate(VALUES):
        middle, part = LEFT + (at + 0.5) * across, efficiency(values, CABLE_BYTES)
        y, width = y_of(part), across * 0.62
        marks.append(
            f'<rect x="{middle - width / 2:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
            'fill="#a5c8f5"/>'
        )
        marks.append(_text(middle, HEIGHT - BOTTOM - 10, f"{part:.0%}", "middle", 'font-weight="bold"'))
        gain = efficiency(FULL, CABLE_BYTES) / part - 1
        marks.append(_text(middle, HEIGHT - BOTTOM + 18, f"{values}" + (" (full MTU)" if values == FULL else "")))
        if values != FULL:
            marks.append(_text(middle, HEIGHT - BOTTOM - 28, f"full MTU +{gain:.0%}"))
        limit = y_of(efficiency(values, RACK_BYTES))
        marks.append(
            f'<path d="M{middle - width / 2:.1f} {limit}H{middle + width / 2:.1f}" stroke="#57606a" '
            'stroke-dasharray="4 3"/>'
        )
        for number, (rate, ink) in enumerate(INKS.items()):
            x = middle + (number - 0.5) * width / 2
            of: Spread = spread(goodputs(found, rate, values))
            marks.append(f'<path d="M{x:.1f} {y_of(of.p5)}V{y_of(of.p95)}" stroke="{ink}" stroke-width="2"/>')
            marks.append(f'<circle cx="{x:.1f}" cy="{y_of(of.median)}" r="4.5" fill="{ink}"/>')
    marks.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="#57606a"/>')
    marks.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 12, "values of 32 bits in a packet"))
    marks.append(_text(LEFT, 20, "The values' part of a link's rate", "start", 'font-size="16" font-weight="bold"'))
    legend = [
        ('<rect y="-10" width="14" height="11" fill="#a5c8f5"/>', "a cable, by headers"),
        ('<path d="M0 -4H16" stroke="#57606a" stroke-dasharray="4 3"/>', "a rack, by headers"),
        *((f'<circle cx="7" cy="-4" r="4.5" fill="{ink}"/>', f"measured, {rate}") for rate, ink in INKS.items()),
    ]
    x = float(LEFT)
    for mark, label in legend:
        marks.append(f'<g transform="translate({x:.0f} 46)">{mark}{_text(22, 0, label, "start")}</g>')
        x += 36 + 7.4 * len(label)
    drawn = "\n  ".join(marks)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="Helvetica, Arial, sans-serif" font-size="13">
  <title>The values' part of a link, by the values in a packet</title>
  <style>
    @media (prefers-color-scheme: dark) {{
      [fill="#ffffff"] {{ fill: #0d1117 }} [fill="#24292f"] {{ fill: #c9d1d9 }} [fill="#a5c8f5"] {{ fill: #0c2d6b }}
      [stroke="#d0d7de"] {{ stroke: #30363d }}
    }}
  </style>
  <rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
  {drawn}
</svg>
"""


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#24292f" {more}>{text}</text>'.replace(
        " >", ">"
    )


if __name__ == "__main__":
    driver.run(packet_values)
