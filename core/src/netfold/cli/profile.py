"""`netfold profile`: record and report where a training job spends its time on the network."""

from pathlib import Path
from typing import Annotated

import typer

from netfold.cli.output import STDOUT_TABLE, Output, with_output
from netfold.cli.verb import exit_on, new_app

app = new_app(help="Show where a training job spends its time on the network.", no_args_is_help=True)

_Run = Annotated[Path, typer.Argument(help="The folder that `netfold profile run` wrote.")]
_Buckets = Annotated[str, typer.Option(help="Upper bounds of the size buckets; K, M, G are 2^10, 2^20, 2^30.")]
_Steps = Annotated[
    str,
    typer.Option(
        help="Count these steps alone, as 10..200; all: also what is outside of steps.", show_default="every step"
    ),
]
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

    with exit_on("profile run", LaunchError):
        folder = new_folder(output)
        code = launch(command, folder)
    ranks = max(len(list(folder.glob(f"{kind}-*/metadata.json"))) for kind in ("rank", "nccl"))
    if ranks == 0:
        typer.echo(f"netfold profile: no process of the job was in a group; {folder} holds no records", err=True)
    else:
        typer.echo(f"netfold profile: {ranks} ranks in {folder}; `netfold profile report {folder}` shows it", err=True)
    raise typer.Exit(code)


@app.command()
@with_output("json", "csv", "html")
def report(run: _Run, output: Output, buckets: _Buckets = _BUCKETS, steps: _Steps = "") -> None:
    """Report operations by kind and size, hidden communication, stragglers and advice.

    Without --output and -o: prints a table and writes the page RUN/report.html.
    """
    from netfold.profile.analyse import analyse
    from netfold.profile.export import as_csv, as_json
    from netfold.profile.overlap import each_step
    from netfold.profile.page import render_page
    from netfold.profile.run import read_run
    from netfold.profile.table import render_table
    from netfold.profile.window import in_steps
    from netfold.tuning.advice import advise

    with exit_on("profile report", ValueError):
        found = in_steps(read_run(run), steps)
        findings = advise(found, analyse(found, _sizes(buckets)))

    def page() -> str:
        return render_page(findings, found, each_step=each_step(found))

    output.show(render_table(findings), json=lambda: as_json(findings), csv=lambda: as_csv(findings), html=page)
    if output == STDOUT_TABLE:
        with exit_on("profile report", OSError):
            (run / "report.html").write_text(page(), encoding="utf-8")
        typer.echo(f"\nthe page: {run / 'report.html'}")


@app.command()
@with_output("json")
def compare(a: _Run, b: _Run, output: Output, buckets: _Buckets = _BUCKETS, steps: _Steps = "") -> None:
    """Show what became faster or SLOWER from run A to run B, by operation and size, and what is within the noise."""
    from netfold.profile.compare import compare as compare_runs
    from netfold.profile.export import comparison_as_json
    from netfold.profile.run import read_run
    from netfold.profile.table import render_comparison
    from netfold.profile.window import in_steps

    with exit_on("profile compare", ValueError):
        found = compare_runs(in_steps(read_run(a), steps), in_steps(read_run(b), steps), _sizes(buckets))
    output.show(render_comparison(found), json=lambda: comparison_as_json(found))


@app.command()
def export(
    run: _Run,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="For ui.perfetto.dev and chrome://tracing.")] = False,
    output: Annotated[Path | None, typer.Option("-o", help="The file; default: ./RUN.perfetto.json.")] = None,
) -> None:
    """Write a run for another tool: every operation, step and arrow between ranks; the page holds only a part."""
    from netfold.profile.analyse import analyse
    from netfold.profile.perfetto import write_trace
    from netfold.profile.run import read_run

    file = output or Path(f"{run.resolve().name}.perfetto.json")
    with exit_on("profile export", ValueError, OSError):
        if not perfetto:
            raise ValueError("name the other tool; --perfetto is the only choice")
        found = read_run(run)
        count = write_trace(found, analyse(found).clocks, file)
    typer.echo(f"{file}: {count:,} events; open it in https://ui.perfetto.dev")


def _sizes(buckets: str) -> list[int]:
    from netfold.quantity import parse_size

    return [parse_size(each.strip()) for each in buckets.split(",")]
