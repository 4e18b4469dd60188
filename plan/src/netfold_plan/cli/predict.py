"""`netfold plan predict`: predict a job's step, from its file or from options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from netfold.cli.output import Output, with_output
from netfold.cli.verb import exit_on, names_and_files

# The keys of a job's file that have an option, by section. `predict` reads their values from the context.
_KEYS = {
    (): ("model", "cluster"),
    ("job",): ("gpus", "batch", "precision", "optimizer", "schedule", "overlap", "in_network"),
    ("split",): ("tensor", "pipeline", "data", "micro_batch", "interleave", "sequence", "zero", "recompute"),
    ("price",): ("gpu_hour", "kwh"),
    ("training",): ("samples",),
}
# Options with another name than their key.
_OPTIONS = {"gpu_hour": "price", "gpus": "ranks"}


def _models() -> Sequence[str]:
    from netfold_plan.model.registry import names

    return names()


def _clusters() -> Sequence[str]:
    from netfold_plan.cluster import preset_names

    return preset_names()


def _recipes() -> Sequence[str]:
    from netfold.extras import MissingExtraError, plugin

    try:
        names: Sequence[str] = plugin("netfold.models", "recipe_names", "--recipe", "train")()
    except MissingExtraError:
        return ()
    return names


@with_output("json", "html")
def predict(
    context: typer.Context,
    output: Output,
    file: Annotated[Path | None, typer.Argument(help="A job's file (TOML); its keys are options, too.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A name of `netfold plan models`, or gpt:hidden=..,layers=..,heads=..,sequence=..",
            autocompletion=names_and_files(_models),
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="A recipe of `netfold train`, instead of a model.", autocompletion=names_and_files(_recipes, ".toml")
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option(help="A torch module, instead of a model: package.module:factory:width=128.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="SHAPE", help="Inputs of the module, samples first: 32x3x224x224, 8x128:int64."
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A folder of `netfold profile`, instead of a model: the job that ran there.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a recipe's key: parallel.pipeline=4."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A name of `netfold plan clusters`, a file's path (.toml), or measured=FILE,device=NAME.",
            autocompletion=names_and_files(_clusters, ".toml"),
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks to train on, one for each device.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a step, of all ranks together.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, f16, tf32 or f32.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, momentum or sgd.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedule of a pipeline: 1f1b or gpipe.")] = None,
    overlap: Annotated[bool | None, typer.Option(help="Reduce gradients during the backward pass.")] = None,
    in_network: Annotated[
        bool | None, typer.Option(help="Reduce in the network.", show_default="on tiers that can")
    ] = None,
    tensor: Annotated[int | None, typer.Option(help="Ranks that split each layer.", show_default="free")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Stages.", show_default="free")] = None,
    data: Annotated[int | None, typer.Option(help="Replicas.", show_default="free")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples of a microbatch.", show_default="free")] = None,
    interleave: Annotated[int | None, typer.Option(help="Virtual stages of a rank.", show_default="free")] = None,
    sequence: Annotated[
        bool | None, typer.Option(help="Tensor ranks split norms by tokens.", show_default="free")
    ] = None,
    zero: Annotated[int | None, typer.Option(help="0 to 3.", show_default="free")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.", show_default="free")] = None,
    price: Annotated[float | None, typer.Option(help="Price of a device for an hour.")] = None,
    kwh: Annotated[float | None, typer.Option(help="Price of a kilowatt-hour, added to it.")] = None,
    samples: Annotated[float | None, typer.Option(help="Samples of the whole training.")] = None,
    curve: Annotated[str | None, typer.Option(help="Also predict these numbers of ranks: 8..1024, or 8,24,96.")] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="network=tcp,in-network or cluster=a,b; repeat it for several.")
    ] = None,
    events: Annotated[bool, typer.Option("--events", help="Also simulate the best split event by event.")] = False,
    jitter: Annotated[float | None, typer.Option(help="Jitter of computing, as a ratio; simulates events.")] = None,
    straggler: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=FACTOR", help="A slow rank and its slowdown; simulates events."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="File for the simulated step, for ui.perfetto.dev; simulates events.")
    ] = None,
) -> None:
    """Predict time and memory of a training step, and find the best way to split the model.

    Each part of the split without an option is free: all splits that divide evenly are tried. Options go before the
    file. All problems are printed, a line each; the exit code is then 2.
    """
    options = {
        (*section, name): context.params[_OPTIONS.get(name, name)] for section, names in _KEYS.items() for name in names
    }

    from netfold_plan.cli.sources import find_source
    from netfold_plan.events import Conditions, write_timeline
    from netfold_plan.render import as_json, render_page, render_text
    from netfold_plan.request import parse_request, read_job
    from netfold_plan.result import solve, stage_ranks
    from netfold_plan.variants.scaling_curve import parse_range

    with exit_on("plan", ValueError):
        tree, where = read_job(file) if file is not None else ({}, {})
        where = dict(where)
        _set_options(tree, where, {key: value for key, value in options.items() if value is not None})
        source = find_source(tree, recipe, settings or (), module, inputs or (), profile)
        found = solve(
            parse_request(
                _with_defaults(tree, source.job),
                where,
                model=source.model,
                device=source.device,
                network=source.network,
            ),
            sizes=parse_range(curve) if curve is not None else (),
            comparisons=tuple(compare or ()),
            conditions=Conditions(jitter or 0.0, stragglers=_stragglers(straggler or ()))
            if events or jitter is not None or straggler or timeline is not None
            else None,
        )
    output.show(render_text(found), json=lambda: as_json(found), html=lambda: render_page(found))
    if timeline is not None and found.simulated is not None:
        with exit_on("plan", OSError):
            write_timeline(found.simulated, stage_ranks(found.best.job), timeline)
        typer.echo(f"\nthe timeline: {timeline}", err=output.form != "table")


def _stragglers(options: Sequence[str]) -> dict[int, float]:
    found = {}
    for each in options:
        rank, _, factor = each.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(f"--straggler {each}: write a rank and its slowdown, such as 3=1.5") from None
    return found


def _set_options(tree: dict[str, Any], where: dict[tuple[str, ...], str], options: dict[tuple[str, ...], Any]) -> None:
    """Replace keys of a job's file by options. `where` then names the option as the place of the key."""
    for key, value in options.items():
        table = tree
        for part in key[:-1]:
            inner = table.get(part)
            # If the file has another value than a table here, parse_request reports the file's line.
            table = table.setdefault(part, {}) if inner is None or isinstance(inner, dict) else {}
        table[key[-1]] = value
        option = _OPTIONS.get(key[-1], key[-1]).replace("_", "-")
        where[key] = f"--{option} {value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{option}"


def _with_defaults(tree: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that a recipe, a module or a profile gives and that `tree` does not have."""
    return tree | {
        name: section | tree.get(name, {}) if isinstance(tree.get(name, {}), dict) else tree[name]
        for name, section in job.items()
    }
