"""`netfold plan`: what scaling out will bring, before anyone pays for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from netfold.cli import plan_inputs, plan_predict
from netfold.cli.verb import DefaultCommandGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from netfold.plan.validate import Report, Score, Sourced

# Of a table that goes to a file.
_PIPED_WIDTH = 120

app = typer.Typer(
    cls=DefaultCommandGroup,
    help="What scaling out will bring, on which network, split how: `netfold plan JOB.toml`, or options.",
    no_args_is_help=True,
)
app.command("predict")(plan_predict.predict)
app.command("clusters")(plan_inputs.clusters)
app.command("models")(plan_inputs.models)
app.command("networks")(plan_inputs.networks)
app.command("trace")(plan_inputs.trace)


@app.command("validate")
def validate(
    runs: Annotated[Path | None, typer.Option(help="Measured steps: a CSV table, a row a run.")] = None,
    cluster: Annotated[str, typer.Option(help="Where they ran: a preset's name, or a TOML file.")] = "dgx-a100",
    calibrate: Annotated[Path | None, typer.Option(help="At most 10 runs of the same target, to learn from.")] = None,
    only_claims: Annotated[
        bool, typer.Option("--claims", help="Without --runs: the talks' headline claims alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Without --runs: the table that is committed.")
    ] = False,
) -> None:
    """Predict what others measured, and say how far off it is.

    With --runs: a row a run, measured beside predicted, then the mean absolute error, the rank correlation among the
    splits of one question, how much longer the split takes that would have been chosen than the best, and how many
    runs lie in the 80% band. Without: all published sources that ship with netfold, each without its own rows, and the
    talks' headline claims, each with the talk's number beside the prediction.
    """
    import json

    from netfold.plan.cluster import load_cluster
    from netfold.plan.validate import read_runs
    from netfold.plan.validate import validate as compare

    if runs is None:
        if calibrate is not None:
            typer.echo("netfold plan validate: --calibrate FILE goes with --runs FILE, of the same target", err=True)
            raise typer.Exit(2)
        _published(as_json, as_markdown, only_claims)
        return
    if only_claims:
        typer.echo("netfold plan validate: --claims are the talks', and --runs are yours; leave one out", err=True)
        raise typer.Exit(2)
    try:
        known = read_runs(calibrate) if calibrate else []
        report = compare(read_runs(runs), load_cluster(cluster), known)
    except ValueError as error:
        typer.echo(f"netfold plan validate: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
        return
    _show(report)


def _published(as_json: bool, as_markdown: bool, only_claims: bool) -> None:
    import json

    from netfold.plan.validate import markdown, validate_published
    from netfold.plan.validate.claims import claims, claims_markdown, claims_text

    found, said = [] if only_claims else validate_published(), claims()
    if as_json:
        shown = {} if only_claims else {"sources": [each.to_json() for each in found]}
        typer.echo(json.dumps(shown | {"claims": [claim.to_json() for claim in said]}, indent=1))
        return
    if as_markdown:
        typer.echo(claims_markdown(said) if only_claims else f"{markdown(found)}\n{claims_markdown(said)}", nl=False)
        return
    if found:
        _show_sources(found)
    typer.echo(claims_text(said))


def _show_sources(found: Sequence[Sourced]) -> None:
    from rich.table import Table

    shown = Table(title="predictions beside what others measured", title_justify="left")
    shown.add_column("source")
    for name in ("rows", "mean error", "bias", "worst", "in the band"):
        shown.add_column(name, justify="right")
    for each in found:
        score = each.score
        errors = (f"{100 * score.mean_error:.1f}%", f"{100 * score.bias:+.1f}%", f"{100 * score.worst_error:.1f}%")
        shown.add_row(each.source.name, str(score.rows), *errors, f"{100 * score.covered:.0f}%")
    _console().print(shown)


def _show(report: Report) -> None:
    from rich.table import Table

    names = ("line", "model", "GPUs", "batch", "micro", "t x p x d", "measured ms", "predicted ms", "error")
    shown = Table(title=f"on {report.cluster}", title_justify="left")
    for name in names:
        shown.add_column(name, justify="left" if name == "model" else "right")
    for row in report.rows:
        job = row.run.job
        shown.add_row(
            str(row.run.line),
            row.run.model.name,
            str(row.run.gpus),
            str(job.global_batch),
            str(job.micro_batch),
            f"{job.split.tensor} x {job.split.pipeline} x {job.split.data}",
            f"{row.run.measured_ms:.1f}",
            f"{row.predicted_ms:.1f}",
            f"{100 * (row.predicted_ms / row.run.measured_ms - 1):+.1f}%",
        )
    console = _console()
    console.print(shown)
    if report.calibrated:
        console.print(f"constants fitted to {report.calibrated} runs; recomputation: {report.recomputation}")
    console.print(_sentence(report.score), soft_wrap=True, highlight=False)


def _sentence(score: Score) -> str:
    text = f"{score.rows} runs: mean absolute error {100 * score.mean_error:.1f}% (bias {100 * score.bias:+.1f}%)"
    if score.rank_correlation is not None:
        text += f", rank correlation within a model {score.rank_correlation:.3f}"
    if score.regret is not None:
        text += f", the split chosen takes {100 * score.regret:.1f}% longer than the best"
    return text + f", {100 * score.covered:.0f}% in the 80% band"


def _console() -> Console:
    """As wide as a table needs, where nobody's window says otherwise."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)
