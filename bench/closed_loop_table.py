"""The closed loop's table: what was predicted, what was measured, and how far apart they are. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from netfold.bench.spread import spread

# The goal: so far off at most.
GOAL = 0.10


class Held(NamedTuple):
    """A prediction held against its measurement. steps: how many; off: of the measured median."""

    recipe: str
    hosts: str
    rate: str
    way: str
    predicted_s: float
    median_s: float
    p5_s: float
    p95_s: float
    steps: int

    @property
    def off(self) -> float:
        return self.predicted_s / self.median_s - 1


def rows(kept: dict[str, Any]) -> list[Held]:
    found = []
    for recipe, record in kept.items():
        for place, ways in record.get("measured", {}).items():
            hosts, _, rate = place.partition(", ")
            for way, seconds in ways.items():
                around = spread(seconds)
                predicted_s = record["predicted"][place][way]
                found.append(
                    Held(recipe, hosts, rate, way, predicted_s, around.median, around.p5, around.p95, around.n)
                )
    return found


def render(kept: dict[str, Any]) -> str:
    held = rows(kept)
    machines = "\n".join(
        f"- {recipe}: predicted {record['predicted_at']}, measured from {record['measured_at']} on; {record['machine']}"
        for recipe, record in kept.items()
        if "machine" in record
    )
    by_way = [
        f"| {way} | {rate} | {_errors(each for each in held if (each.way, each.rate) == (way, rate))} |"
        for way in dict.fromkeys(each.way for each in held)
        for rate in dict.fromkeys(each.rate for each in held)
    ]
    by_hosts = [
        f"| {hosts} | {rate} | {_errors(each for each in held if (each.hosts, each.rate) == (hosts, rate))} |"
        for hosts in dict.fromkeys(each.hosts for each in held)
        for rate in dict.fromkeys(each.rate for each in held)
    ]
    by_recipe = [
        f"| {recipe} | all | {_errors(each for each in held if each.recipe == recipe)} |"
        for recipe in dict.fromkeys(each.recipe for each in held)
    ]
    every = "\n".join(
        f"| {each.recipe} | {each.hosts} | {each.rate} | {each.way} | {1e3 * each.predicted_s:.1f} "
        f"| {1e3 * each.median_s:.1f} ({1e3 * each.p5_s:.1f}..{1e3 * each.p95_s:.1f}) | {each.steps} "
        f"| {100 * each.off:+.1f}% |"
        for each in held
    )
    head = "mean error | worst | within 10% |\n|---|---|---|---|---|"
    return f"""# The planner's closed loop

`python bench/closed_loop.py`. A step of each recipe in an emulated rack, predicted before it was run there, from its
step on one host with nobody to talk to and from all_reduces between two hosts. Errors are of the measured median,
{len(held)} of them; the goal is {100 * GOAL:.0f}%. Layers are timers of what they took here; what surrounds them, and
what is sent, is real. All hosts share this machine's cores, which is part of what is predicted. What the planner takes
into account, and what it leaves out: docs/explanation/plan-closed-loop.md.

| way | network | {head}
{chr(10).join(by_way)}
| all | all | {_errors(held)} |

| hosts | network | {head}
{chr(10).join(by_hosts)}

| recipe | network | {head}
{chr(10).join(by_recipe)}

## Every prediction

Milliseconds a step; measured: median (p5..p95) of so many steps, ways in turn in the same processes.

| recipe | hosts | network | way | predicted | measured | steps | error |
|---|---|---|---|---|---|---|---|
{every}

## When, and on what

{machines}
"""


def _errors(held: Iterable[Held]) -> str:
    each = list(held)
    if not each:
        return "- | - | -"
    off = [abs(one.off) for one in each]
    worst = max(each, key=lambda one: abs(one.off))
    inside = sum(one <= GOAL for one in off)
    return (
        f"{100 * statistics.fmean(off):.1f}% | {100 * worst.off:+.1f}% ({worst.recipe}, {worst.hosts}, {worst.rate}, "
        f"{worst.way}) | {inside} of {len(each)}"
    )
