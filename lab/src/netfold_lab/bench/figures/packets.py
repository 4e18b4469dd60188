"""Goodput through the switch against the number of values in a packet."""

from netfold import units
from netfold._native import protocol
from netfold_lab.bench.figures import chart
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import (
    SWITCH,
    Figure,
    FigureText,
    Measurements,
    in_rack,
    in_rate,
    in_times,
    run_cases,
)
from netfold_lab.bench.rack_runner import Configuration
from netfold_lab.bench.spread import Spread, spread
from netfold_lab.rack import Rack
from netfold_lab.rack.link import parse_link

HOSTS = 4
MTU = 9000
# By rate, the bytes of a call, for calls of some tenths of a second.
RATES = {"200mbit": 4 << 20, "1gbit": 16 << 20}
# The least that a switch takes; a full MTU of 1500; a full MTU of 9000; and sizes between them.
PAYLOADS = (512, 1024, 1408, 4096, 8880)
SMALLEST, FULL = 512, 1408
# The least fraction of the headers' limit that the text calls line rate.
LINE = 0.95
# Headers of a packet on the link: Ethernet 14, IPv4 20, UDP 8.
_OUTER_BYTES = 42


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"hosts": HOSTS, "mtu": MTU, "size_bytes": RATES}
    for (rate, size_bytes), part in zip(RATES.items(), share.split([1] * len(RATES)), strict=True):
        with Rack(HOSTS, rate, mtu=MTU) as rack, in_rack(rack, part, taken) as runner:
            configurations = [Configuration(str(payload), HOSTS, SWITCH, payload) for payload in PAYLOADS]
            runner.open(configurations)

            def turn(case: Configuration, number: int, rate: str = rate, size_bytes: int = size_bytes) -> None:
                taken.add(rate, case.payload_bytes, number, runner.turn(case, size_bytes, number + 1))

            run_cases(part, taken, configurations, turn, of=f" on links of {in_rate(rate)}")


def tell(taken: Measurements) -> FigureText:
    payloads, rates = taken.xs(), list(taken.settings["size_bytes"])
    values = [payload // 4 for payload in payloads]
    limit = {payload: payload / (payload + protocol.HEADER_BYTES + _OUTER_BYTES) for payload in payloads}
    part = {rate: {payload: _goodput(taken, rate, payload) for payload in payloads} for rate in rates}
    lines = [chart.Line(f"links of {in_rate(rate)}", values, list(part[rate].values())) for rate in rates]
    picture = chart.lines(
        {"": [*lines, chart.Line("limit by headers", values, values=list(limit.values()))]},
        name=TITLE,
        x_label="values in a packet (f32)",
        y_label="goodput / rate of the link",
        x_log=True,
        y_from=0.5,
    )
    gained = {rate: taken.ratios((rate, SMALLEST), (rate, FULL)) for rate in rates}
    short = []
    for rate in rates:
        reached = {payload // 4: part[rate][payload].median / limit[payload] for payload in payloads}
        if below := [f"{share:.1%} with {count} values" for count, share in reached.items() if share < LINE]:
            short.append(
                f"Below line rate on links of {in_rate(rate)}, of the limit by headers: {', '.join(below)}. The hosts "
                f"and the switch share {taken.cores} cores here."
            )
    short.append(
        "Not alike: a packet of the talk carries the 32 values that its P4 program can add. Headers leave less of such "
        f"a packet than of the smallest packet here, {SMALLEST // 4} values, so there was more to gain."
    )
    smallest = ", ".join(
        f"{part[rate][SMALLEST].median / limit[SMALLEST]:.1%} on links of {in_rate(rate)}" for rate in rates
    )
    factors = ", ".join(f"{in_times(gained[rate])} times on links of {in_rate(rate)}" for rate in rates)
    sizes = ", ".join(f"{units.size(size)} at {in_rate(rate)}" for rate, size in taken.settings["size_bytes"].items())
    return FigureText(
        picture,
        ["values", "bytes of values", *(f"goodput / rate, {in_rate(rate)}" for rate in rates), "limit by headers"],
        [
            [
                str(payload // 4),
                str(payload),
                *(in_times(part[rate][payload]) for rate in rates),
                f"{limit[payload]:.2f}",
            ]
            for payload in payloads
        ],
        f"{taken.settings['hosts']} hosts, links of MTU {taken.settings['mtu']}. Packets of {SMALLEST // 4} values "
        f"reach these fractions of the limit by headers: {smallest}. Packets that fill an MTU of 1500 ({FULL // 4} "
        f"values) are quicker than packets of {SMALLEST // 4} values: {factors}; by headers alone it would be "
        f"{limit[FULL] / limit[SMALLEST]:.2f}. {sizes}.",
        short,
    )


def _goodput(taken: Measurements, rate: str, payload: int) -> Spread:
    bits, rate_bits = taken.settings["size_bytes"][rate] * 8, parse_link(rate).rate_bits
    return spread([bits / took_s / rate_bits for took_s in taken.values(rate, payload)])


TITLE = "Goodput, by the size of a packet"
FIGURE = Figure(
    "packets",
    TITLE,
    "“SwitchML reaches line rate with small packets”; it “would have ~30% better performance if the switch could "
    "support MTU-sized packets”. (Scaling Distributed Machine Learning with In-Network Aggregation: SwitchML.)",
    weight=5,
    measure=measure,
    tell=tell,
)
