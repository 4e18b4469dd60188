"""Predictions beside measured runs: the planner's aims, the shipped constants, and the errors of bad tables."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from validation.__main__ import main
from validation.calibrate import GUESSES, fit_shipped
from validation.report import calibrated, validate
from validation.runs import COLUMNS, read_runs
from validation.score import Case, score
from validation.sources import DATA, SOURCES, Source, fit_law, sources_markdown

from netfold_plan.cluster import load_cluster
from netfold_plan.step import FITTED, predict

RUNS = read_runs(DATA / "a100_single_node_gpt.csv")
HEAD = ",".join(COLUMNS)
LINE = "8,32,4,1024,16,24,1024,2,2,2,219.7"


def _source(begins: str) -> Source:
    return next(source for source in SOURCES if source.name.startswith(begins))


def test_shipped_constants_equal_the_fit() -> None:
    fitted = fit_shipped([(run.model, run.job, run.measured_s) for run in RUNS[::3]], load_cluster("dgx-a100"))
    for name in GUESSES:
        assert getattr(FITTED, name) == pytest.approx(getattr(fitted, name), rel=0.05), name


def test_predictions_within_one_node_are_within_a_tenth_and_inside_their_band() -> None:
    found = validate(RUNS, load_cluster("dgx-a100")).score
    assert found.mean_error < 0.06
    assert 0.7 < found.covered < 0.9
    assert found.rank_correlation is not None and found.rank_correlation > 0.95
    assert found.regret is not None and found.regret < 0.035


@pytest.mark.parametrize(
    ("begins", "mean", "worst"),
    [
        ("Megatron-LM, tensor", 0.10, 0.10),
        ("Korthikanti, table 5", 0.10, 0.10),
        ("Megatron-LM's figures", 0.10, 0.15),
        ("Korthikanti, figure 1", 0.05, 0.05),
        ("llm-foundry", 0.10, None),
    ],
)
def test_unfitted_sources_are_within_the_target_error(begins: str, mean: float, worst: float | None) -> None:
    found = score(_source(begins).compare())
    assert found.mean_error <= mean
    assert worst is None or found.worst_error <= worst


def test_bus_bandwidth_is_within_a_twentieth_from_16_mb_on() -> None:
    for case in _source("vTrain").compare():
        large = int(case.name.split()[2]) >= 16 << 20
        assert abs(case.error) <= (0.05 if large else 0.15), case.name


def test_edsr_times_of_all_three_libraries_follow_from_the_first_five_rows() -> None:
    cases = _source("EDSR").compare()
    for library in {case.name.rsplit(",", 1)[0] for case in cases}:
        errors = [abs(case.error) for case in cases if case.name.startswith(library + ",")]
        assert len(errors) == 5 and sum(errors) / 5 <= 0.05 and max(errors) <= 0.12


def test_the_committed_table_equals_the_present_predictions() -> None:
    committed = (Path(__file__).parents[3] / "lab" / "bench" / "results" / "plan.md").read_text()
    quick = [source for source in SOURCES if source.name.startswith(("Megatron", "Korthikanti", "vTrain", "EDSR"))]
    for section in sources_markdown([(source, source.compare()) for source in quick]).split("\n## ")[1:]:
        assert section.strip() in committed, "make it again: python lab/bench/validation > lab/bench/results/plan.md"


def test_a_law_fitted_to_exact_runs_is_exact() -> None:
    law = fit_law([(count, count / (0.5 + 0.125 * power)) for power, count in enumerate((1, 2, 4, 8))], 1e-9)
    assert law.samples_per_s(1024) == pytest.approx(1024 / 1.75)


def test_a_calibrated_target_is_found_again() -> None:
    """Runs a fifth slower than the constants predict, of a target that recomputes everything."""
    cluster, slower = load_cluster("dgx-a100"), replace(FITTED, layer_factor=1.2)
    picked = [run for run in RUNS if run.model.hidden == 2048 and run.job.micro_batch == 8][:20]
    made = [
        replace(
            run, measured_ms=1e3 * predict(run.model, cluster, replace(run.job, recomputation="full"), slower).step_s
        )
        for run in picked
    ]
    constants, recomputation = calibrated(made[::2], cluster, "none")
    assert recomputation == "full"
    assert validate(made[1::2], cluster, made[::2]).score.mean_error < 0.02
    assert constants.spread < FITTED.spread


def test_calibration_on_ten_runs_of_a_target_improves_the_others() -> None:
    cluster, without, with_them = load_cluster("dgx-a100"), [], []
    for seed in range(4):
        order = random.Random(seed).sample(RUNS, len(RUNS))
        known, asked = order[:10], order[10::12]
        without.append(validate(asked, cluster).score.mean_error)
        with_them.append(validate(asked, cluster, known).score.mean_error)
    assert sum(with_them) < 0.95 * sum(without)
    assert sum(with_them) / 4 < 0.06


def test_all_runs_of_a_table_share_one_recomputation_setting() -> None:
    """Width 8192 on one node does not fit unless all is recomputed, so its small neighbours recompute too."""
    cluster = load_cluster("dgx-a100")
    large = replace(RUNS[0], model=replace(RUNS[0].model, hidden=8192, heads=64))
    alone, beside = validate(RUNS[:3], cluster), validate([*RUNS[:3], large], cluster)
    assert (alone.recomputation, beside.recomputation) == ("none", "full")
    assert all(slow.predicted > 1.1 * quick.predicted for quick, slow in zip(alone.cases, beside.cases, strict=False))


def test_one_delayed_run_does_not_affect_the_calibration_of_others() -> None:
    cluster, with_it, without = load_cluster("dgx-a100"), [], []
    for seed in range(3):
        order = random.Random(seed).sample(RUNS, len(RUNS))
        known, asked = order[:10], order[10::24]
        slow = [replace(known[0], measured_ms=2 * known[0].measured_ms), *known[1:]]
        without.append(validate(asked, cluster, known).score.mean_error)
        with_it.append(validate(asked, cluster, slow).score.mean_error)
    assert sum(with_it) < 1.2 * sum(without)


def test_a_band_is_narrower_where_runs_of_the_shape_are_known() -> None:
    cluster = load_cluster("dgx-a100")
    shape = [run for run in RUNS if run.job.split.tensor == 2 and run.job.micro_batch == 4]
    other = next(run for run in RUNS if run.job.split.tensor == 8 and run.job.micro_batch == 1)
    near, far = validate([shape[20], other], cluster, shape[:10]).cases
    assert (near.high / near.predicted - 1) < 0.7 / 0.95 * (far.high / far.predicted - 1)


def test_scores_of_a_table_made_by_hand() -> None:
    rows = [
        Case("first", "s", 10.0, 11.0, 9.0, 12.0, "a"),
        Case("second", "s", 20.0, 10.0, 9.0, 11.0, "a"),
        Case("third", "s", 40.0, 40.0, 39.0, 41.0, "a"),
    ]
    found = score(rows)
    assert found.mean_error == pytest.approx((0.1 + 0.5 + 0) / 3)
    assert found.bias == pytest.approx((0.1 - 0.5) / 3)
    assert found.regret == pytest.approx(1.0)
    assert found.rank_correlation == pytest.approx(0.5)
    assert found.covered == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "has no column '# GPUs'"),
        (f"{HEAD}\n", "has no runs"),
        (f"{HEAD}\n{LINE.replace('219.7', 'soon')}\n", "line 2: iteration time .* is not a number"),
        (f"{HEAD}\n{LINE.replace('219.7', '-1')}\n", "line 2: iteration time .* must be above 0"),
        (f"{HEAD}\n{LINE}\n{LINE.replace('8,32', '16,32')}\n", "line 3: .* is 8 GPUs, not 16"),
        (f"{HEAD}\n{LINE.replace('8,32,', '8,33,')}\n", "line 2: a global batch of 33 cannot be divided evenly"),
    ],
)
def test_an_invalid_table_is_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_runs(path)


def test_the_script_prints_measured_and_predicted_in_milliseconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD},further\n{LINE},left alone\n")
    main(["--runs", str(path), "--cluster", "dgx-a100", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["cases"]
    assert row["measured"] == 219.7 and row["predicted"] == pytest.approx(219.7, rel=0.3)


def test_a_run_beyond_the_cluster_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD.replace(',', ' , ')}\n{LINE}\n8,8,1,1536,12,24,1024,8,1,1,100\n")
    with pytest.raises(ValueError, match="line 3: GPT 1536x24: 12 heads cannot be split over 8 tensor ranks"):
        validate(read_runs(path), load_cluster("dgx-a100"))


def test_too_many_calibration_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="11 calibration runs are more than 10"):
        validate(RUNS[:1], load_cluster("dgx-a100"), RUNS[:11])
