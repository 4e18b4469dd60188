"""Findings and comparisons for other programs: JSON with all values, CSV with the rows. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from netfold.page.escape import pick
from netfold.profile.compare import Change, Comparison
from netfold.profile.findings import Findings, Row


def as_json(findings: Findings) -> str:
    """The fields of `Findings` by name; in seconds, bytes, and bytes per second."""
    return json.dumps(asdict(findings), indent=1)


def as_csv(findings: Findings) -> str:
    """One line for each row, with the fields of `Row`. Unknown: empty. Counts by name: `ring:75 tree:25`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in fields(Row)]
    writer.writerow(names)
    for row in findings.rows:
        writer.writerow([_cell(getattr(row, name)) for name in names])
    return text.getvalue()


def comparison_as_json(found: Comparison) -> str:
    """The fields of `Comparison` and `Change`, and the properties of `Change`: improvements in percent, verdicts."""
    changes = {"rows": [_change(row) for row in found.rows], "total": _change(found.total)}
    return json.dumps({**vars(found), **changes}, indent=1)


def _change(change: Change) -> dict[str, Any]:
    return asdict(change) | pick(change, "improvement", "per_step_s", "improvement_per_step", "verdict")


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return " ".join(f"{name}:{count}" for name, count in value.items())
    return "" if value is None else value
