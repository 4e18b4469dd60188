"""The fraction of a training step that is computing, against the number of hosts."""

from netfold_lab.bench.config import BenchEnvironment
from netfold_lab.bench.figures import chart
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import (
    GLOO,
    Figure,
    FigureText,
    Measurements,
    deadline_s,
    in_percent,
    in_rate,
    note,
)
from netfold_lab.bench.figures.replay import BACKENDS, NETFOLD, replay
from netfold_lab.bench.runner import start_runner
from netfold_lab.bench.spread import Spread, spread

# The largest number first, since the time may end before the last.
HOSTS = (8, 2, 4)
# As in figure `speedup`, with slower links: with fast links, few hosts show little difference.
RATE, STANDS_FOR = "250mbit", "2.5 Gbit/s"
# By model: the divisor of the tensors' size, and the factor of the accelerator's speed. An EDSR step takes more than 1
# s.
MODELS = {"resnet50": (10, 1), "edsr": (40, 4)}
# The efficiency of the talk's default setting at scale.
TALK = (0.55, 0.65)


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"rate": RATE, "stands_for": STANDS_FOR, "shrink_and_speed": MODELS}
    for hosts, part in zip(HOSTS, share.split([1] * len(HOSTS)), strict=True):
        if share.left_s <= 0 and taken.rows:
            taken.cut.append(f"The time did not suffice for {hosts} hosts.")
            continue
        place = BenchEnvironment(hosts, rack_rate=RATE, deadline_s=int(deadline_s(part)))
        with start_runner(place, ["torch"]) as runner:
            for (model, (shrink, speed)), turn in zip(MODELS.items(), part.split([1] * len(MODELS)), strict=True):
                replay(runner, turn, taken, model, hosts, shrink=shrink, speed=speed)
            note(taken, runner)


def tell(taken: Measurements) -> FigureText:
    models, counts = taken.xs(), sorted({row["workers"] for row in taken.rows})
    picture = chart.lines(
        {
            model: [
                chart.Line(backend, [1, *counts], [_ALONE, *(efficiency(taken, backend, model, n) for n in counts)])
                for backend in BACKENDS
            ]
            for model in models
        },
        name=TITLE,
        x_label="hosts",
        y_label="computing / step",
        x_log=True,
    )
    most = max(counts)
    with_most = {
        (backend, model): efficiency(taken, backend, model, most).median for backend in BACKENDS for model in models
    }
    short = [
        f"{model}: no better than gloo with {most} hosts, "
        f"{with_most[NETFOLD, model]:.0%} to {with_most[GLOO, model]:.0%}."
        for model in models
        if with_most[NETFOLD, model] <= with_most[GLOO, model]
    ]
    short += [
        f"{model}: {with_most[NETFOLD, model]:.0%} with {most} hosts is not above the efficiency of the talk's default "
        "at scale."
        for model in models
        if with_most[NETFOLD, model] <= TALK[1]
    ]
    short.append(
        "Not alike: the talk measured up to 512 GPUs, several a host. Here are a few hosts on links of ordinary "
        "Ethernet, and a timer takes the place of each accelerator. The talk's efficiency is throughput over that of "
        "as many single GPUs, the same fraction if each GPU keeps its batch. The efficiency of one host is 1 by "
        "definition."
    )
    return FigureText(
        picture,
        ["model", "hosts", *(f"{backend}, computing / step" for backend in BACKENDS)],
        [
            [model, f"{count}", *(in_percent(efficiency(taken, backend, model, count)) for backend in BACKENDS)]
            for model in models
            for count in counts
        ],
        f"Links of {in_rate(taken.settings['rate'])} and smaller tensors stand for links of "
        f"{taken.settings['stands_for']}. With {most} hosts, "
        + "; ".join(
            f"{model}: {', '.join(f'{backend} {with_most[backend, model]:.0%}' for backend in BACKENDS)}"
            for model in models
        )
        + ".",
        short,
    )


def efficiency(taken: Measurements, backend: str, model: str, hosts: int) -> Spread:
    return spread(
        [
            row["compute_s"] / row["took_s"]
            for row in taken.rows
            if (row["series"], row["x"], row["workers"]) == (backend, model, hosts)
        ]
    )


_ALONE = spread([1.0])

TITLE = "Scaling efficiency of training"
FIGURE = Figure(
    "efficiency",
    TITLE,
    f"EDSR over Horovod: “Only ≈ {TALK[0] * 100:.0f}-{TALK[1] * 100:.0f}% scaling efficiency for both MVAPICH2-GDR and "
    "NCCL backends at scale”, up to 512 GPUs. (EDSR with MVAPICH2-GDR and Horovod, profiled by hvprof.)",
    weight=8,
    measure=measure,
    tell=tell,
)
