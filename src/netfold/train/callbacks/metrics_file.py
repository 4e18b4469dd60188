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

from netfold.train.callbacks.profiling import OverlapCallback
from netfold.train.callbacks.result import metric_words
from netfold.train.events import Callback, Ended, Evaluated, Noted, Started, Stepped

NAME = "metrics.jsonl"
Line = dict[str, Any]


class MetricsFile(Callback):
    """Append to a run's metrics.jsonl under a file lock.

    Raises BlockingIOError if another process has the lock. With a full disk each call raises OSError; the file stays
    readable, without the lost lines.
    """

    def __init__(self, folder: Path, every: int = 1, exposed: OverlapCallback | None = None) -> None:
        """every: steps between two lines of steps; the last step always has one."""
        self._every, self._exposed = every, exposed
        self._seen = max((line["step"] for line in read_metrics(folder).steps), default=0)
        self._file = (folder / NAME).open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another process is writing {folder / NAME}: wait for it, or give this run another name (run.name)"
            ) from None
        # The last line of a killed run may be incomplete.
        self._torn = _ends_torn(folder / NAME)
        self._steps = self._batch = 0

    def on_start(self, event: Started) -> None:
        self._steps, self._batch = event.steps, event.batch
        self._write(
            "started", event.step, steps=event.steps, batch=event.batch, ranks=event.ranks,
            parameters=event.parameters, metric=metric_words(event.metric), recipe=event.recipe.model_dump(mode="json"),
        )  # fmt: skip

    def on_step(self, event: Stepped) -> None:
        if event.step % self._every and event.step != self._steps:
            return
        more: Line = {}
        if event.gradient_norm is not None:
            more["gradient_norm"] = event.gradient_norm
        if self._exposed is not None and self._exposed.share is not None:
            more["exposed"] = self._exposed.share
        if event.skipped:
            more["skipped"] = True
        if event.step <= self._seen:
            more["again"] = True
        self._seen = max(self._seen, event.step)
        self._write(
            "step", event.step, loss=event.loss, lr=event.lr, seconds=event.seconds, data_s=event.data_s,
            samples=event.samples, samples_per_s=self._batch / event.seconds, **more,
        )  # fmt: skip

    def on_evaluation(self, event: Evaluated) -> None:
        self._write("evaluation", event.step, values=dict(event.values), seconds=event.seconds)

    def on_note(self, event: Noted) -> None:
        self._write("note", event.step, level=event.level, text=event.text)

    def on_end(self, event: Ended) -> None:
        self._write("ended", event.step, reason=event.reason, seconds=event.seconds)
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _write(self, kind: str, step: int, **what: Any) -> None:
        line = {"kind": kind, "time": round(time.time(), 3), "step": step, **what}
        raw = ("\n" * self._torn + json.dumps(_finite(line)) + "\n").encode()
        written = self._file.write(raw)
        # A full disk may take a part of a line: then the next write begins with a line break.
        self._torn = written != len(raw)
        if self._torn:
            raise OSError(f"{NAME}: {written} of {len(raw)} bytes were written; is the disk full?")


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

    @property
    def is_finished(self) -> bool:
        return self.ended is not None and self.ended["reason"] == "done"


def read_metrics(folder: Path) -> Metrics:
    """Read a run's folder; empty if there is no file yet. Raises OSError."""
    found = Metrics()
    try:
        text = (folder / NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return found
    for row in text.splitlines():
        try:
            line = json.loads(row)
            kind, step = line["kind"], line["step"]
        except (ValueError, KeyError, TypeError):
            found.unreadable += bool(row)
            continue
        if kind in ("started", "note", "ended"):
            found.happened.append(line)
        if kind == "started":
            _forget_after(found, step)
            found.starts.append(line)
            found.ended = None
        elif kind == "step":
            _forget_after(found, step - 1)
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


def _forget_after(found: Metrics, step: int) -> None:
    for lines in (found.steps, found.evaluations):
        while lines and lines[-1]["step"] > step:
            lines.pop()


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return value
