"""`netfold plan clusters`, `models`, `networks` and `trace`: inputs of the planner, with their sources."""

from __future__ import annotations

from typing import Annotated

import typer

from netfold.cli.output import Output, with_output
from netfold.cli.verb import exit_on


@with_output("json")
def clusters(output: Output) -> None:
    """List clusters by name: devices, the links between them, the sources of the figures."""
    from netfold_plan.render.listed import list_clusters, render_clusters

    output.show(render_clusters(), json=list_clusters)


@with_output("json")
def models(output: Output) -> None:
    """List models by name: dimensions, parameters, sources."""
    from netfold_plan.render.listed import list_models, render_models

    output.show(render_models(), json=list_models)


@with_output("json")
def networks(output: Output) -> None:
    """List networks for `--compare network=...`, and what each changes between a cluster's nodes."""
    from netfold_plan.render.listed import list_networks, render_networks

    output.show(render_networks(), json=list_networks)


@with_output("json")
def trace(
    module: Annotated[str, typer.Argument(help="package.module:factory, and options: package.module:factory:width=8.")],
    output: Output,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SHAPE", help="Samples first: 32x3x224x224, 8x128:int64, tokens=8x128:int64."),
    ] = None,
    bucket: Annotated[str, typer.Option(help="Size of DDP's buckets.")] = "25 MiB",
) -> None:
    """List a torch module's parts in order of execution: parameters, arithmetic, activations, buckets.

    Runs the module once forward and backward on tensors without memory. Assumes gradients of 4 bytes per weight.
    """
    from netfold.quantity import parse_quantity
    from netfold_plan.cli.sources import module_model
    from netfold_plan.render.parts import as_object, render_parts

    with exit_on("plan trace", ValueError):
        bucket_bytes = parse_quantity(bucket, "bytes", "--bucket")
        model = module_model(module, inputs or ())
    output.show(render_parts(model, bucket_bytes), json=lambda: as_object(model, bucket_bytes))
