"""`netfold plan`, a question: what a job will take, from its file or from options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

CANNOT = 2


class DefaultCommandGroup(TyperGroup):
    """What is no command's name is a question: `netfold plan job.toml` is `netfold plan predict job.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if named else ["predict", *args])


def predict(
    file: Annotated[Path | None, typer.Argument(help="A job's file (TOML); see docs/reference/plan/index.md.")] = None,
    model: Annotated[str | None, typer.Option(help="A name, or gpt:hidden=..,layers=..,heads=..,sequence=...")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Of `netfold train`, instead of a model.")] = None,
    module: Annotated[
        str | None, typer.Option(help="A torch module, instead of a model: package.module:factory:width=128.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SHAPE", help="Of the module, samples first: 32x3x224x224, 8x128:int64."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A folder of `netfold profile`, instead of a model: what ran there.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Over the recipe: parallel.pipeline=4.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A name, a file's path (.toml), or measured=FILE,device=NAME.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Devices to train on.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a step, of all devices together.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, f16, tf32 or f32.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, momentum or sgd.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of a pipeline: 1f1b or gpipe.")] = None,
    overlap: Annotated[bool | None, typer.Option(help="Gradients travel beside the backward pass.")] = None,
    in_network: Annotated[
        bool | None, typer.Option(help="Reductions in the network, where a tier can.", show_default="where it can")
    ] = None,
    tensor: Annotated[int | None, typer.Option(help="Ranks that split each layer.", show_default="free")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Stages.", show_default="free")] = None,
    data: Annotated[int | None, typer.Option(help="Replicas.", show_default="free")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples at a time.", show_default="free")] = None,
    interleave: Annotated[int | None, typer.Option(help="Pieces of a stage.", show_default="free")] = None,
    sequence: Annotated[
        bool | None, typer.Option(help="Tensor ranks split norms by tokens.", show_default="free")
    ] = None,
    zero: Annotated[int | None, typer.Option(help="0 to 3.", show_default="free")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.", show_default="free")] = None,
    price: Annotated[float | None, typer.Option(help="Of a device for an hour.")] = None,
    kwh: Annotated[float | None, typer.Option(help="Of a kilowatt-hour, beside it.")] = None,
    samples: Annotated[float | None, typer.Option(help="Of the whole training.")] = None,
    curve: Annotated[str | None, typer.Option(help="Devices to look at too: 8..1024, or 8,24,96.")] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="network=tcp,in-network or cluster=a,b; as often as you like.")
    ] = None,
    events: Annotated[bool, typer.Option("--events", help="Play the best way as events too.")] = False,
    jitter: Annotated[float | None, typer.Option(help="Of computing, as a ratio; plays events.")] = None,
    straggler: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=FACTOR", help="A rank that is slow; plays events."),
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="The played step, for ui.perfetto.dev; plays events.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="A page with plots, in one file.")] = None,
) -> None:
    """What a step of training will take, of time and of memory, and the best way to split it.

    What is not fixed of the split is free: all ways that come out even are tried. What an option says holds, whatever
    the file says. All that is wrong is said, a line each; the exit code is then 2.
    """
    said: dict[tuple[str, ...], Any] = {
        ("model",): model,
        ("cluster",): cluster,
        ("job", "gpus"): gpus,
        ("job", "batch"): batch,
        ("job", "precision"): precision,
        ("job", "optimizer"): optimizer,
        ("job", "schedule"): schedule,
        ("job", "overlap"): overlap,
        ("job", "in_network"): in_network,
        ("split", "tensor"): tensor,
        ("split", "pipeline"): pipeline,
        ("split", "data"): data,
        ("split", "micro_batch"): micro_batch,
        ("split", "interleave"): interleave,
        ("split", "sequence"): sequence,
        ("split", "zero"): zero,
        ("split", "recompute"): recompute,
        ("price", "gpu_hour"): price,
        ("price", "kwh"): kwh,
        ("training", "samples"): samples,
    }

    from netfold.cli.plan_given import given_model
    from netfold.plan.events import Conditions, write_timeline
    from netfold.plan.render import as_json as render_json
    from netfold.plan.render import render_page, render_text
    from netfold.plan.request import parse_request, read_job
    from netfold.plan.result import solve, stage_ranks
    from netfold.plan.scaling_curve import parse_range

    try:
        tree: dict[str, Any] = {}
        where: dict[tuple[str, ...], str] = {}
        if file is not None:
            tree, places = read_job(file)
            where.update(places)
        _over(tree, where, {key: value for key, value in said.items() if value is not None})
        given = given_model(tree, recipe, settings or (), module, inputs or (), profile)
        found = solve(
            parse_request(
                _under(tree, given.says), where, model=given.model, device=given.device, network=given.network
            ),
            sizes=parse_range(curve) if curve is not None else (),
            comparisons=tuple(compare or ()),
            conditions=Conditions(jitter or 0.0, stragglers=_stragglers(straggler or ()))
            if events or jitter is not None or straggler or timeline is not None
            else None,
        )
    except ValueError as error:
        for problem in str(error).splitlines():
            typer.echo(f"netfold plan: {problem}", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo(render_json(found) if as_json else render_text(found))
    _write(html, "page", as_json, lambda path: path.write_text(render_page(found), encoding="utf-8"))
    if found.simulated is not None:
        played, stages = found.simulated, stage_ranks(found.best.job)
        _write(timeline, "timeline", as_json, lambda path: write_timeline(played, stages, path))


def _write(path: Path | None, what: str, aside: bool, write: Callable[[Path], object]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        typer.echo(f"netfold plan: {path} cannot be written: {error.strerror}; say another place", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo(f"\nthe {what}: {path}", err=aside)


def _stragglers(said: Sequence[str]) -> dict[int, float]:
    found = {}
    for each in said:
        rank, _, factor = each.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(
                f"--straggler {each}: write a rank and how many times as slow it is, such as 3=1.5"
            ) from None
    return found


def _over(tree: dict[str, Any], where: dict[tuple[str, ...], str], said: dict[tuple[str, ...], Any]) -> None:
    """Put options over a file's keys; the place of a problem with one is then the option."""
    for key, value in said.items():
        table = tree
        for part in key[:-1]:
            inner = table.get(part)
            # A file that has something else here is complained of by its own line.
            table = table.setdefault(part, {}) if inner is None or isinstance(inner, dict) else {}
        table[key[-1]] = value
        option = _OPTIONS.get(key, key[-1]).replace("_", "-")
        where[key] = f"--{option} {value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{option}"


def _under(tree: dict[str, Any], says: dict[str, Any]) -> dict[str, Any]:
    """What a recipe, a module or a profile says, where nothing else is said."""
    return tree | {
        name: said | tree.get(name, {}) if isinstance(tree.get(name, {}), dict) else tree[name]
        for name, said in says.items()
    }


_OPTIONS: dict[tuple[str, ...], str] = {("price", "gpu_hour"): "price"}
