"""What a leaf in each rack saves where racks share an uplink."""

from netfold.bench.figures import chart
from netfold.bench.figures.budget import Share
from netfold.bench.figures.figure import (
    GLOO,
    RING,
    SWITCH,
    Figure,
    FigureText,
    Measurements,
    deadline_s,
    in_mb,
    in_ms,
    in_rate,
    in_times,
    run_cases,
)
from netfold.bench.rack_runner import Configuration, start_rack_runner
from netfold.rack import Rack

HOSTS, RACKS = 8, 2
RATE = "200mbit"
SIZE_BYTES = 8 << 20
LEAVES, ROOT = "netfold, a leaf in each rack", "netfold, one switch at the core"


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"hosts": HOSTS, "racks": RACKS, "rate": RATE, "size_bytes": SIZE_BYTES}
    with Rack(HOSTS, RATE, racks=RACKS, uplink=RATE) as rack:
        rack.start_switch(lambda line: None)
        rack.start_leaves(lambda line: None)
        with start_rack_runner(rack, deadline_s(share)) as turns:
            ways = [
                Configuration(LEAVES, HOSTS, SWITCH),
                Configuration(ROOT, HOSTS, {**SWITCH, "switch": str(rack.switch_address)}),
                Configuration(RING, HOSTS, {"algorithm": "all_reduce=ring"}),
                Configuration(GLOO, HOSTS),
            ]
            turns.open(ways)

            def turn(way: Configuration, number: int) -> None:
                taken.add(way.label, "", number, turns.turn(way, SIZE_BYTES, number + 1))

            run_cases(share, taken, ways, turn)
            taken.note(turns)


def tell(taken: Measurements) -> FigureText:
    shapes = taken.series()
    picture = chart.dots(
        [chart.Dots(shape, {shape: taken.spread(shape, "").scaled(1e3)}) for shape in shapes],
        name=TITLE,
        x_label=f"all_reduce of {in_mb(taken.settings['size_bytes'])}, ms",
    )
    slower = {shape: taken.ratios((shape, ""), (LEAVES, "")) for shape in shapes}
    return FigureText(
        picture,
        ["", "ms", "over a leaf in each rack"],
        [[shape, in_ms(taken.spread(shape, "")), in_times(slower[shape])] for shape in shapes],
        f"{in_mb(taken.settings['size_bytes'])} of f32 among {taken.settings['hosts']} hosts in "
        f"{taken.settings['racks']} racks; links and each rack's uplink of {in_rate(taken.settings['rate'])}. Without "
        f"leaves, one switch at the core takes {in_times(slower[ROOT])} times as long, gloo {in_times(slower[GLOO])}.",
        [
            *(f"Slower than {shape}: {of.median:.2f} of its time." for shape, of in slower.items() if of.median < 1),
            "The talk had nothing measured to compare with.",
        ],
    )


TITLE = "Several racks: a tree of switches"
FIGURE = Figure(
    "tree",
    TITLE,
    "Future work: “Can we use multiple switches to implement hierarchical SwitchML?” (Scaling Distributed Machine "
    "Learning with In-Network Aggregation: SwitchML.)",
    weight=3,
    measure=measure,
    tell=tell,
)
