"""What all verbs share: exit codes, errors as lines, times and rates as options, a default subcommand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

# Exit codes, as a shell's. The command line is wrong, or this machine cannot run the command.
CANNOT = 2
# The command ran, and something failed or a problem was found.
FAILED = 1


@contextlib.contextmanager
def exit_on(verb: str, *errors: type[Exception], code: int = CANNOT) -> Iterator[None]:
    """Print these errors on stderr, one line for each problem, and exit with `code`."""
    try:
        yield
    except errors as error:
        print_problems(verb, error)
        raise typer.Exit(code) from None


def print_problems(verb: str, error: Exception) -> None:
    text = str(error)
    if isinstance(error, KeyError):
        text = str(error.args[0])  # str() of a KeyError has quotes around the sentence
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}; choose another path"
    for problem in text.splitlines():
        typer.echo(f"netfold {verb}: {problem}", err=True)


def time_option(default: str | None, *, least_s: float = 0.0, most_s: float = math.inf, help: str) -> Any:
    """An option for a time with its unit, such as 50us or 30s. The verb gets seconds."""
    return typer.Option(default, parser=_parser("time", least_s, most_s), metavar="TIME", help=help)


def rate_option(default: str | None, *, help: str) -> Any:
    """An option for a rate with its unit, such as 1gbit. The verb gets bytes per second."""
    return typer.Option(default, parser=_parser("rate", 1.0, math.inf), metavar="RATE", help=help)


def _parser(kind: str, least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        from netfold.plan.cluster.units import parse_quantity

        try:
            value = parse_quantity(text, kind, f"a {kind}")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if not least <= value <= most:
            unit = "s" if kind == "time" else "bytes/s"
            raise typer.BadParameter(f"{text} is out of range; the range is {least:g} to {most:g} {unit}")
        return value

    return parse


class DefaultCommandGroup(TyperGroup):
    """A group whose first command also runs without its name, with a file or with options.

    `netfold plan job.toml` is `netfold plan predict job.toml`. A first argument that is neither an option nor looks
    like a file must be a command's name; otherwise the group prints an error with the nearest name.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        is_file = "." in first or "/" in first or Path(first).is_file()
        is_option = first.startswith("-") and first not in ctx.help_option_names
        if is_option or (is_file and first not in self.commands):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)
