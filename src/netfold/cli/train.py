"""`netfold train RECIPE`: a training job from one file. `netfold train report FOLDER`: its page again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from netfold.extras import need

if TYPE_CHECKING:
    from netfold.bootstrap.launchers import Placement

# As of a shell: the command line, or this machine, cannot do what was asked.
CANNOT = 2
NEEDED = ("torch", "pydantic")


class _DefaultCommandGroup(TyperGroup):
    """What is no command's name is a recipe's: `netfold train edsr.toml` is `netfold train run edsr.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


app = typer.Typer(
    cls=_DefaultCommandGroup, help="Train what a recipe says; `train report FOLDER` makes a run's page again."
)


@app.command(epilog="netfold train report FOLDER makes the page of a run again.")
def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe, a TOML file; see docs/reference/train/recipes.md.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="parallel.pipeline=4, over the file; KEY= takes a key out."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the plan, and start nothing.")] = False,
    ranks_here: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks to start here.", show_default="those that [parallel] makes"),
    ] = None,
) -> None:
    """Train what a recipe says: as one of the ranks that torchrun, srun or mpirun has started, or by starting them.

    All that is wrong with the recipe is said first, a line each. The exit code is then 2; 1 where training failed; 3
    where a policy of [fault_tolerance] ended it; 75 where it was asked to stop (SIGTERM): nothing is lost, and the same
    command goes on.
    """
    _need_packages()

    from netfold.bootstrap.launchers import is_launched
    from netfold.train.fault_tolerance.stop import unwind_on_signals

    # To load torch and to make the data takes a while.
    with contextlib.nullcontext() if is_launched() else unwind_on_signals():
        _run(recipe, settings or (), explain, ranks_here)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Of a run: runs/edsr.")]) -> None:
    """Make a run's page, report.html, again from what its folder holds. The exit code is 2 where it holds no run."""
    _need_packages()

    from netfold.train.report import write_report

    try:
        typer.echo(write_report(folder))
    except (ValueError, OSError) as error:
        typer.echo(f"netfold train report: {error}", err=True)
        raise typer.Exit(CANNOT) from None


def _run(recipe: Path, settings: Sequence[str], explain: bool, ranks_here: int | None) -> None:
    from netfold.bootstrap.launchers import is_launched, placement
    from netfold.train.recipe.errors import RecipeError
    from netfold.train.recipe.load import load
    from netfold.train.recipe.split import ranks_asked, split

    # A module:factory of one's own is looked for here, as `python -m` does.
    sys.path.insert(0, "")
    place: Placement | None = None
    try:
        place = placement() if is_launched() else None
        if place is not None and ranks_here is not None:
            raise ValueError(f"--ranks {ranks_here}: a launcher has started {place.size} ranks already; leave it out")
        asked, source = load(recipe, settings)
        try:
            ranks = place.size if place is not None else ranks_here or ranks_asked(asked.parallel)
            if place is None or explain:
                from netfold.train.recipe.validate import validate_recipe

                checked = validate_recipe(asked, ranks)
            else:
                # A rank makes model and data to train, and finds the rest itself.
                split(asked, ranks)
            if not explain:
                from netfold.train.callbacks.selection import check_packages

                check_packages(asked)
        except ValueError as error:
            raise RecipeError(source.placed(error)) from None
    except ValueError as error:
        # Every rank has found the same.
        if place is None or place.rank == 0:
            for problem in str(error).splitlines():
                typer.echo(f"netfold train: {problem}", err=True)
        raise typer.Exit(CANNOT) from None
    if explain:
        from netfold.train.explain import explain as explained
        from netfold.train.explain.render import print_plan

        if place is None or place.rank == 0:
            print_plan(explained(asked, checked))
    elif place is not None:
        from netfold.train.rank import train as train_here

        raise typer.Exit(train_here(asked, source))
    else:
        from netfold.train.launch import launch

        del checked
        raise typer.Exit(launch(asked, source, ranks))


def _need_packages() -> None:
    need("netfold train", NEEDED, "train")
