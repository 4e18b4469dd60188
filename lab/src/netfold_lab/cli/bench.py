"""`netfold bench`: nccl-tests-like benchmarks, every backend paired with its peers."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from netfold.cli.output import Output, with_output
from netfold.cli.verb import FAILED, exit_on, new_app, time_option
from netfold.extras import need

app = new_app(help="Benchmarks in nccl-tests' words, every backend paired with its peers.", no_args_is_help=True)

_Check = Annotated[int, typer.Option("-c", "--check", min=0, max=1, help="Check every element (1) or none (0).")]
_Ranks = Annotated[int, typer.Option(help="Ranks.")]
_RackRate = Annotated[str | None, typer.Option(help="Run in an emulated rack with links of this rate: 1gbit.")]
_Loss = Annotated[str, typer.Option(help="Packets that each link of the rack loses: 0.1%.")]
_Delay = Annotated[str, typer.Option(help="Delay of each link of the rack, beyond the serialisation time: 50us.")]
_Switch = Annotated[
    bool | None,
    typer.Option("--switch/--no-switch", help="With an aggregator, or host algorithms only; default: a rack has one."),
]


def _bench(
    context: typer.Context,
    backend: Annotated[
        list[str],
        typer.Option(
            "--backend",
            help="A backend to measure; repeat it to compare: a torch backend (gloo, netfold), netfold:shared, "
            "netfold:ring, netfold:in_network:bf16 (an algorithm, a wire format), communicator[:...], mpi (the one "
            "installed here), mpi:openmpi, mpi:intel, mpi:mpich, and mpi:...:out for out of place.",
        ),
    ],
    output: Output,
    begin: Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size; K, M, G are 2^10, 2^20, 2^30.")] = "4",
    end: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--stepfactor", help="Factor from one size to the next.")] = 4,
    rounds: Annotated[int, typer.Option("-n", "--iters", help="Timed rounds; each backend runs once in each.")] = 20,
    warmups: Annotated[int, typer.Option("-w", "--warmup_iters", help="Rounds before the timed ones.")] = 5,
    check: _Check = 1,
    ranks: _Ranks = 4,
    dtype: Annotated[
        str,
        typer.Option("-d", "--datatype", "--dtype", help="f32, f64, f16, bf16, i32, i64; several by commas, or all."),
    ] = "f32",
    redop: Annotated[
        str, typer.Option("--op", "--redop", help="sum, prod, min, max, avg; several by commas, or all.")
    ] = "sum",
    rack_rate: _RackRate = None,
    loss: _Loss = "0%",
    delay: _Delay = "0us",
    switch: _Switch = None,
    breakdown: Annotated[
        bool, typer.Option(help="Split the time of small operations into Python, queue and wire.")
    ] = False,
    timeout: float = time_option("600s", least_s=1.0, help="Limit for the whole run."),
) -> None:
    """Time one collective of every size on every backend, interleaved, and check every element.

    The ratio column is a peer's time over the row's, paired round by round, with its 5th and 95th percentile.
    """
    from netfold.quantity import parse_size
    from netfold_lab.bench.collectives import parse_collective, parse_redops
    from netfold_lab.bench.config import BenchEnvironment, Trials
    from netfold_lab.bench.mpi_peers import with_mpi_named
    from netfold_lab.bench.report import describe_run, make_rows, total_wrong
    from netfold_lab.bench.runner import BenchError, measure
    from netfold_lab.bench.sizes import parse_dtypes, sweep
    from netfold_lab.bench.table import render_table
    from netfold_lab.rack import RackError
    from netfold_lab.rack.processes import exit_on_signals

    verb = f"bench {context.info_name}"
    with exit_on(verb, RackError, ValueError), exit_on(verb, BenchError, code=FAILED):
        place = BenchEnvironment(ranks, rack_rate, loss, delay, switch, round(timeout))
        backends = [with_mpi_named(each) for each in backend]
        collective = parse_collective(str(context.info_name))
        sizes = [0] if collective.name == "barrier" else sweep(parse_size(begin), parse_size(end), factor)
        dtypes = parse_dtypes(dtype)
        trials = [
            Trials(
                collective=collective.name,
                backends=backends,
                sizes=_sizes_of_elements(sizes, one_dtype) if len(dtypes) > 1 else sizes,
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
            results, described = measure(place, *trials)
    rows = [row for each, result in zip(trials, results, strict=True) for row in make_rows(place, each, result)]
    run = describe_run(described, trials[0], rows)
    run["config"] |= {"dtype": dtype, "redop": redop}
    output.show(render_table(rows), json=lambda: run, csv=lambda: run["rows"])
    if total_wrong(rows) > 0 or all(row.refused is not None for row in rows):
        raise typer.Exit(FAILED)


def _sizes_of_elements(sizes: list[int], dtype: str) -> list[int]:
    """The sizes that hold at least one element of `dtype`; all sizes if none does (the run then reports an error)."""
    from netfold_lab.bench.sizes import DTYPES

    return [size for size in sizes if size >= DTYPES[dtype].item_bytes] or sizes


# One command for each collective. The names are listed here so that `netfold --help` need not import the benchmarks.
for _collective in (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("broadcast", "reduce", "gather", "scatter", "send-recv", "ping-pong", "barrier"),
):
    app.command(_collective)(with_output("json", "csv")(_bench))


@app.command()
@with_output("json", "csv")
def model(
    name: Annotated[list[str], typer.Argument(help="Models: resnet50, vgg16, bert-large, ... `list` shows them all.")],
    output: Output,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            help="A backend to measure; repeat it to compare: a torch backend (gloo, netfold), netfold:shared, "
            "communicator.",
        ),
    ] = None,
    bucket: Annotated[str, typer.Option(help="Size of DDP's buckets; the first one is of 1M.")] = "25M",
    shrink: Annotated[
        int, typer.Option(help="Send 1 in so many elements; on links so many times slower the ratio is the real one.")
    ] = 1,
    compute_scale: Annotated[float, typer.Option(help="Accelerators so many times as fast as published.")] = 1.0,
    rounds: Annotated[int, typer.Option("-n", "--iters", help="Timed steps of each backend and model.")] = 10,
    warmups: Annotated[int, typer.Option("-w", "--warmup_iters", help="Steps before the timed ones.")] = 1,
    check: _Check = 1,
    ranks: _Ranks = 4,
    rack_rate: _RackRate = None,
    loss: _Loss = "0%",
    delay: _Delay = "0us",
    switch: _Switch = None,
    timeout: float = time_option("600s", least_s=1.0, help="Limit for the whole run."),
) -> None:
    """Replay training steps of a known model: the accelerator is a timer, the communication of its gradients is real.

    Gradients fill buckets as DDP's do, while the timer runs. The step ends when all sums have arrived. Computing times
    are published measurements of one accelerator.
    """
    from netfold.quantity import parse_size
    from netfold_lab.bench.config import BenchEnvironment, Replay
    from netfold_lab.bench.runner import BenchError
    from netfold_lab.bench.step import describe_network, replay_models, total_wrong
    from netfold_lab.bench.step_table import model_rows, render_models, render_steps
    from netfold_lab.rack import RackError
    from netfold_lab.rack.processes import exit_on_signals

    if name == ["list"]:
        output.show(render_models(), json=model_rows, csv=model_rows)
        return
    with exit_on("bench model", RackError, ValueError), exit_on("bench model", BenchError, code=FAILED):
        place = BenchEnvironment(ranks, rack_rate, loss, delay, switch, round(timeout))
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
    output.show(f"# {describe_network(place, replay)}\n{render_steps(rows)}", json=lambda: run, csv=lambda: run["rows"])
    if total_wrong(rows) > 0 or all(row.refused is not None for row in rows):
        raise typer.Exit(FAILED)


@app.command()
def suite(
    folder: Annotated[Path, typer.Argument(help="Folder for collectives.md, suite.md and their JSON.")] = Path(
        "lab/bench/results"
    ),
    section: Annotated[list[str] | None, typer.Option(help="Only this section; repeat it. `list` names them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: about 2 minutes in place of 8.")] = False,
) -> None:
    """Measure netfold beside gloo and the MPIs installed here, and print each goal beside the measured value."""
    from netfold_lab.bench.goals import SECTIONS
    from netfold_lab.bench.suite import run_suite
    from netfold_lab.rack.processes import exit_on_signals

    if section == ["list"]:
        for name, title in SECTIONS.items():
            typer.echo(f"{name:12} {title}")
        return
    with exit_on("bench suite", ValueError), exit_on_signals():
        bad = run_suite(section or [], folder, typer.echo, quick=quick)
    raise typer.Exit(FAILED if bad else 0)


@app.command()
def accuracy(
    folder: Annotated[Path, typer.Argument(help="Folder for accuracy.md.")] = Path("lab/bench/results"),
    quick: Annotated[bool, typer.Option("--quick", help="Every part once, in seconds: too short to learn.")] = False,
    timeout: float = time_option("1800s", help="Limit for the whole run."),
) -> None:
    """Measure the error of sums in each wire format, and train two models with it; takes 4 to 9 minutes."""
    import os

    from netfold_lab.bench.accuracy.report import render
    from netfold_lab.bench.accuracy.run import measure_accuracy
    from netfold_lab.bench.accuracy.settings import Settings
    from netfold_lab.bench.ranks import BenchError
    from netfold_lab.rack import RackError
    from netfold_lab.rack.processes import exit_on_signals
    from netfold_train.runs.machine import spoken

    need("netfold bench accuracy", ["torch"], "torch")
    settings = Settings.quick() if quick else Settings()
    load = os.getloadavg()[0]
    with (
        exit_on("bench accuracy", RackError),
        exit_on("bench accuracy", BenchError, code=FAILED),
        exit_on_signals(),
    ):
        found = measure_accuracy(settings, typer.echo, timeout)
    folder.mkdir(parents=True, exist_ok=True)
    text = render(settings, found, spoken(load))
    (folder / "accuracy.md").write_text(text)
    typer.echo(text)
    if not all(each["agree"] for each in (*found["trainings"], *found["sweep"])):
        raise typer.Exit(FAILED)


@app.command()
@with_output("json", "csv")
def links(
    output: Output,
    hosts: Annotated[str, typer.Option(help="Hosts of a rack; several racks by commas.")] = "4,8",
    rate: Annotated[str, typer.Option(help="Rate of a worker's link; several by commas.")] = "200mbit",
    c: Annotated[
        str,
        typer.Option(
            "-c",
            help="The switch's link over a worker's, several by commas; P: a port for each worker, 0: the first "
            "worker's host is the switch.",
        ),
    ] = "0.25,0.5,1,2,4,P",
    size: Annotated[str, typer.Option(help="Size of the tensor, several by commas; K, M, G.")] = "16M",
    loss: Annotated[str, typer.Option(help="Loss on every link, such as 0.1%.")] = "0%",
    rounds: Annotated[int, typer.Option("-n", min=1, help="Timed rounds; each backend runs once in each.")] = 10,
) -> None:
    """Compare a switch behind its own link with a ring over the same links, in an emulated rack. Needs root.

    Takes about 20 seconds for a rack at 200 Mbit/s. The exit code is 1 where `auto` misses a goal that the table
    states.
    """
    import os

    from netfold.quantity import parse_size
    from netfold_lab.bench.links import LinkSetup, measure, table
    from netfold_lab.rack import RackError
    from netfold_lab.rack.processes import exit_on_signals
    from netfold_train.runs.machine import spoken

    load = os.getloadavg()[0]
    found = {}
    with exit_on("bench links", RackError, ValueError):
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
    last = f"{rounds} rounds per rack, after some that are not timed; {spoken(load)}"
    rows = [asdict(place) | asdict(taken) | {"bound_s": place.bound_s} for place, taken in found.items()]
    output.show("\n".join([*table(found), "", last]), json=lambda: rows, csv=lambda: rows)
    if not all(taken.met(place) for place, taken in found.items()):
        raise typer.Exit(FAILED)


@app.command()
@with_output("json")
def figures(
    output: Output,
    folder: Annotated[Path, typer.Argument(help="Folder for figures.html, figures.json and a CSV per figure.")] = Path(
        "netfold-figures"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="About 5 minutes in place of 20.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this figure; repeat it. `list` names them.")] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Measure nothing; make the page from FOLDER's data.")
    ] = False,
) -> None:
    """Redraw the talks' figures: netfold beside gloo in an emulated rack, as one page with its data. Needs root.

    Prints the page's path, or with `--output json` all data in FOLDER.
    """
    from netfold_lab.bench.figures.run import FIGURES, PAGE, QUICK_S, TOTAL_S, document_of, read, run_figures, write
    from netfold_lab.rack import RackError
    from netfold_lab.rack.processes import exit_on_signals

    if only == ["list"]:
        titles = {figure.name: figure.title for figure in FIGURES.values()}
        output.show("\n".join(f"{name:12} {title}" for name, title in titles.items()), json=lambda: titles)
        return
    with exit_on("bench figures", RackError, ValueError):
        if redraw:
            found = read(folder)
            write(folder, found)
        else:
            with exit_on_signals():
                say = lambda line: typer.echo(line, err=True)
                found = run_figures(folder, only or [], say, total_s=QUICK_S if quick else TOTAL_S)
    output.show(f"{folder / PAGE}", json=lambda: document_of(found))
    if any(taken.lack or taken.wrong for taken in found.values()):
        raise typer.Exit(FAILED)
