"""The speedup of training known models: steps are replayed, with a timer as accelerator and with real transfers."""

from netfold_lab.bench.config import BenchEnvironment
from netfold_lab.bench.figures import by_link, chart
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import (
    GLOO,
    Figure,
    FigureText,
    Measurements,
    deadline_s,
    in_ms,
    in_rate,
    in_times,
    note,
)
from netfold_lab.bench.figures.replay import NETFOLD, replay
from netfold_lab.bench.runner import start_runner
from netfold_plan.model.catalogue import find_model

HOSTS = 8
# With tensors a 50th of their size, these links stand for links of 10 Gbit/s, the slower ones of the talk's testbed.
RATE, SHRINK, STANDS_FOR = "200mbit", 50, "10 Gbit/s"
# SwitchML's nine. The models with the largest differences come first, since the time may end before the last.
MODELS = ("vgg16", "resnet50", "inception3", "alexnet", "googlenet", "vgg11", "resnet101", "inception4", "vgg19")
# The talk's range: 20% to 300% quicker.
TALK = (1.2, 4.0)


def measure(share: Share, taken: Measurements) -> None:
    taken.settings |= {"hosts": HOSTS, "rate": RATE, "shrink": SHRINK, "stands_for": STANDS_FOR}
    place = BenchEnvironment(HOSTS, rack_rate=RATE, deadline_s=int(deadline_s(share)))
    skipped = []
    with start_runner(place, ["torch"]) as runner:
        for model, part in zip(MODELS, share.split([1] * len(MODELS)), strict=True):
            if share.left_s <= 0 and taken.rows:
                skipped.append(model)
            else:
                replay(runner, part, taken, model, HOSTS, shrink=SHRINK, speed=1)
        note(taken, runner)
    if skipped:
        taken.cut.append(f"The time did not suffice for {', '.join(skipped)}.")


def tell(taken: Measurements) -> FigureText:
    hosts = taken.settings["hosts"]
    gain = {model: taken.ratios((GLOO, model), (NETFOLD, model)) for model in taken.xs(NETFOLD)}
    models = sorted(gain, key=lambda model: gain[model].median, reverse=True)
    picture = chart.dots(
        {model: {NETFOLD: gain[model]} for model in models},
        name=TITLE,
        x_label="gloo's step over netfold's (right of 1: netfold is quicker)",
        band=(*TALK, "the talk's range, over TensorFlow with NCCL"),
    )
    ring = 2 * (hosts - 1) / hosts
    below = [model for model in models if gain[model].median < TALK[0]]
    short = []
    if below:
        short.append(f"Below the talk's range, {TALK[0]:.1f} to {TALK[1]:.1f}: {', '.join(below)}.")
    short.append(
        "Not alike: the talk compares with TensorFlow over NCCL. This figure compares with gloo, whose ring fills the "
        f"links. A ring sends 2 (P − 1) / P = {ring:.2f} times the bytes that go to a switch. A larger gain over a "
        "ring that fills its links is impossible for any model."
    )
    short.append(
        "No model is trained here: a timer waits for the published computing times of one accelerator, and gradients "
        "are sent meanwhile, in the buckets of PyTorch's DDP."
    )
    return FigureText(
        picture,
        ["model", "gradients, MB", "computing, ms", f"{NETFOLD}, ms", "gloo, ms", "gloo / netfold"],
        [
            [
                model,
                f"{find_model(model).gradient_bytes / 2**20:.0f}",
                f"{taken.spread(NETFOLD, model, 'compute_s').median * 1e3:.0f}",
                in_ms(taken.spread(NETFOLD, model)),
                in_ms(taken.spread(GLOO, model)),
                in_times(gain[model]),
            ]
            for model in models
        ],
        f"{hosts} hosts, and a switch with a port for each (c = P). "
        f"Links of {in_rate(taken.settings['rate'])} and tensors of 1/{taken.settings['shrink']} of "
        f"their size stand for links of {taken.settings['stands_for']}. Steps are between "
        f"{gain[models[-1]].median:.2f} ({models[-1]}) and {gain[models[0]].median:.2f} ({models[0]}) times as quick "
        "as over gloo.",
        short,
        by_link.by_model(models, hosts),
    )


TITLE = "Training steps: how much quicker"
FIGURE = Figure(
    "speedup",
    TITLE,
    "“A speedup from 20% to 300% compared to Tensorflow/NCCL”, 9 standard CNN benchmarks on 8 servers with P100 GPUs. "
    "(Scaling Distributed Machine Learning with In-Network Aggregation: SwitchML.)",
    weight=10,
    measure=measure,
    tell=tell,
)
