"""Which part of a run the page's timeline shows, and the numbers that its script draws.

A page must open at once, whatever the run: it carries so many operations and no more. A run with more is shown by its
median step and its slowest; the page says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from netfold.profile.columns import TRANSFERS, Integers, completes
from netfold.profile.findings import ClockOffset, Straggler
from netfold.profile.page import units
from netfold.profile.run import Run, Trace
from netfold.profile.timeline import align_clocks, group_name, lanes

# Of the whole page. An operation takes some 60 bytes of it, a step or a stretch of computing some 30.
MOST_OPERATIONS = 20_000
MOST_STRETCHES = 20_000
MOST_STEPS = 10_000
MOST_RANKS = 64
# Of the first rank's time; what is said of an operation, in the order of the numbers in `operations`.
FIELDS = (
    "began",
    "lasted",
    "lane",
    "operation",
    "bytes",
    "sequence",
    "group",
    "algorithm",
    "wire",
    "queued",
    "error",
    "submitted",
)


@dataclass(frozen=True)
class Timeline:
    """said: sentences on what is shown and how far it can be trusted; data: for the script, times in nanoseconds.

    watched: whether it is known when training threads computed.
    """

    said: list[str]
    watched: bool
    data: Mapping[str, Any]


@dataclass(frozen=True)
class _Window:
    name: str
    begin_ns: int
    end_ns: int


class _Names:
    """Names by number, the same numbers for all ranks."""

    def __init__(self) -> None:
        self.lists: dict[str, dict[str, int]] = {"operation": {}, "algorithm": {}, "wire": {}, "error": {}, "group": {}}

    def numbers(self, trace: Trace, operations: Any, what: str) -> Integers:
        known, out = self.lists[what], np.zeros(len(operations), np.int64)
        for number in np.unique(operations[what]):
            name = group_name(trace, int(number)) if what == "group" else trace.metadata.name_of(what, int(number))
            out[operations[what] == number] = known.setdefault(name, len(known))
        return out


def timeline(run: Run, clocks: Sequence[ClockOffset], lateness: Sequence[Straggler]) -> Timeline | None:
    """None where no rank recorded an operation."""
    total = sum(len(trace.operations) for trace in run.traces)
    if total == 0:
        return None
    traces = _shown(align_clocks(run, clocks), lateness)
    windows = _windows(traces)
    cut = [_cut(window, traces, MOST_OPERATIONS // len(windows)) for window in windows]
    names = _Names()
    spans = {(window.name, trace.metadata.rank): _spans(trace, window) for window in cut for trace in traces}
    shaded = sum(len(each) for each in spans.values()) <= 3 * MOST_STEPS
    data: dict[str, Any] = {
        "windows": [
            {
                "name": window.name,
                "length": window.end_ns - window.begin_ns,
                "ranks": [
                    _rank(trace, window, names, MOST_STRETCHES // (len(cut) * len(traces)))
                    | {"steps": spans[window.name, trace.metadata.rank] if shaded else []}
                    for trace in traces
                ],
            }
            for window in cut
        ],
    }
    data |= {"names": {what: list(known) for what, known in names.lists.items()}}
    data |= {"fields": FIELDS, "transfers": sorted(TRANSFERS)}
    said = _said(run, traces, windows, cut, clocks)
    if len(traces) < len(run.traces):
        which = "those that the others waited for longest" if lateness else "the first of those that did anything"
        said.append(f"Of the ranks {len(traces)} are shown, {which}.")
    if any(not completes(trace).all() for trace in traces):
        said.append("Where only the submission to a device was recorded an operation is a mark as wide as a pixel.")
    if not shaded:
        said.append(f"More than {MOST_STEPS:,} steps: they are not shaded.")
    return Timeline(said, any(rank["computing"] for window in data["windows"] for rank in window["ranks"]), data)


def _shown(run: Run, lateness: Sequence[Straggler]) -> list[Trace]:
    """All ranks, or those that the others waited for longest; who did nothing comes last."""
    if len(run.traces) <= MOST_RANKS:
        return run.traces
    waited_for = {late.rank: late.waited_for_s for late in lateness}

    def order(trace: Trace) -> tuple[bool, float]:
        return len(trace.operations) == 0, -waited_for.get(trace.metadata.rank, 0.0)

    return sorted(sorted(run.traces, key=order)[:MOST_RANKS], key=lambda trace: trace.metadata.rank)


def _windows(traces: Sequence[Trace]) -> list[_Window]:
    """The whole run; where it has too many operations two steps of it, or its middle where nobody marked steps."""
    begins = np.sort(np.concatenate([trace.operations["started_ns"] for trace in traces]))
    ends = [trace.operations["finished_ns"] for trace in traces]
    if len(begins) <= MOST_OPERATIONS:
        first, last = int(begins[0]), max(int(each.max()) for each in ends if len(each))
        for trace in traces:
            if len(trace.steps):
                first = min(first, int(trace.steps["began_ns"].min()))
                last = max(last, int(trace.steps["ended_ns"].max()))
        return [_Window("the whole run", first, max(last, first + 1))]
    leader = next((trace for trace in traces if len(trace.steps)), None)
    if leader is None:
        middle = (len(begins) - MOST_OPERATIONS) // 2
        first, last = int(begins[middle]), int(begins[middle + MOST_OPERATIONS - 1])
        return [_Window("the middle of the run", first, max(last, first + 1))]
    order = np.argsort(leader.steps["ended_ns"] - leader.steps["began_ns"], kind="stable")
    median, slowest = int(order[len(order) // 2]), int(order[-1])
    windows = [_step("the median step", median, traces)]
    return windows if median == slowest else [*windows, _step("the slowest step", slowest, traces)]


def _step(name: str, number: int, traces: Sequence[Trace]) -> _Window:
    """From when the first rank began it to when the last one ended it."""
    spans = [trace.steps[number].tolist() for trace in traces if number < len(trace.steps)]
    first = min(began_ns for began_ns, _ in spans)
    last = max(ended_ns for _, ended_ns in spans)
    return _Window(f"{name} (step {number:,})", first, max(last, first + 1))


def _cut(window: _Window, traces: Sequence[Trace], most: int) -> _Window:
    """As much of a window's beginning as has no more than `most` operations."""
    every = np.sort(np.concatenate([trace.operations["started_ns"][_within(trace, window)] for trace in traces]))
    if len(every) <= most:
        return window
    return _Window(window.name, window.begin_ns, max(int(every[most]), window.begin_ns + 1))


def _within(trace: Trace, window: _Window) -> Any:
    began, finished = trace.operations["started_ns"], trace.operations["finished_ns"]
    return (began < window.end_ns) & (finished >= window.begin_ns)


def _rank(trace: Trace, window: _Window, names: _Names, stretches: int) -> dict[str, Any]:
    operations = trace.operations[_within(trace, window)]
    submitted = ~completes(trace)[_within(trace, window)]
    order = np.argsort(operations["started_ns"], kind="stable")
    operations, submitted = operations[order], submitted[order]
    # Of a submission to a device the moment is known, not how long the operation took.
    lasted = np.where(submitted, 0, operations["finished_ns"] - operations["started_ns"])
    lane = lanes(operations["started_ns"], operations["started_ns"] + lasted)
    columns: dict[str, Any] = {
        "began": operations["started_ns"] - window.begin_ns,
        "lasted": lasted,
        "lane": lane,
        "bytes": operations["bytes"],
        "sequence": operations["sequence"],
        "queued": np.where(submitted, 0, operations["started_ns"] - operations["queued_ns"]),
        "submitted": submitted,
    }
    columns |= {what: names.numbers(trace, operations, what) for what in names.lists}
    # No error is no name, whatever a rank calls it.
    columns["error"] = np.where(operations["error"] == 0, -1, columns["error"])
    flat = np.stack([columns[field].astype(np.int64) for field in FIELDS], axis=1).reshape(-1)
    return {
        "rank": trace.metadata.rank,
        "host": trace.metadata.host,
        "lanes": int(lane.max()) + 1 if len(lane) else 0,
        "operations": flat.tolist(),
        "computing": _computing(trace, window, stretches),
    }


def _spans(trace: Trace, window: _Window) -> list[int]:
    """Number, begin and end of each step that the window touches."""
    began, ended = trace.steps["began_ns"] - window.begin_ns, trace.steps["ended_ns"] - window.begin_ns
    touched = np.nonzero((began < window.end_ns - window.begin_ns) & (ended > 0))[0]
    return [int(number) for step in touched for number in (step, began[step], ended[step])]


def _computing(trace: Trace, window: _Window, most: int) -> list[int]:
    """Begin, end and percentage of each stretch in which the training thread computed.

    Lines of progress count up: leaving lines out makes stretches longer and says nothing wrong.
    """
    at = trace.progress["at_ns"] - window.begin_ns
    first = max(0, int(np.searchsorted(at, 0, side="right")) - 1)
    last = int(np.searchsorted(at, window.end_ns - window.begin_ns, side="left")) + 1
    lines = trace.progress[first:last]
    lines = lines[np.concatenate(([True], np.diff(lines["at_ns"]) > 0))] if len(lines) else lines
    lines = lines[:: max(1, -(-len(lines) // max(most, 1)))]
    if len(lines) < 2:
        return []
    at, passed = lines["at_ns"] - window.begin_ns, np.diff(lines["at_ns"])
    percent = np.clip(np.rint(100 * np.diff(lines["busy_ns"]) / passed), 0, 100).astype(np.int64)
    out: list[int] = []
    for begin, end, part in zip(at[:-1].tolist(), at[1:].tolist(), percent.tolist(), strict=True):
        if out and out[-1] == part:
            out[-2] = end
        else:
            out += [begin, end, part]
    return out


def _said(
    run: Run, traces: Sequence[Trace], windows: Sequence[_Window], cut: Sequence[_Window], clocks: Sequence[ClockOffset]
) -> list[str]:
    total = sum(len(trace.operations) for trace in run.traces)
    shown = " and ".join(
        f"{whole.name}, {units.seconds((whole.end_ns - whole.begin_ns) * 1e-9)}"
        + (f", of which the first {units.seconds((part.end_ns - part.begin_ns) * 1e-9)}" if part != whole else "")
        for whole, part in zip(windows, cut, strict=True)
    )
    ranks = "1 rank" if len(run.traces) == 1 else f"{len(run.traces):,} ranks"
    said = [f"Shown: {shown}; the run has {units.count(total)} operations of {ranks}."]
    bounds = {clock.rank: clock.bound_ns for clock in clocks}
    others = [trace.metadata.rank for trace in traces if trace is not run.traces[0]]
    apart = [rank for rank in others if bounds.get(rank) is None]
    if apart:
        said.append(f"Nothing bounds how far the clocks of these ranks are off: {', '.join(map(str, apart))}.")
    known = [bound for rank, bound in bounds.items() if bound is not None and rank not in apart]
    if known and max(known) > 0:
        said.append(f"Between ranks, times may be off by up to {units.seconds(max(known) * 1e-9)}.")
    return said
