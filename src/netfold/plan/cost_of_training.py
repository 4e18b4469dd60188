"""What training costs: money by the device hour, energy by the devices' highest power."""

from __future__ import annotations

from dataclasses import dataclass

from netfold.plan.cluster import Cluster

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Prices:
    """Of a device for an hour and of a kilowatt-hour in addition, in any one currency; 0 where unknown."""

    gpu_hour: float = 0.0
    kwh: float = 0.0
    currency: str = ""


@dataclass(frozen=True)
class Cost:
    """money: None without a price. energy_kwh: at most, of the devices alone; None where their power is unknown."""

    gpu_hours: float
    money: float | None
    energy_kwh: float | None

    def times(self, count: float) -> Cost:
        """The cost of `count` times as long."""
        money, energy = (None if each is None else count * each for each in (self.money, self.energy_kwh))
        return Cost(count * self.gpu_hours, money, energy)


def training_cost(seconds: float, devices: int, cluster: Cluster, prices: Prices) -> Cost:
    hours = devices * seconds / _HOUR_S
    energy = hours * cluster.device.power_w / 1000 if cluster.device.power_w else None
    money = hours * prices.gpu_hour + (energy or 0.0) * prices.kwh
    return Cost(hours, money if money > 0 else None, energy)
