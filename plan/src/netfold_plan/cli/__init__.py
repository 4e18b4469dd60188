"""`netfold plan`: what scaling out will bring, before anyone pays for it."""

from __future__ import annotations

from netfold_plan.cli import inputs, predict
from netfold.cli.verb import DefaultCommandGroup, new_app

app = new_app(
    cls=DefaultCommandGroup,
    help="What scaling out will bring, on which network, split how: `netfold plan JOB.toml`, or options.",
    no_args_is_help=True,
)
app.command("predict")(plan_predict.predict)
app.command("clusters")(plan_inputs.clusters)
app.command("models")(plan_inputs.models)
app.command("networks")(plan_inputs.networks)
app.command("trace")(plan_inputs.trace)
