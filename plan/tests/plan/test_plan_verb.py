"""`netfold plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netfold.cli import app

ASKED = ("--model", "megatron-1b7", "--cluster", "dgx-a100", "--ranks", "16", "--batch", "64")


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_a_fully_fixed_split_is_the_only_prediction() -> None:
    fixed = ("--tensor", "2", "--pipeline", "2", "--micro-batch", "1", "--interleave", "1", "--zero", "0")
    code, said = plan(*ASKED, *fixed, "--no-sequence", "--recompute", "full")
    assert code == 0, said
    assert "split: tensor 2 x pipeline 2 x data 4, microbatches of 1, full recomputation" in said
    assert "the best splits" not in said and "the fastest of" not in said
    for part in (
        "a step takes",
        "computing",
        "bubble",
        "optimizer",
        "activations",
        "samples per second",
        "what limits it",
    ):
        assert part in said


def test_free_dimensions_are_searched_and_the_best_splits_are_listed_with_reasons() -> None:
    code, said = plan(*ASKED)
    assert code == 0 and "that fit, of" in said
    assert "the best splits, the fastest of each mesh" in said and "of a step more" in said
    assert "less memory for more time" in said and "what more would buy" in said


def test_json_has_the_numbers_of_the_text() -> None:
    code, said = plan(
        *ASKED, "--output", "json", "--curve", "8,16", "--compare", "network=tcp", "--price", "2", "--samples", "1e6"
    )
    assert code == 0
    found = json.loads(said)
    best = found["best"]
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"], rel=1e-9)
    assert best["low_s"] < best["step_s"] < best["high_s"] and best["memory"]["total"] <= best["memory"]["of"]
    assert [point["devices"] for point in found["curves"]["strong"]] == [8, 16]
    assert [each["name"] for each in found["comparisons"]["network=tcp"]] == ["as it is", "tcp"]
    assert found["training_s"] == pytest.approx(1e6 / best["samples_per_s"])
    assert found["training_cost"]["money"] == pytest.approx(2 * found["training_cost"]["gpu_hours"])


def test_options_override_the_file_and_errors_name_option_or_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('model = "megatron-1b7"\ncluster = "dgx-a100"\n[job]\ngpus = 16\nbatch = 60\n')
    code, said = plan(str(file), "--batch", "64", "--recompute", "full")
    assert code == 0 and "a batch of 64" in said
    code, said = plan(str(file), "--precision", "bf17", "--cluster", "dgx-a10")
    assert code == 2
    assert said.splitlines() == [
        "netfold plan: --precision bf17: job.precision is 'bf17'; it must be one of f32, tf32, f16, bf16; did you mean "
        "bf16?",
        "netfold plan: --cluster dgx-a10: there is no cluster 'dgx-a10'; did you mean dgx-a100? (or give a .toml "
        "file's path)",
    ]


def test_the_error_for_a_model_too_large_has_the_missing_bytes_in_one_line() -> None:
    code, said = plan("--model", "megatron-1t", "--cluster", "dgx-a100", "--ranks", "16", "--batch", "16")
    assert code == 2 and len(said.splitlines()) == 1
    assert "megatron-1t does not fit, however split" in said and "GB too little" in said


def test_time_to_accuracy_comes_from_a_curve_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'model = "bert-large"\ncluster = "dgx-a100"\n[job]\ngpus = 8\nbatch = 64\n'
        "[training]\ndataset = 1e6\nepochs = { 32 = 4, 128 = 8 }\n"
    )
    assert "to the accuracy, 5.66 epochs: " in plan(str(file))[1]
    assert "not known at a batch of 512" in plan(str(file), "--batch", "512")[1]


@pytest.mark.parametrize(("verb", "word"), [("clusters", "dgx-a100"), ("models", "gpt3-175b"), ("networks", "tcp")])
def test_shipped_models_and_clusters_are_listed_with_sources(verb: str, word: str) -> None:
    code, said = plan(verb)
    assert code == 0 and f"{word}:" in said and "  from: " in said


def test_predictions_beyond_published_runs_are_marked() -> None:
    asked = ("--model", "gpt3-175b", "--cluster", "dgx-a100", "--ranks", "256", "--batch", "256", "--micro-batch", "1")
    assert "note: ZeRO-3 over 256 ranks" in plan(*asked, "--tensor", "1", "--pipeline", "1", "--zero", "3")[1]
    assert "note: 16 tensor ranks exceed a node of 8" in plan(*asked, "--tensor", "16", "--pipeline", "2")[1]
    wide = ("--model", "gpt3-175b", "--cluster", "dgx-a100", "--ranks", "2304", "--batch", "2304", "--micro-batch", "1")
    assert "note: pipelines over 2,304 ranks" in plan(*wide, "--tensor", "8", "--pipeline", "12", "--zero", "0")[1]
    counted = ("--model", "resnet50", "--cluster", "dgx-1", "--ranks", "8", "--batch", "512", "--pipeline", "1")
    assert "note: resnet50: convolutions count as matrix products" in plan(*counted)[1]
    assert "note:" not in plan(*asked, "--tensor", "8", "--pipeline", "8", "--recompute", "full")[1]


def test_a_step_is_simulated_as_events_and_its_timeline_is_written(tmp_path: Path) -> None:
    fixed = ("--tensor", "2", "--pipeline", "2", "--micro-batch", "1", "--interleave", "1", "--zero", "0")
    file = tmp_path / "step.json"
    code, said = plan(*ASKED, *fixed, "--jitter", "0.05", "--straggler", "3=1.5", "--timeline", str(file))
    assert code == 0, said
    assert "the same step, simulated as events" in said and f"the timeline: {file}" in said
    assert json.loads(file.read_text())["traceEvents"]
    assert plan(*ASKED, *fixed, "--straggler", "three")[0] == 2
    assert plan(*ASKED, *fixed, "--jitter", "nan")[0] == 2
    code, said = plan(*ASKED, *fixed, "--straggler", "99=2")
    assert code == 2 and "there is no rank 99" in said


def test_failures_cost_time_and_give_a_checkpoint_interval(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    failing = '[failures]\nhours_between = 8000\ncheckpoint = "60 s"\nrestart = "300 s"\n'
    asked = 'model = "megatron-1b7"\ncluster = "dgx-a100"\n[job]\ngpus = 16\nbatch = 64\n[training]\nsamples = 1e8\n'
    file.write_text(asked + failing)
    code, said = plan(str(file), "--recompute", "full")
    assert (
        code == 0 and "with a failure every 20.8 days, a checkpoint every" in said and "of the time is progress" in said
    )
    file.write_text(asked + failing.replace('"60 s"', '"60 MB"'))
    code, said = plan(str(file))
    assert code == 2 and "is a quantity of bytes, where one of time is needed" in said
    file.write_text(asked + failing.replace("hours_between = 8000\n", ""))
    assert "failures.hours_between is missing" in plan(str(file))[1]
