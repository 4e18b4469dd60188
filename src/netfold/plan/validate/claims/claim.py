"""One number of a talk with the planner's beside it, and the questions that such numbers answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from netfold.plan.cluster import Cluster
from netfold.plan.request import Request, parse_request
from netfold.plan.search import Choice, search

# Of what is gained or lost: a prediction further off than this is said not to come out.
NEAR = 0.2


@dataclass(frozen=True)
class Claim:
    """words: the talk's own. said: its number; None where it has none. unit: of both numbers, behind them.

    asked: of the planner, in words. low, high: between which the prediction is what the talk says; infinite where it
    says no more than a bound. why: of a prediction that does not come out, or what it depends on.
    """

    name: str
    talk: str
    words: str
    said: float | None
    predicted: float
    unit: str
    low: float
    high: float
    asked: str
    why: str = ""

    @property
    def comes_out(self) -> bool:
        return self.low <= self.predicted <= self.high

    def to_json(self) -> dict[str, Any]:
        bounds = {"low": self.low, "high": self.high if self.high < float("inf") else None}
        return asdict(self) | bounds | {"comes_out": self.comes_out}


def near(said: float, nothing: float = 0.0) -> tuple[float, float]:
    """The band in which a prediction is what was said. nothing: what no gain, or no loss, would be."""
    off = NEAR * abs(said - nothing)
    return said - off, said + off


@dataclass(frozen=True)
class ClaimJob:
    """A data-parallel job as a file has it (docs/reference/plan/index.md); the planner chooses what `split` leaves
    free."""

    model: str
    cluster: str
    gpus: int
    batch: int
    job: Mapping[str, Any]
    split: Mapping[str, Any] = field(default_factory=dict)

    def request(self) -> Request:
        split = {"tensor": 1, "pipeline": 1, "zero": 0, "recompute": "none"} | dict(self.split)
        job = {"gpus": self.gpus, "batch": self.batch} | dict(self.job)
        return parse_request({"model": self.model, "cluster": self.cluster, "job": job, "split": split}, {})

    def best(self, cluster: Cluster | None = None, *, in_network: bool | None = None) -> Choice:
        """cluster: in place of its own. in_network: in place of what the job says."""
        asked = self.request()
        job = asked.job if in_network is None else replace(asked.job, in_network=in_network)
        return search(asked.model, cluster or asked.cluster, asked.devices, job, asked.space).best

    @property
    def text(self) -> str:
        keys = {**self.job, **self.split}
        said = ", ".join(f"{key}={str(value).lower()}" for key, value in keys.items())
        devices = f"data parallel over {self.gpus:,} devices" if self.gpus > 1 else "one device"
        return f"{self.model} on {self.cluster}, {devices}, batch {self.batch:,}; {said}"
