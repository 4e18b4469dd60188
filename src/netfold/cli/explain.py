"""`netfold explain`: which algorithm would run, and why."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    operation: Annotated[str, typer.Argument(help="all-reduce, broadcast, all-gather, ...")],
    size: Annotated[str, typer.Option(help="Bytes of the tensor, such as 4, 64K, 16M.")] = "16M",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks in the group.")] = 4,
) -> None:
    """Print the algorithm that would run an operation, and the reason, under the present environment."""
    from netfold.bench.sizes import parse_size
    from netfold.communicator import Options
    from netfold.plan import build_table

    try:
        options = Options().resolved()
        table = build_table(
            ranks=ranks, switch=options.switch, algorithm=str(options.algorithm), wire=str(options.wire)
        )
        row = table.choose(operation.replace("-", "_"), parse_size(size))
    except (ValueError, KeyError) as error:
        typer.echo(f"netfold explain: {error.args[0]}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{row.operation} of {size} on {ranks} ranks: {row.algorithm}, wire {row.wire}: {row.reason}")
