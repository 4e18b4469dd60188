"""metrics.jsonl: all events of a run in order, one JSON object per line.

    {"kind": "started", "time": .., "step": 0, "steps": 100, "batch": 8, "ranks": 2, "parameters": .., "metric": {..},
     "recipe": {..}}
    {"kind": "step", "time": .., "step": 1, "loss": .., "lr": .., "seconds": .., "data_s": .., "samples": ..,
     "samples_per_s": ..}      and if known or true: "gradient_norm", "exposed", "skipped", "again"
    {"kind": "evaluation", "time": .., "step": 50, "values": {"psnr": .., "loss": ..}, "seconds": ..}
    {"kind": "note", "time": .., "step": 50, "level": "warning", "text": ".."}
    {"kind": "ended", "time": .., "step": 100, "reason": "done", "seconds": ..}

Each line is one write, so a killed run leaves all its lines. A run that continues from step n appends; repeated steps
have `again`. The last line of a step counts, and no line from before a start at an earlier step.
`time`: seconds since 1970. A number that is not finite is null.
"""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from netfold.train.callbacks.events import Callback, Ended, Evaluated, Noted, Started, Stepped
from netfold.train.data.examples import Metric

NAME = "metrics.jsonl"
Line = dict[str, Any]


class MetricsFile(Callback):
    """Append to a run's metrics.jsonl under a file lock.

    Raises BlockingIOError if another process has the lock. With a full disk each call raises OSError; the file stays
    readable, without the lost lines.
    """

    def __init__(self, folder: Path, every: int = 1) -> None:
        """every: steps between two lines of steps; the last step always has one."""
        self._every = every
        self._seen = max((line["step"] for line in read_metrics(folder).steps), default=0)
        self._file = (folder / NAME).open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another process is writing {folder / NAME}: wait for it, or give this run another name (run.name)"
            ) from None
        # The last line of a killed run may be incomplete.
        self._torn = (folder / NAME).read_bytes()[-1:] not in (b"", b"\n")
        self._steps = 0

    def on_start(self, event: Started) -> None:
        self._steps = event.steps
        self._write(
            "started", event.step, steps=event.steps, batch=event.batch, ranks=event.ranks,
            parameters=event.parameters, metric=metric_words(event.metric), recipe=event.recipe.model_dump(),
        )  # fmt: skip

    def on_step(self, event: Stepped) -> None:
        if event.step % self._every and event.step != self._steps:
            return
        again = {"again": True} if event.step <= self._seen else {}
        self._seen = max(self._seen, event.step)
        self._write("step", **step_values(event), **again)

    def on_evaluation(self, event: Evaluated) -> None:
        self._write("evaluation", event.step, values=event.values, seconds=event.seconds)

    def on_note(self, event: Noted) -> None:
        self._write("note", **vars(event))

    def on_end(self, event: Ended) -> None:
        self._write("ended", **vars(event))
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _write(self, kind: str, step: int, **what: Any) -> None:
        line = {"kind": kind, "time": round(time.time(), 3), "step": step, **what}
        raw = b"\n" * self._torn + to_json(line, inf_nan_mode="null") + b"\n"
        written = self._file.write(raw)
        # A full disk may take a part of a line: then the next write begins with a line break.
        self._torn = written != len(raw)
        if self._torn:
            raise OSError(f"{NAME}: {written} of {len(raw)} bytes were written; is the disk full?")


def step_values(event: Stepped) -> dict[str, Any]:
    """The numbers of a step, those that are known."""
    return {name: value for name, value in vars(event).items() if value is not None and value is not False}


@dataclass
class Metrics:
    """The lines of a metrics.jsonl in order, without those that were repeated later."""

    starts: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)
    notes: list[Line] = field(default_factory=list)
    happened: list[Line] = field(default_factory=list)
    """Starts, notes and ends, in order."""
    ended: Line | None = None
    """None: the run goes on, or was killed after its last start."""
    unreadable: int = 0
    """Incomplete lines."""
    restarts: int = 0
    """Starts after one that did not end by itself, and was not asked to stop."""
    steps_repeated: int = 0
    seconds_lost: float = 0.0
    """From the time of the step that each restart continued from (or of the first start) to the restart."""

    @property
    def is_finished(self) -> bool:
        return self.ended is not None and self.ended["reason"] == "done"

    @property
    def cost_of_failures(self) -> str:
        """A sentence; "" without restarts."""
        if not self.restarts:
            return ""
        return (
            f"cost of failures: {self.restarts} restarts of all ranks, {self.steps_repeated} steps repeated, "
            f"{self.seconds_lost:.1f} s lost"
        )

    def _start(self, line: Line) -> None:
        done = self.steps[-1]["step"] if self.steps else 0
        self._forget_after(line["step"])
        if self.starts and (self.ended is None or self.ended["reason"] not in ("done", "SIGTERM")):
            self.restarts += 1
            self.steps_repeated += max(0, done - line["step"])
            since = self.steps[-1] if self.steps else self.starts[0]
            self.seconds_lost += line["time"] - since["time"]
        self.starts.append(line)
        self.ended = None

    def _forget_after(self, step: int) -> None:
        for lines in (self.steps, self.evaluations):
            while lines and lines[-1]["step"] > step:
                lines.pop()


def read_metrics(folder: Path) -> Metrics:
    """Read a run's folder; empty if there is no file yet. Raises OSError."""
    found = Metrics()
    try:
        text = (folder / NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return found
    for row in text.split("\n"):
        try:
            line = json.loads(row)
            kind, step = line["kind"], line["step"]
        except (ValueError, KeyError, TypeError):
            found.unreadable += bool(row)
            continue
        if kind in ("started", "note", "ended"):
            found.happened.append(line)
        if kind == "started":
            found._start(line)
        elif kind == "step":
            # Training may also go back to a checkpoint without a new start.
            found._forget_after(step - 1)
            found.steps.append(line)
        elif kind == "evaluation":
            found.evaluations.append(line)
        elif kind == "note":
            found.notes.append(line)
        elif kind == "ended":
            found.ended = line
    return found


def is_held(folder: Path) -> bool:
    """Whether a process is writing this run's metrics."""
    try:
        with (folder / NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def metric_words(metric: Metric) -> dict[str, Any]:
    """The fields of a metric, without its functions."""
    return {name: value for name, value in vars(metric).items() if name not in ("score", "items")}


def with_unit(value: float, unit: str) -> str:
    """Four digits, because differences are small compared with the values."""
    return f"{value:.4g} {unit}".rstrip()


def result(metric: Mapping[str, Any], value: float | None) -> str:
    """`psnr 28.41 dB, 0.31 dB better than 28.1 dB (bicubic)`. metric: `metric_words`. value: None for NaN."""
    name, unit, baseline = metric["name"], metric["unit"], metric["baseline"]
    base = f"{with_unit(baseline, unit)} ({metric['baseline_is']})"
    if value is None or math.isnan(value):
        return f"{name} is not a number; the baseline is {base}"
    gain = (value - baseline) * (1 if metric["better"] == "higher" else -1)
    if gain == 0:
        return f"{name} {with_unit(value, unit)}, no better than {base}"
    far = f"{abs(gain):.3g} {unit}".rstrip()
    return f"{name} {with_unit(value, unit)}, {far} {'better' if gain > 0 else 'worse'} than {base}"
