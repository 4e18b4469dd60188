"""The part of a run that the page's timeline shows, and the numbers for timeline.js.

The number of operations on the page is bounded, so that every page opens at once. Of a larger run the timeline shows
the median step and the slowest step, and names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from netfold import units
from netfold.profile.columns import TRANSFERS, Bools, Integers, completes
from netfold.profile.findings import ClockOffset, Straggler
from netfold.profile.run import Run, Trace
from netfold.profile.timeline import align_clocks, computing_percent, group_name, lanes

# Bounds of the whole page. An operation takes about 60 bytes of it, a step or a stretch of computing about 30.
MOST_OPERATIONS = 20_000
MOST_STRETCHES = 20_000
MOST_STEPS = 10_000
MOST_RANKS = 64
# The numbers of an operation in `operations`, in order. Times are in nanoseconds of the first rank's clock.
FIELDS = (
    *("began", "lasted", "lane", "operation", "bytes", "sequence", "group", "algorithm", "wire"),
    *("queued", "error", "submitted"),
)
_NAMED = ("operation", "algorithm", "wire", "error", "group")


@dataclass(frozen=True)
class Timeline:
    """The result of `timeline`."""

    notes: list[str]  # sentences: what is shown, and how exact the times are
    watched: bool  # whether it is known when training threads computed
    data: Mapping[str, Any]  # for the script


@dataclass(frozen=True)
class _Window:
    name: str
    begin_ns: int
    end_ns: int

    @property
    def text(self) -> str:
        return units.seconds((self.end_ns - self.begin_ns) * 1e-9)


class _Names:
    """Numbers for names, the same numbers for all ranks."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, int]] = {what: {} for what in _NAMED}

    def numbers(self, trace: Trace, operations: Any, what: str) -> Integers:
        """[n] numbers of the operations' names."""
        table, out = self.tables[what], np.zeros(len(operations), np.int64)
        for number in np.unique(operations[what]):
            name = group_name(trace, int(number)) if what == "group" else trace.metadata.name_of(what, int(number))
            out[operations[what] == number] = table.setdefault(name, len(table))
        return out


def timeline(run: Run, clocks: Sequence[ClockOffset], lateness: Sequence[Straggler]) -> Timeline | None:
    """Return the timeline; None if no rank recorded an operation."""
    total = sum(len(trace.operations) for trace in run.traces)
    if total == 0:
        return None
    traces = _shown(align_clocks(run, clocks), lateness)
    whole = _windows(traces)
    windows = [_cut(window, traces, MOST_OPERATIONS // len(whole)) for window in whole]
    names = _Names()
    spans = {(window.name, trace.metadata.rank): _spans(trace, window) for window in windows for trace in traces}
    shaded = sum(map(len, spans.values())) <= 3 * MOST_STEPS
    stretches = MOST_STRETCHES // (len(windows) * len(traces))
    drawn: list[dict[str, Any]] = [
        {
            "name": window.name,
            "length": window.end_ns - window.begin_ns,
            "ranks": [
                _rank(trace, window, names, stretches)
                | {"steps": spans[window.name, trace.metadata.rank] if shaded else []}
                for trace in traces
            ],
        }
        for window in windows
    ]
    shown = " and ".join(
        f"{all_.name}, {all_.text}" + (f", of which the first {part.text}" if part != all_ else "")
        for all_, part in zip(whole, windows, strict=True)
    )
    ranks = units.plural(len(run.traces), "rank")
    notes = [
        f"Shown: {shown}; the run has {units.count(total)} operations of {ranks}.",
        *_clock_notes(run, traces, clocks),
    ]
    if len(traces) < len(run.traces):
        which = "those with the longest waits for them" if lateness else "the first that recorded operations"
        notes.append(f"Of the ranks {len(traces)} are shown, {which}.")
    if any(not completes(trace).all() for trace in traces):
        notes.append("An operation of which only the submission to a device was recorded is a mark one pixel wide.")
    if not shaded:
        notes.append(f"More than {MOST_STEPS:,} steps: they are not shaded.")
    return Timeline(
        notes,
        any(rank["computing"] for window in drawn for rank in window["ranks"]),
        {
            "windows": drawn,
            "names": {what: list(table) for what, table in names.tables.items()},
            "fields": FIELDS,
            "transfers": sorted(TRANSFERS),
        },
    )


def _shown(run: Run, lateness: Sequence[Straggler]) -> list[Trace]:
    """All ranks, or those with the longest waits for them. Ranks without operations come last."""
    if len(run.traces) <= MOST_RANKS:
        return run.traces
    waited_for = {late.rank: late.waited_for_s for late in lateness}

    def order(trace: Trace) -> tuple[bool, float]:
        return len(trace.operations) == 0, -waited_for.get(trace.metadata.rank, 0.0)

    return sorted(sorted(run.traces, key=order)[:MOST_RANKS], key=lambda trace: trace.metadata.rank)


def _windows(traces: Sequence[Trace]) -> list[_Window]:
    """The whole run; if it has too many operations, two of its steps, or its middle if no steps were marked."""
    begins = np.sort(np.concatenate([trace.operations["started_ns"] for trace in traces]))
    if len(begins) <= MOST_OPERATIONS:
        first = min([int(begins[0]), *(int(trace.steps["began_ns"].min()) for trace in traces if len(trace.steps))])
        ends = [times for trace in traces for times in (trace.operations["finished_ns"], trace.steps["ended_ns"])]
        return [_window("the whole run", first, max(int(each.max()) for each in ends if len(each)))]
    leader = next((trace for trace in traces if len(trace.steps)), None)
    if leader is None:
        middle = (len(begins) - MOST_OPERATIONS) // 2
        return [_window("the middle of the run", int(begins[middle]), int(begins[middle + MOST_OPERATIONS - 1]))]
    order = np.argsort(leader.steps["ended_ns"] - leader.steps["began_ns"], kind="stable")
    median, slowest = int(order[len(order) // 2]), int(order[-1])
    windows = [_step("the median step", median, traces)]
    return windows if median == slowest else [*windows, _step("the slowest step", slowest, traces)]


def _window(name: str, begin_ns: int, end_ns: int) -> _Window:
    return _Window(name, begin_ns, max(end_ns, begin_ns + 1))


def _step(name: str, number: int, traces: Sequence[Trace]) -> _Window:
    """From the first rank's begin of a step to the last rank's end."""
    spans = [trace.steps[number].tolist() for trace in traces if number < len(trace.steps)]
    return _window(f"{name} (step {number:,})", min(began for began, _ in spans), max(ended for _, ended in spans))


def _cut(window: _Window, traces: Sequence[Trace], most: int) -> _Window:
    """The longest beginning of a window with at most `most` operations."""
    every = np.sort(np.concatenate([trace.operations["started_ns"][_within(trace, window)] for trace in traces]))
    return window if len(every) <= most else _window(window.name, window.begin_ns, int(every[most]))


def _within(trace: Trace, window: _Window) -> Bools:
    began, finished = trace.operations["started_ns"], trace.operations["finished_ns"]
    within: Bools = (began < window.end_ns) & (finished >= window.begin_ns)
    return within


def _rank(trace: Trace, window: _Window, names: _Names, stretches: int) -> dict[str, Any]:
    within = _within(trace, window)
    operations, submitted = trace.operations[within], ~completes(trace)[within]
    order = np.argsort(operations["started_ns"], kind="stable")
    operations, submitted = operations[order], submitted[order]
    # Of a submission to a device the duration is unknown.
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
    columns |= {what: names.numbers(trace, operations, what) for what in _NAMED}
    # Error 0 is no error, whatever its name in the rank's table.
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
    """Number, begin and end of each step within the window."""
    began, ended = trace.steps["began_ns"] - window.begin_ns, trace.steps["ended_ns"] - window.begin_ns
    touched = np.nonzero((began < window.end_ns - window.begin_ns) & (ended > 0))[0]
    return [int(number) for step in touched for number in (step, began[step], ended[step])]


def _computing(trace: Trace, window: _Window, most: int) -> list[int]:
    """Begin, end and percentage of each stretch in which the training thread computed.

    Progress lines are sums since the start: without some of them, stretches are longer and still correct.
    """
    at = trace.progress["at_ns"]
    first = max(0, int(np.searchsorted(at, window.begin_ns, side="right")) - 1)
    last = int(np.searchsorted(at, window.end_ns, side="left")) + 1
    lines = trace.progress[first:last]
    changes, percent = computing_percent(lines[:: max(1, -(-len(lines) // max(most, 1)))])
    changes = changes - window.begin_ns
    flat: list[int] = np.stack([changes[:-1], changes[1:], percent[:-1]], axis=1).reshape(-1).tolist()
    return flat


def _clock_notes(run: Run, traces: Sequence[Trace], clocks: Sequence[ClockOffset]) -> list[str]:
    notes = []
    bounds = {clock.rank: clock.bound_ns for clock in clocks}
    others = [trace.metadata.rank for trace in traces if trace is not run.traces[0]]
    apart = [rank for rank in others if bounds.get(rank) is None]
    if apart:
        notes.append(f"Nothing bounds the clock errors of these ranks: {', '.join(map(str, apart))}.")
    known = [bound for rank, bound in bounds.items() if bound is not None and rank not in apart]
    if known and max(known) > 0:
        notes.append(f"Between ranks, times may be off by up to {units.seconds(max(known) * 1e-9)}.")
    return notes
