"""The published measurements that ship with netfold, and what a source makes of its own."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from netfold.plan.step import Prediction
from netfold.plan.validate.score import Compared

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class Published:
    """One measured result. notes: `key=value` words, as its table has them."""

    model: str
    hardware: str
    workers: str
    parallelism: str
    metric: str
    value: float
    unit: str
    notes: str

    def note(self, key: str) -> str:
        """The word behind `key=`. Raises ValueError where there is none."""
        found = re.search(rf"\b{key}=(\S+)", self.notes)
        if found is None:
            raise ValueError(f"{self.model}, {self.metric}: the notes {self.notes!r} have no {key}=")
        return found[1]

    def number(self, key: str) -> int:
        return int(self.note(key))

    def degree(self, kind: str) -> int:
        """Of TP, PP, DP or VP in `parallelism`; 1 where it is not said."""
        found = re.search(rf"\b{kind}(\d+)", self.parallelism)
        return int(found[1]) if found else 1


@dataclass(frozen=True)
class Case:
    """One published result with its prediction, both in `unit`; what is compared here the source says."""

    name: str
    unit: str
    compared: Compared


@dataclass(frozen=True)
class Source:
    """cluster: where its runs are taken to be. fitted: which constants saw some of its rows, and how they are left out.

    begins: how the table's first column begins.
    """

    name: str
    begins: str
    cluster: str
    fitted: str
    cases: Callable[[Sequence[Published]], list[Case]]

    def compare(self) -> list[Case]:
        return self.cases([row for source, row in _rows() if source.startswith(self.begins)])


@cache
def _rows() -> tuple[tuple[str, Published], ...]:
    with (DATA / "calibration.csv").open(newline="", encoding="utf-8") as file:
        return tuple(
            (
                row["source"],
                Published(
                    row["model"],
                    row["hardware"],
                    row["workers"],
                    row["parallelism"],
                    row["metric"],
                    float(row["value"]),
                    row["unit"],
                    row["notes"],
                ),
            )
            for row in csv.DictReader(file)
        )


def of_time(name: str, measured_s: float, prediction: Prediction, question: Hashable = None) -> Case:
    return Case(name, "s", Compared(question, measured_s, prediction.step_s, prediction.low_s, prediction.high_s))
