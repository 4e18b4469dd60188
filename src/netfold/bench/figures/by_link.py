"""Two of the talks' pictures for a switch behind a link of its own: c = 1, 2, 4 beside the talk's, a port a worker.

Nothing is measured here: all of it is the cost model's (docs/how-to/aggregators.md); bench/split.py measures some of
it.
"""

from collections.abc import Sequence
from dataclasses import replace

from netfold.bench.figures import chart
from netfold.bench.figures.figure import Predicted, in_mb
from netfold.bench.spread import Spread, spread
from netfold.plan.link_gains import LINKS, gains, measured_request, name_of
from netfold.tuning import DEFAULT_LINKS, Link, Topology
from netfold.tuning.cost import Case, given_back_bytes_per_s, ring_bytes_per_s, split_rate

_MODEL = (
    "c is the rate of the switch's link over a worker's; c = P, a port a worker, is the talk's switch. A host that "
    "adds has one link, mostly c = 1; a ring takes what the link cannot."
)


def by_hosts(size_bytes: int, hosts: Sequence[int], *, rate_bytes_per_s: float) -> Predicted:
    """Time of an all_reduce against the number of hosts; rate_bytes_per_s: of tensors, over a worker's link."""
    lines = [
        chart.Line(name_of(c), hosts, [_exactly(1e3 * _split_s(size_bytes, x, c, rate_bytes_per_s)) for x in hosts])
        for c in LINKS
    ]
    ring = [1e3 * size_bytes / ring_bytes_per_s(x, rate_bytes_per_s) for x in hosts]
    most = max(hosts)
    times = ", ".join(f"{line.spreads[-1].median / line.spreads[0].median:.2f} with {line.label}" for line in lines)
    return Predicted(
        chart.lines(
            [chart.Panel("", lines, [chart.Reference("a ring alone", hosts, ring)])],
            name="Time of an all_reduce, by the number of hosts and the switch's link",
            x_label="hosts",
            y_label=f"all_reduce of {in_mb(size_bytes)}, ms",
            x_log=True,
        ),
        ["hosts", *(f"{line.label}, ms" for line in lines), "a ring alone, ms"],
        [
            [str(x), *(f"{line.spreads[at].median:.0f}" for line in lines), f"{ring[at]:.0f}"]
            for at, x in enumerate(hosts)
        ],
        f"{_MODEL} {most} hosts take so many times as long as {min(hosts)}: {times}, {ring[-1] / ring[0]:.2f} by a "
        "ring alone. Only with a port a worker it is flat. By bytes, without latencies and without what hosts compute.",
    )


def by_model(models: Sequence[str], workers: int) -> Predicted:
    """How many times as quick steps are as by a ring, on the talk's own cluster."""
    found = {model: gains(measured_request(model, "switchml-10g", workers)) for model in models}
    ordered = sorted(models, key=lambda model: found[model][None], reverse=True)
    rows = [chart.Dots(model, {name_of(c): _exactly(found[model][c]) for c in LINKS}) for model in ordered]
    most = ordered[0]
    return Predicted(
        chart.dots(
            rows,
            name="Training steps: how much quicker, by the switch's link",
            x_label="a step by a ring over a step with the switch (right of 1: quicker)",
            numbers=False,
        ),
        ["model", *map(name_of, LINKS)],
        [[model, *(f"{found[model][c]:.2f}" for c in LINKS)] for model in ordered],
        f"{_MODEL} {most} gains "
        + ", ".join(f"{100 * (found[most][c] - 1):.0f}% with {name_of(c)}" for c in LINKS)
        + f". {workers} workers of switchml-10g, P100 and 10 Gbit/s, gradients beside the backward pass, against a "
        "ring that fills its links.",
    )


def _split_s(size_bytes: int, hosts: int, c: int | None, rate_bytes_per_s: float) -> float:
    """By its bytes alone; cores are no limit."""
    given = given_back_bytes_per_s(hosts, (c or hosts) * rate_bytes_per_s, float("inf"))
    links = replace(DEFAULT_LINKS, network=Link(0.0, rate_bytes_per_s), switches=(given,))
    return size_bytes / split_rate(Case(size_bytes, Topology.apart(hosts), links, switch=1))


def _exactly(value: float) -> Spread:
    """Of one value, which has no spread."""
    return spread([value])
