"""`netfold train RECIPE`: a training job from one file. `netfold train report FOLDER`: its page again.

`netfold train export FOLDER OUT`: its weights as safetensors.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from netfold.cli.output import STDOUT_TABLE, Output, with_output
from netfold.cli.verb import CANNOT, DefaultCommandGroup, exit_on, names_and_files, new_app, print_problems
from netfold.extras import need

if TYPE_CHECKING:
    from netfold.bootstrap.launchers import Placement
    from netfold_train.rank import Evaluation


class _TrainGroup(DefaultCommandGroup):
    """`netfold train gpt` trains the recipe of this name that comes with netfold."""

    def names(self) -> Sequence[str]:
        return _shipped()


app = new_app(
    cls=_TrainGroup,
    help="Train a recipe, `netfold train RECIPE.toml`, or one of those that `netfold train recipes` lists by its name.",
    no_args_is_help=True,
)


def _shipped() -> Sequence[str]:
    from netfold_train.recipe.load import shipped_names

    return shipped_names()


@app.command()
@with_output("json")
def run(
    recipe: Annotated[
        Path,
        typer.Argument(
            help="A recipe, a TOML file, or a name of `netfold train recipes`.",
            autocompletion=names_and_files(_shipped, ".toml"),
        ),
    ],
    output: Output,
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
    command continues the run. --output and -o are for --explain.
    """
    if output != STDOUT_TABLE and not explain:
        raise typer.BadParameter("it gives the form of the plan; add --explain", param_hint="--output, -o")
    need("netfold train", ("torch", "pydantic"), "train")

    from netfold.bootstrap.launchers import is_launched
    from netfold_train.fault_tolerance.stop import unwind_on_signals

    # Loading torch and making the data takes seconds, in which a signal must already end the process cleanly.
    with contextlib.nullcontext() if is_launched() else unwind_on_signals():
        _run(recipe, settings or (), output if explain else None, ranks_here)


@app.command()
@with_output("json")
def recipes(output: Output) -> None:
    """List the recipes that come with netfold: name, what it trains."""
    need("netfold train", ("pydantic",), "train")
    from netfold_train.recipe.load import shipped_recipes

    found = shipped_recipes()
    lines = [line for name, about in found for line in (name, textwrap.indent(textwrap.fill(about, 100), "  "))]
    output.show("\n".join(lines), json=lambda: [{"name": name, "about": about} for name, about in found])


_SETTINGS = typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the run's recipe, such as other data.")
_RANKS = typer.Option("--ranks", min=1, help="Ranks to start here.", show_default="the recipe's")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run: runs/edsr.")],
    settings: Annotated[list[str] | None, _SETTINGS] = None,
    ranks_here: Annotated[int | None, _RANKS] = None,
) -> None:
    """Evaluate a run's newest checkpoint on the held-out examples, on any number of ranks, and print the result.

    Exit codes as of a training; 2 if there is no checkpoint, or the run is still being trained.
    """
    _evaluate(run, settings or (), ranks_here, None)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a run: runs/edsr.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    settings: Annotated[list[str] | None, _SETTINGS] = None,
    ranks_here: Annotated[int | None, _RANKS] = None,
) -> None:
    """Write the outputs of a run's newest checkpoint for the held-out examples as safetensors, and evaluate them."""
    _evaluate(run, settings or (), ranks_here, out)


def _evaluate(run: Path, settings: Sequence[str], ranks_here: int | None, out: Path | None) -> None:
    need("netfold train evaluate", ("torch", "pydantic", "safetensors"), "train")
    from netfold.bootstrap.launchers import is_launched
    from netfold_train.fault_tolerance.stop import unwind_on_signals
    from netfold_train.rank import Evaluation
    from netfold_train.runs import RECIPE
    from netfold_train.runs.metrics import is_held

    if not is_launched():
        with exit_on("train evaluate", ValueError, OSError):
            if is_held(run):
                raise ValueError(f"{run} is still being trained; evaluate it when it has ended")
            if out is not None:
                out.mkdir(parents=True)
    # Other ranks than the run's divide the data anew.
    divided = [] if ranks_here is None else ["parallel.data="]
    with contextlib.nullcontext() if is_launched() else unwind_on_signals():
        _run(run / RECIPE, [*divided, *settings], None, ranks_here, Evaluation(run.absolute(), out and out.absolute()))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="The folder of a run: runs/edsr.")]) -> None:
    """Make a run's page, report.html, again from the data in its folder. Exit code 2 if the folder holds no run."""
    from netfold_train.runs.page import write_report

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
    from netfold_train.checkpoint.export import export as write
    from netfold_train.parallel.precision import DTYPES

    with exit_on("train export", ValueError, OSError):
        typer.echo(write(run, out, None if dtype is None else DTYPES[dtype], ema=ema))


def _run(
    recipe: Path,
    settings: Sequence[str],
    explain: Output | None,
    ranks_here: int | None,
    evaluation: Evaluation | None = None,
) -> None:
    from netfold.bootstrap.launchers import is_launched, placement
    from netfold_train.rank import shared_job
    from netfold_train.recipe.errors import RecipeError, Source
    from netfold_train.recipe.load import load
    from netfold_train.recipe.split import ranks_asked, split

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
        if place is None or explain is not None:
            from netfold_train.dry_run.validate import validate_recipe

            checked = validate_recipe(asked, ranks)
        else:
            # A rank makes model and data to train, and finds all further problems itself.
            split(asked, ranks)
        if explain is None:
            from netfold_train.callbacks.selection import check_packages

            check_packages(asked)
    except ValueError as error:
        # Every rank finds the same problems; rank 0 prints them.
        if place is None or place.rank == 0:
            print_problems("train", RecipeError(source.placed(error)))
        raise typer.Exit(CANNOT) from None
    if explain is not None:
        from netfold_train.dry_run.explain import explain as explained
        from netfold_train.dry_run.render import as_object, print_plan

        if place is None or place.rank == 0:
            plan = explained(asked, checked)
            explain.show(lambda console: print_plan(plan, console), json=lambda: as_object(plan))
    elif place is not None:
        from netfold_train.rank import train as train_here

        raise typer.Exit(train_here(asked, source, evaluation))
    else:
        from netfold_train.launch import launch

        del checked
        raise typer.Exit(launch(asked, source, ranks))
