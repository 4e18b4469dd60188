"""Findings and comparisons as text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from netfold import units
from netfold.profile.compare import Change, Comparison
from netfold.profile.findings import Findings, Row, Straggler

_HEADER = (
    *("operation", "size", "count", "time(ms)", "share", "mean(ms)", "p50", "p99", "exposed(ms)", "queue(ms)"),
    *("skew(ms)", "algbw", "busbw", "algorithms", "wires", "wire", "resent", "registered", "errors"),
)
# The largest number of lines about stragglers; the longest waits come first.
_MOST_RANKS = 8


def render_table(findings: Findings) -> str:
    """One line on the whole run and one line for each row, then steps, ranks, advice and gaps.

    Bandwidths are in GB/s of 10^9 bytes, as in nccl-tests; units of sizes are powers of 2^10.
    """
    parts = [_whole(findings)]
    if findings.rows:
        parts.append("\n".join(units.aligned(_without_empty([_HEADER, *map(_cells, findings.rows)]))))
    parts.append(registrations_text(findings))
    parts.append(_steps(findings))
    parts.append("\n".join(_late(findings.stragglers)))
    parts.append("\n".join(("prediction: " if each.prediction else "") + each.text for each in findings.advice))
    parts.append("\n".join(f"# {text}" for text in findings.coverage_gaps))
    return "\n\n".join(part for part in parts if part)


def registrations_text(findings: Findings) -> str:
    """The memory that ranks on a fabric kept registered, in a sentence; empty without a fabric."""
    each = findings.registrations.values()
    if not each:
        return ""
    ranges, size, evictions = (sum(one.get(name, 0) for one in each) for name in ("ranges", "bytes", "evictions"))
    return (
        f"registered with the fabric at the end: {ranges} ranges of memory, {units.size(size)}, on {len(each)} ranks; "
        f"{evictions} were evicted for other ranges (NETFOLD_REGISTRATION_CACHE_ENTRIES, "
        "NETFOLD_REGISTRATION_CACHE_BYTES)"
    )


def render_comparison(found: Comparison) -> str:
    """hvprof's table. Improvements are in percent of A; a loss is negative."""
    by_step = found.total.steps is not None and found.total.steps[0] != found.total.steps[1]
    header = ["operation", "size", "A (ms)", "B (ms)", "improvement"]
    header += ["a step: A (ms)", "B (ms)", "improvement", ""] if by_step else [""]
    cells = [header]
    for change in (*found.rows, found.total):
        size = units.size_range(change.above_bytes, change.to_bytes) if change.operation else ""
        line = [change.name, size, _ms(change.a_s), _ms(change.b_s), _percent(change.improvement)]
        if by_step:
            line += [*map(_ms, change.per_step_s or (None, None)), _percent(change.improvement_per_step)]
        cells.append([*line, _verdict(change)])
    titles = [f"A: {found.a_title}", f"B: {found.b_title}"]
    return "\n".join([*titles, *units.aligned(cells), *(f"# {note}" for note in found.notes)])


def _whole(findings: Findings) -> str:
    overlap = findings.overall
    hosts = units.plural(len(findings.hosts), "host")
    line = f"{findings.title}: {len(findings.ranks)} of {findings.size} ranks on {hosts}; {overlap.wall_s:.3g} s"
    if overlap.communication_s is None:
        return f"{line}; how long its operations took is not known: only their submission was recorded"
    line += f", in which a rank communicated {overlap.communication_s:.3g} s"
    if overlap.communication_s > 0:
        line += f" ({100 * overlap.communication_s / overlap.wall_s:.0f}%)"
    if findings.submissions:
        line += f", not counting {sum(findings.submissions.values()):,} submitted operations"
    if overlap.exposed_s is not None and overlap.overlap_ratio is not None:
        line += f", {overlap.exposed_s:.3g} s of it exposed: computing hid {100 * overlap.overlap_ratio:.0f}%"
    return line


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        units.size_range(row.above_bytes, row.to_bytes),
        f"{row.count:g}" if row.count < 1e6 else f"{row.count:.0f}",
        _ms(row.total_s),
        "-" if row.share is None else f"{100 * row.share:.1f}%",
        *map(_ms, (row.mean_s, row.p50_s, row.p99_s, row.exposed_s, row.queue_s, row.skew_s)),
        *(f"{bandwidth / 1e9:.4f}" if bandwidth else "-" for bandwidth in (row.algbw, row.busbw)),
        *(_shares(named) for named in (row.algorithms, row.wires)),
        "-" if row.wire_bytes is None else units.size(row.wire_bytes),
        "-" if row.retransmissions is None else f"{row.retransmissions:g}",
        _registered(row),
        str(row.errors),
    )


def _registered(row: Row) -> str:
    """The share of tensors whose memory was already registered with the fabric."""
    if row.registration_hits is None or row.registration_misses is None:
        return "-"
    return f"{100 * row.registration_hits / (row.registration_hits + row.registration_misses):.0f}%"


def _shares(named: Mapping[str, int]) -> str:
    """`ring`, or `ring 75%, tree 25%`."""
    whole = sum(named.values())
    if len(named) <= 1:
        return next((name for name in named if name != "?"), "-")
    return ", ".join(f"{name} {100 * count / whole:.0f}%" for name, count in named.items())


def _without_empty(cells: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """Drop the columns in which every row has `-` or `0`."""
    keep = [at for at in range(len(_HEADER)) if any(line[at] not in ("-", "0") for line in cells[1:])]
    return [[line[at] for at in keep] for line in cells]


def _steps(findings: Findings) -> str:
    steps = findings.steps
    if steps is None:
        return ""
    parts = (("wall", steps.wall_s), ("communication", steps.communication_s), ("exposed", steps.exposed_s))
    times = ", ".join(f"{name} {_spread(values)}" for name, values in parts if values is not None)
    return f"{units.plural(steps.count, 'step')}, a step (p5..p95): {times}"


def _late(lateness: Sequence[Straggler]) -> list[str]:
    """The ranks for which other ranks waited, the longest waits first."""
    late = sorted((each for each in lateness if each.delays), key=lambda each: -each.delay_s)
    lines = [
        f"rank {each.rank} ({each.host}) was last in {each.delays} of {each.compared} operations: "
        f"{each.waiting_ranks} waited {_ms(each.delay_s)} ms for it; it waited {_ms(each.waited_s)} ms for other ranks"
        for each in late[:_MOST_RANKS]
    ]
    return [*lines, f"and {len(late) - _MOST_RANKS} more ranks"] if len(late) > _MOST_RANKS else lines


def _verdict(change: Change) -> str:
    verdict = change.verdict
    if change.within_noise is None and verdict in ("faster", "SLOWER"):
        few = change.steps is not None or change.counts[0] == change.counts[1]
        reason = "too few to tell noise" if few else f"{change.counts[0]:g} and {change.counts[1]:g} operations"
        return f"{verdict} ({reason})"
    return verdict


def _spread(values: tuple[float, float, float]) -> str:
    median, p5, p95 = map(_ms, values)
    return f"{median} ms ({p5}..{p95})"


def _ms(seconds: float | None) -> str:
    """Milliseconds in three digits, or in all digits before the point; `-` if unknown."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f}" if seconds >= 0.9995 else f"{seconds * 1e3:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}%"
