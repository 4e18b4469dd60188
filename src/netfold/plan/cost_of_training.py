"""What training costs: money by the device hour, energy by what devices draw at most."""

from __future__ import annotations

from dataclasses import dataclass

from netfold.plan.cluster import Cluster

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Prices:
    """In any one currency; 0 where it is not known. gpu_hour: of a device. kwh: of a kilowatt-hour, beside it."""

    gpu_hour: float = 0.0
    kwh: float = 0.0
    currency: str = ""


@dataclass(frozen=True)
class Cost:
    """money: None where no price is known. energy_kwh: of the devices alone, at most; None where their power is not."""

    gpu_hours: float
    money: float | None
    energy_kwh: float | None


def training_cost(seconds: float, devices: int, cluster: Cluster, prices: Prices) -> Cost:
    """Of so long on so many devices."""
    hours = devices * seconds / _HOUR_S
    energy = hours * cluster.device.power_w / 1000 if cluster.device.power_w else None
    money = hours * prices.gpu_hour + (energy or 0.0) * prices.kwh
    return Cost(hours, money if money > 0 else None, energy)
