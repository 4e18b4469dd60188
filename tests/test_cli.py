"""Common to all verbs of `netfold`: --output and -o, times and rates with units, errors for mistyped commands."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from rich.table import Table
from sources import SOURCES
from typer.testing import CliRunner

from netfold.cli import app, verb
from netfold.cli.output import Output, with_output
from netfold.console import plain_console

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


def leaves(command: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command and group by its words."""
    found = {path: command}
    for name, child in getattr(command, "commands", {}).items():
        found |= leaves(child, (*path, name))
    return found


VERBS = leaves(typer.main.get_command(app))


def plain(text: str) -> str:
    return " ".join(text.split())


def test_every_help_is_its_source() -> None:
    """All words are the source's, with every bracket and colon; a group with a default command has its options, too."""
    for words, command in VERBS.items():
        helps = [CliRunner().invoke(app, [*words, option]) for option in ("--help", "-h")]
        assert [each.exit_code for each in helps] == [0, 0] and helps[0].output == helps[1].output, words
        # Long words are broken in the narrow column of descriptions.
        joined = "".join(helps[0].output.split())
        first = next(iter(command.commands.values())) if isinstance(command, verb.DefaultCommandGroup) else command
        for parameter in [*command.params, *first.params]:
            assert all(option in helps[0].output for option in parameter.opts if option.startswith("-")), words
            about = getattr(parameter, "help", None) or ""
            assert "".join(about.split()) in joined, (words, about)
        assert "".join((command.help or "").split()) in joined, words


def test_help_names_no_file_that_a_wheel_lacks() -> None:
    for words, command in VERBS.items():
        texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
        assert not [text for text in texts if re.search(r"\b(docs|examples|bench)/\w+[/.]", text)], words


def test_brackets_and_colons_of_users_reach_the_terminal() -> None:
    text = "[fault_tolerance] package.module:factory:width [/] :smile:"
    stream = io.StringIO()
    console = plain_console(file=stream, width=200)
    table = Table("a")
    table.add_row(text)
    console.print(text)
    console.print(table)
    assert stream.getvalue().count(text) == 2
    # Every other console of the program is one of these.
    assert not [
        str(path)
        for folder in SOURCES
        for path in folder.rglob("*.py")
        if path.name != "console.py" and re.search(r"(?<!plain_)\bConsole\(", path.read_text())
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "clusters"),
        ("plan", "models"),
        ("plan", "networks"),
        ("plan", "--model", "bert-large", "--cluster", "ethernet-10g", "--ranks", "2", "--batch", "64"),
        ("explain", "all-reduce"),
        ("train", "recipes"),
        ("bench", "model", "list"),
        ("bench", "figures", "--only", "list"),
        ("doctor", "job"),
        ("top", "--once"),
    ],
)
def test_a_result_is_json_on_request(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*words, "--output", "json"])
    assert done.stdout and isinstance(json.loads(done.stdout), list | dict), done.stderr


def test_a_plan_of_a_training_is_json() -> None:
    pytest.importorskip("torch")
    done = CliRunner().invoke(app, ["train", "gpt", "--explain", "--output", "json"])
    plan = json.loads(done.stdout)
    assert plan["split"]["ranks"] == 2 and plan["places"] and plan["parameters"] > 4e6
    refused = CliRunner().invoke(app, ["train", "gpt", "--output", "json"])
    assert refused.exit_code == 2 and "add --explain" in refused.stderr


def test_every_verb_with_a_form_refuses_an_unknown_ending(tmp_path: Path) -> None:
    file = tmp_path / "result.pdf"
    for words in (("plan", "clusters"), ("explain", "all-reduce"), ("train", "recipes"), ("doctor", "job")):
        done = CliRunner().invoke(app, [*words, "-o", str(file)])
        assert done.exit_code == 2 and "the endings are .json, .txt; --output allows any" in plain(done.stderr)
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("plan",), "--model"),
        (("plan",), "clusters"),
        (("plan", "--model"), "bert-large"),
        (("plan", "--cluster"), "ethernet-10g"),
        (("plan", "--recipe"), "gpt"),
        (("plan", "--model", "bert-large"), "--batch"),
        (("train",), "gpt-zero3"),
        (("train",), "recipes"),
        (("train",), "--explain"),
        (("train", "gpt"), "--ranks"),
    ],
)
def test_completion_offers_names_and_the_options_of_a_default_command(words: tuple[str, ...], offered: str) -> None:
    environment = {"_NETFOLD_COMPLETE": "complete_bash", "COMP_WORDS": f"netfold {' '.join(words)} {offered[:3]}"}
    environment["COMP_CWORD"] = str(len(words) + 1)
    done = subprocess.run(
        [Path(sys.executable).with_name("netfold")], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert offered in done.stdout.split(), (done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("bench", "all-reduce", "--backend", "nosuch"), "torch has no backend 'nosuch'; there are netfold,"),
        (("plan", "--model", "gpt3-175b", "--cluster", "dgx-a100"), "--ranks is missing: devices to train on"),
        (("plan", "--ranks", "4"), "--model is missing: a name of `netfold plan models`"),
        (("explain", "all-reduse"), "all_reduse"),
        (("doctor", "check", "--timeout", "3"), "has no unit"),
        (("profile", "report", "none"), "none"),
        (("train", "none.toml"), "none.toml: there is no such file"),
        (("train", "report", "none"), "none"),
        (("switch", "--memory", "lots"), "lots"),
    ],
)
def test_a_wrong_argument_is_a_sentence_and_exit_code_2(words: tuple[str, ...], sentence: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and sentence in plain(done.stderr), (done.exit_code, done.stderr, done.exception)
    assert len(done.stderr.splitlines()) <= 4


def test_every_result_has_the_same_options() -> None:
    options = {
        " ".join(("netfold", *words)): {option for parameter in command.params for option in parameter.opts}
        for words, command in VERBS.items()
    }
    assert {"--output", "-o"} <= options["netfold bench all-reduce"] & options["netfold plan predict"] & options[
        "netfold top"
    ]
    gone = {"--json", "--csv", "--html", "--gpus", "--drain-s", "--every-s", "--latency-us", "--rate-mbps"}
    assert not {path: found & gone for path, found in options.items() if found & gone}
