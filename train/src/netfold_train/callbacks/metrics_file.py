"""Write metrics.jsonl (`netfold_train.runs.metrics` has its format)."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from netfold_train.callbacks.events import Callback, Ended, Evaluated, Noted, Started, Stepped
from netfold_train.data.examples import Metric
from netfold_train.runs import METRICS
from netfold_train.runs.metrics import read_metrics


class MetricsFile(Callback):
    """Append to a run's metrics.jsonl under a file lock.

    Raises BlockingIOError if another process has the lock. With a full disk each call raises OSError; the file stays
    readable, without the lost lines.
    """

    def __init__(self, folder: Path, every: int = 1) -> None:
        """every: steps between two lines of steps; the last step always has one."""
        self._every = every
        self._seen = max((line["step"] for line in read_metrics(folder).steps), default=0)
        self._file = (folder / METRICS).open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another process is writing {folder / METRICS}: wait for it, or give this run another name (run.name)"
            ) from None
        # The last line of a killed run may be incomplete.
        self._torn = (folder / METRICS).read_bytes()[-1:] not in (b"", b"\n")
        self._steps = 0

    def on_start(self, event: Started) -> None:
        self._steps = event.steps
        self._write(
            "started", event.step, steps=event.steps, batch=event.batch, ranks=event.ranks,
            parameters=event.parameters, metric=metric_words(event.metric), recipe=event.recipe.model_dump(),
            **({"goes_on": True} if event.goes_on else {}),
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
            raise OSError(f"{METRICS}: {written} of {len(raw)} bytes were written; is the disk full?")


def step_values(event: Stepped) -> dict[str, Any]:
    """The numbers of a step, those that are known."""
    return {name: value for name, value in vars(event).items() if value is not None and value is not False}


def metric_words(metric: Metric) -> dict[str, Any]:
    """The fields of a metric, without its functions."""
    return {name: value for name, value in vars(metric).items() if name not in ("score", "items")}
