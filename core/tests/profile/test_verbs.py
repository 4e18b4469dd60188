"""The commands `netfold profile report` and `netfold profile compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from traces import training, write_run
from typer.testing import CliRunner

from netfold.cli import app


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("runs")
    made = {"before": training(3, 8, late=1), "after": training(3, 8)}
    return [str(write_run(run, folder / name)) for name, run in made.items()]


def say(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["profile", *words])
    return result.exit_code, result.stdout, result.stderr


def test_a_report_is_a_table_with_advice(runs: list[str]) -> None:
    code, out, err = say("report", runs[0])
    assert (code, err) == (0, "")
    assert out.startswith("python train.py: 3 of 3 ranks on 3 hosts; ")
    assert "128 KB to 16 MB" in out and "rank 1 (host-1) was last in" in out and "\nprediction: " in out


def test_a_report_as_data_writes_nothing_else(runs: list[str]) -> None:
    code, out, _ = say("report", runs[0], "--output", "json", "--buckets", "1K, 1G")
    found = json.loads(out)
    assert code == 0 and [(row["above_bytes"], row["to_bytes"]) for row in found["rows"]] == [(1024, 1 << 30)] * 2
    assert any(each["prediction"] for each in found["advice"])
    code, out, _ = say("report", runs[0], "--output", "csv")
    assert code == 0 and len(out.splitlines()) == 1 + 3 and out.startswith("operation,above_bytes,")


def test_a_comparison_is_a_table_or_json(runs: list[str]) -> None:
    code, out, _ = say("compare", *runs)
    assert code == 0 and "improvement" in out and out.splitlines()[-1].lstrip().startswith("total")
    code, out, _ = say("compare", *runs, "--output", "json")
    assert code == 0 and json.loads(out)["total"]["steps"] == [8, 8]


def test_an_unreadable_run_is_one_sentence(runs: list[str], tmp_path: Path) -> None:
    code, out, err = say("report", str(tmp_path))
    assert (code, out) == (2, "") and "holds no profile" in err
    code, _, err = say("compare", runs[0], str(tmp_path))
    assert code == 2 and err.startswith("netfold profile compare: ")
    assert say("compare", *runs, "--output", "html")[0] == 2
    code, _, err = say("report", runs[0], "--buckets", "16M,1K")
    assert code == 2 and "ascending" in err
    assert "size 'x' is not understood" in say("report", runs[0], "--buckets", "x")[2]
