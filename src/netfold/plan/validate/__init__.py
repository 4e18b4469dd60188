"""Predictions against published measurements: errors, the choice that they lead to, and how honest the bands are.

`claims` has the talks' headline claims, each beside what is predicted.
"""

from netfold.plan.validate.published import Sourced, markdown, validate_published
from netfold.plan.validate.runs import COLUMNS, Run, read_runs
from netfold.plan.validate.runs_report import MOST_CALIBRATION_RUNS, Report, Row, calibrated, validate
from netfold.plan.validate.score import Compared, Score, score

__all__ = [
    "COLUMNS",
    "MOST_CALIBRATION_RUNS",
    "Compared",
    "Report",
    "Row",
    "Run",
    "Score",
    "Sourced",
    "calibrated",
    "markdown",
    "read_runs",
    "score",
    "validate",
    "validate_published",
]
