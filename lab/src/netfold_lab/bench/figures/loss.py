"""The cost of lost packets for an all_reduce: its time over the time without loss."""

from netfold import units
from netfold_lab.bench.figures import chart
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import (
    GLOO,
    IN_NETWORK,
    SWITCH,
    Figure,
    FigureText,
    Measurements,
    in_ms,
    in_rack,
    in_rate,
    in_times,
    run_cases,
)
from netfold_lab.bench.rack_runner import Configuration, set_congestion_control, set_loss
from netfold_lab.rack import Rack
from netfold_lab.rack.link import parse_link
from netfold_train.runs.machine import congestion_control, congestion_controls

HOSTS = 4
RATE = "200mbit"
SIZE_BYTES = 8 << 20
LOSSES = ("0%", "0.01%", "0.1%", "1%")
# The congestion control of most systems, measured beside this system's.
CUBIC = "cubic"
# The loss that the talk calls reasonable; the largest inflation without impact; the smallest difference that counts.
REASONABLE, NONE = "0.1%", 1.05
ALIKE = 0.02


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"hosts": HOSTS, "rate": RATE, "size_bytes": SIZE_BYTES}
    default = congestion_control()
    # Links that may lose packets cut packets first, so they are made lossy from the start, for every round alike.
    with Rack(HOSTS, RATE, LOSSES[-1]) as rack:
        set_loss(rack, 0)
        with in_rack(rack, share, taken) as runner:
            configurations = [Configuration(IN_NETWORK, HOSTS, SWITCH)]
            runner.open(configurations)
            for control in dict.fromkeys((default, *(each for each in congestion_controls() if each == CUBIC))):
                set_congestion_control(rack, control)
                configurations.append(Configuration(f"{GLOO}, TCP {control}", HOSTS))
                runner.open(configurations[-1:])

            def turn(loss: str, number: int) -> None:
                set_loss(rack, parse_link(RATE, loss).loss_ratio)
                for each in configurations:
                    taken.add(each.label, loss, number, runner.turn(each, SIZE_BYTES, number + 1))

            run_cases(share, taken, LOSSES, turn)


def tell(taken: Measurements) -> FigureText:
    losses, backends = taken.xs(), taken.series()
    none, places = losses[0], list(range(len(losses)))
    inflation = {backend: {x: taken.ratios((backend, x), (backend, none)) for x in losses} for backend in backends}
    picture = chart.lines(
        {"": [chart.Line(backend, places, [inflation[backend][x] for x in losses]) for backend in backends]},
        name=TITLE,
        x_label="loss of a packet on a link, each way",
        y_label="time over that without loss",
        y_log=True,
        ticks=dict(enumerate(losses)),
    )
    by_switch, most = inflation[IN_NETWORK], losses[-1]
    short = []
    if by_switch[REASONABLE].median > NONE:
        short.append(f"Not without impact: at {REASONABLE} it takes {by_switch[REASONABLE].median:.3f} times as long.")
    short += [
        f"Not lower than TCP's at {x}: {by_switch[x].median:.3f}, and {inflation[backend][x].median:.3f} for {backend}."
        for backend in backends[1:]
        for x in losses[1:]
        if by_switch[x].median > inflation[backend][x].median + ALIKE
    ]
    short.append(
        "Not alike: gloo's packets cross two links from host to host, packets to the switch cross one. The talk does "
        "not name its TCP's congestion control."
    )

    def at(x: str) -> str:
        return ", ".join(f"{backend} {in_times(inflation[backend][x])}" for backend in backends)

    def cells(backend: str, x: str) -> tuple[str, str]:
        return in_ms(taken.spread(backend, x)), in_times(inflation[backend][x])

    again = {x: f"{taken.spread(IN_NETWORK, x, 'again').median:.0f}" for x in losses}
    return FigureText(
        picture,
        [
            "loss",
            *(title for backend in backends for title in (f"{backend}, ms", "over no loss")),
            "sent again, in the network",
        ],
        [[x, *(cell for backend in backends for cell in cells(backend, x)), again[x]] for x in losses],
        f"{units.size(taken.settings['size_bytes'])} of f32 among {taken.settings['hosts']} hosts, links of "
        f"{in_rate(taken.settings['rate'])}. Time over that without loss at {REASONABLE}: {at(REASONABLE)}; "
        f"at {most}: {at(most)}.",
        short,
    )


TITLE = "Inflation by lost packets"
FIGURE = Figure(
    "loss",
    TITLE,
    "“SwitchML has a lower inflation than TCP”; “reasonable packet loss rates have no impact on performance”. (Scaling "
    "Distributed Machine Learning with In-Network Aggregation: SwitchML.)",
    weight=6,
    measure=measure,
    tell=tell,
)
