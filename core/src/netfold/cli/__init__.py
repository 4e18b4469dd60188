"""The command line: one thin command for each package, and the commands that other packages register.

May import every package of netfold; the cli of another package alone imports this one. Commands import their packages
when they run, so that `netfold --help` stays fast. `verb` has what all commands share, and `output` the options
--output and -o. An entry point of the group netfold.commands is a verb: a typer.Typer, or a function. Tests: `pytest
tests/test_cli.py`, and the tests of each package.
"""

from __future__ import annotations

import errno
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from netfold.cli import doctor, explain, nccl_env, nccl_tuning, profile, store, switch, top
from netfold.cli.verb import CANNOT, new_app
from netfold.extras import VERBS, MissingExtraError, missing_extra, plugin

app = new_app(
    name="netfold",
    help="The network part of a training job: collectives that add up gradients inside the network.",
    no_args_is_help=True,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"netfold {version('netfold')}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    pass


app.command("explain")(explain.explain)
app.command("store")(store.store)
app.command("nccl-env")(nccl_env.nccl_env)
app.command("nccl-tuning")(nccl_tuning.nccl_tuning)
app.command("top")(top.top)
app.add_typer(switch.app, name="switch")
app.add_typer(doctor.app, name="doctor")
app.add_typer(profile.app, name="profile")


def _missing(verb: str) -> None:
    """A verb whose package is not installed: it says what to install."""

    def command(context: typer.Context) -> None:
        plugin("netfold.commands", verb, f"netfold {verb}", VERBS[verb])

    text = f"Not installed: pip install 'netfold[{VERBS[verb]}]'."
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(verb, help=text, context_settings=settings)(command)


_registered = {entry.name: entry for entry in entry_points(group="netfold.commands")}
for _verb in sorted(VERBS.keys() | _registered.keys()):
    if _verb not in _registered:
        _missing(_verb)
    elif isinstance(_command := _registered[_verb].load(), typer.Typer):
        app.add_typer(_command, name=_verb)
    else:
        app.command(_verb)(_command)


# Errors of a file or folder that this user may not use, or that the file system refuses.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    try:
        app()
    except OSError as error:
        if error.errno not in _REFUSED or error.filename is None:
            raise
        print(f"netfold: {error.filename}: {error.strerror}; choose another path", file=sys.stderr)
        sys.exit(CANNOT)
    except (MissingExtraError, ModuleNotFoundError) as error:
        sentence = missing_extra(error)
        if sentence is None:
            raise
        print(f"netfold: {sentence}", file=sys.stderr)
        sys.exit(CANNOT)
