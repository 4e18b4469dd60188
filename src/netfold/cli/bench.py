"""`netfold bench`: nccl-tests-like benchmarks, every backend paired with its peers."""

from pathlib import Path
from typing import Annotated

import typer

from netfold.extras import need

app = typer.Typer(help="Benchmarks in nccl-tests' words, every backend paired with its peers.")

# Exit code: the command line is wrong, or this machine cannot run it.
CANNOT = 2
# Exit code: a measurement failed or had wrong results.
FAILED = 1


def _bench(
    context: typer.Context,
    backend: Annotated[
        list[str],
        typer.Option(
            "--backend",
            help="Who is measured; repeat it to compare: a torch backend (gloo, netfold), netfold:shared, "
            "netfold:ring, netfold:in_network:bf16 (an algorithm, a wire format), communicator[:...], mpi (the one "
            "that is here), mpi:openmpi, mpi:intel, mpi:mpich, and mpi:...:out for out of place.",
        ),
    ],
    begin: Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size; K, M, G are 2^10, 2^20, 2^30.")] = "4",
    end: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--stepfactor", help="From a size to the next.")] = 4,
    rounds: Annotated[int, typer.Option("-n", "--iters", help="Timed rounds; each backend runs once in each.")] = 20,
    warmups: Annotated[int, typer.Option("-w", "--warmup_iters", help="Rounds before that are not timed.")] = 5,
    check: Annotated[int, typer.Option("-c", "--check", min=0, max=1, help="Check every element (1) or none (0).")] = 1,
    ranks: Annotated[int, typer.Option(help="Ranks.")] = 4,
    dtype: Annotated[
        str,
        typer.Option("-d", "--datatype", "--dtype", help="f32, f64, f16, bf16, i32, i64; several by commas, or all."),
    ] = "f32",
    redop: Annotated[
        str, typer.Option("--op", "--redop", help="sum, prod, min, max, avg; several by commas, or all.")
    ] = "sum",
    rack_rate: Annotated[str | None, typer.Option(help="Run in a rack with such links: 1gbit.")] = None,
    loss: Annotated[str, typer.Option(help="Packets each link of the rack loses: 0.1%.")] = "0%",
    delay: Annotated[str, typer.Option(help="What each link of the rack takes beside its rate: 50us.")] = "0us",
    switch: Annotated[
        bool | None,
        typer.Option(
            "--switch/--no-switch", help="With an aggregator, or by host algorithms; a rack has one unless told."
        ),
    ] = None,
    breakdown: Annotated[bool, typer.Option(help="Small sizes: a call's Python, queue, wire.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, the table on stderr.")] = False,
    timeout: Annotated[int, typer.Option(help="Seconds for the whole run.")] = 600,
) -> None:
    """Time one collective of every size on every backend, interleaved, and check every element.

    The ratio column is a peer's time over the row's, paired round by round, with its 5th and 95th percentile.
    """
    import json

    from netfold.bench.collectives import parse_collective, parse_redops
    from netfold.bench.config import BenchEnvironment, Trials
    from netfold.bench.mpi_peers import with_mpi_named
    from netfold.bench.report import describe_run, make_rows, total_wrong
    from netfold.bench.runner import BenchError, measure
    from netfold.bench.sizes import parse_dtypes, parse_size, sweep
    from netfold.bench.table import render_table
    from netfold.rack import RackError
    from netfold.rack.processes import exit_on_signals

    verb = context.info_name
    assert verb is not None
    try:
        place = BenchEnvironment(ranks, rack_rate, loss, delay, switch, timeout)
        backends = [with_mpi_named(each) for each in backend]
        collective = parse_collective(verb)
        sizes = [0] if verb == "barrier" else sweep(parse_size(begin), parse_size(end), factor)
        dtypes = parse_dtypes(dtype)
        trials = [
            Trials(
                collective=collective.name,
                backends=backends,
                sizes=_that_hold_one(sizes, one_dtype) if len(dtypes) > 1 else sizes,
                rounds=rounds,
                warmups=warmups,
                dtype=one_dtype,
                check=bool(check),
                breakdown=breakdown,
                redop=one_redop,
            )
            for one_dtype in dtypes
            for one_redop in (parse_redops(redop) if collective.reduces else ["sum"])
        ]
        with exit_on_signals():
            results = measure(place, *trials)
    except (RackError, ValueError) as error:
        typer.echo(f"netfold bench {verb}: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    except BenchError as error:
        typer.echo(f"netfold bench {verb}: {error}", err=True)
        raise typer.Exit(FAILED) from None
    rows = [row for each, result in zip(trials, results, strict=True) for row in make_rows(place, each, result)]
    typer.echo(render_table(rows), err=as_json)
    if as_json:
        described = describe_run(place, trials[0], results[-1], rows)
        described["config"] |= {"dtype": dtype, "redop": redop}
        typer.echo(json.dumps(described, indent=1))
    if total_wrong(rows) > 0 or all(row.refused is not None for row in rows):
        raise typer.Exit(FAILED)


def _that_hold_one(sizes: list[int], dtype: str) -> list[int]:
    """The sizes that hold at least one element of `dtype`; all sizes if none does (the run then reports an error)."""
    from netfold.bench.sizes import DTYPES

    return [size for size in sizes if size >= DTYPES[dtype].item_bytes] or sizes


# One command for each collective. The names are listed here so that `netfold --help` need not import the bench.
for _collective in (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("broadcast", "reduce", "gather", "scatter", "send-recv", "ping-pong", "barrier"),
):
    app.command(_collective)(_bench)


@app.command()
def model(
    name: Annotated[list[str], typer.Argument(help="Models: resnet50, vgg16, bert-large, ... `list` shows them all.")],
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            help="Who is measured; repeat it to compare: a torch backend (gloo, netfold), netfold:shared, "
            "communicator.",
        ),
    ] = None,
    bucket: Annotated[str, typer.Option(help="DDP's bucket size, but for the first of 1M.")] = "25M",
    shrink: Annotated[
        int, typer.Option(help="Send 1 in so many elements; on links so many times slower the ratio is the real one.")
    ] = 1,
    compute_scale: Annotated[float, typer.Option(help="Accelerators so many times as fast as published.")] = 1.0,
    rounds: Annotated[int, typer.Option("-n", "--iters", help="Timed steps of each backend and model.")] = 10,
    warmups: Annotated[int, typer.Option("-w", "--warmup_iters", help="Steps before that are not timed.")] = 1,
    check: Annotated[int, typer.Option("-c", "--check", min=0, max=1, help="Check every element (1) or none (0).")] = 1,
    ranks: Annotated[int, typer.Option(help="Ranks.")] = 4,
    rack_rate: Annotated[str | None, typer.Option(help="Run in a rack with such links: 200mbit.")] = None,
    loss: Annotated[str, typer.Option(help="Packets each link of the rack loses: 0.1%.")] = "0%",
    delay: Annotated[str, typer.Option(help="What each link of the rack takes beside its rate: 50us.")] = "0us",
    switch: Annotated[
        bool | None,
        typer.Option(
            "--switch/--no-switch", help="With an aggregator, or by host algorithms; a rack has one unless told."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, the table on stderr.")] = False,
    timeout: Annotated[int, typer.Option(help="Seconds for the whole run.")] = 600,
) -> None:
    """Replay training steps of a known model: the accelerator is a timer, the communication of its gradients is real.

    Gradients fill buckets as DDP's do, while the timer runs; the step ends when every sum is there. Computing times are
    published ones of one accelerator.
    """
    import json

    from netfold.bench.config import BenchEnvironment, Replay
    from netfold.bench.runner import BenchError
    from netfold.bench.sizes import parse_size
    from netfold.bench.step import describe_network, replay_models, total_wrong
    from netfold.bench.step_table import render_models, render_steps
    from netfold.rack import RackError
    from netfold.rack.processes import exit_on_signals

    if name == ["list"]:
        typer.echo(render_models())
        return
    try:
        place = BenchEnvironment(ranks, rack_rate, loss, delay, switch, timeout)
        replay = Replay(
            models=name,
            backends=backend or [],
            rounds=rounds,
            warmups=warmups,
            bucket_bytes=parse_size(bucket),
            shrink=shrink,
            compute_scale=compute_scale,
            check=bool(check),
        )
        with exit_on_signals():
            rows, run = replay_models(place, replay)
    except (RackError, ValueError) as error:
        typer.echo(f"netfold bench model: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    except BenchError as error:
        typer.echo(f"netfold bench model: {error}", err=True)
        raise typer.Exit(FAILED) from None
    typer.echo(f"# {describe_network(place, replay)}\n{render_steps(rows)}", err=as_json)
    if as_json:
        typer.echo(json.dumps(run, indent=1))
    if total_wrong(rows) > 0 or all(row.refused is not None for row in rows):
        raise typer.Exit(FAILED)


@app.command()
def suite(
    folder: Annotated[Path, typer.Argument(help="Where collectives.md, suite.md and their JSON go.")] = Path(
        "bench/results"
    ),
    section: Annotated[list[str] | None, typer.Option(help="Only this one; repeat it. `list` names them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: about two minutes in place of eight.")] = False,
) -> None:
    """Measure what netfold claims, beside gloo and the MPIs that are here, and print goal beside measured."""
    from netfold.bench.goals import SECTIONS
    from netfold.bench.suite import run_suite
    from netfold.rack.processes import exit_on_signals

    if section == ["list"]:
        for name, title in SECTIONS.items():
            typer.echo(f"{name:12} {title}")
        return
    try:
        with exit_on_signals():
            bad = run_suite(section or [], folder, typer.echo, quick=quick)
    except ValueError as error:
        typer.echo(f"netfold bench suite: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    raise typer.Exit(FAILED if bad else 0)


@app.command()
def accuracy(
    folder: Annotated[Path, typer.Argument(help="Where accuracy.md goes.")] = Path("bench/results"),
    quick: Annotated[bool, typer.Option("--quick", help="Every part once, in seconds: too short to learn.")] = False,
    timeout: Annotated[int, typer.Option(help="Seconds for the whole run.")] = 1800,
) -> None:
    """What each wire format keeps of sums, and what becomes of two models trained with it; four to nine minutes."""
    import os

    from netfold.bench.accuracy.report import render
    from netfold.bench.accuracy.run import AccuracyError, measure_accuracy
    from netfold.bench.accuracy.settings import Settings
    from netfold.bench.machine import describe_machine, describe_versions
    from netfold.rack import RackError
    from netfold.rack.processes import exit_on_signals

    need("netfold bench accuracy", ["torch"], "torch")
    settings = Settings.quick() if quick else Settings()
    load = os.getloadavg()[0]
    try:
        with exit_on_signals():
            found = measure_accuracy(settings, typer.echo, timeout)
    except RackError as error:
        typer.echo(f"netfold bench accuracy: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    except AccuracyError as error:
        typer.echo(f"netfold bench accuracy: {error}", err=True)
        raise typer.Exit(FAILED) from None
    machine, versions = describe_machine(), describe_versions({})
    where = (
        f"{machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, load {load:.1f} to "
        f"{os.getloadavg()[0]:.1f}; netfold {versions['netfold']}, commit {versions['commit']}, Python "
        f"{versions['python']}."
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = render(settings, found, where)
    (folder / "accuracy.md").write_text(text)
    typer.echo(text)
    if not all(each["agree"] for each in (*found["trainings"], *found["sweep"])):
        raise typer.Exit(FAILED)


@app.command()
def links(
    hosts: Annotated[str, typer.Option(help="Hosts a rack, several by commas.")] = "4,8",
    rate: Annotated[str, typer.Option(help="Of a worker's link, several by commas.")] = "200mbit",
    c: Annotated[
        str,
        typer.Option(
            "-c",
            help="The switch's link over a worker's, several by commas; P: a port a worker, 0: the first worker's host "
            "is the switch.",
        ),
    ] = "0.25,0.5,1,2,4,P",
    size: Annotated[str, typer.Option(help="Of the tensor, several by commas; K, M, G.")] = "16M",
    loss: Annotated[str, typer.Option(help="On every link, such as 0.1%.")] = "0%",
    rounds: Annotated[int, typer.Option("-n", min=1, help="Timed rounds; each backend runs once in each.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="What was measured, on stdout, in place of a table.")] = False,
) -> None:
    """What a switch behind a link of its own is worth, beside a ring over the same links. Needs root: an emulated rack.

    Some 20 seconds a rack at 200 Mbit/s. The exit code is 1 where `auto` misses a goal that the table states.
    """
    import json
    import os

    from netfold.bench.links import LinkSetup, measure, table
    from netfold.bench.machine import spoken
    from netfold.bench.sizes import parse_size
    from netfold.rack import RackError
    from netfold.rack.processes import exit_on_signals

    load = os.getloadavg()[0]
    found = {}
    try:
        places = [
            LinkSetup(link, count, float(count if each == "P" else each), parse_size(length), loss)
            for link in rate.split(",")
            for count in map(int, hosts.split(","))
            for each in c.split(",")
            for length in size.split(",")
            if each == "P" or float(each) < count
        ]
        with exit_on_signals():
            for place in places:
                found[place] = measure(place, rounds)
                typer.echo(table({place: found[place]})[-1], err=True)
    except (RackError, ValueError) as error:
        typer.echo(f"netfold bench links: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    if as_json:
        rows = [vars(place) | vars(taken) | {"bound_s": place.bound_s} for place, taken in found.items()]
        typer.echo(json.dumps(rows))
    else:
        last = f"{rounds} rounds a rack, after some that are not timed; {spoken((load, os.getloadavg()[0]))}"
        typer.echo("\n".join([*table(found), "", last]))
    if not all(taken.met(place) for place, taken in found.items()):
        raise typer.Exit(FAILED)


@app.command()
def figures(
    folder: Annotated[Path, typer.Argument(help="Where figures.html, figures.json and a CSV a figure go.")] = Path(
        "netfold-figures"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Within some five minutes in place of twenty.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this one; repeat it. `list` names them.")] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Measure nothing; make the page from FOLDER's data.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything that FOLDER holds, on stdout.")] = False,
) -> None:
    """Redraw the talks' figures: netfold beside gloo in an emulated rack, as one page with its data. Needs root."""
    import json

    from netfold.bench.figures.run import FIGURES, PAGE, QUICK_S, TOTAL_S, document_of, read, run_figures, write
    from netfold.rack import RackError
    from netfold.rack.processes import exit_on_signals

    if only == ["list"]:
        for figure in FIGURES.values():
            typer.echo(f"{figure.name:12} {figure.title}")
        return
    try:
        if redraw:
            found = read(folder)
            write(folder, found)
        else:
            with exit_on_signals():
                say = lambda line: typer.echo(line, err=True)
                found = run_figures(folder, only or [], say, total_s=QUICK_S if quick else TOTAL_S)
    except (RackError, ValueError) as error:
        typer.echo(f"netfold bench figures: {error}", err=True)
        raise typer.Exit(CANNOT) from None
    typer.echo(json.dumps(document_of(found)) if as_json else f"{folder / PAGE}")
    if any(taken.lack or taken.wrong for taken in found.values()):
        raise typer.Exit(FAILED)
