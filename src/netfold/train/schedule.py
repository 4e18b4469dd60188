"""The learning rate: a function of the step, so there is nothing to save and short runs follow it too."""

from __future__ import annotations

import math

from netfold.train.recipe import Schedule


def learning_rate(lr: float, schedule: Schedule, step: int, steps: int, batch: int) -> float:
    """At `step` (from 0) of `steps`, for a global batch. Up in a line, then down to `final` by the shape."""
    if schedule.reference_batch is not None:
        lr *= batch / schedule.reference_batch
    if step < schedule.warmup:
        return lr * (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(1, steps - schedule.warmup)
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[schedule.shape]
    return lr * (schedule.final + (1.0 - schedule.final) * left) if schedule.shape != "constant" else lr
