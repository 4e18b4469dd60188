"""`netfold ...`: one thin verb a room. May import every room; nothing imports cli.

Verbs import what they need when they run, so that `netfold --help` stays quick.
"""

from __future__ import annotations

import typer

from netfold.cli import bench, demo, doctor, explain, plan, profile, rack, switch, top, train

app = typer.Typer(
    name="netfold",
    help="The network part of a training job: collectives that add up gradients inside the network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("explain")(explain.explain)
app.command("top")(top.top)
app.add_typer(train.app, name="train")
app.add_typer(switch.app, name="switch")
app.add_typer(bench.app, name="bench")
app.add_typer(rack.app, name="rack")
app.add_typer(doctor.app, name="doctor")
app.add_typer(profile.app, name="profile")
app.add_typer(plan.app, name="plan")


def main() -> None:
    app()
