"""A torch module as the planner takes it, and `netfold plan trace`: what was seen of it, part by part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from netfold.extras import need

if TYPE_CHECKING:
    from netfold.plan.model import Traced


def module_model(said: str, inputs: Sequence[str]) -> Traced:
    """The model of `package.module:factory`, traced with inputs of these shapes.

    Raises ValueError, a line a problem, where it cannot be made or traced; without torch and pydantic.
    """
    need("a module", ("torch", "pydantic"), "train")

    from netfold.train.trace import parse_input, parse_module, trace_module

    # A module:factory of one's own is looked for here, as `python -m` does.
    sys.path.insert(0, "")
    return trace_module(parse_module(said), [parse_input(each) for each in inputs], said)


def trace(
    module: Annotated[str, typer.Argument(help="package.module:factory, and options: package.module:factory:width=8.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SHAPE", help="Samples first: 32x3x224x224, 8x128:int64, tokens=8x128:int64."),
    ] = None,
    bucket: Annotated[str, typer.Option(help="What DDP's buckets hold.")] = "25 MiB",
    as_json: Annotated[bool, typer.Option("--json", help="The same, as JSON.")] = False,
) -> None:
    """What a torch module asks for, part by part in order of execution: parameters, arithmetic, activations, buckets.

    It is run once forward and back on tensors without memory. Its weights' gradients are taken to be of 4 bytes.
    """
    import json

    from netfold.plan.cluster.units import parse_quantity
    from netfold.plan.render.parts import as_object, render_parts

    try:
        bucket_bytes = parse_quantity(bucket, "bytes", "--bucket")
        model = module_model(module, inputs or ())
    except ValueError as error:
        for problem in str(error).splitlines():
            typer.echo(f"netfold plan trace: {problem}", err=True)
        raise typer.Exit(2) from None
    typer.echo(json.dumps(as_object(model, bucket_bytes), indent=1) if as_json else render_parts(model, bucket_bytes))
