"""Predictions of two figures for a switch behind a link of its own: c = 1, 2, 4, and the talk's port per worker.

c is the rate of the switch's link over the rate of a worker's link. Everything here comes from the cost model
(docs/how-to/aggregators.md); `lab/bench/train_steps.py --links` measures training steps by c.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from netfold import units
from netfold.tuning import DEFAULT_LINKS, Link, Topology
from netfold.tuning.cost import Case, given_back_bytes_per_s, ring_bytes_per_s, split_rate
from netfold_lab.bench.figures import chart
from netfold_lab.bench.figures.figure import Predicted
from netfold_lab.bench.spread import spread
from netfold_plan.variants.link_gains import LINKS as RATIOS
from netfold_plan.variants.link_gains import gains, measured_request, name_of

# By c, None for a port per worker.
LINKS: Mapping[int | None, str] = {c: name_of(c) for c in RATIOS}
_MODEL = (
    "c is the rate of the switch's link over a worker's; c = P, a port per worker, is the talk's switch. A host that "
    "aggregates has one link, mostly c = 1; a ring carries what this link cannot."
)


def by_hosts(size_bytes: int, hosts: Sequence[int], *, rate_bytes_per_s: float) -> Predicted:
    """The time of an all_reduce by the number of hosts. rate_bytes_per_s: of tensors, over a worker's link."""
    times = {name: [1e3 * _split_s(size_bytes, x, c, rate_bytes_per_s) for x in hosts] for c, name in LINKS.items()}
    ring = [1e3 * size_bytes / ring_bytes_per_s(x, rate_bytes_per_s) for x in hosts]
    lines = [chart.Line(name, hosts, [spread([each]) for each in values]) for name, values in times.items()]
    grown = ", ".join(f"{values[-1] / values[0]:.2f} with {name}" for name, values in times.items())
    columns = {**times, "a ring alone": ring}
    return Predicted(
        chart.lines(
            {"": [*lines, chart.Line("a ring alone", hosts, values=ring)]},
            name="Time of an all_reduce, by the number of hosts and the switch's link",
            x_label="hosts",
            y_label=f"all_reduce of {units.size(size_bytes)}, ms",
            x_log=True,
        ),
        ["hosts", *(f"{name}, ms" for name in columns)],
        [[str(x), *(f"{values[at]:.0f}" for values in columns.values())] for at, x in enumerate(hosts)],
        f"{_MODEL} {max(hosts)} hosts take longer than {min(hosts)} by these factors: {grown}, "
        f"{ring[-1] / ring[0]:.2f} by a ring alone. The time is constant only with a port per worker. By bytes, "
        "without latencies and without the hosts' computing.",
    )


def by_model(models: Sequence[str], workers: int) -> Predicted:
    """The speedup of training steps against a ring, on the talk's own cluster."""
    found = {model: gains(measured_request(model, "switchml-10g", workers)) for model in models}
    ordered = sorted(models, key=lambda model: found[model][None], reverse=True)
    most = ordered[0]
    percents = ", ".join(f"{100 * (found[most][c] - 1):.0f}% with {name}" for c, name in LINKS.items())
    return Predicted(
        chart.dots(
            {model: {name: spread([found[model][c]]) for c, name in LINKS.items()} for model in ordered},
            name="Speedup of training steps, by the switch's link",
            x_label="a step by a ring over a step with the switch (right of 1: quicker)",
            numbers=False,
        ),
        ["model", *LINKS.values()],
        [[model, *(f"{found[model][c]:.2f}" for c in LINKS)] for model in ordered],
        f"{_MODEL} {most} gains {percents}. {workers} workers of switchml-10g, P100 and 10 Gbit/s, gradients beside "
        "the backward pass, against a ring that fills its links.",
    )


def _split_s(size_bytes: int, hosts: int, c: int | None, rate_bytes_per_s: float) -> float:
    """By bytes alone, without a limit by cores."""
    given = given_back_bytes_per_s(hosts, (c or hosts) * rate_bytes_per_s, math.inf)
    links = replace(DEFAULT_LINKS, network=Link(0.0, rate_bytes_per_s), switches=(given,))
    return size_bytes / split_rate(Case(size_bytes, Topology.apart(hosts), links, switch=1))
