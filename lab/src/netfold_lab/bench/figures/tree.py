"""The gain by a leaf switch in each rack if racks share an uplink."""

from netfold import units
from netfold_lab.bench.figures import chart
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import (
    GLOO,
    RING,
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
from netfold_lab.bench.rack_runner import Configuration
from netfold_lab.rack import Rack

HOSTS, RACKS = 8, 2
RATE = "200mbit"
SIZE_BYTES = 8 << 20
LEAVES, ROOT = "netfold, a leaf in each rack", "netfold, one switch at the core"


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"hosts": HOSTS, "racks": RACKS, "rate": RATE, "size_bytes": SIZE_BYTES}
    with Rack(HOSTS, RATE, racks=RACKS, uplink=RATE) as rack, in_rack(rack, share, taken) as runner:
        configurations = [
            Configuration(LEAVES, HOSTS, SWITCH),
            Configuration(ROOT, HOSTS, {**SWITCH, "switch": str(rack.switch_address)}),
            Configuration(RING, HOSTS, {"algorithm": "all_reduce=ring"}),
            Configuration(GLOO, HOSTS),
        ]
        runner.open(configurations)

        def turn(case: Configuration, number: int) -> None:
            taken.add(case.label, "", number, runner.turn(case, SIZE_BYTES, number + 1))

        run_cases(share, taken, configurations, turn)


def tell(taken: Measurements) -> FigureText:
    shapes, size = taken.series(), units.size(taken.settings["size_bytes"])
    picture = chart.dots(
        {shape: {shape: taken.spread(shape, "").scaled(1e3)} for shape in shapes},
        name=TITLE,
        x_label=f"all_reduce of {size}, ms",
    )
    slower = {shape: taken.ratios((shape, ""), (LEAVES, "")) for shape in shapes}
    return FigureText(
        picture,
        ["", "ms", "over a leaf in each rack"],
        [[shape, in_ms(taken.spread(shape, "")), in_times(slower[shape])] for shape in shapes],
        f"{size} of f32 among {taken.settings['hosts']} hosts in {taken.settings['racks']} racks; links and each "
        f"rack's uplink of {in_rate(taken.settings['rate'])}. Without leaves, one switch at the core takes "
        f"{in_times(slower[ROOT])} times as long, gloo {in_times(slower[GLOO])}.",
        [
            *(f"Slower than {shape}: {of.median:.2f} of its time." for shape, of in slower.items() if of.median < 1),
            "The talk has no measurement to compare with.",
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
