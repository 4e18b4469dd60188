"""metrics.jsonl: all events of a run in order, one JSON object per line.

    {"kind": "started", "time": .., "step": 0, "steps": 100, "batch": 8, "ranks": 2, "parameters": .., "metric": {..},
     "recipe": {..}}            and "goes_on", where a new rank 0 follows one that was lost, and no rank started again
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netfold_train.runs import METRICS

Line = dict[str, Any]


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
            f"cost of failures: {self.restarts} restart{'' if self.restarts == 1 else 's'} of all ranks, "
            f"{self.steps_repeated} step{'' if self.steps_repeated == 1 else 's'} repeated, "
            f"{self.seconds_lost:.1f} s lost"
        )

    def _start(self, line: Line) -> None:
        if line.get("goes_on"):
            self.starts.append(line)
            return
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
        text = (folder / METRICS).read_text(encoding="utf-8", errors="replace")
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
        with (folder / METRICS).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


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
