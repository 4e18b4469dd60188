"""Compares each goal with what was measured: one verdict a goal. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from netfold.quantity import format_size
from netfold_lab.bench.goals import Goal
from netfold_lab.bench.report import Row
from netfold_lab.bench.spread import paired_ratios, spread
from netfold_lab.bench.table import describe_ratio, describe_time, markdown

Rows = Mapping[str, Row]


@dataclass(frozen=True)
class Verdict:
    """One line of the report."""

    what: str
    size: str
    ranks: str
    ours: str
    our_time: str
    peer: str
    peer_time: str
    ratio: str
    goal: str
    met: bool | None  # None: there is no goal, or nothing could be measured
    why: str = ""  # nothing could be measured, or a failed check


def evaluate_goal(goal: Goal, rows: Rows, limit_s: float | None = None) -> Verdict:
    """Return the verdict on one goal. The best peer is the one with the least median time.

    rows: of the goal's own trial, by backend.
    limit_s: the alpha-beta limit, for a goal against it.
    """
    ours = rows.get(goal.ours)
    medians = {name: rows[name].time_ns for name in goal.peers if name in rows}
    peers = {name: time_ns for name, time_ns in medians.items() if time_ns is not None}
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
        name = min(peers, key=lambda peer: peers[peer].median)
        peer_time = describe_time(peers[name])
        of = spread(paired_ratios(rows[name].times_ns, ours.times_ns))
    return Verdict(
        **_head(goal),
        our_time=describe_time(ours.time_ns),
        peer=name,
        peer_time=peer_time,
        ratio=describe_ratio(of),
        met=None if goal.at_least is None else of.median >= goal.at_least,
    )


def unmeasured(goal: Goal, why: str) -> Verdict:
    return Verdict(
        **_head(goal), our_time="-", peer=" / ".join(goal.peers), peer_time="-", ratio="-", met=None, why=why
    )


def render_verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    header = ["what", "size", "ranks", "backend", "time, median (p5..p95)", "beside", "its time", "ratio (p5..p95)"]
    rows = []
    for one in verdicts:
        # The table has room for the reason's first line; the JSON has all of it.
        first_line = one.why.splitlines()[0].replace("|", "/") if one.why else ""
        end = f"not measured: {first_line}" if one.why else {True: "met", False: "**missed**", None: ""}[one.met]
        times = (one.our_time, one.peer, one.peer_time, one.ratio)
        rows.append([one.what, one.size, one.ranks, one.ours, *times, one.goal, end])
    return markdown([*header, "goal", ""], rows)


def _head(goal: Goal) -> dict[str, str]:
    return {
        "what": goal.collective,
        "size": format_size(goal.size_bytes),
        "ranks": f"{goal.place.workers}" + (" hosts" if goal.place.rack_rate else ""),
        "ours": goal.ours,
        "goal": "-" if goal.at_least is None else f">= {goal.at_least:.2f}",
    }
