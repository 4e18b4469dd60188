"""The residual process carries errors of known runs to runs of a similar shape, and to no other run."""

from dataclasses import replace

import pytest
from validation.calibrate import ResidualGP
from validation.runs import read_runs
from validation.sources import DATA

from netfold_plan.job import Split

RUN = replace(read_runs(DATA / "a100_single_node_gpt.csv")[0], measured_ms=110.0)


def test_an_error_is_applied_almost_whole_to_a_run_of_the_same_shape() -> None:
    (factor,) = ResidualGP([RUN] * 4, [100.0] * 4).factors([RUN])
    assert factor == pytest.approx(1.1, rel=0.01)


def test_an_error_is_not_applied_to_a_run_of_another_shape() -> None:
    far = replace(RUN, job=replace(RUN.job, split=Split(tensor=8)), model=replace(RUN.model, hidden=12288))
    (factor,) = ResidualGP([RUN] * 4, [100.0] * 4).factors([far])
    assert factor == pytest.approx(1.0, abs=1e-3)


def test_known_runs_without_errors_change_nothing() -> None:
    assert ResidualGP([RUN], [110.0]).factors([RUN, RUN]) == pytest.approx([1.0, 1.0])
