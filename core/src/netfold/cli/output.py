"""The options `--output FORM` and `-o FILE` of every verb that prints a result."""

from __future__ import annotations

import csv
import enum
import functools
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console

    # A text, or a function that prints the table.
    Table = str | Callable[[Console], object]

# The least width in columns of a table that goes to a file or to a pipe. A larger COLUMNS widens the table. A smaller
# one is a terminal's: GNU readline sets it for the children of its process.
_PIPED_WIDTH = 160


@dataclass(frozen=True)
class Output:
    """The form and the place of a verb's result.

    form: table, json, csv or html.
    file: None for standard output.
    """

    form: str
    file: Path | None

    def show(self, table: Table, **renderings: Callable[[], Any]) -> None:
        """Print the result in the chosen form. With a file, write the form there and print the table.

        renderings: by form, a function that returns a text; for JSON also an object, for CSV also a sequence of rows.
        """
        shown = table if self.form == "table" else _encode(self.form, renderings[self.form]())
        if self.file is None:
            _write(shown, sys.stdout)
            return
        # cli.main prints an error of the file system as one line.
        with self.file.open("w", encoding="utf-8") as stream:
            _write(shown, stream)
        if self.form != "table":
            _write(table, sys.stdout)
        typer.echo(f"wrote {self.file}", err=True)


# What a live view can replace.
STDOUT_TABLE = Output("table", None)


def with_output(*forms: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options --output and -o. The verb takes both as one argument, `output`.

    forms: those that the verb can render beside a table.
    """
    form_type: Any = enum.Enum("Form", [(form, form) for form in ("table", *forms)])  # type: ignore[misc]
    form_option = typer.Option("--output", help="The form of the result; default: the ending of -o, else table.")
    file_option = typer.Option("-o", dir_okay=False, writable=True, help="Write the result to this file.")

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(*args: Any, output_form: Any, output_file: Path | None, **named: Any) -> None:
            form = output_form.value if output_form else _form_of(output_file, forms)
            if output_file is not None and not output_file.parent.is_dir():
                raise typer.BadParameter(f"there is no folder {output_file.parent}", param_hint="-o")
            verb(*args, output=Output(form, output_file), **named)

        signature = inspect.signature(verb, eval_str=True)
        options = {
            **{name: each for name, each in signature.parameters.items() if name != "output"},
            "output_form": _keyword("output_form", Annotated[form_type | None, form_option]),
            "output_file": _keyword("output_file", Annotated[Path | None, file_option]),
        }
        # typer reads both.
        run.__signature__ = signature.replace(parameters=list(options.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: each.annotation for name, each in options.items()}
        return run

    return decorate


def _form_of(file: Path | None, forms: Sequence[str]) -> str:
    """The form of a file's ending: a table without one and for .txt."""
    suffix = "" if file is None else file.suffix.removeprefix(".")
    if suffix in ("", "txt"):
        return "table"
    if suffix not in forms:
        endings = ", ".join(f".{form}" for form in (*forms, "txt"))
        raise typer.BadParameter(f"{file}: the endings are {endings}; --output allows any", param_hint="-o")
    return suffix


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _encode(form: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, indent=1) if form == "json" else _csv(value)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV: `time_ns.median` for a nested value, values of a list separated by spaces, empty for None."""
    flat = [dict(_flatten("", row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flatten(prefix: str, row: Mapping[str, Any]) -> list[tuple[str, Any]]:
    cells: list[tuple[str, Any]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            cells += _flatten(f"{prefix}{name}.", value)
        else:
            cells.append((prefix + name, " ".join(map(str, value)) if isinstance(value, list | tuple) else value))
    return cells


def _write(value: Table, stream: TextIO) -> None:
    if isinstance(value, str):
        print(value.removesuffix("\n"), file=stream, flush=True)
        return
    from netfold.console import plain_console

    columns = os.environ.get("COLUMNS", "")
    piped = max(_PIPED_WIDTH, int(columns) if columns.isdecimal() else 0)
    value(plain_console(file=stream, width=None if stream.isatty() else piped))
