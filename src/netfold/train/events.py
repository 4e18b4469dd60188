"""Who is told what happens in a run: the progress on screen, metrics.jsonl, TensorBoard, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from netfold.train.examples import Metric, Panel
from netfold.train.model import Model
from netfold.train.recipe import Recipe


@dataclass(frozen=True)
class Started:
    """What a run begins with."""

    recipe: Recipe
    model: Model
    ranks: int
    rank: int
    step: int
    """Steps already done: more than 0 where a run goes on from a checkpoint."""
    steps: int
    batch: int
    """Samples a step, of the whole job."""
    parameters: int
    """Of the whole model."""
    metric: Metric
    """What evaluations are told in."""


@dataclass(frozen=True)
class Stepped:
    """One step of the optimizer."""

    step: int
    """From 1."""
    loss: float
    """The mean over the global batch; under `diloco` over what this rank's copy of the model has seen of it."""
    lr: float
    gradient_norm: float | None
    """Where gradients are clipped."""
    seconds: float
    data_s: float
    """Of them, waiting for the batch."""
    samples: int
    """Since the start of training, all runs together."""
    skipped: bool = False
    """The step's update was left out."""


@dataclass(frozen=True)
class Evaluated:
    """A look at the held-out examples."""

    step: int
    values: Mapping[str, float]
    """The metric by its name, and "loss"."""
    seconds: float
    pictures: Sequence[Panel] = ()
    """After the last step, where the data has some to show: on rank 0."""


@dataclass(frozen=True)
class Noted:
    """Something that a person should know: a warning, a choice and its reason, a recovery."""

    step: int
    level: str
    """ "info", "warning" or "error" """
    text: str


@dataclass(frozen=True)
class Ended:
    step: int
    reason: str
    """ "done", or why not."""
    seconds: float


class Callback(Protocol):
    """Called on the training thread of every rank that has one; must return soon, and must not raise.

    A class that says this is its base is told of everything, and does nothing about what it does not define.
    """

    def on_start(self, event: Started) -> None:
        return

    def on_step(self, event: Stepped) -> None:
        return

    def on_evaluation(self, event: Evaluated) -> None:
        return

    def on_note(self, event: Noted) -> None:
        return

    def on_end(self, event: Ended) -> None:
        return


HANDLERS = {
    Started: "on_start",
    Stepped: "on_step",
    Evaluated: "on_evaluation",
    Noted: "on_note",
    Ended: "on_end",
}
"""By the event, the method of a `Callback` that is called with it."""
