"""Time of an all_reduce against the number of hosts."""

from netfold import units
from netfold_lab.bench.figures import by_link, chart
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import (
    GLOO,
    IN_NETWORK,
    RING,
    SWITCH,
    Figure,
    FigureText,
    Measurements,
    cases_among,
    describe_mpi,
    in_ms,
    in_rack,
    in_rate,
    in_times,
    mpi_series,
    run_cases,
)
from netfold_lab.bench.mpi_peers import find_mpi
from netfold_lab.bench.rack_runner import Configuration
from netfold_lab.rack import Rack
from netfold_lab.rack.link import parse_link
from netfold_lab.rack.measure import payload_share

HOSTS = (2, 4, 8, 16)
# Two cores carry 8 hosts of 1 Gbit/s through the software switch (lab/bench/results/links.md). 16 of these links carry
# a fifth of that, so that the links, and not the cores, limit the time.
RATE = "100mbit"
SIZE_BYTES = 4 << 20
# The largest ratio of the times with the most and the fewest hosts that the text calls flat.
FLAT = 1.05
OPTIONS = {IN_NETWORK: SWITCH, RING: {"algorithm": "all_reduce=ring"}, GLOO: None}
# Bytes of data in a full TCP packet with an MTU of 1500.
_MSS = 1448


def measure(share: Share, taken: Measurements, counts: tuple[int, ...] = HOSTS, size_bytes: int = SIZE_BYTES) -> None:
    mpi = find_mpi()
    taken.settings |= {"rate": RATE, "size_bytes": size_bytes, "mpi": mpi}
    with Rack(max(counts), RATE) as rack, in_rack(rack, share, taken, mpi) as runner:
        cases = cases_among(counts, OPTIONS, mpi)
        runner.open([configuration for _, configuration in cases])

        def turn(case: tuple[str, Configuration], number: int) -> None:
            series, configuration = case
            taken.add(series, configuration.workers, number, runner.turn(configuration, size_bytes, number + 1))

        run_cases(share, taken, cases, turn)


def tell(taken: Measurements) -> FigureText:
    hosts, size_bytes, rate = taken.xs(), taken.settings["size_bytes"], taken.settings["rate"]
    peers = [GLOO, *mpi_series(taken)]
    series = [*OPTIONS, *mpi_series(taken)]
    once_ms = size_bytes * 8e3 / parse_link(rate).rate_bits / payload_share(_MSS)
    lines = [chart.Line(one, hosts, [taken.spread(one, x).scaled(1e3) for x in hosts]) for one in series]
    limits = [
        chart.Line("line rate, once", hosts, values=[once_ms] * len(hosts)),
        chart.Line("line rate, 2 (P − 1) / P times", hosts, values=[once_ms * 2 * (x - 1) / x for x in hosts]),
    ]
    picture = chart.lines(
        {"": [*lines, *limits]},
        name=TITLE,
        x_label="hosts",
        y_label=f"all_reduce of {units.size(size_bytes)}, ms",
        x_log=True,
    )
    least, most = min(hosts), max(hosts)
    grown = {one: taken.ratios((one, most), (one, least)) for one in OPTIONS}
    short = [
        "Not alike: the talk's switch was a Tofino on links of 10 and 100 Gbit/s. This one is a process that shares "
        f"{taken.cores} cores with all hosts, on links slow enough for these cores.",
        describe_mpi(taken, hosts),
    ]
    if grown[IN_NETWORK].median > FLAT:
        short.insert(0, f"Not flat: {most} hosts take {grown[IN_NETWORK].median:.3f} times as long as {least}.")
    return FigureText(
        picture,
        ["hosts", *(f"{one}, ms" for one in series), *(f"{peer} / in the network" for peer in peers)],
        [
            [
                str(x),
                *(in_ms(taken.spread(one, x)) for one in series),
                *(in_times(taken.ratios((peer, x), (IN_NETWORK, x))) for peer in peers),
            ]
            for x in hosts
        ],
        f"{units.size(size_bytes)} of f32 over links of {in_rate(rate)}; the switch has one link for each host (c = "
        f"P). {most} hosts take {in_times(grown[IN_NETWORK])} times as long as {least} through the switch, "
        f"{in_times(grown[RING])} by netfold's ring, {in_times(grown[GLOO])} by gloo.",
        short,
        by_link.by_hosts(size_bytes, hosts, rate_bytes_per_s=parse_link(rate).rate_bits / 8 * payload_share(_MSS)),
    )


TITLE = "Time of an all_reduce, by the number of hosts"
FIGURE = Figure(
    "hosts",
    TITLE,
    "“SwitchML performance does not depend on the number of workers”, on a testbed of 16 servers. (Scaling "
    "Distributed Machine Learning with In-Network Aggregation: SwitchML.)",
    weight=6,
    measure=measure,
    tell=tell,
)
