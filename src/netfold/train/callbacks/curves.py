"""The curves that trackers show: the numbers of a step and of an evaluation, by name."""

from __future__ import annotations

from collections.abc import Mapping

from netfold.train.events import Evaluated, Stepped


def of_step(event: Stepped, batch: int, exposed: float | None) -> dict[str, float]:
    """What there is. batch: samples a step; exposed: the share of time that is exposed communication."""
    values: Mapping[str, float | None] = {
        "loss": event.loss,
        "lr": event.lr,
        "gradient norm": event.gradient_norm,
        "step seconds": event.seconds,
        "samples per second": batch / event.seconds,
        "exposed communication": exposed,
    }
    return {f"train/{name}": value for name, value in values.items() if value is not None}


def of_evaluation(event: Evaluated) -> dict[str, float]:
    return {f"held-out/{name}": value for name, value in event.values.items()}
