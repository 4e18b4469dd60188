"""An invented run: the events that a trainer would send to its callbacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from netfold_train import Metric, Recipe
from netfold_train.callbacks.events import HANDLERS, Callback, Ended, Evaluated, Noted, Started, Stepped
from netfold_train.models.model import Model

STEPS, BATCH, EVERY = 20, 16, 5
BITS = Metric("bits per byte", "bit", "lower", lambda output, target: output, 5.25, "how often each byte comes")


def recipe(folder: Path, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name": "gpt", "width": 32},
            "data": {"name": "source"},
            "training": {"steps": STEPS, "batch": BATCH},
            "report": {"tensorboard": False, "profile": False},
            "run": {"folder": str(folder), "name": "invented"},
            **sections,
        }
    )


def started(asked: Recipe, step: int = 0) -> Started:
    model = Model(torch.nn.Identity(), lambda output, target: output)
    return Started(asked, model, 4, 0, step, STEPS, BATCH, 12_345, BITS)


def stepped(step: int, attempt: int = 0) -> Stepped:
    """A distinct value in every field of every step and of every attempt."""
    at = step + 100 * attempt
    norm = None if step < 3 else 1.0 + at / 64
    seconds = 0.03 + at / 1024
    return Stepped(step, 5.0 - at / 128, 1e-3 / at, norm, seconds, at / 65536, step * BATCH, BATCH / seconds)


def evaluated(step: int, attempt: int = 0) -> Evaluated:
    at = step + 100 * attempt
    return Evaluated(step, {"bits per byte": 8.0 - at / 32, "loss": 5.5 - at / 64}, 0.25 + at / 256)


def goes_through(asked: Recipe, first: int, last: int, attempt: int = 0) -> list[Any]:
    """The events of steps first+1..last, without an end."""
    events: list[Any] = [started(asked, first)]
    for step in range(first + 1, last + 1):
        events.append(stepped(step, attempt))
        events += [evaluated(step, attempt)] * (step % EVERY == 0)
    return events


def a_run_that_was_cut_off_and_went_on(asked: Recipe) -> list[list[Any]]:
    """The events of a run that is killed after step 13 and resumed after step 10, with a note and a loss of NaN."""
    bad = stepped(7)
    first = [bad_one(event, bad) for event in goes_through(asked, 0, 13)]
    first.insert(9, Noted(7, "warning", "the loss of step 7 is <nan>: the step was left out"))
    second = [
        *goes_through(asked, 10, STEPS, attempt=1),
        Noted(STEPS, "info", "all is well"),
        Ended(STEPS, "done", 12.5),
    ]
    return [first, second]


def bad_one(event: Any, bad: Stepped) -> Any:
    if event != bad:
        return event
    return replace(bad, loss=math.nan, gradient_norm=math.inf, skipped=True)


def tell(listeners: Sequence[Callback], events: Sequence[Any]) -> None:
    for event in events:
        for listener in listeners:
            getattr(listener, HANDLERS[type(event)])(event)


class Failing(Callback):
    """Raise `error` in every call, unless it is None."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.told: list[Any] = []

    def _hear(self, event: Any) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(event)

    on_start = on_step = on_evaluation = on_note = on_end = _hear
