"""Time of a small all_reduce against the number of hosts."""

from netfold_lab.bench.figures import chart
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import (
    GLOO,
    HOSTS_ONLY,
    IN_NETWORK,
    SWITCH,
    Figure,
    FigureText,
    Measurements,
    cases_among,
    describe_mpi,
    in_rack,
    in_times,
    in_us,
    mpi_series,
    run_cases,
)
from netfold_lab.bench.mpi_peers import find_mpi
from netfold_lab.bench.rack_runner import Configuration
from netfold_lab.bench.spread import Spread
from netfold_lab.rack import Rack

HOSTS = (2, 4, 8, 16)
RATE = "1gbit"
SIZES = (8, 512, 4096)
CALLS = 10
OPTIONS = {IN_NETWORK: SWITCH, HOSTS_ONLY: {}, GLOO: None}


def measure(share: Share, taken: Measurements) -> None:
    mpi = find_mpi()
    taken.settings |= {"rate": RATE, "sizes": SIZES, "calls": CALLS, "mpi": mpi}
    with Rack(max(HOSTS), RATE) as rack, in_rack(rack, share, taken, mpi) as runner:
        cases = cases_among(HOSTS, OPTIONS, mpi)
        runner.open([configuration for _, configuration in cases])

        def turn(case: tuple[str, Configuration], number: int) -> None:
            series, configuration = case
            for size_bytes in SIZES:
                found = runner.turn(configuration, size_bytes, number + 1, calls=CALLS)
                taken.add(_series(series, size_bytes), configuration.workers, number, found)

        run_cases(share, taken, cases, turn)


def tell(taken: Measurements) -> FigureText:
    hosts, sizes = taken.xs(), taken.settings["sizes"]
    series, peers = [*OPTIONS, *mpi_series(taken)], [HOSTS_ONLY, GLOO, *mpi_series(taken)]

    def time(one: str, size: int, count: int) -> Spread:
        return taken.spread(_series(one, size), count)

    def speedup(peer: str, size: int, count: int) -> Spread:
        return taken.ratios((_series(peer, size), count), (_series(IN_NETWORK, size), count))

    picture = chart.lines(
        {
            f"{size} B": [chart.Line(one, hosts, [time(one, size, x).scaled(1e6) for x in hosts]) for one in series]
            for size in sizes
        },
        name=TITLE,
        x_label="hosts",
        y_label="all_reduce, us",
        x_log=True,
        y_log=True,
    )
    most = max(hosts)
    slower = [
        f"Slower than {peer} at {size} B among {count} hosts: {by.median:.2f} of its speed."
        for size in sizes
        for count in hosts
        for peer in peers
        if (by := speedup(peer, size, count)).median < 1
    ]
    return FigureText(
        picture,
        ["size, B", "hosts", *(f"{one}, us" for one in series), *(f"{peer} / in the network" for peer in peers)],
        [
            [
                str(size),
                str(x),
                *(in_us(time(one, size, x)) for one in series),
                *(in_times(speedup(peer, size, x)) for peer in peers),
            ]
            for size in sizes
            for x in hosts
        ],
        f"Medians of {taken.settings['calls']} calls in a round, the slowest host's. {sizes[0]} B among {most} hosts: "
        f"{in_us(time(IN_NETWORK, sizes[0], most))} us through the switch, {in_us(time(GLOO, sizes[0], most))} us by "
        f"gloo, {in_times(speedup(GLOO, sizes[0], most))} times as long; {sizes[-1]} B, "
        f"{in_times(speedup(GLOO, sizes[-1], most))} times.",
        [
            *slower,
            describe_mpi(taken, hosts),
            f"Not alike: {taken.cores} cores run {most} hosts and the switch, so the time grows with the number of "
            "hosts on every backend. SHARP runs in the switches of an InfiniBand network of 1500 nodes.",
        ],
    )


def _series(one: str, size_bytes: int) -> str:
    return f"{one}, {size_bytes} B"


TITLE = "Latency of small all_reduces"
FIGURE = Figure(
    "latency",
    TITLE,
    "All-reduce with SHARP is quicker than without, on 1500 nodes with 60,000 MPI ranks; the figure's curves are a "
    "picture without numbers. (In-Network Computing to Enable Large Scale Deep Learning Training: SHARP.)",
    weight=5,
    measure=measure,
    tell=tell,
)
