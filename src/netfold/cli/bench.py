"""`netfold bench`: nccl-tests-like benchmarks, each backend paired with its peers."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Benchmarks in nccl-tests' words, each backend paired with its peers.")

# The command line, or this machine, cannot do what was asked.
CANNOT = 2
# It was measured, and something was wrong or failed.
FAILED = 1


@app.command("all-reduce")
def all_reduce(
    backend: Annotated[list[str], typer.Option(help="A torch.distributed backend; repeat it to compare.")],
    begin: Annotated[str, typer.Option("-b", help="Smallest size; K, M, G are 2^10, 2^20, 2^30.")] = "4",
    end: Annotated[str, typer.Option("-e", help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", help="From a size to the next.")] = 4,
    rounds: Annotated[int, typer.Option("-n", help="Timed rounds; each backend runs once in each.")] = 20,
    warmups: Annotated[int, typer.Option("-w", help="Rounds before that are not timed.")] = 5,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 4,
    dtype: Annotated[str, typer.Option(help="f32, f64, f16, bf16, i32 or i64.")] = "f32",
    rack_rate: Annotated[str | None, typer.Option(help="Run in a rack with such links: 1gbit.")] = None,
    loss: Annotated[str, typer.Option(help="Packets each link of the rack loses: 0.1%.")] = "0%",
    breakdown: Annotated[bool, typer.Option(help="Small sizes: a call's Python, queue, wire.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, the table on stderr.")] = False,
    timeout: Annotated[int, typer.Option(help="Seconds for the whole run.")] = 600,
) -> None:
    """Time all_reduce of every size on every backend, interleaved, and check every element.

    The ratio column is a peer's time over the row's, paired round by round, with its 5th and 95th percentile.
    """
    import json

    from netfold.bench.config import Config
    from netfold.bench.launch import BenchError, measure
    from netfold.bench.report import describe_run, make_rows, total_wrong
    from netfold.bench.sizes import parse_size, sweep
    from netfold.bench.table import render_table
    from netfold.rack import RackError
    from netfold.rack.processes import exit_on_signals

    try:
        config = Config(
            backends=backend,
            workers=workers,
            sizes=sweep(parse_size(begin), parse_size(end), factor),
            rounds=rounds,
            warmups=warmups,
            dtype=dtype,
            breakdown=breakdown,
            rack_rate=rack_rate,
            rack_loss=loss,
            deadline_s=timeout,
        )
        with exit_on_signals():
            result = measure(config)
    except (RackError, ValueError) as error:
        typer.echo(f"netfold bench all-reduce: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    except BenchError as error:
        typer.echo(f"netfold bench all-reduce: {error}", err=True)
        raise typer.Exit(FAILED) from None
    rows = make_rows(config, result)
    typer.echo(render_table(rows), err=as_json)
    if as_json:
        typer.echo(json.dumps(describe_run(config, result, rows), indent=1))
    if total_wrong(rows) > 0:
        raise typer.Exit(FAILED)


@app.command()
def suite(
    folder: Annotated[Path, typer.Argument(help="Where suite.md and suite.json go.")] = Path("bench/results"),
    backend: Annotated[list[str] | None, typer.Option(help="In place of netfold and gloo.")] = None,
) -> None:
    """Measure what netfold claims, beside gloo: a rack, loopback, and one small call. About five minutes."""
    from netfold.bench.suite import make_cases, run_suite
    from netfold.rack.processes import exit_on_signals

    with exit_on_signals():
        bad = run_suite(make_cases(backend or ["netfold", "gloo"]), folder, typer.echo)
    raise typer.Exit(FAILED if bad else 0)
