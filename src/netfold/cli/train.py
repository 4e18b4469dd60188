"""`netfold train RECIPE`: a training job from one file. `netfold train report FOLDER`: its page again.

`netfold train export FOLDER OUT`: its weights as safetensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from netfold.cli.verb import CANNOT, DefaultCommandGroup, exit_on, print_problems
from netfold.extras import need
from netfold.units import plural

if TYPE_CHECKING:
    from netfold.bootstrap.launchers import Placement


class _TrainGroup(DefaultCommandGroup):
    """`netfold train gpt` trains the recipe of this name that comes with netfold."""

    def names(self) -> Sequence[str]:
        from netfold.train.recipe.load import shipped_names

        return shipped_names()


app = typer.Typer(
    cls=_TrainGroup,
    help="Train a recipe: `netfold train RECIPE.toml`. `netfold train report FOLDER` makes a run's page again, "
    "`netfold train export FOLDER OUT` writes its weights.",
    no_args_is_help=True,
)


@app.command(epilog="netfold train report FOLDER makes the page of a run again.")
def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe, a TOML file; see docs/reference/train/recipes.md.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file: parallel.pipeline=4. KEY= removes it."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the plan, and start nothing.")] = False,
    ranks_here: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks to start here.", show_default="those that [parallel] makes"),
    ] = None,
) -> None:
    """Train a recipe: as one of the ranks that torchrun, srun or mpirun has started, or by starting the ranks.

    All problems of the recipe are printed first, a line each, and the exit code is 2. Exit code 1: training failed. 3:
    a policy of [fault_tolerance] ended the run. 75: the run was asked to stop (SIGTERM); nothing is lost, and the same
    command continues the run.
    """
    need("netfold train", ("torch", "pydantic"), "train")

    from netfold.bootstrap.launchers import is_launched
    from netfold.train.fault_tolerance.stop import unwind_on_signals

    # Loading torch and making the data takes seconds, in which a signal must already end the process cleanly.
    with contextlib.nullcontext() if is_launched() else unwind_on_signals():
        _run(recipe, settings or (), explain, ranks_here)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="The folder of a run: runs/edsr.")]) -> None:
    """Make a run's page, report.html, again from the data in its folder. Exit code 2 if the folder holds no run."""
    from netfold.runs.page import write_report

    with exit_on("train report", ValueError, OSError):
        typer.echo(write_report(folder))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, runs/edsr, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[
        Literal["f32", "bf16", "f16"] | None, typer.Option(help="The type of the weights.", show_default="as saved")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="The averages of the weights (EMA) instead of the weights.")
    ] = False,
) -> None:
    """Write the weights of a run's newest complete checkpoint as safetensors, beside the recipe. Starts no ranks.

    Exit code 2 if there is no complete checkpoint, or the folder exists.
    """
    need("netfold train export", ("torch", "pydantic", "safetensors"), "train")
    from netfold.train.checkpoint.export import export as write
    from netfold.train.parallel.precision import DTYPES

    with exit_on("train export", ValueError, OSError):
        done = write(run, out, None if dtype is None else DTYPES[dtype], ema=ema)
        files = plural(done.files, "file")
        typer.echo(f"{out}: {done.tensors} tensors of step {done.step}, {done.size_bytes / 1e6:.1f} MB in {files}")


def _run(recipe: Path, settings: Sequence[str], explain: bool, ranks_here: int | None) -> None:
    from netfold.bootstrap.launchers import is_launched, placement
    from netfold.train.rank import shared_job
    from netfold.train.recipe.errors import RecipeError, Source
    from netfold.train.recipe.load import load
    from netfold.train.recipe.split import ranks_asked, split

    # As `python -m` does, so that a recipe can name a module:factory in the working directory.
    sys.path.insert(0, "")
    place: Placement | None = None
    source = Source()
    try:
        place = placement() if is_launched() else None
        if place is not None and ranks_here not in (None, place.size):
            raise ValueError(f"--ranks {ranks_here}: a launcher has started {place.size} ranks already; leave it out")
        asked, source = shared_job() or load(recipe, settings)
        ranks = place.size if place is not None else ranks_here or ranks_asked(asked.parallel)
        if place is None or explain:
            from netfold.dry_run.validate import validate_recipe

            checked = validate_recipe(asked, ranks)
        else:
            # A rank makes model and data to train, and finds all further problems itself.
            split(asked, ranks)
        if not explain:
            from netfold.train.callbacks.selection import check_packages

            check_packages(asked)
    except ValueError as error:
        # Every rank finds the same problems; rank 0 prints them.
        if place is None or place.rank == 0:
            print_problems("train", RecipeError(source.placed(error)))
        raise typer.Exit(CANNOT) from None
    if explain:
        from netfold.dry_run.explain import explain as explained
        from netfold.dry_run.render import print_plan

        if place is None or place.rank == 0:
            print_plan(explained(asked, checked))
    elif place is not None:
        from netfold.train.rank import train as train_here

        raise typer.Exit(train_here(asked, source))
    else:
        from netfold.train.launch import launch

        del checked
        raise typer.Exit(launch(asked, source, ranks))
