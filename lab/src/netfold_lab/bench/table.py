"""Tables, for a terminal and as Markdown, and the numbers in them. Pure."""

from collections.abc import Iterable, Sequence

from netfold.units import aligned
from netfold_lab.bench.report import Breakdown, Ratio, Row
from netfold_lab.bench.spread import Spread

_HEADER = (
    *("size(B)", "count", "type", "redop", "backend", "algorithm", "wire"),
    *("time(us)", "p5..p95", "algbw", "busbw", "#wrong", "wire(B/rank)"),
)
RATIO_HEADER = ("ratio", "p5..p95", "n", "to")


def render_table(rows: Sequence[Row]) -> str:
    """Render one line a row; bandwidths in GB/s (10^9, as nccl-tests); the ratio is the peer's time over the row's."""
    lines = aligned([(*_HEADER, *RATIO_HEADER), *(_cells(row) for row in rows)])
    for row in rows:
        if row.breakdown is not None:
            lines.append(f"# {row.size_bytes} B, {row.backend}, one call: {describe_breakdown(row.breakdown)}")
    for row in rows:
        if row.tolerance > 0 and row.wrong is not None:
            lines.append(
                f"# {row.size_bytes} B, {row.backend}: an element counts as wrong where it is off by more than "
                f"{row.tolerance:.4g}"
            )
    lines += [f"# {row.size_bytes} B, {row.backend}: {row.refused}" for row in rows if row.refused is not None]
    return "\n".join(lines)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    first, *others = (f"| {' | '.join(row)} |" for row in (header, *rows))
    return [first, "|" + "---|" * len(header), *others]


def describe_breakdown(breakdown: Breakdown) -> str:
    """Return `42.0 us = Python 12.0 + queue 1.0 + wire 29.0 (medians of 640 calls)`, as far as it is known."""
    whole = f"{_us(breakdown.call_ns)} us"
    if breakdown.python_ns is None or breakdown.queue_ns is None or breakdown.wire_ns is None:
        return f"{whole} (median of {breakdown.calls} calls)"
    parts = (("Python", breakdown.python_ns), ("queue", breakdown.queue_ns), ("wire", breakdown.wire_ns))
    named = " + ".join(f"{name} {_us(part_ns)}" for name, part_ns in parts)
    return f"{whole} = {named} (medians of {breakdown.calls} calls)"


def describe_time(time_ns: Spread) -> str:
    """Return `182.40 ms (180.10..190.20)`; below a millisecond in us."""
    unit_ns, unit = (1e6, "ms") if time_ns.median >= 1e6 else (1e3, "us")
    median, p5, p95 = (value / unit_ns for value in (time_ns.median, time_ns.p5, time_ns.p95))
    return f"{median:.2f} {unit} ({p5:.2f}..{p95:.2f})"


def describe_ratio(of: Spread) -> str:
    """Return `1.50 (1.40..1.60, n=9)`."""
    return f"{of.median:.2f} ({of.p5:.2f}..{of.p95:.2f}, n={of.n})"


def ratio_cells(ratio: Ratio | None) -> tuple[str, ...]:
    """Return the cells under RATIO_HEADER."""
    if ratio is None:
        return ("-",) * len(RATIO_HEADER)
    of = ratio.spread
    return f"{of.median:.2f}", f"{of.p5:.2f}..{of.p95:.2f}", str(of.n), ratio.peer


def _cells(row: Row) -> tuple[str, ...]:
    time = ("-", "-")
    if row.time_ns is not None:
        time = (_us(row.time_ns.median), f"{_us(row.time_ns.p5)}..{_us(row.time_ns.p95)}")
    return (
        *(str(row.size_bytes), str(row.count), row.dtype, row.redop, row.backend),
        *(row.algorithm or "-", row.wire or "-"),
        *time,
        *("-" if bandwidth is None else f"{bandwidth / 1e9:.4f}" for bandwidth in (row.algbw, row.busbw)),
        "-" if row.wrong is None else str(row.wrong),
        "-" if row.wire_bytes is None else f"{row.wire_bytes:.0f}",
        *ratio_cells(row.ratio),
    )


def _us(time_ns: float) -> str:
    return f"{time_ns / 1e3:.1f}"
