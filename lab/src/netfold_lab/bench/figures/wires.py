"""The time of each wire format, and the error of its sums."""

from netfold import units
from netfold_lab.bench.figures import chart
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import (
    GLOO,
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

HOSTS = 4
RATE = "200mbit"
SIZE_BYTES = 8 << 20
WIRES = ("f32", "bf16", "f16", "i32", "i8")
# The largest ratio to f32's time that the text calls unaffected.
SAME = 1.05


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"hosts": HOSTS, "rate": RATE, "size_bytes": SIZE_BYTES}
    with Rack(HOSTS, RATE) as rack, in_rack(rack, share, taken) as runner:
        configurations = [Configuration(wire, HOSTS, {**SWITCH, "wire_dtype": wire}) for wire in WIRES]
        configurations.append(Configuration(GLOO, HOSTS))
        runner.open(configurations)

        def turn(case: Configuration, number: int) -> None:
            found = runner.turn(case, SIZE_BYTES, number + 1, values="normal")
            taken.add(case.label, "", number, found, error=found.error, sent_bytes=found.sent_bytes)

        run_cases(share, taken, configurations, turn)


def tell(taken: Measurements) -> FigureText:
    formats = taken.series()
    names = {each: f"{each}, f32" if each == GLOO else each for each in formats}
    quicker = {each: taken.ratios(("f32", ""), (each, "")) for each in formats}
    error = {each: taken.spread(each, "", "error").median for each in formats}
    picture = chart.plane(
        {names[each]: (quicker[each], error[each]) for each in formats},
        name=TITLE,
        x_label="f32's time over its own, through the switch (right: quicker)",
        y_label="rms error / rms of the sum",
    )
    fixed = taken.ratios(("i32", ""), ("f32", ""))
    short = []
    if fixed.median > SAME:
        short.append(
            f"Not unaffected: i32, the talk's fixed point, takes {fixed.median:.2f} times as long as f32. i32 agrees "
            "on an exponent for every block first. SwitchML has one factor that a person must choose."
        )
    short.append("Not shown here: the effect on training. netfold bench accuracy trains two models with each format.")
    return FigureText(
        picture,
        ["format", "ms", "f32's time over it", "error of the sum", "bytes sent a host"],
        [
            [
                names[each],
                in_ms(taken.spread(each, "")),
                in_times(quicker[each]),
                f"{error[each]:.0e}",
                "not counted" if each == GLOO else f"{taken.spread(each, '', 'sent_bytes').median:,.0f}",
            ]
            for each in formats
        ],
        f"{units.size(taken.settings['size_bytes'])} of normal f32 values among {taken.settings['hosts']} hosts, links "
        f"of {in_rate(taken.settings['rate'])}. i32, fixed point as the talk's, takes {in_times(fixed)} times as long "
        f"as f32, with an error of {error['i32']:.0e} (f32: {error['f32']:.0e}). bf16 is {in_times(quicker['bf16'])} "
        f"times as quick, with an error of {error['bf16']:.0e}; i8 {in_times(quicker['i8'])} and {error['i8']:.0e}. "
        "The error is the root mean square of the sums' errors over that of the exact sums.",
        short,
    )


TITLE = "Wire formats: time, and error of a sum"
FIGURE = Figure(
    "wires",
    TITLE,
    "“Tensor Aggregation Time unaffected by quantization thanks to AVX instructions”; training to similar accuracy "
    "“for a large range of scaling factors”. (Scaling Distributed Machine Learning with In-Network Aggregation: "
    "SwitchML.)",
    weight=4,
    measure=measure,
    tell=tell,
)
