"""The standing set of measurements, `make bench`: what netfold claims, beside gloo, in about five minutes."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netfold.bench.config import Config
from netfold.bench.launch import BenchError, measure
from netfold.bench.machine import describe_machine, describe_versions
from netfold.bench.report import Row, document, make_rows, total_wrong
from netfold.bench.sizes import format_size
from netfold.bench.table import describe_breakdown, describe_ratio
from netfold.rack import RackError

# Of one case; five of them, each usually done in a fifth of it.
CASE_DEADLINE_S = 150


@dataclass(frozen=True)
class Case:
    """target: the least ratio to gloo that is asked for, None where the number is only reported."""

    title: str
    config: Config
    target: float | None = None


@dataclass(frozen=True)
class Outcome:
    """rows is empty where the case was not measured; reason says why then."""

    case: Case
    rows: list[Row]
    document: dict[str, Any] | None
    reason: str | None = None


def cases(backends: Sequence[str] = ("netfold", "gloo")) -> list[Case]:
    def config(workers: int, size_bytes: int, rounds: int, **more: Any) -> Config:
        return Config(list(backends), workers, [size_bytes], rounds, deadline_s=CASE_DEADLINE_S, **more)

    rack = {"rack_rate": "1gbit"}
    return [
        Case("rack, 4 workers, 1 Gbit/s links", config(4, 16 << 20, 20, **rack), target=1.35),
        Case("rack, 8 workers, 1 Gbit/s links", config(8, 16 << 20, 20, **rack), target=1.35),
        Case("loopback, 4 workers", config(4, 64 << 20, 12, warmups=2)),
        Case("loopback, 2 workers", config(2, 4, 50, breakdown=True)),
        Case("loopback, 4 workers", config(4, 4, 50, breakdown=True)),
    ]


def run_suite(todo: Sequence[Case], folder: Path, say: Callable[[str], None]) -> int:
    """Measure every case, write suite.md and suite.json into `folder`; return how many failed or were wrong."""
    outcomes = []
    for case in todo:
        say(f"{case.title}, {format_size(case.config.sizes[0])} ...")
        outcomes.append(_measure(case))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "suite.json").write_text(json.dumps([_as_json(outcome) for outcome in outcomes], indent=1) + "\n")
    markdown = render_markdown(outcomes)
    (folder / "suite.md").write_text(markdown)
    say(markdown)
    return sum(outcome.document is None and not _excused(outcome) or total_wrong(outcome.rows) > 0 for outcome in outcomes)
