"""`netfold plan clusters`, `models`, `networks`: what ships with netfold, each with its sources."""

from __future__ import annotations

import typer


def clusters() -> None:
    """Clusters by name: devices, what joins them, where the figures come from."""
    from netfold.plan.render.listed import render_clusters

    typer.echo(render_clusters())


def models() -> None:
    """Models by name: dimensions, parameters, where they come from."""
    from netfold.plan.render.listed import render_models

    typer.echo(render_models())


def networks() -> None:
    """Networks for `--compare network=...`, and what each changes between a cluster's nodes."""
    from netfold.plan.render.listed import render_networks

    typer.echo(render_networks())
