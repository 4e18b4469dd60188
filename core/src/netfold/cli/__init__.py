"""The command line: one thin command for each package.

May import every package; nothing imports cli. Commands import their packages when they run, so that `netfold --help`
stays fast. `verb` has what all commands share, and `output` the options --output and -o.
Tests: `pytest tests/test_cli.py`, and the tests of each package.
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from netfold.cli import (
    bench,
    demo,
    doctor,
    explain,
    nccl_env,
    nccl_tuning,
    plan,
    profile,
    rack,
    store,
    switch,
    top,
    train,
)
from netfold.cli.verb import CANNOT, new_app
from netfold.extras import MissingExtraError, missing_extra

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


app.command("demo")(demo.demo)
app.command("explain")(explain.explain)
app.command("store")(store.store)
app.command("nccl-env")(nccl_env.nccl_env)
app.command("nccl-tuning")(nccl_tuning.nccl_tuning)
app.command("top")(top.top)
app.add_typer(train.app, name="train")
app.add_typer(switch.app, name="switch")
app.add_typer(bench.app, name="bench")
app.add_typer(rack.app, name="rack")
app.add_typer(doctor.app, name="doctor")
app.add_typer(profile.app, name="profile")
app.add_typer(plan.app, name="plan")


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
