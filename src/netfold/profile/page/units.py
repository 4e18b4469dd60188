"""Numbers for people: three digits, and the unit behind."""

from __future__ import annotations

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZES = ((1 << 40, "TB"), (1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB"))
# Bandwidths are decimal, as nccl-tests' are; sizes are not, as its are not.
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "KB/s"))


def seconds(value: float) -> str:
    """`1.50 s`, `12.3 ms`, `456 µs`; from two minutes on `2 min 5 s`, `3 h 20 min`."""
    if value < 0:
        return "−" + seconds(-value)
    if value >= 2 * 3600:
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours:,} h {minutes} min"
    if value >= 120:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s"
    for unit, name in _TIMES:
        if value >= 0.9995 * unit:
            return f"{_three_digits(value / unit)} {name}"
    return "0 s" if value == 0 else f"{_three_digits(value / 1e-9)} ns"


def size(value: float) -> str:
    """`4 B`, `1.50 KB` (of 1024 bytes), `128 MB`."""
    for unit, name in _SIZES:
        if value >= unit:
            return f"{_three_digits(value / unit)} {name}"
    return f"{count(value)} B"


def rate(value: float) -> str:
    """Bytes a second: `1.25 GB/s`, of 10^9 bytes."""
    for unit, name in _RATES:
        if value >= unit:
            return f"{_three_digits(value / unit)} {name}"
    return f"{count(value)} B/s"


def ratio(value: float) -> str:
    """`38 %`, `4.2 %`, `0.13 %`."""
    percent = 100 * value
    if percent == 0:
        return "0 %"
    if percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2f} %" if percent < 1 else f"{percent:.1f} %" if percent < 9.95 else f"{percent:.0f} %"


def count(value: float) -> str:
    """`1,200`; a mean over ranks may have a fraction: `12.5`."""
    return f"{round(value):,}" if value == round(value) else f"{value:,.1f}"


def bucket(above_bytes: int, to_bytes: int | None) -> str:
    """`up to 128 KB`, `128 KB to 16 MB`, `above 64 MB`."""
    if to_bytes is None:
        return f"above {size(above_bytes)}"
    return f"{size(above_bytes)} to {size(to_bytes)}" if above_bytes > 0 else f"up to {size(to_bytes)}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
