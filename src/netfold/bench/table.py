"""Rows as text for a terminal. Pure."""

from collections.abc import Sequence

from netfold.bench.report import Breakdown, Row
from netfold.bench.spread import Spread

_HEADER = (
    *(
        "size(B)",
        "count",
        "type",
        "redop",
        "backend",
        "algorithm",
        "wire",
        "time(us)",
        "p5..p95",
        "algbw",
        "busbw",
        "#wrong",
    ),
    *("wire(B/rank)", "ratio", "p5..p95", "n", "to"),
)


def render_table(rows: Sequence[Row]) -> str:
    """One line a row; bandwidths in GB/s (10^9, as nccl-tests); the ratio is the peer's time over the row's."""
    cells = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines += [
        f"# {row.size_bytes} B, {row.backend}, one call: {describe_breakdown(row.breakdown)}"
        for row in rows
        if row.breakdown is not None
    ]
    lines += [
        f"# {row.size_bytes} B, {row.backend}: an element counts as wrong where it is off by more than "
        f"{row.tolerance:.4g}"
        for row in rows
        if row.tolerance > 0 and row.wrong is not None
    ]
    lines += [f"# {row.size_bytes} B, {row.backend}: {row.refused}" for row in rows if row.refused is not None]
    return "\n".join(lines)


def describe_breakdown(breakdown: Breakdown) -> str:
    """`42.0 us = Python 12.0 + queue 1.0 + wire 29.0 (medians of 640 calls)`, as far as it is known."""
    whole = f"{_us(breakdown.call_ns)} us"
    if breakdown.python_ns is None or breakdown.queue_ns is None or breakdown.wire_ns is None:
        return f"{whole} (median of {breakdown.calls} calls)"
    parts = (("Python", breakdown.python_ns), ("queue", breakdown.queue_ns), ("wire", breakdown.wire_ns))
    named = " + ".join(f"{name} {_us(part_ns)}" for name, part_ns in parts)
    return f"{whole} = {named} (medians of {breakdown.calls} calls)"


def describe_time(time_ns: Spread) -> str:
    """`182.40 ms (180.10..190.20)`, or in us below a millisecond."""
    unit_ns, unit = (1e6, "ms") if time_ns.median >= 1e6 else (1e3, "us")
    median, p5, p95 = (value / unit_ns for value in (time_ns.median, time_ns.p5, time_ns.p95))
    return f"{median:.2f} {unit} ({p5:.2f}..{p95:.2f})"


def _cells(row: Row) -> tuple[str, ...]:
    ratio = ("-", "-", "-", "-")
    if row.ratio is not None:
        of = row.ratio.spread
        ratio = (f"{of.median:.2f}", f"{of.p5:.2f}..{of.p95:.2f}", str(of.n), row.ratio.peer)
    time = ("-", "-")
    if row.time_ns is not None:
        time = (_us(row.time_ns.median), f"{_us(row.time_ns.p5)}..{_us(row.time_ns.p95)}")
    return (
        *(
            str(row.size_bytes),
            str(row.count),
            row.dtype,
            row.redop,
            row.backend,
            row.algorithm or "-",
            row.wire or "-",
        ),
        *time,
        *("-" if bandwidth is None else f"{bandwidth / 1e9:.4f}" for bandwidth in (row.algbw, row.busbw)),
        "-" if row.wrong is None else str(row.wrong),
        "-" if row.wire_bytes is None else f"{row.wire_bytes:.0f}",
        *ratio,
    )


def _us(time_ns: float) -> str:
    return f"{time_ns / 1e3:.1f}"
