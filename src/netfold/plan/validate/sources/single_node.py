"""GPT on one node of A100, 1,440 splits: each kind of rank predicted by constants fitted to the other kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from netfold.plan.cluster import load_cluster
from netfold.plan.step import FITTED, predict
from netfold.plan.validate.calibrate import fit_shipped
from netfold.plan.validate.runs import Run, read_runs
from netfold.plan.validate.sources.table import DATA, Case, Published, of_time

_FILE = "a100_single_node_gpt.csv"
# Of 8 pairs of width and tensor degree, each with 4 microbatches, 7 are left.
_KINDS_LEFT = 28
# Every seventh run has all kinds of layer in it, and is fitted in a second.
_EVERY = 7


def crossed(_: Sequence[Published]) -> list[Case]:
    """The fitted constants never saw the width and tensor degree that they are asked for."""
    runs = read_runs(DATA / _FILE)
    cluster = load_cluster("dgx-a100")
    cases = []
    for kind in sorted({_kind(run) for run in runs}):
        others = [
            (run.model, run.job, run.measured_ms / 1e3) for run in [run for run in runs if _kind(run) != kind][::_EVERY]
        ]
        constants = replace(fit_shipped(others, cluster, _KINDS_LEFT), spread=FITTED.spread)
        for run in runs:
            if _kind(run) == kind:
                prediction = predict(run.model, cluster, run.job, constants)
                cases.append(of_time(f"line {run.line}", run.measured_ms / 1e3, prediction, run.request))
    return cases


def _kind(run: Run) -> tuple[int, int]:
    return run.model.hidden, run.job.split.tensor
