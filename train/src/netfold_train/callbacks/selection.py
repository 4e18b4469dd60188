"""Choose a run's callbacks by its recipe, and keep their errors from ending the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from netfold.extras import command
from netfold_train.callbacks.events import HANDLERS, Callback, Event, Noted
from netfold_train.callbacks.metrics_file import MetricsFile
from netfold_train.callbacks.profiling import ProfileCallback
from netfold_train.callbacks.progress import ProgressCallback
from netfold_train.callbacks.report import ReportCallback
from netfold_train.callbacks.trackers import MLflow, TensorBoard, Tracker, Wandb
from netfold_train.recipe import Recipe

# By their packages' names, which are their keys in a recipe's `report`.
_TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


def make_callbacks(recipe: Recipe, folder: Path, rank: int) -> list[Callback]:
    """Make the callbacks of `rank` for a `Trainer`. folder: of `run_folder`.

    Rank 0 has all callbacks; other ranks only record their communication. An error of a callback is reported once, and
    does not end the run. Raises ValueError if a package is missing, BlockingIOError if another process writes this run.
    """
    asked = recipe.report
    # The profile is first: it must see a step's end before the other callbacks work.
    chosen: list[Callback] = [ProfileCallback(folder)] if asked.profile else []
    if rank == 0:
        check_packages(recipe)
        chosen.append(MetricsFile(folder, asked.every))
        chosen += [kind(folder, asked.every) for name, kind in _TRACKERS.items() if getattr(asked, name)]
        chosen += [ReportCallback(folder), ProgressCallback(folder)]
    guarded: list[GuardedCallback] = []
    guarded += [GuardedCallback(each, guarded) for each in chosen]
    return list(guarded)


def check_packages(recipe: Recipe) -> None:
    """Raise ValueError if a package that the recipe needs is missing; also called before ranks start."""
    for name in _TRACKERS:
        if getattr(recipe.report, name) and find_spec(name) is None:
            raise ValueError(
                f"report.{name} is on, and the package {name} is not installed: {command(name)}, or set "
                f"report.{name} = false"
            )


class GuardedCallback(Callback):
    """A callback that may fail. The other callbacks get a note at its first failure in a row, and when it works again.

    It still receives all events: a full disk may have space again.
    """

    def __init__(self, callback: Callback, others: Sequence[Callback]) -> None:
        """others: the callbacks that get the notes, perhaps with this one. Without another one stderr gets them."""
        self._callback, self._others = callback, others
        self._failures = 0

    def _forward(self, event: Event) -> None:
        name = type(self._callback).__name__
        try:
            getattr(self._callback, HANDLERS[type(event)])(event)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                kind = type(error).__name__
                self._note(event.step, f"{name} failed ({kind}: {error}); training continues without it")
        else:
            failures, self._failures = self._failures, 0
            if failures:
                self._note(event.step, f"{name} works again, without {failures} earlier events")

    on_start = on_step = on_evaluation = on_note = on_end = _forward

    def _note(self, step: int, text: str) -> None:
        others = [other for other in self._others if other is not self]
        for other in others:
            other.on_note(Noted(step, "warning", text))
        if not others:
            print(f"netfold train: step {step}: {text}", file=sys.stderr, flush=True)
