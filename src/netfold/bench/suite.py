"""The standing set of measurements, `make bench`: what netfold claims, beside gloo, in about five minutes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netfold.bench.config import Config
from netfold.bench.launch import BenchError, measure
from netfold.bench.report import Row, describe_run, make_rows, total_wrong
from netfold.bench.sizes import format_size
from netfold.bench.table import describe_breakdown, describe_ratio, describe_time
from netfold.rack import RackError
from netfold.rack.command import missing

# Of one case; five of them, each usually done in a fifth of it.
CASE_DEADLINE_S = 150


@dataclass(frozen=True)
class Case:
    """target: the least median ratio to the second backend that is asked for; None: only reported."""

    title: str
    config: Config
    target: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Rows, or the reason why there are none; failed: that reason is not merely what this machine lacks."""

    case: Case
    rows: list[Row] = field(default_factory=list)
    document: dict[str, Any] | None = None
    reason: str | None = None
    failed: bool = False


def make_cases(backends: Sequence[str]) -> list[Case]:
    def config(workers: int, size_bytes: int, rounds: int, **more: Any) -> Config:
        return Config(list(backends), workers, [size_bytes], rounds, deadline_s=CASE_DEADLINE_S, **more)

    return [
        Case("rack, 1 Gbit/s links", config(4, 16 << 20, 20, rack_rate="1gbit"), target=1.35),
        Case("rack, 1 Gbit/s links", config(8, 16 << 20, 20, rack_rate="1gbit"), target=1.35),
        Case("loopback", config(4, 64 << 20, 12, warmups=2)),
        Case("loopback", config(2, 4, 50, breakdown=True)),
        Case("loopback", config(4, 4, 50, breakdown=True)),
    ]


def run_suite(cases: Sequence[Case], folder: Path, say: Callable[[str], None]) -> int:
    """Measure every case and write suite.md and suite.json into `folder`.

    Returns how many cases failed or had a wrong element; a missed target is in the table, and no failure.
    """
    outcomes = []
    for case in cases:
        say(f"measuring: {_case_name(case)}")
        outcomes.append(_measure(case))
    folder.mkdir(parents=True, exist_ok=True)
    whole = [
        {"title": outcome.case.title, "target": outcome.case.target, "reason": outcome.reason}
        | {"run": outcome.document}
        for outcome in outcomes
    ]
    (folder / "suite.json").write_text(json.dumps(whole, indent=1) + "\n")
    markdown = render_markdown(outcomes)
    (folder / "suite.md").write_text(markdown)
    say(markdown)
    return sum(outcome.failed or total_wrong(outcome.rows) > 0 for outcome in outcomes)


def render_markdown(outcomes: Sequence[Outcome]) -> str:
    """One line a case and backend, the breakdowns below it, and what it was measured on."""
    lines = [
        "| where | workers | size | backend | time, median (p5..p95) | ratio (p5..p95) | asked | wire bytes a rank "
        "| wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        lines += _lines(outcome)
    broken_down = [(outcome, row) for outcome in outcomes for row in outcome.rows if row.breakdown is not None]
    if broken_down:
        lines += ["", "One small call through torch:", ""]
    for outcome, row in broken_down:
        assert row.breakdown is not None
        lines.append(f"- {_case_name(outcome.case)}, {row.backend}: {describe_breakdown(row.breakdown)}")
    documents = [outcome.document for outcome in outcomes if outcome.document is not None]
    if documents:
        lines += ["", _measured_on(documents[0])]
    return "\n".join(lines) + "\n"


def _measure(case: Case) -> Outcome:
    if case.config.rack_rate is not None and (lack := missing(loss=False)):
        return Outcome(case, reason=lack)
    try:
        result = measure(case.config)
    except (BenchError, RackError) as error:
        return Outcome(case, reason=str(error), failed=True)
    rows = make_rows(case.config, result)
    return Outcome(case, rows, describe_run(case.config, result, rows))


def _lines(outcome: Outcome) -> list[str]:
    case = outcome.case
    head = f"| {case.title} | {case.config.workers} | {format_size(case.config.sizes[0])} |"
    if outcome.reason is not None:
        # A table's line ends where the text's first does; the whole reason is in the JSON.
        return [f"{head} - | not measured: {outcome.reason.splitlines()[0]} | - | {_asked(case)} | - | - |"]
    return [
        f"{head} {row.backend} | {describe_time(row.time_ns)} | {describe_ratio(row)} "
        f"| {_asked(case) if index == 0 else '-'} | {'-' if row.wire_bytes is None else round(row.wire_bytes)} "
        f"| {row.wrong} |"
        for index, row in enumerate(outcome.rows)
    ]


def _asked(case: Case) -> str:
    return "-" if case.target is None else f">= {case.target:g}"


def _case_name(case: Case) -> str:
    return f"{case.title}, {case.config.workers} workers, {format_size(case.config.sizes[0])}"


def _measured_on(document: dict[str, Any]) -> str:
    machine, versions = document["machine"], document["versions"]
    return (
        f"Measured on {machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, TCP congestion "
        f"control {machine['tcp_congestion_control']}; netfold {versions['netfold']}, torch {versions['torch']}, "
        f"Python {versions['python']}. f32, sum; backends interleaved round by round; the ratio is the other "
        "backend's time over the row's, paired by round."
    )
