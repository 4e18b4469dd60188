"""`netfold plan`: what scaling out will bring, before anyone pays for it."""

from __future__ import annotations

from netfold.cli.verb import DefaultCommandGroup, new_app
from netfold_plan.cli import inputs, predict

app = new_app(
    cls=DefaultCommandGroup,
    help="What scaling out will bring, on which network, split how: `netfold plan JOB.toml`, or options.",
    no_args_is_help=True,
)
app.command("predict")(predict.predict)
app.command("clusters")(inputs.clusters)
app.command("models")(inputs.models)
app.command("networks")(inputs.networks)
app.command("trace")(inputs.trace)
