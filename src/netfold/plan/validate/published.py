"""All published sources at once: what `netfold plan validate` says without a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from netfold.plan.validate.score import Score, score
from netfold.plan.validate.sources import SOURCES, Case, Source

# Rows of a source that are listed one by one, at most.
_MOST_SHOWN = 50


@dataclass(frozen=True)
class Sourced:
    """A source with its cases, and how good they are together."""

    source: Source
    cases: tuple[Case, ...]
    score: Score

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "name": case.name,
                "unit": case.unit,
                "measured": case.compared.measured,
                "predicted": case.compared.predicted,
                "low": case.compared.low,
                "high": case.compared.high,
            }
            for case in self.cases
        ]
        return {
            "source": self.source.name,
            "cluster": self.source.cluster,
            "fitted": self.source.fitted,
            "score": asdict(self.score),
            "rows": rows,
        }


def validate_published(sources: Sequence[Source] = SOURCES) -> list[Sourced]:
    """Each source predicted without its own rows, or with what its `fitted` says. Takes some seconds."""
    found = []
    for source in sources:
        cases = tuple(source.compare())
        found.append(Sourced(source, cases, score([case.compared for case in cases])))
    return found


def markdown(found: Sequence[Sourced]) -> str:
    """A table of all sources, a row each; every row of the small ones follows."""
    lines = [
        "# Predictions beside what others measured",
        "",
        "Made by `netfold plan validate --markdown`. Errors are parts of the measured value, in the mean absolute;",
        "bias keeps signs. Each source is predicted by constants that saw none of its rows, or as the last column",
        "says.",
        "",
        "| source | rows | mean error | bias | worst | in the 80% band | regret | what was fitted to it |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for each in found:
        regret = "" if each.score.regret is None else f"{100 * each.score.regret:.1f}%"
        lines.append(
            f"| {each.source.name} | {each.score.rows} | {100 * each.score.mean_error:.1f}% "
            f"| {100 * each.score.bias:+.1f}% | {100 * each.score.worst_error:.1f}% | {100 * each.score.covered:.0f}% "
            f"| {regret} | {each.source.fitted} |"
        )
    for each in found:
        if each.score.rows > _MOST_SHOWN:
            continue
        lines += ["", f"## {each.source.name}", "", "| | measured | predicted | error |", "|---|---:|---:|---:|"]
        for case in each.cases:
            row = case.compared
            lines.append(
                f"| {case.name} | {row.measured:.4g} {case.unit} | {row.predicted:.4g} {case.unit} "
                f"| {100 * row.error:+.1f}% |"
            )
    return "\n".join(lines) + "\n"
