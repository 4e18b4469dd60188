"""Pictures as SVG elements, by matplotlib: lines with their spread, dots in rows, points in a plane. All labelled where
they are drawn, told apart by shape as well as colour, in the page's colours, so that light and dark both read well.

Needs the extra `demo`, for matplotlib; importing this module does not.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from netfold.bench.spread import Spread

# What matplotlib draws, and the page's variable that takes its place.
INK = {
    "#0a0001": "var(--netfold)",
    "#0a0002": "var(--gloo)",
    "#0a0003": "var(--quiet)",
    "#0a0004": "var(--text)",
    "#0a0005": "var(--line)",
    "#0a0006": "var(--third)",
    "#0a0007": "var(--fourth)",
}
NETFOLD, GLOO, QUIET, TEXT, LINE, THIRD, FOURTH = INK

# By what a series' name starts with; the first that fits. Colour and marker.
_LOOKS = (
    ("netfold, in the network", NETFOLD, "o"),
    ("netfold, a leaf", NETFOLD, "o"),
    ("netfold, with a switch", NETFOLD, "o"),
    ("gloo, TCP cubic", FOURTH, "D"),
    ("gloo", GLOO, "s"),
    ("MPI", FOURTH, "v"),
    ("netfold", THIRD, "^"),
)
_OTHERS = ((NETFOLD, "o"), (THIRD, "^"), (GLOO, "s"), (FOURTH, "D"))
_WIDTH, _HEIGHT = 8.6, 3.9
# Of a label's height, between two labels' middles.
_LABEL_POINTS = 13.0


class MissingError(RuntimeError):
    """matplotlib is not here; the message says how to get it."""


@dataclass(frozen=True)
class Line:
    """A series: a spread at every x."""

    label: str
    xs: Sequence[float]
    spreads: Sequence[Spread]


@dataclass(frozen=True)
class Reference:
    """A curve without a spread, that nothing was measured for: a limit, or what was asked for."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]
    references: Sequence[Reference] = ()


@dataclass(frozen=True)
class Point:
    """One thing in a plane, with its spread along x."""

    label: str
    x: Spread
    y: float


@dataclass(frozen=True)
class Dots:
    """A row of dots, one a series, each with its spread."""

    label: str
    spreads: Mapping[str, Spread] = field(default_factory=dict)


def lines(
    panels: Sequence[Panel],
    *,
    name: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    y_from: float = 0,
    ticks: Mapping[float, str] | None = None,
) -> str:
    """Panels beside each other over one y axis; bars from the 5th to the 95th percentile. ticks: of x, else its xs."""
    figure = blank(_HEIGHT)
    from matplotlib.transforms import offset_copy

    axes: list[Axes] = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    for one, panel in zip(axes, panels, strict=True):
        dress(one)
        one.set_title(panel.title, loc="left", fontsize=10, color=TEXT)
        one.set_xlabel(x_label)
        if x_log:
            one.set_xscale("log", base=2)
        if y_log:
            one.set_yscale("log")
        for reference in panel.references:
            one.plot(reference.xs, reference.ys, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
        for number, line in enumerate(panel.lines):
            colour, marker = _look(line.label, number)
            medians = [of.median for of in line.spreads]
            below = [of.median - of.p5 for of in line.spreads]
            above = [of.p95 - of.median for of in line.spreads]
            # Beside each other, or bars at one x would hide each other.
            aside = 4 * (number - (len(panel.lines) - 1) / 2)
            moved = offset_copy(one.transData, figure, x=aside, units="points")
            style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6}
            one.errorbar(line.xs, medians, [below, above], capsize=3, elinewidth=1.0, transform=moved, **style)
        _ticks(one, ticks or {x: f"{x:g}" for line in panel.lines for x in line.xs})
    axes[0].set_ylabel(y_label)
    _limit(axes, panels, x_log=x_log, y_from=None if y_log else y_from)
    # Labels at the right end of the last panel alone: the order of its lines is that of the others.
    last = panels[-1]
    ends = [
        (line.xs[-1], line.spreads[-1].median, line.label, _look(line.label, number)[0])
        for number, line in enumerate(last.lines)
    ]
    ends += [(reference.xs[-1], reference.ys[-1], reference.label, QUIET) for reference in last.references]
    _label_ends(figure, axes[-1], ends)
    return svg(figure, name)


def dots(
    rows: Sequence[Dots],
    *,
    name: str,
    x_label: str,
    band: tuple[float, float, str] | None = None,
    numbers: bool = True,
) -> str:
    """A row a thing, the first on top; x from 0. band: from, to and what it means, shaded. numbers: above the dots;
    none where a row's dots lie too close for that.
    """
    series = list(dict.fromkeys(label for row in rows for label in row.spreads))
    figure = blank(1.3 + 0.42 * len(rows))
    axes: Axes = figure.subplots()
    dress(axes)
    if band is not None:
        axes.axvspan(band[0], band[1], color=LINE, alpha=0.6, linewidth=0)
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "va": "bottom", "ha": "left", "fontsize": 9}
        axes.annotate(band[2], (band[0], 1.01), color=QUIET, **place)
    for number, label in enumerate(series):
        colour, marker = _look(label, number)
        for place_y, row in enumerate(rows):
            if (of := row.spreads.get(label)) is None:
                continue
            spans = [[of.median - of.p5], [of.p95 - of.median]]
            style: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "markersize": 7,
                "capsize": 3,
                "linestyle": "none",
            }
            axes.errorbar([of.median], [place_y], xerr=spans, label=label if place_y == 0 else None, **style)
            said = f"{of.median:.2f}" if of.median < 10 else f"{of.median:.0f}"
            offset: dict[str, Any] = {
                "xytext": (0, 6),
                "textcoords": "offset points",
                "ha": "center",
                "va": "bottom",
                "fontsize": 9,
            }
            if numbers:
                axes.annotate(said, (of.median, place_y), color=TEXT, **offset)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.6)
    # One round that went astray must not press all others together: its bar leaves the picture.
    medians = [of.median for row in rows for of in row.spreads.values()]
    axes.set_xlim(0, max(1.2 * max(medians), band[1] * 1.05 if band is not None else 0))
    axes.set_xlabel(x_label)
    if any(len(row.spreads) > 1 for row in rows):
        above: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(series)}
        axes.legend(frameon=False, labelcolor=TEXT, borderaxespad=0.2, **above)
    return svg(figure, name)


def plane(points: Sequence[Point], *, name: str, x_label: str, y_label: str) -> str:
    """Points over a logarithmic y."""
    figure = blank(_HEIGHT)
    axes: Axes = figure.subplots()
    dress(axes)
    axes.set_yscale("log")
    for number, point in enumerate(points):
        colour, marker = (GLOO, "s") if point.label.startswith("gloo") else (NETFOLD, "o")
        spans = [[point.x.median - point.x.p5], [point.x.p95 - point.x.median]]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 7, "capsize": 3, "linestyle": "none"}
        axes.errorbar([point.x.median], [point.y], xerr=spans, **style)
        # Neighbours would write over each other: every other one writes left of its dot.
        right = number % 2 == 0
        offset: dict[str, Any] = {"xytext": (8 if right else -8, 0), "textcoords": "offset points", "va": "center"}
        beside: dict[str, Any] = {"ha": "left" if right else "right", "fontsize": 10, **offset}
        axes.annotate(point.label, (point.x.p95 if right else point.x.p5, point.y), color=colour, **beside)
    name_powers(axes)
    axes.set_ylim(min(point.y for point in points) / 4, max(point.y for point in points) * 4)
    axes.set_xlim(0, max(point.x.p95 for point in points) * 1.12)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return svg(figure, name)


def require() -> None:
    """Raises MissingError where no picture could be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingError(
            "pictures need matplotlib; install netfold's extra `demo`: pip install 'netfold[demo]'"
        ) from None


def blank(height: float) -> Figure:
    """A picture so many inches high, as wide as the page, on the page's own ground."""
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def dress(axes: Axes) -> None:
    """A grid and no frame, in the page's colours."""
    axes.patch.set_alpha(0)
    axes.grid(True, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", labelcolor=TEXT, length=0)
    axes.xaxis.label.set_color(TEXT)
    axes.yaxis.label.set_color(TEXT)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)


def name_powers(axes: Axes) -> None:
    """`10⁻⁷` at a logarithmic y axis: matplotlib's own way is a formula."""
    from matplotlib.ticker import FuncFormatter

    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "10" + f"{math.log10(value):.0f}".translate(raised)))


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element: no prolog, no metadata, no address of any kind."""
    import matplotlib as mpl

    _literally(figure)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    said = f' role="img" aria-label="{escape(name)}"'
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', lambda match: match[1] + said, svg, count=1)
    for drawn, variable in INK.items():
        svg = svg.replace(drawn, variable)
    return svg


def _look(label: str, number: int) -> tuple[str, str]:
    return next(
        ((colour, marker) for start, colour, marker in _LOOKS if label.startswith(start)),
        _OTHERS[number % len(_OTHERS)],
    )


def _ticks(axes: Axes, ticks: Mapping[float, str]) -> None:
    from matplotlib.ticker import NullLocator

    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(ticks), list(ticks.values()))


def _limit(axes: Sequence[Axes], panels: Sequence[Panel], *, x_log: bool, y_from: float | None) -> None:
    """All bars are in. y_from: where a linear y begins; None: it is logarithmic."""
    low = min(of.p5 for panel in panels for line in panel.lines for of in line.spreads)
    high = max(of.p95 for panel in panels for line in panel.lines for of in line.spreads)
    high = max([high, *(y for panel in panels for reference in panel.references for y in reference.ys)])
    if y_from is None:
        axes[0].set_ylim(low / 1.15, high * 1.15)
        _plain_decades(axes[0], high / low)
    else:
        axes[0].set_ylim(y_from, high + 0.05 * (high - y_from))
    for one, panel in zip(axes, panels, strict=True):
        xs = [x for line in panel.lines for x in line.xs]
        least, most = min(xs), max(xs)
        if x_log:
            aside = max(most / least, 2) ** 0.1
            one.set_xlim(least / aside, most * aside)
        else:
            aside = 0.06 * max(most - least, 1)
            one.set_xlim(least - aside, most + aside)


def _plain_decades(axes: Axes, span: float) -> None:
    """1, 2, 5, 10, 20, ... as they are, not as powers; no more of them than can be read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.yaxis.set_major_locator(
        MaxNLocator(6, steps=(1, 2, 5, 10)) if span < 4 else LogLocator(base=10, subs=(1, 2, 5))
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_ends(figure: Figure, axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """A label right of each line's end, pushed apart where they would cover each other."""
    _literally(figure)
    figure.draw_without_rendering()
    to_points = 72 / figure.dpi
    wanted = sorted(
        (float(axes.transData.transform((x, y))[1]) * to_points, index) for index, (x, y, *_) in enumerate(ends)
    )
    placed: list[float] = []
    for height, _ in wanted:
        placed.append(height if not placed else max(height, placed[-1] + _LABEL_POINTS))
    # Half of what they were pushed up goes down again: they stay about their lines.
    lift = max((new - old for new, (old, _) in zip(placed, wanted, strict=True)), default=0) / 2
    for new, (old, index) in zip(placed, wanted, strict=True):
        x, y, label, colour = ends[index]
        offset: dict[str, Any] = {
            "xytext": (10, new - lift - old),
            "textcoords": "offset points",
            "va": "center",
            "fontsize": 10,
        }
        axes.annotate(label, (x, y), color=colour, annotation_clip=False, **offset)


def _literally(figure: Figure) -> None:
    """No label is a formula, whatever its signs."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
