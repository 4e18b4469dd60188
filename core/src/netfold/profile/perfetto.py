"""Write a run in the Trace Event Format (Chrome's JSON), for ui.perfetto.dev and chrome://tracing.

Each rank is a process. One thread has the steps. The operations have as many threads as were under way at once, since
slices of one thread must not overlap; so have NCCL's transfers, if its profiler was recorded. A counter shows how much
the training thread computed. Arrows join the slices of one call, from the rank that began first to the rank that began
last. Times are microseconds of the first rank's clock since the first event. An operation of which only the submission
to a device was recorded is a slice `submit ...`, as long as the submission took on the host. Format: "Trace Event
Format", Google, 2016; flows by `bind_id`.
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
from netfold.profile.timeline import align_clocks, computing_percent, group_name, lanes, number_calls

_STEPS_THREAD = 1
_FIRST_LANE = 2
_FIRST_TRANSFER_LANE = 2048
# Thread numbers are unique in the trace: some readers take equal numbers for one thread, in any process.
_THREADS_A_RANK = 4096
_WORK_THREAD = _THREADS_A_RANK - 1
_FIELDS = RECORD.names or ()
_AT_ONCE = 4096
# An arrow comes into a slice, goes out of it, or both.
_IN, _OUT = 1, 2


def write_trace(run: Run, clocks: Iterable[ClockOffset], path: Path) -> int:
    """Write the whole run to `path`, replaced atomically. Return the number of events.

    Memory: about 100 bytes for each operation beyond the run. Raises OSError if the file cannot be written.
    """
    return write_events(trace_events(run, clocks), path)


def write_events(events: Iterable[dict[str, Any]], path: Path) -> int:
    """Write events to `path` one by one; the file is replaced atomically. Return their number."""
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
    """The events of each rank. The process of a rank with an unbounded clock error has a label that says so."""
    clocks = list(clocks)
    run = align_clocks(run, clocks)
    bounded = {clock.rank for clock in clocks if clock.bound_ns is not None}
    bounded |= {trace.metadata.rank for trace in run.traces[:1]}
    origin_ns = min((first for trace in run.traces for first in _first_times(trace)), default=0)
    for trace, (call, role) in zip(run.traces, _arrows(run), strict=True):
        yield from _process(trace, bounded=trace.metadata.rank in bounded)
        for number, (began_ns, ended_ns) in enumerate(trace.steps.tolist()):
            yield _slice(trace, _STEPS_THREAD, f"step {number}", "step", began_ns - origin_ns, ended_ns - origin_ns)
        yield from _operations(trace, origin_ns, call, role)
        yield from _transfers(trace, origin_ns)
        for at_ns, percent in zip(*(each.tolist() for each in computing_percent(trace.progress)), strict=True):
            yield _event(trace, "C", "training thread computes", args={"percent": percent}, ts=_us(at_ns - origin_ns))


def work_events(trace: Trace, work: Iterable[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """A rank's computing as slices of one thread, for predictions: a measured run has percentages only.

    work: (name, begin, end), ascending, in ns since the first event.
    """
    yield from _thread(trace, _WORK_THREAD, "work")
    for name, began_ns, ended_ns in work:
        yield _slice(trace, _WORK_THREAD, name, "computing", began_ns, ended_ns)


def merge_traces(
    measured: Iterable[dict[str, Any]], predicted: Iterable[dict[str, Any]], step: int
) -> Iterator[dict[str, Any]]:
    """The events of a measured trace, then those of a predicted trace as further processes.

    The predicted trace begins with the first rank's step of that number, or at 0 if the measured trace lacks this step.
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


def _event(trace: Trace, phase: str, name: str, thread: int = 0, **fields: Any) -> dict[str, Any]:
    pid = trace.metadata.rank + 1  # 0 is the kernel's idle process
    return {"ph": phase, "name": name, "pid": pid, "tid": pid * _THREADS_A_RANK + thread, **fields}


def _slice(trace: Trace, thread: int, name: str, category: str, began_ns: int, ended_ns: int) -> dict[str, Any]:
    return _event(trace, "X", name, thread, cat=category, ts=_us(began_ns), dur=_us(ended_ns - began_ns))


def _thread(trace: Trace, thread: int, name: str) -> Iterator[dict[str, Any]]:
    yield _event(trace, "M", "thread_name", thread, args={"name": name})
    yield _event(trace, "M", "thread_sort_index", thread, args={"sort_index": thread})


def _process(trace: Trace, *, bounded: bool) -> Iterator[dict[str, Any]]:
    about = trace.metadata
    yield _event(trace, "M", "process_name", args={"name": f"rank {about.rank} on {about.host}"})
    yield _event(trace, "M", "process_sort_index", args={"sort_index": about.rank})
    if not bounded:
        yield _event(trace, "M", "process_labels", args={"labels": "nothing bounds the error of its clock"})
    if len(trace.steps):
        yield from _thread(trace, _STEPS_THREAD, "steps")


def _first_times(trace: Trace) -> Iterator[int]:
    for times in (trace.operations["started_ns"], trace.steps["began_ns"], trace.progress["at_ns"]):
        if len(times):
            yield int(times.min())


def _operations(trace: Trace, origin_ns: int, call: Integers, role: Integers) -> Iterator[dict[str, Any]]:
    operations, about = trace.operations, trace.metadata
    order, ends = np.argsort(operations["started_ns"], kind="stable"), completes(trace)
    lane = lanes(operations["started_ns"][order], operations["finished_ns"][order])
    for number in range(int(lane.max()) + 1 if len(lane) else 0):
        # Larger numbers are threads of the next rank.
        assert _FIRST_LANE + number < _FIRST_TRANSFER_LANE, (
            f"rank {about.rank} had {number} operations under way at once"
        )
        yield from _thread(trace, _FIRST_LANE + number, "operations" if number == 0 else f"operations ({number + 1})")
    # Convert NumPy's numbers to Python's in batches: one by one takes longer than all the rest.
    for first in range(0, len(order), _AT_ONCE):
        part = order[first : first + _AT_ONCE]
        numbers = zip(*(operations[name][part].tolist() for name in _FIELDS), strict=True)
        others = (
            lane[first : first + _AT_ONCE].tolist(),
            call[part].tolist(),
            role[part].tolist(),
            ends[part].tolist(),
        )
        for values, row, number, arrow, is_timed in zip(numbers, *others, strict=True):
            record = dict(zip(_FIELDS, values, strict=True))
            name = about.name_of("operation", record["operation"])
            name, kind = (name, "communication") if is_timed else (f"submit {name}", "submission")
            began_ns, ended_ns = record["started_ns"] - origin_ns, record["finished_ns"] - origin_ns
            event = _slice(trace, _FIRST_LANE + row, name, kind, began_ns, ended_ns)
            event["args"] = _args(trace, record)
            if arrow:
                event["bind_id"] = number
            if arrow & _IN:
                event["flow_in"] = True
            if arrow & _OUT:
                event["flow_out"] = True
            yield event


def _transfers(trace: Trace, origin_ns: int) -> Iterator[dict[str, Any]]:
    """The slices of the transfers by NCCL's channels."""
    if trace.nccl is None or not len(trace.nccl.transfers):
        return
    transfers = trace.nccl.transfers[np.argsort(trace.nccl.transfers["began_ns"], kind="stable")]
    numbers = dict(zip(trace.nccl.rows["id"].tolist(), trace.nccl.places.tolist(), strict=True))
    # More at once than this share the last lane.
    lane = np.minimum(lanes(transfers["began_ns"], transfers["ended_ns"]), _WORK_THREAD - _FIRST_TRANSFER_LANE - 1)
    for number in range(int(lane.max()) + 1):
        yield from _thread(
            trace, _FIRST_TRANSFER_LANE + number, "network" if number == 0 else f"network ({number + 1})"
        )
    for row, number in zip(transfers, lane.tolist(), strict=True):
        name = f"{'send to' if row['is_send'] else 'receive from'} {row['peer']}"
        began_ns, ended_ns = int(row["began_ns"]) - origin_ns, int(row["ended_ns"]) - origin_ns
        event = _slice(trace, _FIRST_TRANSFER_LANE + number, name, "network", began_ns, ended_ns)
        event["args"] = {what: int(row[what]) for what in ("bytes", "channel", "steps", "net_bytes", "net_requests")}
        event["args"] |= {
            f"{what}_us": _us(int(row[f"{what}_ns"])) for what in ("gpu_wait", "peer_wait", "network", "net")
        }
        if (place := numbers.get(int(row["operation"]))) is not None:
            event["args"]["operation"] = trace.metadata.name_of("operation", int(trace.operations["operation"][place]))
        yield event


def _args(trace: Trace, record: Mapping[str, int]) -> dict[str, Any]:
    about = trace.metadata
    args = {
        "group": group_name(trace, record["group"]),
        "sequence": record["sequence"],
        "bytes": record["bytes"],
        "queued_us": _us(record["started_ns"] - record["queued_ns"]),
    }
    for what in ("dtype", "reduce", "algorithm", "wire"):
        if what in about.names:
            args[what] = about.name_of(what, record[what])
    args |= {what: record[what] for what in ("wire_bytes", "retransmissions")}
    if record["slowest_rank"] >= 0:
        args["slowest_rank"] = record["slowest_rank"]
    if record["error"]:
        args["error"] = about.name_of("error", record["error"])
    return args


def _arrows(run: Run) -> list[tuple[Integers, Integers]]:
    """For each trace: each operation's call, and `_IN` and `_OUT` of its slice; 0 if it has no arrow."""
    number = number_calls(run)
    if not number:
        return []
    # Of submissions to a device it is unknown which rank waited.
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
    """The nanoseconds that a reader computes from microseconds."""
    return int(time_us * 1000)


def _us(time_ns: int) -> float:
    """The microseconds from which a reader computes exactly `time_ns`, by multiplying with 1000 and cutting off.

    A reader may drop a slice that seems to begin a nanosecond before the previous slice of its thread ended.
    """
    time_us = time_ns / 1000
    return time_us if _ns(time_us) == time_ns else math.nextafter(time_us, math.inf)
