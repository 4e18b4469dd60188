"""Common to all verbs of `netfold`: --output and -o, times and rates with units, errors for mistyped commands."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from netfold.cli import app, verb
from netfold.cli.output import Output, with_output

ROWS = [{"name": "a", "time": {"median": 1.5}, "rounds": [1, 2]}, {"name": "b", "time": None, "rounds": []}]
shared = typer.Typer()


@shared.command()
@with_output("json", "csv")
def show(output: Output, repeat: int = 1) -> None:
    output.show("table\n" * repeat, json=lambda: ROWS, csv=lambda: ROWS)


@shared.command()
def wait(
    time: float = verb.time_option("1s", least_s=0.1, help=""), rate: float = verb.rate_option("1gbit", help="")
) -> None:
    typer.echo(f"{time:g} {rate:g}")


@shared.command()
def fail(kind: str) -> None:
    errors = {
        "value": ValueError("one\ntwo"),
        "key": KeyError("no a"),
        "file": FileNotFoundError(2, "No such file", "x"),
    }
    with verb.exit_on("verb", ValueError, KeyError, OSError):
        raise errors[kind]


def ran(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(shared, words)
    return done.exit_code, done.stdout, done.stderr


def test_a_result_is_a_table_json_or_csv() -> None:
    assert ran("show") == (0, "table\n", "")
    assert ran("show", "--output", "table", "--repeat", "2") == (0, "table\ntable\n", "")
    assert json.loads(ran("show", "--output", "json")[1]) == ROWS
    assert list(csv.DictReader(ran("show", "--output", "csv")[1].splitlines())) == [
        {"name": "a", "time.median": "1.5", "rounds": "1 2", "time": ""},
        {"name": "b", "time.median": "", "rounds": "", "time": ""},
    ]
    assert ran("show", "--output", "html")[0] == 2


@pytest.mark.parametrize(("columns", "width"), [(None, 160), ("80", 160), ("200", 200), ("wide", 160)])
def test_a_table_in_a_pipe_is_no_narrower_than_160_columns(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GNU readline sets COLUMNS=80 in the environment of the processes that its process starts."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    widths: list[int] = []
    Output("table", tmp_path / "result.txt").show(lambda console: widths.append(console.width))
    assert widths == [width]


def test_a_file_gets_the_form_of_its_suffix_and_the_table_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert ran("show", "-o", str(file)) == (0, "table\n", f"wrote {file}\n")
    assert json.loads(file.read_text()) == ROWS
    assert ran("show", "-o", str(tmp_path / "result"), "--output", "csv")[:2] == (0, "table\n")
    assert (tmp_path / "result").read_text().startswith("name,time.median,")
    assert ran("show", "-o", str(tmp_path / "result.txt")) == (0, "", f"wrote {tmp_path / 'result.txt'}\n")
    assert (tmp_path / "result.txt").read_text() == "table\n"
    assert "there is no folder" in ran("show", "-o", str(tmp_path / "none" / "result.json"))[2]


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ((), "1 1.25e+08"),
        (("--time", "250ms", "--rate", "9.4gbit"), "0.25 1.175e+09"),
        (("--time", "2 s", "--rate", "100 Gbit/s"), "2 1.25e+10"),
    ],
)
def test_times_and_rates_have_units(words: tuple[str, ...], seen: str) -> None:
    assert ran("wait", *words)[:2] == (0, seen + "\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--time", "3"), "has no unit"),
        (("--time", "1gbit"), "is a quantity of rate"),
        (("--time", "1us"), "is below 0.1 s"),
    ],
)
def test_a_time_without_a_unit_is_an_error(words: tuple[str, ...], sentence: str) -> None:
    code, _, error = ran("wait", *words)
    assert code == 2 and sentence in " ".join(error.replace("│", " ").split())


def test_an_error_is_a_line_for_each_problem() -> None:
    assert ran("fail", "value") == (2, "", "netfold verb: one\nnetfold verb: two\n")
    assert ran("fail", "key") == (2, "", "netfold verb: no a\n")
    assert ran("fail", "file") == (2, "", "netfold verb: x: No such file; choose another path\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("plan", "predct"), "there is no command or file 'predct'; did you mean 'predict'?"),
        (("plan", "nothing"), "there is no command or file 'nothing'; the commands are predict, clusters,"),
        (("plan", "none.toml"), "none.toml: cannot be read"),
        (("bench", "all-reduse"), "No such command 'all-reduse'. Did you mean 'all-reduce'"),
    ],
)
def test_a_mistyped_command_is_an_error_and_not_a_file(words: tuple[str, ...], sentence: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and sentence in " ".join(done.stderr.replace("│", " ").split())


def test_train_takes_the_name_of_a_recipe_and_suggests_one() -> None:
    pytest.importorskip("pydantic")
    said = [CliRunner().invoke(app, ["train", word]).stderr for word in ("reprot", "gtp")]
    assert "did you mean 'report'?" in said[0] and "did you mean 'gpt'?" in said[1]


def test_every_result_has_the_same_options() -> None:
    def leaves(command: object, path: str) -> dict[str, set[str]]:
        children = getattr(command, "commands", {})
        if children:
            return {
                name: found for key, child in children.items() for name, found in leaves(child, f"{path} {key}").items()
            }
        return {path: {option for parameter in command.params for option in parameter.opts}}  # type: ignore[attr-defined]

    options = leaves(typer.main.get_command(app), "netfold")
    assert {"--output", "-o"} <= options["netfold bench all-reduce"] & options["netfold plan predict"] & options[
        "netfold top"
    ]
    gone = {"--json", "--csv", "--html", "--gpus", "--drain-s", "--every-s", "--latency-us", "--rate-mbps"}
    assert not {path: found & gone for path, found in options.items() if found & gone}
