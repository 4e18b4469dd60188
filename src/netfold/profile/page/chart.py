"""A chart: marks of SVG in a frame of HTML.

Drawn by hand and not by matplotlib: a profile is often shown where the job ran, which has no use for a plotting
library, and what we draw is rectangles and lines. The marks stretch with the page while labels, being text of the page,
keep their size: the same chart is read on a phone, on paper, in light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from netfold.profile.page.escape import escape

# The marks' own units, across and up.
SIDE = 1000
_MOST_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, the values at its ends; base: of a logarithmic one, None where it is linear.

    least_step: between two ticks of a linear one, for what comes in whole numbers.
    """

    title: str
    low: float
    high: float
    text: Callable[[float], str]
    base: int | None = None
    least_step: float = 0.0

    @staticmethod
    def holding(title: str, low: float, high: float, text: Callable[[float], str], base: int) -> Axis:
        """A logarithmic one, from a power of `base` at or below `low` to one at or above `high`."""
        first = math.floor(math.log(low, base) + 1e-9)
        last = max(first + 1, math.ceil(math.log(high, base) - 1e-9))
        return Axis(title, float(base) ** first, float(base) ** last, text, base)

    def at(self, value: float) -> float:
        """Where a value stands: 0 to SIDE, held within."""
        if self.base is None:
            part = (value - self.low) / (self.high - self.low)
        else:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return SIDE * min(1.0, max(0.0, part))

    def ticks(self) -> list[float]:
        if self.base is None:
            step = max(self.least_step, _round_step((self.high - self.low) / _MOST_TICKS))
            first = math.ceil(self.low / step - 1e-9)
            return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        powers = round(math.log(self.high / self.low, self.base))
        every = math.ceil(powers / _MOST_TICKS)
        return [self.low * float(self.base) ** index for index in range(0, powers + 1, every)]


def chart(marks: str, across: Axis, up: Axis, *, said: str) -> str:
    """marks: SVG, x from the left, y from the top, 0 to SIDE each; said: the picture, for who cannot see it."""
    lines = "".join(
        f'<line class="grid" x1="0" x2="{SIDE}" y1="{SIDE - up.at(tick):.1f}" y2="{SIDE - up.at(tick):.1f}"/>'
        for tick in up.ticks()
    )
    left = "".join(
        f'<span style="bottom:{up.at(tick) / SIDE:.2%}">{escape(up.text(tick))}</span>' for tick in up.ticks()
    )
    below = "".join(
        f'<span style="left:{across.at(tick) / SIDE:.2%}">{escape(across.text(tick))}</span>' for tick in across.ticks()
    )
    return (
        f'<div class="chart" role="img" aria-label="{escape(said)}">'
        f'<div class="up-title">{escape(up.title)}</div><div class="up">{left}</div>'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">{lines}{marks}</svg>'
        f'<div class="across">{below}</div><div class="across-title">{escape(across.title)}</div></div>'
    )


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is no smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
