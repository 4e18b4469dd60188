"""Findings and comparisons as text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from netfold.profile.compare import Change, Comparison
from netfold.profile.findings import KB, MB, Findings, Row, Straggler

_HEADER = (
    *("operation", "size", "count", "time(ms)", "share", "mean(ms)", "p50", "p99", "exposed(ms)", "queue(ms)"),
    *("skew(ms)", "algbw", "busbw", "algorithms", "wires", "wire", "resent", "registered", "errors"),
)
# Lines of lateness and of clocks, at most: those that matter most come first.
_MOST_RANKS = 8


def render_table(findings: Findings) -> str:
    """What is said of the whole, one line a row, then steps, ranks, advice and what was not seen. Bandwidths in GB/s
    (10^9, as nccl-tests), sizes in 2^10."""
    parts = [_whole(findings)]
    if findings.rows:
        parts.append("\n".join(_aligned(_said([_HEADER, *(_cells(row) for row in findings.rows)]))))
    parts.append(registrations_text(findings))
    parts.append("\n".join(_steps(findings)))
    parts.append("\n".join(_late(findings.stragglers)))
    parts.append("\n".join(("prediction: " if each.prediction else "") + each.text for each in findings.advice))
    parts.append("\n".join(f"# {text}" for text in findings.coverage_gaps))
    return "\n\n".join(part for part in parts if part)


def registrations_text(findings: Findings) -> str:
    """What ranks on a fabric kept registered, in a sentence; empty where none is."""
    each = findings.registrations.values()
    if not each:
        return ""
    ranges, size, evictions = (sum(one.get(name, 0) for one in each) for name in ("ranges", "bytes", "evictions"))
    return (
        f"registered with the fabric at the end: {ranges} ranges of memory, {bytes_text(size)}, on "
        f"{len(each)} ranks; {evictions} were evicted for others (NETFOLD_REGISTRATION_CACHE_ENTRIES, "
        f"NETFOLD_REGISTRATION_CACHE_BYTES)"
    )


def render_comparison(found: Comparison) -> str:
    """hvprof's table; improvements in percent of A, a loss with its minus."""
    by_step = found.total.steps is not None and found.total.steps[0] != found.total.steps[1]
    header = ["operation", "size", "A (ms)", "B (ms)", "improvement"]
    header += ["a step: A (ms)", "B (ms)", "improvement", ""] if by_step else [""]
    cells = [header]
    for change in (*found.rows, found.total):
        size = sizes_text(change.above_bytes, change.to_bytes) if change.operation else ""
        line = [change.name, size, _known_ms(change.a_s), _known_ms(change.b_s), _percent(change.improvement)]
        if by_step and change.steps is not None:
            line += [*map(_known_ms, change.per_step_s or (None, None)), _percent(change.improvement_per_step)]
        cells.append([*line, _verdict(change)])
    titles = [f"A: {found.a_title}", f"B: {found.b_title}"]
    return "\n".join([*titles, *_aligned(cells), *(f"# {note}" for note in found.notes)])


def sizes_text(above_bytes: int, to_bytes: int | None) -> str:
    """`to 128 KB`, `128 KB - 16 MB`, `above 64 MB`."""
    if to_bytes is None:
        return f"above {bytes_text(above_bytes)}"
    if above_bytes == 0:
        return f"to {bytes_text(to_bytes)}"
    return f"{bytes_text(above_bytes)} - {bytes_text(to_bytes)}"


def bytes_text(size: float) -> str:
    """`128 KB`, `25.6 MB`: three digits, of powers of 2^10."""
    for unit, name in ((MB * KB, "GB"), (MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:.0f} {name}"
    return f"{size:.3g} B" if size < 1000 else f"{size:.0f} B"


def _whole(findings: Findings) -> str:
    overlap = findings.overall
    line = f"{findings.title}: {len(findings.ranks)} of {findings.size} ranks on {len(findings.hosts)} hosts"
    if len(findings.hosts) == 1:
        line = line.removesuffix("s")
    line += f"; {overlap.wall_s:.3g} s"
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
        sizes_text(row.above_bytes, row.to_bytes),
        f"{row.count:g}" if row.count < 1e6 else f"{row.count:.0f}",
        _known_ms(row.total_s),
        "-" if row.share is None else f"{100 * row.share:.1f}%",
        *map(_known_ms, (row.mean_s, row.p50_s, row.p99_s, row.exposed_s, row.queue_s, row.skew_s)),
        *(f"{bandwidth / 1e9:.4f}" if bandwidth else "-" for bandwidth in (row.algbw, row.busbw)),
        *(_counted(named) for named in (row.algorithms, row.wires)),
        "-" if row.wire_bytes is None else bytes_text(row.wire_bytes),
        "-" if row.retransmissions is None else f"{row.retransmissions:g}",
        _registered(row),
        str(row.errors),
    )


def _registered(row: Row) -> str:
    """The share of tensors whose memory a fabric knew already."""
    if row.registration_hits is None or row.registration_misses is None:
        return "-"
    return f"{100 * row.registration_hits / (row.registration_hits + row.registration_misses):.0f}%"


def _counted(named: Mapping[str, int]) -> str:
    """`ring`, or `ring 75%, tree 25%`."""
    whole = sum(named.values())
    if len(named) <= 1:
        return next((name for name in named if name != "?"), "-")
    return ", ".join(f"{name} {100 * count / whole:.0f}%" for name, count in named.items())


def _said(cells: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """Without the columns in which no row has anything to say: the table is wide enough."""
    keep = [at for at in range(len(_HEADER)) if any(line[at] not in ("-", "0") for line in cells[1:])]
    return [[line[at] for at in keep] for line in cells]


def _steps(findings: Findings) -> list[str]:
    steps = findings.steps
    if steps is None:
        return []
    said = [f"{steps.count} step{'s' * (steps.count > 1)}, a step (p5..p95): wall {_spread(steps.wall_s)}"]
    if steps.communication_s is not None:
        said.append(f"communication {_spread(steps.communication_s)}")
    if steps.exposed_s is not None:
        said.append(f"exposed {_spread(steps.exposed_s)}")
    return [", ".join(said)]


def _late(lateness: Sequence[Straggler]) -> list[str]:
    """Whom the others waited for, most first."""
    late = sorted((each for each in lateness if each.last), key=lambda each: -each.waited_for_s)
    lines = [
        f"rank {each.rank} ({each.host}) was last in {each.last} of {each.operations} operations: the others waited "
        f"{_ms(each.waited_for_s)} ms for it; it waited {_ms(each.waited_s)} ms for others"
        for each in late[:_MOST_RANKS]
    ]
    return [*lines, f"and {len(late) - _MOST_RANKS} more ranks"] if len(late) > _MOST_RANKS else lines


def _verdict(change: Change) -> str:
    word = change.verdict
    if change.within_noise is None and word in ("faster", "SLOWER"):
        few = change.steps is not None or change.counts[0] == change.counts[1]
        reason = "too few to tell noise" if few else f"{change.counts[0]:g} and {change.counts[1]:g} operations"
        return f"{word} ({reason})"
    return word


def _spread(values: tuple[float, float, float]) -> str:
    median, p5, p95 = values
    return f"{_ms(median)} ms ({_ms(p5)}..{_ms(p95)})"


def _known_ms(seconds: float | None) -> str:
    return "-" if seconds is None else _ms(seconds)


def _ms(seconds: float) -> str:
    return _three(seconds * 1e3)


def _three(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}%"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
