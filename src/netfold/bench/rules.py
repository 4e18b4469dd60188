"""Measured beside asked, a line a goal. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from netfold.bench.goals import Goal
from netfold.bench.report import Row
from netfold.bench.sizes import format_size
from netfold.bench.spread import Spread, paired_ratios, spread
from netfold.bench.table import describe_time

Rows = Mapping[str, Row]


@dataclass(frozen=True)
class Verdict:
    """One line of the report. met: None where nothing was asked, or nothing could be measured (why says what)."""

    what: str
    size: str
    ranks: str
    ours: str
    our_time: str
    peer: str
    peer_time: str
    ratio: str
    goal: str
    met: bool | None
    why: str = ""


def evaluate_goal(goal: Goal, rows: Rows, limit_s: float | None = None) -> Verdict:
    """rows: by backend, of the goal's own trial; the best peer is the one with the least median time."""
    ours = rows.get(goal.ours)
    peers = [rows[backend] for backend in goal.peers if backend in rows and rows[backend].time_ns is not None]
    if ours is None or ours.time_ns is None:
        return unmeasured(goal, (ours.refused if ours is not None else None) or f"{goal.ours} was not measured")
    if goal.against_limit:
        if limit_s is None:
            return unmeasured(goal, "the limit is not known")
        name, peer_time = "the limit", f"{limit_s * 1e3:.2f} ms"
        of = spread([limit_s * 1e9 / time_ns for time_ns in ours.times_ns])
    else:
        if not peers:
            refusals = [rows[backend].refused for backend in goal.peers if backend in rows]
            return unmeasured(goal, next(filter(None, refusals), f"no peer of {', '.join(goal.peers)} is here"))
        best = min(peers, key=_median)
        name, peer_time = best.backend, _time(best)
        of = spread(paired_ratios(best.times_ns, ours.times_ns))
    return Verdict(
        **_head(goal),
        our_time=_time(ours),
        peer=name,
        peer_time=peer_time,
        ratio=_ratio(of),
        met=None if goal.at_least is None else of.median >= goal.at_least,
    )


def unmeasured(goal: Goal, why: str) -> Verdict:
    return Verdict(
        **_head(goal), our_time="-", peer=" / ".join(goal.peers), peer_time="-", ratio="-", met=None, why=why
    )


def render_verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [
        "| what | size | ranks | backend | time, median (p5..p95) | beside | its time | ratio (p5..p95) | goal | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in verdicts:
        # A table's line ends where the text's first does; the whole reason is in the JSON.
        first_line = one.why.splitlines()[0].replace("|", "/") if one.why else ""
        end = f"not measured: {first_line}" if one.why else {True: "met", False: "**missed**", None: ""}[one.met]
        cells = (one.what, one.size, one.ranks, one.ours, one.our_time, one.peer, one.peer_time, one.ratio, one.goal)
        lines.append(f"| {' | '.join(cells)} | {end} |")
    return lines


def _head(goal: Goal) -> dict[str, str]:
    return {
        "what": goal.collective,
        "size": format_size(goal.size_bytes),
        "ranks": f"{goal.place.workers}" + (" hosts" if goal.place.rack_rate else ""),
        "ours": goal.ours,
        "goal": "-" if goal.at_least is None else f">= {goal.at_least:.2f}",
    }


def _median(row: Row) -> float:
    assert row.time_ns is not None
    return row.time_ns.median


def _time(row: Row) -> str:
    assert row.time_ns is not None
    return describe_time(row.time_ns)


def _ratio(of: Spread) -> str:
    return f"{of.median:.2f} ({of.p5:.2f}..{of.p95:.2f}, n={of.n})"
