"""`netfold plan`: what scaling out will bring, before anyone pays for it."""

from __future__ import annotations

import typer

from netfold.cli import plan_listed, plan_module, plan_predict

app = typer.Typer(
    cls=plan_predict.DefaultCommandGroup,
    help="What scaling out will bring, on which network, split how: `netfold plan JOB.toml`, or options.",
    no_args_is_help=True,
)
app.command("predict")(plan_predict.predict)
app.command("clusters")(plan_listed.clusters)
app.command("models")(plan_listed.models)
app.command("networks")(plan_listed.networks)
app.command("trace")(plan_module.trace)
