"""metrics.jsonl: all that a run says, a JSON object a line, in the order in which it happened.

    {"kind": "started", "time": .., "step": 0, "steps": 100, "batch": 8, "ranks": 2, "parameters": .., "metric": {..},
     "recipe": {..}}
    {"kind": "step", "time": .., "step": 1, "loss": .., "lr": .., "seconds": .., "data_s": .., "samples": ..,
     "samples_per_s": ..}      and where there is one: "gradient_norm", "exposed", "skipped": true, "again": true
    {"kind": "evaluation", "time": .., "step": 50, "values": {"psnr": .., "loss": ..}, "seconds": ..}
    {"kind": "note", "time": .., "step": 50, "level": "warning", "text": ".."}
    {"kind": "ended", "time": .., "step": 100, "reason": "done", "seconds": ..}

A line is one write: a run that is killed leaves all that it said. A run that goes on from step n appends, and what it
does again has `again`: of one step the last line counts, and none that came before a start at an earlier step.
`time` is seconds since 1970; a number that is not finite is null.
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

from netfold.train.callbacks.overlap import OverlapCallback
from netfold.train.callbacks.result import metric_words
from netfold.train.events import Callback, Ended, Evaluated, Noted, Started, Stepped

NAME = "metrics.jsonl"
Line = dict[str, Any]


class MetricsFile(Callback):
    """Appends to a run's metrics.jsonl, and holds it: two runs must not write one file.

    Raises BlockingIOError where another process holds it. A full disk raises OSError from each call; what could not be
    written is missing, and the file stays readable.
    """

    def __init__(self, folder: Path, every: int = 1, exposed: OverlapCallback | None = None) -> None:
        """every: steps between two lines of steps; the last one of a run always has one."""
        self._every, self._exposed = every, exposed
        self._seen = max((line["step"] for line in read_metrics(folder).steps), default=0)
        self._file = (folder / NAME).open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"{folder / NAME} is written by another process now: wait for it, or call this run otherwise (run.name)"
            ) from None
        # The last line of a run that was cut off may have no end.
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
        # A full disk takes a part of the line: the next one begins anew.
        self._torn = written != len(raw)
        if self._torn:
            raise OSError(f"{NAME}: {written} of {len(raw)} bytes were written; is the disk full?")


@dataclass
class Metrics:
    """What a metrics.jsonl says, without what was done again: lines as above, in order."""

    starts: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)
    notes: list[Line] = field(default_factory=list)
    happened: list[Line] = field(default_factory=list)
    """Starts, notes and ends, as they came."""
    ended: Line | None = None
    """None where the last start has no end yet: the run goes on, or was killed."""
    unreadable: int = 0
    """Lines that were cut off."""

    @property
    def is_finished(self) -> bool:
        return self.ended is not None and self.ended["reason"] == "done"


def read_metrics(folder: Path) -> Metrics:
    """Of a run's folder; empty where there is no file yet. Raises OSError."""
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
    """Whether a process writes this run's metrics now."""
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
