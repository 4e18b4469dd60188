"""`netfold plan`: what training will take, on which cluster, split how."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from netfold.cli import plan_listed, plan_predict


class _PredictUnlessNamed(TyperGroup):
    """What is no command's name is a question: `netfold plan job.toml` is `netfold plan predict job.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if named else ["predict", *args])


app = typer.Typer(
    cls=_PredictUnlessNamed,
    help="What training will take, on which cluster, split how: `netfold plan JOB.toml`, or options.",
    no_args_is_help=True,
)
app.command("predict")(plan_predict.predict)
app.command("clusters")(plan_listed.clusters)
app.command("models")(plan_listed.models)
app.command("networks")(plan_listed.networks)
