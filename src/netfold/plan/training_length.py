"""How long training takes as a whole: by samples, or to an accuracy that so many epochs reach at each batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingLength:
    """samples: of the whole training; 0 where it is not known. dataset: samples of an epoch.

    epochs: (samples of a step, epochs to the accuracy), by batch: what measurements of one's own or others' say.
    Raises ValueError for a curve without a dataset.
    """

    samples: float = 0.0
    dataset: float = 0.0
    epochs: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.epochs and not self.dataset:
            raise ValueError("training.epochs: how many samples an epoch has is not said; write training.dataset")
        if self.epochs and self.samples:
            raise ValueError("training.samples and training.epochs say the same in two ways; leave one out")

    def epochs_at(self, batch: float) -> float | None:
        """Between two points of the curve along powers (both axes logarithmic); None beyond its ends."""
        for (low, at_low), (high, at_high) in zip(self.epochs, self.epochs[1:] or self.epochs, strict=False):
            if low <= batch <= high:
                part = math.log(batch / low) / math.log(high / low) if high > low else 0.0
                return float(at_low * (at_high / at_low) ** part)
        return None

    def seconds(self, batch: float, samples_per_s: float) -> float | None:
        """Of the whole training; None where its length is not known at this batch."""
        if self.epochs:
            epochs = self.epochs_at(batch)
            return None if epochs is None else epochs * self.dataset / samples_per_s
        return self.samples / samples_per_s if self.samples else None
