"""A run as a sequence diagram, in text or as SVG: a lane for each worker and switch, time from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from netfold._native import protocol
from netfold_plan.sim.network import SWITCH, Packet, address_of
from netfold_plan.sim.simulation import Call, Lost, Record, Writable

_LANE = 22  # characters
_PIXELS = 7.5  # a character
_ROW = 20  # pixels


@dataclass(frozen=True, slots=True)
class Line:
    """One event.

    source, to: a worker's index or a switch's address; equal where nothing travels.
    """

    when: str
    source: int
    to: int
    label: str
    became: str = ""
    arrives: bool = True


def line_of(record: Record) -> Line:
    """Return an event of a simulation as a line."""
    when, event = f"{record.when_ns / 1000:.1f} us", record.event
    if isinstance(event, Packet | Lost):
        packet = event.packet if isinstance(event, Lost) else event
        verdict = record.verdict
        became = "lost" if verdict is None else verdict.outcome
        if verdict is not None and verdict.outcome == "dropped":
            became += f": {verdict.drop}"
        return Line(when, packet.source, packet.to, _label(packet), became, arrives=not isinstance(event, Lost))
    label = "call" if isinstance(event, Call) else "writable" if isinstance(event, Writable) else "timer"
    return Line(when, event.worker, event.worker, label)


def _label(packet: Packet) -> str:
    header = protocol.Header.parse(packet.data)
    if header is None:
        return "garbage"
    return f"{'result' if header.flags & protocol.FLAGS['from_switch'] else 'chunk'} {header.chunk}"


def text(lines: Sequence[Line], workers: int, leaves: int = 0) -> str:
    """Draw workers to the left, then leaves, then the switch, and the outcome of each event to the right."""
    width = max((len(line.when) for line in lines), default=0)
    lanes = _lanes(workers, leaves)
    rows = [" " * width + "".join(name.center(_LANE) for name in lanes.values())]
    rows += [f"{line.when:>{width}}{_drawn(line, list(lanes))}  {line.became}".rstrip() for line in lines]
    return "\n".join(rows)


def _lanes(workers: int, leaves: int) -> dict[int, str]:
    """Return the names of all lanes by address, from left to right."""
    names = {index: f"worker {index}" for index in range(workers)}
    names |= {address_of(leaf): f"leaf {leaf}" for leaf in range(leaves)}
    return names | {SWITCH: "switch"}


def _drawn(line: Line, lanes: Sequence[int]) -> str:
    row = [" "] * (_LANE * len(lanes))
    for lane in range(len(lanes)):
        row[_middle(lane)] = "|"
    source, to = (_middle(lanes.index(address)) for address in (line.source, line.to))
    if source == to:
        _write(row, source - len(line.label) // 2 - 1, f"[{line.label}]")
        return "".join(row)
    left, right = min(source, to), max(source, to)
    row[left + 1 : right] = "-" * (right - left - 1)
    # The label stands beside the source's lane.
    label = f" {line.label} "
    _write(row, left + 3 if source == left else right - 2 - len(label), label)
    head = (">" if source == left else "<") if line.arrives else "x"
    row[right - 1 if source == left else left + 1] = head
    return "".join(row)


def _middle(lane: int) -> int:
    return _LANE * lane + _LANE // 2


def _write(row: list[str], at: int, what: str) -> None:
    row[at : at + len(what)] = what


def svg(lines: Sequence[Line], workers: int, leaves: int = 0) -> str:
    """Draw the same as one SVG document."""
    lanes = _lanes(workers, leaves)
    when = 8 + _PIXELS * max((len(line.when) for line in lines), default=0)
    lane_x = {address: when + _PIXELS * _middle(lane) for lane, address in enumerate(lanes)}
    beside = when + _PIXELS * _LANE * len(lanes)
    width = beside + _PIXELS * max((len(line.became) for line in lines), default=0) + 8
    height = _ROW * (len(lines) + 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" font-family="monospace" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for address, x in lane_x.items():
        out.append(f'<text x="{x:.0f}" y="14" text-anchor="middle">{lanes[address]}</text>')
        out.append(f'<path d="M{x:.0f} {_ROW}V{height}" stroke="silver"/>')
    for row, line in enumerate(lines):
        y = _ROW * (row + 2)
        source, to = lane_x[line.source], lane_x[line.to]
        out.append(f'<text x="{when - 8:.0f}" y="{y}" text-anchor="end">{escape(line.when)}</text>')
        out.append(f'<text x="{beside:.0f}" y="{y}">{escape(line.became)}</text>')
        label, anchor = source, "middle"
        if source != to:
            sign = 1 if to > source else -1
            colour = "black" if line.arrives else "crimson"
            end = to if line.arrives else (source + to) / 2
            tip = f"m{-6 * sign} -4l{6 * sign} 4l{-6 * sign} 4" if line.arrives else "m-4 -4l8 8m0 -8l-8 8"
            out.append(f'<path d="M{source:.0f} {y}H{end:.0f}{tip}" stroke="{colour}" fill="none"/>')
            label, anchor = source + 8 * sign, "start" if sign > 0 else "end"
        out.append(f'<text x="{label:.0f}" y="{y - 4}" text-anchor="{anchor}">{escape(line.label)}</text>')
    return "\n".join([*out, "</svg>", ""])
