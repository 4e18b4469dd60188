"""Who is told of a run: chosen by its recipe, and kept from ending it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from netfold.extras import command
from netfold.train.callbacks.metrics_file import MetricsFile
from netfold.train.callbacks.overlap import OverlapCallback
from netfold.train.callbacks.profiling import ProfileCallback
from netfold.train.callbacks.progress import ProgressCallback
from netfold.train.callbacks.tensorboard import TensorBoard
from netfold.train.callbacks.trackers import MLflow, Wandb
from netfold.train.events import Callback, Ended, Evaluated, Noted, Started, Stepped
from netfold.train.recipe import Recipe
from netfold.train.report.listener import ReportCallback

# By their packages' names, which are their keys in a recipe's `report`.
_TRACKERS: dict[str, type[TensorBoard | Wandb | MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def make_callbacks(recipe: Recipe, folder: Path, rank: int) -> list[Callback]:
    """For `Trainer`, on the rank of the world that this process is. folder: of `run_folder`.

    Rank 0 has all of them; the others only record what they communicate. None of them ends a run: what one raises is
    said once. Raises ValueError where a package is missing that the recipe asks for, BlockingIOError where another
    process writes this run.
    """
    asked = recipe.report
    # Profiles first: a step ends before others are told of it.
    chosen: list[Callback] = [ProfileCallback(folder, rank)] if asked.profile else []
    if rank == 0:
        exposed = OverlapCallback()
        chosen += [exposed, MetricsFile(folder, asked.every, exposed)]
        check_packages(recipe)
        for name, tracker in _TRACKERS.items():
            if getattr(asked, name):
                chosen.append(tracker(folder, asked.every, exposed))
        chosen += [ReportCallback(folder), ProgressCallback(folder, exposed)]
    guarded: list[GuardedCallback] = []
    guarded += [GuardedCallback(each, guarded) for each in chosen]
    return list(guarded)


def check_packages(recipe: Recipe) -> None:
    """ValueError where a package is missing that the recipe asks for: to be asked before ranks start, too."""
    for name in _TRACKERS:
        if getattr(recipe.report, name) and find_spec(name) is None:
            raise ValueError(
                f"report.{name} is on, and the package {name} is not installed: {command(name)}, or set "
                f"report.{name} = false"
            )


class GuardedCallback(Callback):
    """A listener that may fail: its first failure in a row is told to the others, and when it works again.

    It goes on being told: a full disk may have room again.
    """

    def __init__(self, callback: Callback, others: Sequence[Callback]) -> None:
        """others: who is told, itself perhaps among them; nobody else there: stderr is."""
        self._callback, self._others = callback, others
        self._failures = 0

    def on_start(self, event: Started) -> None:
        self._tell("on_start", event)

    def on_step(self, event: Stepped) -> None:
        self._tell("on_step", event)

    def on_evaluation(self, event: Evaluated) -> None:
        self._tell("on_evaluation", event)

    def on_note(self, event: Noted) -> None:
        self._tell("on_note", event)

    def on_end(self, event: Ended) -> None:
        self._tell("on_end", event)

    def _tell(self, what: str, event: Started | Stepped | Evaluated | Noted | Ended) -> None:
        name = type(self._callback).__name__
        try:
            getattr(self._callback, what)(event)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                kind = type(error).__name__
                self._note(event.step, f"{name} failed ({kind}: {error}); training goes on without it while it does")
        else:
            failures, self._failures = self._failures, 0
            if failures:
                self._note(event.step, f"{name} works again; {failures} things it was told are missing there")

    def _note(self, step: int, text: str) -> None:
        others = [other for other in self._others if other is not self]
        for other in others:
            other.on_note(Noted(step, "warning", text))
        if not others:
            print(f"netfold train: step {step}: {text}", file=sys.stderr, flush=True)
