"""How long operations took, by the size of their messages: every operation of a run, as a cloud a kind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from netfold.profile.columns import completes
from netfold.profile.page import units
from netfold.profile.page.chart import SIDE, Axis, chart
from netfold.profile.page.escape import escape
from netfold.profile.record import Records
from netfold.profile.run import Run

# Cells of a cloud, across and up.
_ACROSS, _UP = 48, 32
_SHADES = 8


def scatter(run: Run) -> str:
    """Operations without bytes (a barrier) are on no logarithmic scale, and left out."""
    by_name = _operations(run)
    if not by_name:
        return "<p>No operation of this run carried bytes and has a time.</p>"
    sizes = [each["bytes"] for parts in by_name.values() for each in parts]
    times = [_time_s(each) for parts in by_name.values() for each in parts]
    across = Axis.holding(
        "bytes of one rank's tensor",
        min(int(s.min()) for s in sizes),
        max(int(s.max()) for s in sizes),
        units.size,
        base=2,
    )
    up = Axis.holding("time", min(t.min() for t in times), max(t.max() for t in times), units.seconds, base=10)
    figures = "".join(
        f"<figure>{_cloud(name, parts, across, up)}<figcaption>{escape(name)}, "
        f"{units.count(sum(len(part) for part in parts))} operations of all ranks</figcaption></figure>"
        for name, parts in sorted(by_name.items(), key=lambda pair: -sum(len(part) for part in pair[1]))
    )
    return (
        f'<div class="clouds">{figures}</div><p class="quiet">Time from start to end of every operation by its size, '
        f"both on logarithmic scales; the stronger, the more. What has no bytes (a barrier) is left out.</p>"
    )


def _operations(run: Run) -> Mapping[str, list[Records]]:
    """Those with bytes whose end was recorded, by name; a part a rank."""
    found: dict[str, list[Records]] = {}
    for trace in run.traces:
        with_bytes = trace.operations[(trace.operations["bytes"] > 0) & completes(trace)]
        for number in np.unique(with_bytes["operation"]):
            name = trace.metadata.name_of("operation", int(number))
            found.setdefault(name, []).append(with_bytes[with_bytes["operation"] == number])
    return found


def _time_s(operations: Records) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    taken: np.ndarray[tuple[int], np.dtype[np.float64]] = (
        np.maximum(operations["finished_ns"] - operations["started_ns"], 1) * 1e-9
    )
    return taken


def _cloud(name: str, parts: list[Records], across: Axis, up: Axis) -> str:
    counts = np.zeros((_ACROSS, _UP))
    x_edges = np.geomspace(across.low, across.high, _ACROSS + 1)
    y_edges = np.geomspace(up.low, up.high, _UP + 1)
    for part in parts:
        # Rounding must not put an extreme outside its own axis.
        size = np.clip(part["bytes"].astype(np.float64), x_edges[0], x_edges[-1])
        counts += np.histogram2d(size, np.clip(_time_s(part), y_edges[0], y_edges[-1]), bins=(x_edges, y_edges))[0]
    # One path a shade, a cell a unit: a full cloud takes 20 KB of the page.
    shade = np.ceil(_SHADES * np.log1p(counts) / np.log1p(counts.max()))
    marks = "".join(
        f'<path opacity="{0.2 + 0.8 * each / _SHADES:.2f}" d="'
        + "".join(f"M{x} {_UP - 1 - y}h1v1h-1z" for x, y in zip(*np.nonzero(shade == each), strict=True))
        + '"/>'
        for each in range(1, _SHADES + 1)
        if (shade == each).any()
    )
    said = f"{name}: a cloud of all operations, time by size; the table of all rows has the numbers"
    scale = f"scale({SIDE / _ACROSS:.4f} {SIDE / _UP:.4f})"
    return chart(f'<g class="cloud" transform="{scale}">{marks}</g>', across, up, said=said)
