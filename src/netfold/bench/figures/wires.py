"""What each wire format takes, beside what it keeps of a sum."""

from netfold.bench.figures import chart
from netfold.bench.figures.budget import Share
from netfold.bench.figures.figure import (
    GLOO,
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

HOSTS = 4
RATE = "200mbit"
SIZE_BYTES = 8 << 20
WIRES = ("f32", "bf16", "f16", "i32", "i8")
# Time over f32's, up to which it is called unaffected.
SAME = 1.05


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"hosts": HOSTS, "rate": RATE, "size_bytes": SIZE_BYTES}
    with Rack(HOSTS, RATE) as rack:
        rack.start_switch(lambda line: None)
        with start_rack_runner(rack, deadline_s(share)) as turns:
            ways = [
                *(Configuration(wire, HOSTS, {**SWITCH, "wire_dtype": wire}) for wire in WIRES),
                Configuration(GLOO, HOSTS),
            ]
            turns.open(ways)

            def turn(way: Configuration, number: int) -> None:
                found = turns.turn(way, SIZE_BYTES, number + 1, values="normal")
                taken.add(way.label, "", number, found, error=found.error, sent_bytes=found.sent_bytes)

            run_cases(share, taken, ways, turn)
            taken.note(turns)


def tell(taken: Measurements) -> FigureText:
    forms = taken.series()
    quicker = {form: taken.ratios(("f32", ""), (form, "")) for form in forms}
    error = {form: taken.spread(form, "", "error").median for form in forms}
    picture = chart.plane(
        [chart.Point(f"{form}, f32" if form == GLOO else form, quicker[form], error[form]) for form in forms],
        name=TITLE,
        x_label="f32's time over its own, through the switch (right: quicker)",
        y_label="rms error / rms of the sum",
    )
    fixed = taken.ratios(("i32", ""), ("f32", ""))
    short = []
    if fixed.median > SAME:
        short.append(
            f"Not unaffected: i32, the talk's fixed point, takes {fixed.median:.2f} times as long as f32. It agrees on "
            "an exponent for every block first, where SwitchML has one factor that a person must choose."
        )
    short.append("Not shown here: what becomes of training; netfold bench accuracy trains two models with each format.")
    return FigureText(
        picture,
        ["format", "ms", "f32's time over it", "error of the sum", "bytes sent a host"],
        [
            [
                f"{form}, f32" if form == GLOO else form,
                in_ms(taken.spread(form, "")),
                in_times(quicker[form]),
                f"{error[form]:.0e}",
                "not counted" if form == GLOO else f"{taken.spread(form, '', 'sent_bytes').median:,.0f}",
            ]
            for form in forms
        ],
        f"{in_mb(taken.settings['size_bytes'])} of normal f32 values among {taken.settings['hosts']} hosts, "
        f"links of {in_rate(taken.settings['rate'])}. i32, fixed point as the talk's, takes {in_times(fixed)} times as "
        f"long as f32 and is off by {error['i32']:.0e} (f32: {error['f32']:.0e}); bf16 is {in_times(quicker['bf16'])} "
        f"times as quick and off by {error['bf16']:.0e}, i8 {in_times(quicker['i8'])} and {error['i8']:.0e}. The error "
        "is the root mean square of the sums' errors over that of the exact sums.",
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
