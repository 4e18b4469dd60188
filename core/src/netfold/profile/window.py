"""Cut a run to a range of its steps, so that start-up and warm-up are not counted as training."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from netfold.profile.run import Run, Trace

# What `--steps` takes in place of a range.
ALL = "all"


def in_steps(run: Run, steps: str = "") -> Run:
    """Return the run without operations that were submitted outside of steps, in `left_out` their number.

    steps: "FIRST..LAST", counted from 1, both included. "all": the whole run, with what came before and after steps.
    "": every step of a run that has steps, else the whole run. A step ends where the optimizer steps, so the job's
    first one, its warm-up, is before step 1.
    ValueError: the text is no range, or no rank has such a step.
    """
    if steps == ALL or (not steps and not any(len(trace.steps) for trace in run.traces)):
        return run
    first, last = 1, max(len(trace.steps) for trace in run.traces)
    if steps:
        form = re.fullmatch(r"(\d+)\.\.(\d+)", steps)
        if form is None or not 1 <= int(form[1]) <= int(form[2]):
            raise ValueError(f"--steps takes a range as 10..200, or {ALL}, not {steps!r}")
        if int(form[1]) > last:
            raise ValueError(f"--steps {steps}: the run has {last} steps")
        first, last = int(form[1]), int(form[2])
    traces = [_cut(trace, first - 1, last) for trace in run.traces]
    before, after = (sum(len(trace.operations) for trace in each) for each in (run.traces, traces))
    span = "outside of the steps" if not steps else f"outside of steps {steps}"
    left_out = f"{before - after:,} operations of all ranks were submitted {span}, and are in no number here"
    return replace(run, traces=traces, left_out=f"{left_out} (--steps {ALL} counts them)" if before > after else "")


def _cut(trace: Trace, first: int, end: int) -> Trace:
    """Keep the steps first to end - 1, counted from 0, and what belongs to them."""
    steps = trace.steps[first:end]
    if not len(steps):
        return Trace.empty(trace.metadata)
    begin_ns, end_ns = steps["began_ns"][0], steps["ended_ns"][-1]
    queued, at = trace.operations["queued_ns"], trace.progress["at_ns"]
    kept = (queued >= begin_ns) & (queued < end_ns)
    # One line more at both ends: the thread was watched there, too.
    lines = slice(
        max(0, int(np.searchsorted(at, begin_ns, side="right")) - 1), int(np.searchsorted(at, end_ns, side="left")) + 1
    )
    # Only `perfetto` reads NCCL's details, and of a whole run.
    return replace(trace, operations=trace.operations[kept], steps=steps, progress=trace.progress[lines], nccl=None)
