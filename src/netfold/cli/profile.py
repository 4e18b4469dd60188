"""`netfold profile`: record and report where a training job spends its time on the network."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from netfold.profile.run import Run

app = typer.Typer(help="Show where a training job spends its time on the network.", no_args_is_help=True)

CANNOT = 2

_Run = Annotated[Path, typer.Argument(help="The folder that `netfold profile run` left.")]
_Buckets = Annotated[str, typer.Option(help="Upper bounds of the size buckets; K, M, G are 2^10, 2^20, 2^30.")]
_BUCKETS = "128K,16M,32M,64M"


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(help="The command to run: `-- python train.py`, `-- torchrun ... train.py`.")
    ],
    output: Annotated[Path | None, typer.Option("-o", help="A new folder; default: netfold-profile-1, -2, ...")] = None,
) -> None:
    """Run a job and record its communication, with any backend. Returns the job's exit code.

    Each process in a group writes a folder for its rank. On several hosts, run this on each host, with -o and a folder
    on a shared file system, or collect the ranks' folders in one folder afterwards.
    """
    from netfold.profile.launch import LaunchError, launch, new_folder

    try:
        folder = new_folder(output)
        code = launch(command, folder)
    except LaunchError as error:
        typer.echo(f"netfold profile run: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    ranks = len(list(folder.glob("rank-*/metadata.json")))
    if ranks == 0:
        typer.echo(f"netfold profile: no process of the job was in a group; {folder} holds no records", err=True)
    else:
        typer.echo(f"netfold profile: {ranks} ranks in {folder}; `netfold profile report {folder}` shows it", err=True)
    raise typer.Exit(code)


@app.command()
def report(
    run: _Run,
    buckets: _Buckets = _BUCKETS,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="The table's rows, as CSV.")] = False,
    html: Annotated[Path | None, typer.Option(help="The page's path; default: RUN/report.html.")] = None,
) -> None:
    """Report operations by kind and size, hidden communication, stragglers and advice.

    Prints a table and writes a page. With --json or --csv, only --html writes a page.
    """
    from dataclasses import replace

    from netfold.plan.advice import advise
    from netfold.profile import export as export_module
    from netfold.profile.analyse import analyse
    from netfold.profile.overlap import each_step
    from netfold.profile.page import render_page
    from netfold.profile.table import render_table

    try:
        if as_json and as_csv:
            raise ValueError("--json and --csv are two ways to say it; take one")
        found = _read(run)
        findings = analyse(found, _sizes(buckets))
    except ValueError as error:
        typer.echo(f"netfold profile report: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    findings = replace(findings, advice=advise(found, findings))
    render = export_module.as_json if as_json else export_module.as_csv if as_csv else render_table
    typer.echo(render(findings), nl=not as_csv)
    if html is None and (as_json or as_csv):
        return
    page = html or run / "report.html"
    try:
        page.write_text(render_page(findings, found, each_step=each_step(found)), encoding="utf-8")
    except OSError as error:
        typer.echo(f"netfold profile report: {page} cannot be written: {error.strerror}; say where: --html", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo(f"\nthe page: {page}", err=as_json or as_csv)


@app.command()
def compare(
    a: _Run,
    b: _Run,
    buckets: _Buckets = _BUCKETS,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what became faster or SLOWER from run A to run B, by operation and size, and what is within the noise."""
    from netfold.profile.compare import compare as compare_runs
    from netfold.profile.export import comparison_as_json
    from netfold.profile.table import render_comparison

    try:
        found = compare_runs(_read(a), _read(b), _sizes(buckets))
    except ValueError as error:
        typer.echo(f"netfold profile compare: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo(comparison_as_json(found) if as_json else render_comparison(found))


@app.command()
def export(
    run: _Run,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="For ui.perfetto.dev and chrome://tracing.")] = False,
    output: Annotated[Path | None, typer.Option("-o", help="The file; default: ./RUN.perfetto.json.")] = None,
) -> None:
    """Write a run for another tool: every operation, step and arrow between ranks; the page holds only a part."""
    from netfold.profile.analyse import analyse
    from netfold.profile.perfetto import write_trace

    file = output or Path(f"{run.resolve().name}.perfetto.json")
    try:
        if not perfetto:
            raise ValueError("say for which tool: --perfetto is the one there is")
        found = _read(run)
        count = write_trace(found, analyse(found).clocks, file)
    except ValueError as error:
        typer.echo(f"netfold profile export: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    except OSError as error:
        typer.echo(f"netfold profile export: {file} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo(f"{file}: {count:,} events; open it in https://ui.perfetto.dev")


def _read(folder: Path) -> "Run":
    from netfold.profile.run import read_run

    return read_run(folder)


def _sizes(buckets: str) -> list[int]:
    from netfold.bench.sizes import parse_size

    return [parse_size(each.strip()) for each in buckets.split(",")]
