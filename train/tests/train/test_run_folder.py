"""A run's folder: its choice, and its first files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from invented_run import goes_through, recipe, tell

from netfold_train import Recipe
from netfold_train.callbacks.events import Ended
from netfold_train.callbacks.metrics_file import MetricsFile
from netfold_train.callbacks.run_folder import run_folder, run_name
from netfold_train.recipe.load import load, read_resolved
from netfold_train.runs import RECIPE

HARD: dict[str, Any] = {
    "model": {
        "name": "my.models:über",
        "text": 'quotes " and \\ and \n a line, \x7f, \x01 and 🎉',
        "numbers": [1, -2.5, 1e-30, 12345678901234567890],
        "table": {"deep": {"a key with spaces": [True, False]}, "empty": {}},
        "none": [],
        "a.dotted key": "x",
        "infinite": float("inf"),
    },
    "data": {"name": "photos", "scale": 3},
    "training": {"epochs": 2, "clip": 0.5, "precision": "f32"},
    "optimizer": {"name": "lamb", "betas": [0.5, 0.75], "eps": 1e-12},
    "parallel": {"data": 2, "bucket_mb": 16.0, "pipeline": 2, "microbatches": 8},
    "diloco": {"every": 20},
    "run": {"folder": "some/where", "name": "x"},
}


def run_through(folder: Path, asked: Recipe, reason: str = "done") -> None:
    tell([MetricsFile(folder)], [*goes_through(asked, 0, 5), Ended(5, reason, 1.0)])


@pytest.mark.parametrize("table", [HARD, {"model": {"name": "gpt"}, "data": {"name": "d"}, "training": {"steps": 1}}])
def test_a_written_recipe_loads_to_an_equal_one(tmp_path: Path, table: dict[str, Any]) -> None:
    asked = Recipe.model_validate({**table, "run": {"folder": str(tmp_path), "name": "x"}})
    folder = run_folder(asked)
    assert read_resolved(folder) == load(folder / RECIPE)[0] == asked
    # All defaults are written, so the defaults of another version change nothing.
    written = json.loads((folder / RECIPE).read_text())
    assert written["training"]["batch"] == 32 and written["fault_tolerance"]["grace_s"] == 30.0


def test_every_shipped_recipe_is_written_completely() -> None:
    paths = sorted((Path(__file__).parents[3] / "train/src/netfold_train/recipes").glob("*.toml"))
    assert paths
    for path in paths:
        asked, _ = load(path)
        assert Recipe.model_validate_json(asked.model_dump_json()) == asked


def test_a_run_is_named_by_its_recipe_or_its_model(tmp_path: Path) -> None:
    assert run_name(recipe(tmp_path)) == "invented"
    assert run_name(recipe(tmp_path, run={"folder": str(tmp_path)})) == "gpt"
    for name in ("a/b", "..", "."):
        with pytest.raises(ValueError, match=r"run\.name is .*, which is not a folder's name"):
            run_name(recipe(tmp_path, run={"name": name}))


def test_a_finished_run_stays_and_an_unfinished_one_continues(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    first = run_folder(asked)
    assert first == tmp_path / "invented"
    assert run_folder(asked) == first  # killed before its first line
    run_through(first, asked, "SIGTERM")
    assert run_folder(asked) == first
    assert len(json.loads((first / "environment.json").read_text())["starts"]) == 3
    run_through(first, asked)
    second = run_folder(asked)
    assert second == tmp_path / "invented-2"
    assert run_folder(asked) == second
    run_through(second, asked)
    assert run_folder(asked) == tmp_path / "invented-3"


def test_a_run_of_another_model_or_other_data_has_its_own_folder(tmp_path: Path) -> None:
    first = run_folder(recipe(tmp_path))
    assert run_folder(recipe(tmp_path, parallel={"pipeline": 2}, training={"steps": 40})) == first
    assert run_folder(recipe(tmp_path, model={"name": "gpt", "width": 64})) == tmp_path / "invented-2"
    assert run_folder(recipe(tmp_path, data={"name": "photos"})) == tmp_path / "invented-3"


def test_a_folder_of_no_run_stays_unchanged(tmp_path: Path) -> None:
    (tmp_path / "invented").mkdir()
    assert run_folder(recipe(tmp_path)) == tmp_path / "invented-2"


def test_resume_never_makes_a_new_folder_except_for_restarted_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(tmp_path, run={"folder": str(tmp_path), "name": "invented", "resume": "never"})
    run_folder(asked)
    second = run_folder(asked)
    assert second == tmp_path / "invented-2"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_folder(asked) == second


def test_a_run_that_a_process_is_writing_is_not_continued(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    folder = run_folder(asked)
    writing = MetricsFile(folder)
    tell([writing], goes_through(asked, 0, 3))
    assert run_folder(asked) == tmp_path / "invented-2"
    with pytest.raises(BlockingIOError, match=r"another process is writing .*: wait for it, or .*run\.name"):
        MetricsFile(folder)


def test_the_error_of_a_folder_that_cannot_be_made_has_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"run\.folder.*Not a directory"):
        run_folder(recipe(tmp_path, run={"folder": str(tmp_path / "file"), "name": "x"}))


def test_the_environment_names_the_hosts_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETFOLD_TOKEN_FILE", "/hidden/place")
    monkeypatch.setenv("NETFOLD_ALGORITHM", "ring")
    monkeypatch.setenv("SOME_PASSWORD", "xyzzy")
    text = (run_folder(recipe(tmp_path)) / "environment.json").read_text()
    assert "/hidden/place" not in text and "xyzzy" not in text
    (start,) = json.loads(text)["starts"]
    assert start["settings"]["NETFOLD_TOKEN_FILE"] == "(set, not shown)"
    assert start["settings"]["NETFOLD_ALGORITHM"] == "ring"
    assert start["versions"]["torch"] and start["versions"]["netfold"]
    (rank,) = start["ranks"]
    assert rank["rank"] == 0 and rank["cores"] >= 1 and rank["host"] and rank["cpu"]
