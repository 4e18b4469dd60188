"""Charts: marks of SVG and labels of HTML in a frame with two axes and a legend.

The marks stretch with the page. Labels and points are HTML, so they keep their size on a phone and on paper. Colours
are variables of the style sheet, for light and dark. A plotting library is not needed where a job runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from netfold import units
from netfold.page.escape import escape

# The side of the marks' square in SVG units.
SIDE = 1000
_MOST_TICKS = 6
# Estimate of a character's width in a label, and the least width of the labels left of a chart.
_CHARACTER_REM, _LEAST_LEFT_REM = 0.42, 4.2

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Axis:
    """An axis from the value `low` to the value `high`.

    text: a value in words.
    base: of the logarithm; None if the axis is linear.
    least_step: the least distance of two ticks of a linear axis.
    named: ticks and their labels, in place of computed ticks.
    """

    title: str
    low: float
    high: float
    text: Callable[[float], str] = str
    base: int | None = None
    least_step: float = 0.0
    named: Mapping[float, str] = field(default_factory=dict)

    @staticmethod
    def holding(title: str, low: float, high: float, text: Callable[[float], str], base: int) -> Axis:
        """A logarithmic axis, from the power of `base` at or below `low` to the power at or above `high`."""
        first = math.floor(math.log(low, base) + 1e-9)
        last = max(first + 1, math.ceil(math.log(high, base) - 1e-9))
        return Axis(title, float(base) ** first, float(base) ** last, text, base)

    def at(self, value: float) -> float:
        """The place of a value, from 0 to SIDE. Values beyond the ends are placed at the ends."""
        if self.base is None:
            part = (value - self.low) / (self.high - self.low)
        else:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return SIDE * min(1.0, max(0.0, part))

    def labels(self) -> list[tuple[float, str]]:
        """(place, label) of each tick."""
        unit, name = self._time_unit()
        write = self.text if not name else lambda value: f"{value / unit:.3g} {name}"
        named = self.named or {tick: write(tick) for tick in self._ticks()}
        return [(self.at(tick), text) for tick, text in named.items()]

    def _time_unit(self) -> tuple[float, str]:
        """(seconds, name) of the one unit of a linear axis of times above 2 minutes; (1, "") of any other axis."""
        if self.text is not units.seconds or self.base is not None:
            return 1.0, ""
        scales = ((2 * 86400, 86400.0, "days"), (2 * 3600, 3600.0, "h"), (120, 60.0, "min"))
        return next(((unit, name) for least, unit, name in scales if self.high >= least), (1.0, ""))

    def _ticks(self) -> list[float]:
        # A logarithmic axis of less than a factor of 4 would have one or two ticks only.
        if self.base is None or (self.base == 10 and self.high / self.low < 4):
            # Ticks at round numbers of the unit of the axis: minutes where seconds() writes minutes.
            unit = self._time_unit()[0]
            step = max(self.least_step, unit * _round_step((self.high - self.low) / unit / _MOST_TICKS))
            first = math.ceil(self.low / step - 1e-9)
            return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        first = math.ceil(math.log(self.low, self.base) - 1e-9)
        last = math.floor(math.log(self.high, self.base) + 1e-9)
        if self.base == 10 and last - first < 2:
            ticks = [10.0**power * factor for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
            return [tick for tick in ticks if self.low <= tick * (1 + 1e-9) and tick <= self.high * (1 + 1e-9)]
        every = max(1, math.ceil((last - first) / _MOST_TICKS))
        return [float(self.base) ** power for power in range(first, last + 1, every)]


class Chart:
    """A chart to which methods add marks.

    ink: a colour of the style sheet, `0` to `7` or a name. label: the mark's entry in the legend.
    """

    def __init__(self, across: Axis, up: Axis) -> None:
        self._across, self._up = across, up
        self._svg: list[str] = []
        self._html: list[str] = []
        self._legend: dict[str, str] = {}  # classes by label

    def svg(self, marks: str) -> None:
        """Add SVG whose coordinates go from 0 to SIDE, x from the left and y from the top."""
        self._svg.append(marks)

    def line(
        self, ink: str, points: Points, label: str = "", *, kind: str = "", dots: bool = False, aside: float = 0.0
    ) -> None:
        """Add a line from point to point. A y of None interrupts the line; a point without neighbours is a dot.

        kind: further classes (`dashed`, `dotted`, `thick`). dots: mark each point. aside: moves the line to the right,
        in SVG units.
        """
        drawn, is_on = [], False
        for x, y in points:
            if y is not None:
                # `h0` makes a dot of a line's end.
                drawn.append(f"{'L' if is_on else 'M'}{self._at(x, y, aside)}{'' if is_on else 'h0'}")
                if dots:
                    self.dot(ink, x, y, aside=aside)
            is_on = y is not None
        self._svg.append(f'<path class="ink-{ink} {kind}" d="{"".join(drawn)}"/>')
        self.label(ink, label, kind or ("dot" if dots else "line"))

    def span(self, ink: str, begin: tuple[float, float], end: tuple[float, float], *, aside: float = 0.0) -> None:
        """Add a thin line between two points, for the spread of a value."""
        self._svg.append(f'<path class="ink-{ink} thin" d="M{self._at(*begin, aside)}L{self._at(*end, aside)}"/>')

    def area(self, ink: str, points: Sequence[tuple[float, float]], label: str = "", *, kind: str = "") -> None:
        """Add a filled polygon between the points and the axis below."""
        low = self._up.low
        outline = [(points[0][0], low), *points, (points[-1][0], low)]
        self._svg.append(f'<polygon class="ink-{ink} {kind}" points="{" ".join(self._at(x, y) for x, y in outline)}"/>')
        self.label(ink, label, kind)

    def level(self, y: float, label: str = "") -> None:
        """Add a dashed line across the chart."""
        at = SIDE - self._up.at(y)
        self._svg.append(f'<line class="ink-quiet dashed level" x1="0" x2="{SIDE}" y1="{at:.1f}" y2="{at:.1f}"/>')
        self.label("quiet", label, "dashed")

    def moment(self, ink: str, x: float, text: str) -> None:
        """Add a line from top to bottom, with a tooltip."""
        at = f'x1="{self._across.at(x):.1f}" x2="{self._across.at(x):.1f}"'
        self._svg.append(f'<line class="ink-{ink} note" {at} y1="0" y2="{SIDE}"><title>{escape(text)}</title></line>')

    def band(self, low: float, high: float, label: str) -> None:
        """Shade the chart between two values across."""
        left, right = self._across.at(low), self._across.at(high)
        self._svg.append(f'<rect class="ink-line" x="{left:.1f}" width="{right - left:.1f}" y="0" height="{SIDE}"/>')
        self.label("line", label, "")

    def dot(self, ink: str, x: float, y: float, text: str = "", *, aside: float = 0.0, side: str = "above") -> None:
        """Add a point whose shape belongs to its colour. side: the text is `above`, `left` or `right`."""
        place = f'style="left:{(self._across.at(x) + aside) / SIDE:.2%};bottom:{self._up.at(y) / SIDE:.2%}"'
        self._html.append(f'<i class="dot ink-{ink}" {place}></i>')
        if text:
            self._html.append(f'<span class="{side}" {place}>{escape(text)}</span>')

    def render(self, description: str, caption: str = "", *, height_rem: float = 0.0) -> str:
        """Return the chart as a figure. description: for screen readers. height_rem: 0 for the default."""
        rows = "".join(
            f'<line class="grid" x1="0" x2="{SIDE}" y1="{SIDE - at:.1f}" y2="{SIDE - at:.1f}"/>'
            for at, _ in self._up.labels()
        )
        left = "".join(f'<span style="bottom:{at / SIDE:.2%}">{escape(text)}</span>' for at, text in self._up.labels())
        below = "".join(
            f'<span style="left:{at / SIDE:.2%}">{escape(text)}</span>' for at, text in self._across.labels()
        )
        longest = max((len(text) for _, text in self._up.labels()), default=0)
        left_rem = max(_LEAST_LEFT_REM, _CHARACTER_REM * longest + 1)
        size = f"--left:{left_rem:.1f}rem" + (f";--height:{height_rem:.1f}rem" if height_rem else "")
        return (
            f'<figure style="{size}"><div class="chart" role="img" aria-label="{escape(description)}">'
            f'<div class="up-title">{escape(self._up.title)}</div><div class="up">{left}</div>'
            f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">{rows}'
            f'{"".join(self._svg)}</svg><div class="over" aria-hidden="true">{"".join(self._html)}</div>'
            f'<div class="across">{below}</div><div class="across-title">{escape(self._across.title)}</div></div>'
            f"{legend(self._legend)}{f'<figcaption>{escape(caption)}</figcaption>' if caption else ''}</figure>"
        )

    def _at(self, x: float, y: float, aside: float = 0.0) -> str:
        return f"{self._across.at(x) + aside:.1f},{SIDE - self._up.at(y):.1f}"

    def label(self, ink: str, label: str, kind: str = "dot") -> None:
        """Add an entry to the legend, for marks that were added without a label."""
        if label:
            self._legend[label] = f"ink-{ink} {kind}"


def legend(entries: Mapping[str, str]) -> str:
    """A legend. entries: the classes of the mark by label; empty without entries."""
    found = "".join(f'<span><i class="{kind}"></i>{escape(label)}</span>' for label, kind in entries.items())
    return f'<div class="legend">{found}</div>' if found else ""


def stack(parts: Mapping[str, float], whole: float, inks: Mapping[str, str], what: str, *, thin: bool = False) -> str:
    """A bar of parts side by side, each as wide as its part of the whole. parts, inks: by the part's name."""
    drawn = "".join(
        f'<i class="ink-{inks[name]}" style="width:{100 * size / whole:.3f}%"></i>'
        for name, size in parts.items()
        if size
    )
    description = ", ".join(f"{name} {units.ratio(size / whole)}" for name, size in parts.items())
    kind = "stack thin" if thin else "stack"
    return f'<div class="{kind}" role="img" aria-label="{escape(what)}: {escape(description)}">{drawn}</div>'


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of 10 that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
