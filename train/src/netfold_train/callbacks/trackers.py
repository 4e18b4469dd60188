"""A run in TensorBoard, Weights & Biases or MLflow, as the recipe asks (`report.tensorboard`, `.wandb`, `.mlflow`).

TensorBoard: `tensorboard --logdir runs`. wandb and MLflow choose where they send data: WANDB_MODE=offline,
WANDB_PROJECT, MLFLOW_TRACKING_URI (such as a database). They do not delay training. A run that continues is the same
run there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netfold_train.callbacks.events import Callback, Ended, Evaluated, Noted, Started, Stepped
from netfold_train.callbacks.metrics_file import step_values

# TensorBoard's interval of writing, which is what a killed run may lose.
_FLUSH_S = 10


class Tracker(Callback):
    """Curves under train/ and held-out/, named as in metrics.jsonl, and notes, in a system outside of netfold."""

    def __init__(self, folder: Path, every: int) -> None:
        """folder: the run's, whose name is the run's name. every: steps between two points."""
        self._folder, self._every = folder, every
        self._started = False

    def _begin(self, event: Started) -> None: ...
    def _log(self, values: Mapping[str, float], step: int) -> None: ...
    def _write_note(self, event: Noted) -> None: ...
    def _finish(self, *, done: bool) -> None: ...

    def on_start(self, event: Started) -> None:
        self._started = True
        self._begin(event)

    def on_step(self, event: Stepped) -> None:
        if event.step % self._every == 0:
            values = step_values(event).items()
            self._log({f"train/{name}": value for name, value in values if name != "step"}, event.step)

    def on_evaluation(self, event: Evaluated) -> None:
        self._log({f"held-out/{name}": value for name, value in event.values.items()}, event.step)

    def on_note(self, event: Noted) -> None:
        if self._started:
            self._write_note(event)

    def on_end(self, event: Ended) -> None:
        # A finished run accepts no notes.
        self._started = False
        self._finish(done=event.reason == "done")

    def _run_id(self, new: str | None = None) -> str | None:
        """The tracker's own id of this run: `new`, or the one of an earlier start; None at the first start."""
        path = self._folder / f"{type(self).__name__.lower()}.id"
        if new is not None:
            path.write_text(new)
        return path.read_text() if path.exists() else None


class TensorBoard(Tracker):
    """Notes are text. A run that continues replaces the points of repeated steps."""

    def _begin(self, event: Started) -> None:
        from tensorboard.compat.proto import summary_pb2  # type: ignore[import-untyped]
        from torch.utils.tensorboard import SummaryWriter

        self._proto: Any = summary_pb2
        purged = event.step + 1 if event.step else None
        self._writer: Any = SummaryWriter(str(self._folder / "tensorboard"), purge_step=purged, flush_secs=_FLUSH_S)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        # One event for all values: passing it to the writing thread costs more than making it.
        each = [self._proto.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(self._proto.Summary(value=each), step)

    def _write_note(self, event: Noted) -> None:
        self._writer.add_text(event.level, event.text, event.step)

    def _finish(self, *, done: bool) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Warnings and errors are alerts. wandb's own files are in the run's folder."""

    def _begin(self, event: Started) -> None:
        self._run: Any = importlib.import_module("wandb").init(
            name=self._folder.name, dir=str(self._folder), id=self._run_id(), resume="allow",
            config=event.recipe.model_dump(mode="json"),
        )  # fmt: skip
        self._run_id(self._run.id)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def _write_note(self, event: Noted) -> None:
        if event.level != "info":
            self._run.alert(title=f"step {event.step}", text=event.text)

    def _finish(self, *, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


class MLflow(Tracker):
    """The recipe's keys are the run's parameters, and notes its tags."""

    def _begin(self, event: Started) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        known = self._run_id()
        run = self._mlflow.start_run(run_id=known, run_name=self._folder.name)
        if known is None:  # MLflow accepts a parameter once per run.
            sections = event.recipe.model_dump(mode="json", exclude_none=True).items()
            self._mlflow.log_params({f"{name}.{key}": value for name, keys in sections for key, value in keys.items()})
        self._run_id(run.info.run_id)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._active().log_metrics(values, step=step, synchronous=False)

    def _write_note(self, event: Noted) -> None:
        self._active().set_tag(f"{event.level} at step {event.step}", event.text)

    def _finish(self, *, done: bool) -> None:
        self._active().end_run("FINISHED" if done else "KILLED")

    def _active(self) -> Any:
        """Raise RuntimeError without an active run, where MLflow would begin a run of another name."""
        if self._mlflow.active_run() is None:
            raise RuntimeError("its run could not be started")
        return self._mlflow
