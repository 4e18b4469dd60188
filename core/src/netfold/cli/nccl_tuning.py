"""`netfold nccl-tuning`: writes the table for NCCL's tuner in netfold's plugin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from netfold.cli.verb import exit_on


def nccl_tuning(
    link: Annotated[
        Path, typer.Argument(help="A measured link: of `netfold doctor check --output json` on the job's hosts.")
    ],
    file: Annotated[Path, typer.Option("-o", help="The table.")],
    shape: Annotated[
        list[str], typer.Option("--shape", metavar="RANKSxHOSTS", help="Of a communicator: 16x2. May be repeated.")
    ],
    least_gain: Annotated[
        float | None,
        typer.Option(help="NCCL's choice changes only to what is faster by this part; default: 0.3.", min=0.0),
    ] = None,
) -> None:
    """Write a table of times for NCCL's algorithms and protocols, by netfold's cost model and a measured link.

    Use it with `eval "$(netfold nccl-env --tune FILE)"`. All ranks need the same file.
    """
    from netfold.tuning.measured_link import measured_link
    from netfold.tuning.nccl import LEAST_GAIN, table_text

    with exit_on("nccl-tuning", ValueError):
        text = table_text(
            [_shape(each) for each in shape], measured_link(link), LEAST_GAIN if least_gain is None else least_gain
        )
    file.write_text(text, encoding="utf-8")
    typer.echo(f'nccl-tuning: wrote {file}; eval "$(netfold nccl-env --tune {file})" uses it', err=True)


def _shape(text: str) -> tuple[int, int]:
    if (found := re.fullmatch(r"(\d+)x(\d+)", text)) is None:
        raise ValueError(f"--shape {text}: expected RANKSxHOSTS, such as 16x2")
    return int(found[1]), int(found[2])
