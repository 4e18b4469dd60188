"""Numbers as text for people, in terminals and on pages: three significant digits and a unit. Pure.

May import: the standard library. Tests: `pytest core/tests/page/test_units.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZES = ((1 << 40, "TB"), (1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB"))
# As in nccl-tests, units of bandwidth are powers of 10, and units of sizes are powers of 2.
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "KB/s"))
_COUNTS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


def seconds(value: float) -> str:
    """`1.5 s`, `12.3 ms`, `456 us`; from 2 minutes `2 min 5 s`, from 2 hours `3 h 20 min`, from 2 days `34.5 days`."""
    if value < 0:
        return "−" + seconds(-value)
    if value >= 2 * 86400:
        return f"{value / 86400:.3g} days"
    if value >= 2 * 3600:
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours} h {minutes} min"
    if value >= 120:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s"
    for unit, name in _TIMES:
        # 999.6 us is `1 ms`, not `1000 us`.
        if value >= 0.9995 * unit:
            return f"{_three_digits(value / unit)} {name}"
    return "0 s" if value == 0 else f"{_three_digits(value / 1e-9)} ns"


def size(value: float) -> str:
    """Bytes: `4 B`, `1.5 KB` (of 1024 bytes), `128 MB`."""
    return _scaled(value, _SIZES) or f"{count(value)} B"


def size_range(above_bytes: int, to_bytes: int | None) -> str:
    """A bucket of sizes: `up to 128 KB`, `128 KB to 16 MB`, `above 64 MB`."""
    if to_bytes is None:
        return f"above {size(above_bytes)}"
    return f"{size(above_bytes)} to {size(to_bytes)}" if above_bytes > 0 else f"up to {size(to_bytes)}"


def rate(value: float) -> str:
    """Bytes a second: `1.25 GB/s`, of 10^9 bytes."""
    return _scaled(value, _RATES) or f"{count(value)} B/s"


def ratio(value: float) -> str:
    """A fraction in percent: `38 %`, `4.2 %`, `0.13 %`."""
    percent = 100 * value
    if percent == 0:
        return "0 %"
    if percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2f} %" if percent < 1 else f"{percent:.1f} %" if percent < 9.95 else f"{percent:.0f} %"


def times(factor: float) -> str:
    """`1.48x`, `0.013x`."""
    return f"{factor:.2f}x" if factor >= 0.1 else f"{factor:.2g}x"


def count(value: float) -> str:
    """`1,200`; one decimal if the value is not whole, as a mean over ranks may be: `12.5`."""
    return f"{round(value):,}" if value == round(value) else f"{value:,.1f}"


def big(value: float) -> str:
    """A large count in words: `175 billion`, `1.37 million`, `12,000`."""
    for unit, name in _COUNTS:
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:,.0f}"


def digits(value: float) -> str:
    """A number without a unit, in up to four significant digits: `0.0312`, `28.4`, `1e-5`, `12,000`."""
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def plural(number: int, noun: str) -> str:
    """`1 rank`, `4,096 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_few(texts: Sequence[str], limit: int) -> str:
    """`a, b, c and 2 more`: at most `limit` of the texts."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return f"{', '.join(texts[:limit])}{more}"


def counts(numbers: Mapping[str, int]) -> str:
    """Counts by name, the largest first: `ring 120, tree 8`; `–` if there is none."""
    ordered = sorted(numbers.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {count(number)}" for name, number in ordered) or "–"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Lines of a table for a terminal, one a row: columns two spaces apart, cells to the right.

    left: the columns whose cells go to the left, counted from the front or (negative) from the end.
    """
    to_left = {column % len(rows[0]) for column in left}
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in to_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """The value in the largest unit that is not larger; empty if every unit is larger."""
    return next((f"{_three_digits(value / unit)} {name}" for unit, name in units if value >= unit), "")


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
