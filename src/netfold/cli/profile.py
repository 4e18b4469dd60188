"""`netfold profile`: where a job's time on the network goes."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Where a training job's time on the network goes.", no_args_is_help=True)

# The command line, or this machine, cannot do what was asked.
CANNOT = 2


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(help="What to run: `-- python train.py`, `-- torchrun ... train.py`.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A new folder; netfold-profile-1, -2, ... unless told.")
    ] = None,
) -> None:
    """Run a job and record its communication, whatever backend it uses; its exit code is this one's.

    Each process that is in a group leaves a folder of its rank. On several hosts run this on each, with a folder on a
    shared file system, or collect the ranks' folders in one afterwards.
    """
    from netfold.profile.launch import LaunchError, launch, new_folder

    try:
        folder = new_folder(output)
        code = launch(command, folder)
    except LaunchError as error:
        typer.echo(f"netfold profile run: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    ranks = len(list(folder.glob("rank-*/about.json")))
    if ranks == 0:
        typer.echo(f"netfold profile: no process of the job was in a group; {folder} holds no records", err=True)
    else:
        typer.echo(f"netfold profile: {ranks} ranks in {folder}; `netfold profile report {folder}` shows it", err=True)
    raise typer.Exit(code)
