"""Goodput through the switch against the number of values in a packet."""

from netfold._native import protocol
from netfold.bench.figures import chart
from netfold.bench.figures.budget import Share
from netfold.bench.figures.figure import (
    SWITCH,
    Figure,
    FigureText,
    Measurements,
    deadline_s,
    in_mb,
    in_rate,
    in_times,
    run_cases,
)
from netfold.bench.rack_runner import Configuration, start_rack_runner
from netfold.bench.spread import Spread, spread
from netfold.rack import Rack
from netfold.rack.link import parse_link

HOSTS = 4
MTU = 9000
# Bytes of each, and so many that a call takes some tenths of a second.
RATES = {"200mbit": 4 << 20, "1gbit": 16 << 20}
# The least that a switch takes; what fills an MTU of 1500; what fills one of 9000; and between them.
PAYLOADS = (512, 1024, 1408, 4096, 8880)
SMALLEST, FULL = 512, 1408
# Of what the headers leave, from which the line is called full.
LINE = 0.95
# Of a packet on the link: Ethernet 14, IPv4 20, UDP 8.
_OUTER_BYTES = 42


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"hosts": HOSTS, "mtu": MTU, "size_bytes": RATES}
    for (rate, size_bytes), part in zip(RATES.items(), share.split(len(RATES)), strict=True):
        with Rack(HOSTS, rate, mtu=MTU) as rack:
            rack.start_switch(lambda line: None)
            with start_rack_runner(rack, deadline_s(part)) as turns:
                ways = [Configuration(str(payload), HOSTS, SWITCH, payload) for payload in PAYLOADS]
                turns.open(ways)

                def turn(way: Configuration, number: int, rate: str = rate, size_bytes: int = size_bytes) -> None:
                    taken.add(rate, way.payload_bytes, number, turns.turn(way, size_bytes, number + 1))

                run_cases(part, taken, ways, turn, of=f" on links of {in_rate(rate)}")
                taken.note(turns)


def tell(taken: Measurements) -> FigureText:
    payloads, rates = taken.xs(), list(taken.settings["size_bytes"])
    values = [payload // 4 for payload in payloads]
    limit = [payload / (payload + protocol.HEADER_BYTES + _OUTER_BYTES) for payload in payloads]
    part = {rate: {payload: _goodput(taken, rate, payload) for payload in payloads} for rate in rates}
    picture = chart.lines(
        [
            chart.Panel(
                "",
                [
                    chart.Line(f"links of {in_rate(rate)}", values, [part[rate][each] for each in payloads])
                    for rate in rates
                ],
                [chart.Reference("what headers leave", values, limit)],
            )
        ],
        name=TITLE,
        x_label="values in a packet (f32)",
        y_label="goodput / rate of the link",
        x_log=True,
        y_from=0.5,
    )
    gained = {rate: taken.ratios((rate, SMALLEST), (rate, FULL)) for rate in rates}
    smallest = {rate: part[rate][SMALLEST].median / limit[payloads.index(SMALLEST)] for rate in rates}
    by_headers = limit[payloads.index(FULL)] / limit[payloads.index(SMALLEST)]
    short = []
    for rate in rates:
        reached = {each // 4: part[rate][each].median / most for each, most in zip(payloads, limit, strict=True)}
        if below := [f"{share:.1%} with {count} values" for count, share in reached.items() if share < LINE]:
            short.append(
                f"Short of line rate on links of {in_rate(rate)}, of what headers leave: {', '.join(below)}. The hosts "
                f"and the switch share {taken.cores} cores here."
            )
    short.append(
        "Not alike: a packet of the talk's carries the 32 values that its P4 program can add, of which headers leave "
        f"less than of the least packet here, {SMALLEST // 4} values; so there was more to gain."
    )
    return FigureText(
        picture,
        ["values", "bytes of values", *(f"goodput / rate, {in_rate(rate)}" for rate in rates), "what headers leave"],
        [
            [f"{payload // 4}", f"{payload}", *(in_times(part[rate][payload]) for rate in rates), f"{most:.2f}"]
            for payload, most in zip(payloads, limit, strict=True)
        ],
        f"{taken.settings['hosts']} hosts, links of MTU {taken.settings['mtu']}. Of what headers leave, packets of "
        f"{SMALLEST // 4} values carry "
        + ", ".join(f"{smallest[rate]:.1%} on links of {in_rate(rate)}" for rate in rates)
        + f". Packets that fill an MTU of 1500 ({FULL // 4} values) are quicker than those of {SMALLEST // 4} values "
        + ", ".join(f"{in_times(gained[rate])} times on links of {in_rate(rate)}" for rate in rates)
        + f"; by headers alone it would be {by_headers:.2f}. "
        + ", ".join(f"{in_mb(size)} at {in_rate(rate)}" for rate, size in taken.settings["size_bytes"].items())
        + ".",
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
