"""A run in Weights & Biases or MLflow, where the recipe asks for them (`report.wandb`, `report.mlflow`).

Where they send what they are told is theirs to say: WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI
(a database, for one). Both are told without being waited for. A run that goes on is the same run there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netfold.train.callbacks.curves import of_evaluation, of_step
from netfold.train.callbacks.overlap import OverlapCallback
from netfold.train.events import Callback, Ended, Evaluated, Noted, Started, Stepped


class Wandb(Callback):
    """The run's name is its folder's; what wandb keeps on disk is in there."""

    def __init__(self, folder: Path, every: int, exposed: OverlapCallback) -> None:
        """every: steps between two points."""
        self._wandb = importlib.import_module("wandb")
        self._folder, self._every, self._exposed = folder, every, exposed
        self._batch = 0
        self._run: Any = None
        self._wanted = False

    def on_start(self, event: Started) -> None:
        self._batch, self._wanted = event.batch, True
        kept = _Kept(self._folder / "wandb.json")
        self._run = self._wandb.init(
            name=self._folder.name, dir=str(self._folder), id=kept.known, resume="allow",
            config=event.recipe.model_dump(mode="json"),
        )  # fmt: skip
        kept.keep(self._run.id)

    def on_step(self, event: Stepped) -> None:
        if event.step % self._every == 0:
            self._run.log(of_step(event, self._batch, self._exposed.share), step=event.step)

    def on_evaluation(self, event: Evaluated) -> None:
        self._run.log(of_evaluation(event), step=event.step)

    def on_note(self, event: Noted) -> None:
        if self._wanted and event.level != "info":
            self._run.alert(title=f"step {event.step}", text=event.text)

    def on_end(self, event: Ended) -> None:
        # A finished run takes no alert.
        self._wanted = False
        self._run.finish(exit_code=0 if event.reason == "done" else 1)


class MLflow(Callback):
    """The run's name is its folder's; keys of the recipe are its parameters, what was noted its tags."""

    def __init__(self, folder: Path, every: int, exposed: OverlapCallback) -> None:
        """every: steps between two points."""
        self._mlflow = importlib.import_module("mlflow")
        self._folder, self._every, self._exposed = folder, every, exposed
        self._batch = 0
        self._wanted = False

    def on_start(self, event: Started) -> None:
        self._batch, self._wanted = event.batch, True
        kept = _Kept(self._folder / "mlflow.json")
        run = self._mlflow.start_run(run_id=kept.known, run_name=self._folder.name)
        if kept.known is None:  # a parameter is said once in a run's life
            self._mlflow.log_params(_flat(event.recipe.model_dump(mode="json")))
        kept.keep(run.info.run_id)

    def on_step(self, event: Stepped) -> None:
        if event.step % self._every == 0:
            self._log(of_step(event, self._batch, self._exposed.share), event.step)

    def on_evaluation(self, event: Evaluated) -> None:
        self._log(of_evaluation(event), event.step)

    def on_note(self, event: Noted) -> None:
        if self._wanted:
            self._active()
            self._mlflow.set_tag(f"{event.level} at step {event.step}", event.text)

    def on_end(self, event: Ended) -> None:
        self._wanted = False
        self._active()
        self._mlflow.end_run("FINISHED" if event.reason == "done" else "KILLED")

    def _active(self) -> None:
        """Left to itself it would begin a run of another name, or end none and be content."""
        if self._mlflow.active_run() is None:
            raise RuntimeError("its run could not be started")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._active()
        self._mlflow.log_metrics(values, step=step, synchronous=False)


class _Kept:
    """The tracker's own name for a run, kept in the run's folder for its next start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: str | None = json.loads(path.read_text())["id"] if path.exists() else None

    def keep(self, name: str) -> None:
        self._path.write_text(json.dumps({"id": name}))


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"model": {"name": "gpt"}} -> {"model.name": "gpt"}"""
    found: dict[str, Any] = {}
    for key, each in value.items():
        found.update(_flat(each, f"{before}{key}.") if isinstance(each, Mapping) else {f"{before}{key}": each})
    return found
