"""Parts that all verbs share: exit codes, errors as lines, times and rates as options, a default subcommand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
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
        from netfold.quantity import parse_quantity

        try:
            value = parse_quantity(text, kind, f"a {kind}")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if not least <= value <= most:
            unit = "s" if kind == "time" else "bytes/s"
            limit = f"below {least:g}" if value < least else f"above {most:g}"
            raise typer.BadParameter(f"{text} is {limit} {unit}")
        return value

    return parse


def new_app(**settings: Any) -> typer.Typer:
    """A verb, or a group of verbs: help and errors are plain text, so that no bracket or colon of theirs is markup."""
    return typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def names_and_files(names: Callable[[], Sequence[str]], *endings: str) -> Callable[[str], list[str]]:
    """Complete one of `names()`, a folder, or a file with one of these endings."""

    def complete(incomplete: str) -> list[str]:
        folder, _, start = incomplete.rpartition("/")
        there = sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).glob(f"{start}*"))
        files = [str(each) for each in there if each.suffix in endings]
        folders = [f"{each}/" for each in there if each.is_dir()]
        return [*(name for name in names() if name.startswith(incomplete)), *files, *folders]

    return complete


class DefaultCommandGroup(TyperGroup):
    """A group whose first command also runs without its name, as in `netfold plan job.toml`.

    The first argument must then be an option, a file or one of `names()`. Another word is an error that names the
    nearest command.
    """

    def names(self) -> Sequence[str]:
        """Arguments of the first command that do not look like a file."""
        return ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Add the arguments and options of the first command, which the group takes too."""
        super().format_options(ctx, formatter)
        name, first = next(iter(self.commands.items()))
        with formatter.section(f"Arguments and options of `{name}`, which also runs without its name"):
            formatter.write_dl([record for each in first.params if (record := each.get_help_record(ctx))])

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete commands, names and options of the first command."""
        first = next(iter(self.commands.values()))
        found = super().shell_complete(ctx, incomplete) + first.shell_complete(ctx, incomplete)
        for each in first.params:
            if each.param_type_name == "argument":
                found += each.shell_complete(ctx, incomplete)
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first and first not in self.commands and first not in ctx.help_option_names:
            is_file = "." in first or "/" in first or Path(first).exists()
            is_word = not first.startswith("-") and not is_file and first not in self.names()
            # Completion also asks about lines that are wrong.
            if is_word and not ctx.resilient_parsing:
                near = get_close_matches(first, [*self.commands, *self.names()], 1)
                hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(self.commands)}"
                ctx.fail(f"there is no command or file {first!r}; {hint}")
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)
