"""A run in the Trace Event Format (Chrome's JSON), which ui.perfetto.dev and chrome://tracing open.

A process a rank. Its threads: one for steps, then as many as operations were under way at once, since slices of one
thread must not overlap. A counter shows how much the training thread computed. Arrows go through the slices of one
call, from the rank that began first to the one that began last. Times are microseconds of the first rank's clock since
the first event. An operation of which only the submission to a device was recorded is a slice `submit ...`, as long as
the host took to submit it. The format: "Trace Event Format", Google, 2016; its flows of the second kind (`bind_id`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from netfold.profile.columns import Integers, completes
from netfold.profile.findings import ClockOffset
from netfold.profile.record import RECORD
from netfold.profile.run import Run, Trace
from netfold.profile.timeline import align_clocks, group_name, lanes, number_calls

_STEPS_THREAD = 1
_FIRST_LANE = 2
# Every thread of the trace has a number of its own: some readers take a number for the same thread in any process.
_THREADS_A_RANK = 4096
_WORK_THREAD = _THREADS_A_RANK - 1
_FIELDS = RECORD.names or ()
_AT_ONCE = 4096
# Whether an arrow comes into a slice, goes out of it, or both.
_IN, _OUT = 1, 2


def write_trace(run: Run, clocks: Iterable[ClockOffset], path: Path) -> int:
    """Write the whole run to `path`, replaced whole or not at all; returns how many events it has.

    Memory: beyond the run itself, some 100 bytes an operation. OSError where the file cannot be written.
    """
    return write_events(trace_events(run, clocks), path)


def write_events(events: Iterable[dict[str, Any]], path: Path) -> int:
    """Replaces `path` whole or not at all; returns how many events there were. They go to the disk as they are made."""
    new = path.with_name(path.name + ".new")
    count, encoder = 0, json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    try:
        with new.open("w", encoding="ascii") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for count, event in enumerate(events, 1):
                file.write((",\n" if count > 1 else "") + encoder.encode(event))
            file.write("\n]}\n")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return count


def trace_events(run: Run, clocks: Iterable[ClockOffset]) -> Iterator[dict[str, Any]]:
    """Rank by rank. Where nothing bounds how far a rank's clock is off, its process says so."""
    clocks = list(clocks)
    run = align_clocks(run, clocks)
    bounded = {clock.rank for clock in clocks if clock.bound_ns is not None}
    bounded |= {trace.metadata.rank for trace in run.traces[:1]}
    origin_ns = min((first for trace in run.traces for first in _firsts(trace)), default=0)
    arrows = _arrows(run)
    for trace, (call, role) in zip(run.traces, arrows, strict=True):
        yield from _process(trace, bounded=trace.metadata.rank in bounded)
        yield from _steps(trace, -origin_ns)
        yield from _operations(trace, -origin_ns, call, role)
        yield from _computing(trace, -origin_ns)


def work_events(trace: Trace, work: Iterable[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """What a rank computes as slices of a thread of their own: names, and when they began and ended, ascending, in ns
    since the first event. Of a measured run only a percentage is known; a predicted one has them."""
    yield from _thread(trace, _WORK_THREAD, "work")
    for name, began_ns, ended_ns in work:
        yield _slice(trace, _WORK_THREAD, name, "computing", began_ns, ended_ns)


def merge_traces(
    measured: Iterable[dict[str, Any]], predicted: Iterable[dict[str, Any]], step: int
) -> Iterator[dict[str, Any]]:
    """All events of a measured trace, then those of another as processes of their own.

    The other begins where the first rank's step of that number does, or at 0 where the trace has no such step.
    """
    processes, flows, begins_ns = 0, 0, None
    for event in measured:
        processes, flows = max(processes, event["pid"]), max(flows, event.get("bind_id", 0))
        if begins_ns is None and event.get("cat") == "step" and event["name"] == f"step {step}":
            begins_ns = _ns(event["ts"])
        yield event
    for event in predicted:
        moved = event | {"pid": event["pid"] + processes, "tid": event["tid"] + processes * _THREADS_A_RANK}
        if "ts" in event:
            moved["ts"] = _us(_ns(event["ts"]) + (begins_ns or 0))
        if "bind_id" in event:
            moved["bind_id"] = event["bind_id"] + flows
        yield moved


def _slice(trace: Trace, thread: int, name: str, category: str, began_ns: int, ended_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _pid(trace),
        "tid": _tid(trace, thread),
        "ts": _us(began_ns),
        "dur": _us(ended_ns - began_ns),
    }


def _firsts(trace: Trace) -> Iterator[int]:
    for times in (trace.operations["started_ns"], trace.steps["began_ns"], trace.progress["at_ns"]):
        if len(times):
            yield int(times.min())


def _process(trace: Trace, *, bounded: bool) -> Iterator[dict[str, Any]]:
    about = trace.metadata
    yield _named(trace, "process_name", name=f"rank {about.rank} on {about.host}")
    yield _named(trace, "process_sort_index", sort_index=about.rank)
    if not bounded:
        yield _named(trace, "process_labels", labels="nothing bounds how far its clock is off")
    if len(trace.steps):
        yield from _thread(trace, _STEPS_THREAD, "steps")


def _thread(trace: Trace, thread: int, name: str) -> Iterator[dict[str, Any]]:
    yield {**_named(trace, "thread_name", name=name), "tid": _tid(trace, thread)}
    yield {**_named(trace, "thread_sort_index", sort_index=thread), "tid": _tid(trace, thread)}


def _named(trace: Trace, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _pid(trace), "tid": _tid(trace, 0), "args": args}


def _pid(trace: Trace) -> int:
    return trace.metadata.rank + 1  # 0 is the kernel's idle process


def _tid(trace: Trace, thread: int) -> int:
    return _pid(trace) * _THREADS_A_RANK + thread


def _steps(trace: Trace, shift_ns: int) -> Iterator[dict[str, Any]]:
    for number, (began_ns, ended_ns) in enumerate(trace.steps.tolist()):
        yield _slice(trace, _STEPS_THREAD, f"step {number}", "step", began_ns + shift_ns, ended_ns + shift_ns)


def _operations(trace: Trace, shift_ns: int, call: Integers, role: Integers) -> Iterator[dict[str, Any]]:
    operations, about = trace.operations, trace.metadata
    order, ends = np.argsort(operations["started_ns"], kind="stable"), completes(trace)
    lane = lanes(operations["started_ns"][order], operations["finished_ns"][order])
    for number in range(int(lane.max()) + 1 if len(lane) else 0):
        # Beyond these numbers a lane would be another rank's.
        assert _FIRST_LANE + number < _WORK_THREAD, f"rank {about.rank} had {number} operations under way at once"
        yield from _thread(trace, _FIRST_LANE + number, "operations" if number == 0 else f"operations ({number + 1})")
    # As Python's own numbers, some at a time: one by one takes NumPy longer than all the rest.
    for first in range(0, len(order), _AT_ONCE):
        part = order[first : first + _AT_ONCE]
        numbers = zip(*(operations[name][part].tolist() for name in _FIELDS), strict=True)
        others = (
            lane[first : first + _AT_ONCE].tolist(),
            call[part].tolist(),
            role[part].tolist(),
            ends[part].tolist(),
        )
        for one, row, number, arrow, whole in zip(numbers, *others, strict=True):
            said = dict(zip(_FIELDS, one, strict=True))
            name = about.name_of("operation", said["operation"])
            kind = "communication" if whole else "submission"
            name = name if whole else f"submit {name}"
            began_ns, ended_ns = said["started_ns"] + shift_ns, said["finished_ns"] + shift_ns
            event = _slice(trace, _FIRST_LANE + row, name, kind, began_ns, ended_ns)
            event["args"] = _args(trace, said)
            if arrow:
                event["bind_id"] = number
            if arrow & _IN:
                event["flow_in"] = True
            if arrow & _OUT:
                event["flow_out"] = True
            yield event


def _args(trace: Trace, said: Mapping[str, int]) -> dict[str, Any]:
    about = trace.metadata
    args = {
        "group": group_name(trace, said["group"]),
        "sequence": said["sequence"],
        "bytes": said["bytes"],
        "queued_us": _us(said["started_ns"] - said["queued_ns"]),
    }
    for what in ("dtype", "reduce", "algorithm", "wire"):
        if what in about.names:
            args[what] = about.name_of(what, said[what])
    for what in ("wire_bytes", "retransmissions"):
        args[what] = said[what]
    if said["slowest_rank"] >= 0:
        args["slowest_rank"] = said["slowest_rank"]
    if said["error"]:
        args["error"] = about.name_of("error", said["error"])
    return args


def _computing(trace: Trace, shift_ns: int) -> Iterator[dict[str, Any]]:
    """A line of progress where the percentage changes, and one at the end."""
    for at_ns, percent in zip(*(each.tolist() for each in computing_percent(trace.progress)), strict=True):
        yield {
            "ph": "C",
            "name": "training thread computes",
            "pid": _pid(trace),
            "tid": _tid(trace, 0),
            "ts": _us(at_ns + shift_ns),
            "args": {"percent": percent},
        }


def computing_percent(progress: Any) -> tuple[Integers, Integers]:
    """From when on, on the rank's own clock, which percentage of the time the training thread computed."""
    passed = np.diff(progress["at_ns"])
    apart = np.concatenate(([True], passed > 0)) if len(progress) else np.zeros(0, bool)
    at, busy = progress["at_ns"][apart], progress["busy_ns"][apart]
    if len(at) < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    percent = np.clip(np.rint(100 * np.diff(busy) / np.diff(at)), 0, 100).astype(np.int64)
    changes = np.concatenate(([True], np.diff(percent) != 0))
    # A counter holds its value to the end of the trace, and after the last line nothing is known: 0 claims least.
    return np.append(at[:-1][changes], at[-1]), np.append(percent[changes], 0)


def _arrows(run: Run) -> list[tuple[Integers, Integers]]:
    """For each trace: each operation's call, and `_IN` and `_OUT` of its slice; 0 where it has no arrow."""
    number = number_calls(run)
    if not number:
        return []
    # Of a submission to a device it is not known who waited for whom.
    call = np.concatenate([np.where(completes(t), each, 0) for t, each in zip(run.traces, number, strict=True)])
    began = np.concatenate([trace.operations["started_ns"] for trace in run.traces])
    order = np.lexsort((began, call))
    role = np.full(len(call), _IN | _OUT, np.int64)
    in_order = call[order]
    role[order[np.concatenate(([True], np.diff(in_order) != 0))[: len(order)]]] &= ~_IN
    role[order[np.concatenate((np.diff(in_order) != 0, [True]))[: len(order)]]] &= ~_OUT
    role[call == 0] = 0
    ends = np.cumsum([len(each) for each in number])[:-1]
    return list(zip(np.split(call, ends), np.split(role, ends), strict=True))


def _ns(time_us: float) -> int:
    """As a reader takes it."""
    return int(time_us * 1000)


def _us(time_ns: int) -> float:
    """Where a reader multiplies by 1000 and cuts off, what comes out is still the nanosecond that went in.

    A slice that seems to begin a nanosecond before the last one of its thread ended could be dropped.
    """
    time_us = time_ns / 1000
    return time_us if int(time_us * 1000) == time_ns else math.nextafter(time_us, math.inf)
