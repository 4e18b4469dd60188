"""The events of a run, and the interface of a callback that receives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from netfold_train.data.examples import Metric, Panel
from netfold_train.models.model import Model
from netfold_train.recipe import Recipe


@dataclass(frozen=True)
class Started:
    """The start of a run."""

    recipe: Recipe
    model: Model
    ranks: int
    rank: int
    step: int
    """Steps already done: more than 0 if the run continues from a checkpoint."""
    steps: int
    batch: int
    """Samples per step, of the whole job."""
    parameters: int
    """Of the whole model."""
    metric: Metric
    """The metric of evaluations."""
    goes_on: bool = False
    """No rank has started again: this rank follows the rank 0 that was lost."""


@dataclass(frozen=True)
class Stepped:
    """One step of the optimizer."""

    step: int
    """From 1."""
    loss: float
    """The mean over the global batch; under `diloco` over the share of this rank's site."""
    lr: float
    gradient_norm: float | None
    """None unless gradients are clipped."""
    seconds: float
    data_s: float
    """The part of `seconds` in which the rank waited for its batch."""
    samples: int
    """Since the start of training, over all runs."""
    samples_per_s: float
    exposed: float | None = None
    """An estimate of the share of exposed communication in the newest steps; None if unknown."""
    skipped: bool = False
    """The step's update was left out."""


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of the held-out examples."""

    step: int
    values: Mapping[str, float]
    """The metric by its name, and "loss"."""
    seconds: float
    pictures: Sequence[Panel] = ()
    """On rank 0 after the last step, if the data has pictures."""


@dataclass(frozen=True)
class Noted:
    """A message for people: a warning, a choice and its reason, a recovery."""

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


Event = Started | Stepped | Evaluated | Noted | Ended


class Callback:
    """Receives events on the training thread of its rank; must return soon, and must not raise.

    A subclass defines the methods that it needs. A method that it leaves out does nothing.
    """

    def on_start(self, event: Started) -> None: ...
    def on_step(self, event: Stepped) -> None: ...
    def on_evaluation(self, event: Evaluated) -> None: ...
    def on_note(self, event: Noted) -> None: ...
    def on_end(self, event: Ended) -> None: ...


HANDLERS: dict[type[Event], str] = {
    Started: "on_start",
    Stepped: "on_step",
    Evaluated: "on_evaluation",
    Noted: "on_note",
    Ended: "on_end",
}
"""The type of an event -> the `Callback` method that receives it."""
