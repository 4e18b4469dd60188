"""A whole training: its length in samples, or in epochs to an accuracy, and its cost in money and energy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from netfold_plan.cluster import Cluster

_HOUR_S = 3600.0


@dataclass(frozen=True)
class TrainingLength:
    """samples: of the whole training; 0 where unknown. dataset: samples of an epoch.

    epochs: pairs of batch size and epochs to the accuracy, from measurements.
    Raises ValueError for epochs without a dataset, and for both epochs and samples.
    """

    samples: float = 0.0
    dataset: float = 0.0
    epochs: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.epochs and not self.dataset:
            raise ValueError("training.epochs needs the samples of an epoch; write training.dataset")
        if self.epochs and self.samples:
            raise ValueError("training.samples and training.epochs both give the length; leave one out")

    def epochs_at(self, batch: float) -> float | None:
        """Interpolate between two points on logarithmic axes; None beyond the ends of the curve."""
        for (low, at_low), (high, at_high) in zip(self.epochs, self.epochs[1:] or self.epochs, strict=False):
            if low <= batch <= high:
                part = math.log(batch / low) / math.log(high / low) if high > low else 0.0
                return float(at_low * (at_high / at_low) ** part)
        return None

    def seconds(self, batch: float, samples_per_s: float) -> float | None:
        """Of the whole training; None where the length is unknown at this batch size."""
        if self.epochs:
            epochs = self.epochs_at(batch)
            return None if epochs is None else epochs * self.dataset / samples_per_s
        return self.samples / samples_per_s if self.samples else None


@dataclass(frozen=True)
class Prices:
    """Of a device for an hour and of a kilowatt-hour in addition, in any one currency; 0 where unknown."""

    gpu_hour: float = 0.0
    kwh: float = 0.0
    currency: str = ""


@dataclass(frozen=True)
class Cost:
    """money: None without a price. energy_kwh: at the devices' highest power; None where their power is unknown."""

    gpu_hours: float
    money: float | None
    energy_kwh: float | None


def training_cost(seconds: float, devices: int, cluster: Cluster, prices: Prices) -> Cost:
    hours = devices * seconds / _HOUR_S
    energy = hours * cluster.device.power_w / 1000 if cluster.device.power_w else None
    money = hours * prices.gpu_hour + (energy or 0.0) * prices.kwh
    return Cost(hours, money if money > 0 else None, energy)
