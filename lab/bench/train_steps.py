"""The time of a step of each recipe over netfold and over gloo: here, and between the hosts of an emulated rack.

    .venv/bin/python lab/bench/train_steps.py train-steps [RECIPE ...]        # all: fifty minutes; the rack needs root
    .venv/bin/python lab/bench/train_steps.py train-steps-by-link [NAME ...]      # by the switch's link: 25 minutes

On this machine two ranks really compute, on a core each. In the rack a layer's computing is a timer of what it took on
this machine (`timed_model`), because its hosts share the cores; what they send is real. Sides take turns in the same
processes, a few steps each; a step's time is the slowest rank's. In the rack netfold has the rack's switch. Every rank
has the same share of samples whatever the number of hosts. The seconds go to lab/bench/results/train_steps.json or
train_steps_by_link.json, and the page shows all that is there.

By link, of bert, edsr, resnet50 and vgg16, the rack's switch is a host behind a link of c times a worker's, c of 1, 2
and 4, or in the place of the hosts' switch, with a port per worker (c = P). VGG-16 is no recipe: its layers and their
times are from the planner's catalogue, and its tensors are a 25th of their size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import driver
import typer
from driver import Place, Rank, cell, take_turns

from netfold_lab.bench.program import backward_flops
from netfold_lab.bench.spread import paired_ratios, spread
from netfold_lab.rack.link import parse_link
from netfold_plan.model.catalogue import find_model
from netfold_train.runs.machine import spoken

RECIPES = Path(__file__).parents[2] / "train/src/netfold_train/recipes"
# By its name a side's backend, and its environment.
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "netfold": ("netfold", {}),
    "netfold, ring": ("netfold", {"NETFOLD_ALGORITHM": "ring"}),
    "gloo": ("gloo", {}),
}
BACKENDS = ("netfold", "gloo")
# Models of the planner's catalogue, and the factor by which their tensors are smaller; the rest is a recipe's.
CATALOGUE, DATA_OF = {"vgg16": 25}, "edsr"
LINKED = ("bert", "edsr", "resnet50", "vgg16")
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")]


@dataclass(frozen=True)
class Turns:
    """The number of steps of each side that count."""

    sides: tuple[str, ...]
    steps: int
    """Steps of a turn that count, after `settling` steps that do not."""
    settling: int
    rounds: int
    at_most: int = 0
    budget_s: float = 0.0
    """After at least `rounds` rounds, no further round begins when so many seconds have passed."""


RECIPE_TURNS = Turns(BACKENDS, steps=4, settling=2, rounds=4)
# A new group's first eight large operations do not overlap, because each decides how the next one is split. That is
# about two steps of most models.
LINK_TURNS = Turns(tuple(SIDES), steps=8, settling=4, rounds=2, at_most=8, budget_s=10.0)


def place(hosts: int, rate: str, c: int | None = None) -> tuple[str, Place]:
    """A name, and a place. rate: "": this machine. c: the switch's link over a worker's; None: a port for each."""
    if not rate:
        return f"this machine, {hosts} ranks", Place(hosts)
    name = f"{hosts} hosts, {rate}" + ("" if c is None else f", c = {c}")
    switch_rate = None if c is None else f"{c * parse_link(rate).rate_bits / 1e6:g}mbit"
    return name, Place(hosts, rate, switch=True, switch_rate=switch_rate)


PLACES = dict(
    [place(2, ""), place(4, "1gbit"), place(4, "200mbit"), place(1, "1gbit"), place(2, "1gbit"), place(8, "1gbit")]
)
LINKS = [(8, "1gbit", c) for c in (1, 2, 4, None)] + [(4, "200mbit", c) for c in (1, 2, None)]


def train(me: Rank, times: dict[str, list[dict[str, Any]]]) -> None:
    """A rank. Each order trains a model by one side and returns the seconds of each step.

    times: of the layers, which then sleep; empty: the layers compute.
    """
    import torch
    from timed_model import LayerTime, recipe_of, timed
    from timed_model import train as train_in_group

    from netfold_train.data import make_data
    from netfold_train.models import make_model

    def run(name: str, side: str, steps: int, settling: int) -> list[float]:
        # A model with smaller tensors gets smaller buckets in proportion, so that their number stays.
        recipe = recipe_of(path_of(name), me.size, settling + steps, 25 / CATALOGUE.get(name, 1))
        data = make_data(recipe.data)
        if name in CATALOGUE:  # its output means nothing, and is no picture
            metric = replace(data.metric, score=lambda output, target: torch.zeros(len(target)))
            data = replace(data, metric=metric, pictures=None)

        def make() -> Any:
            model = catalogue_model(name) if name in CATALOGUE else make_model(recipe.model)
            return timed(model, [LayerTime(**each) for each in times[name]]) if times else model

        backend, settings = SIDES[side]
        os.environ.update(settings)
        found = train_in_group(me, backend, recipe, make, data)
        for setting in settings:
            del os.environ[setting]
        return found.seconds[settling:]

    me.serve(run)


def path_of(name: str) -> Path:
    return RECIPES / f"{DATA_OF if name in CATALOGUE else name}.toml"


def catalogue_model(name: str) -> Any:
    """The catalogue's parameters, smaller by the factor in CATALOGUE, in layers that only `timed` can run."""
    import torch
    from torch import nn

    from netfold_train import Chain, Model

    def layer(counts: list[int]) -> nn.Module:
        return nn.ParameterList(nn.Parameter(torch.zeros(max(1, count // CATALOGUE[name]))) for count in counts)

    layers = [(f"layer{at}", layer(each.counts)) for at, each in enumerate(find_model(name).layers)]
    return Model(Chain(layers), lambda output, target: output)


def time_layers(me: Rank) -> None:
    """A process of its own, so that the benchmark stays small. An order: a model's layers with one rank's share."""
    from timed_model import layer_times, recipe_of

    def run(name: str) -> list[dict[str, Any]]:
        """LayerTime's fields, of each layer."""
        recipe = recipe_of(path_of(name), 2, 1)
        if name not in CATALOGUE:
            return [asdict(each) for each in layer_times(recipe)]
        # The published time of a step, by the layers' arithmetic. The output is one number for each sample.
        model, outputs = find_model(name), ((recipe.training.batch, 1),)
        s_a_flop = model.compute_s / sum(layer.flops + backward_flops(layer) for layer in model.layers)
        passes = ((s_a_flop * layer.flops, s_a_flop * backward_flops(layer)) for layer in model.layers)
        return [{"forward_s": forward, "backward_s": backward, "outputs": outputs} for forward, backward in passes]

    me.serve(run)


def measure(names: Sequence[str], places: dict[str, Place], turns: Turns, file: Path) -> dict[str, Any]:
    """Every place, with all names in the same processes; returns all that `file` then holds."""
    load = os.getloadavg()[0]
    with driver.ranks_at(Place(1), time_layers) as ranks:
        times = {name: ranks.ask(name)[0] for name in names}
    seconds: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in names}
    for where, at in places.items():
        with driver.ranks_at(at, train, times if at.rate else {}) as ranks:
            for name in names:
                found = take_turns(
                    turns.sides,
                    turns.rounds,
                    lambda side: driver.slowest(ranks.ask(name, side, turns.steps, turns.settling)),  # noqa: B023
                    warmups=0,
                    at_most=turns.at_most,
                    budget_s=turns.budget_s,
                )
                seconds[name][where] = {side: [*chain(*steps)] for side, steps in found.items()}
    machine = spoken(load)
    return driver.keep(
        file,
        {
            name: {
                "compute_s": sum(took["forward_s"] + took["backward_s"] for took in times[name]),
                "seconds": seconds[name],
                "turns": {where: [turns.steps, turns.settling] for where in places},
                "machine": machine,
            }
            for name in names
        },
        indent=None,
    )


def machines(kept: dict[str, Any]) -> str:
    # Files of older runs have the load alone, before and after.
    return "\n".join(
        f"- {name}: {found.get('machine') or 'load {:.1f} to {:.1f}'.format(*found['load'])}"
        for name, found in kept.items()
    )


def train_steps(names: Names = None) -> str:
    """A step of each recipe, over netfold and over gloo"""
    for name in names or sorted(path.stem for path in RECIPES.glob("*.toml")):
        kept = measure([name], PLACES, RECIPE_TURNS, driver.RESULTS / "train_steps.json")
    rows, efficiency = [], []
    for name, found in kept.items():
        for where in PLACES:
            seconds = found["seconds"][where]
            ratio = cell(paired_ratios(seconds["gloo"], seconds["netfold"]))
            rows.append([name, where, *(cell(seconds[side], ".1f", 1e3) for side in BACKENDS), ratio])
        for backend in BACKENDS:
            of_hosts = (found["seconds"][place(hosts, "1gbit")[0]] for hosts in (1, 2, 4, 8))
            steps = [spread(seconds[backend]).median for seconds in of_hosts]
            efficiency.append(
                [name, f"{1e3 * found['compute_s']:.1f}", backend, *(f"{steps[0] / step:.2f}" for step in steps)]
            )
    turns = RECIPE_TURNS
    return f"""Milliseconds a step, the slowest rank's: median (5% .. 95%) of {turns.rounds * turns.steps} steps in
{turns.rounds} turns of each backend in the same processes; ratio: gloo's over netfold's, step by step. Every rank has
half of the recipe's batch, whatever the number of ranks. On this machine ranks really compute; in the rack a layer's
computing is a timer of what it took here, and netfold has the rack's switch, with a port per host. Buckets of 25 MB on
both sides.

{driver.table("recipe | where | netfold ms | gloo ms | ratio", rows)}

## Scaling efficiency at 1 Gbit/s

The step of one host over that of 1, 2, 4 and 8, each with the same share of samples and the same timers: 1 is perfect.

{driver.table("recipe | computing, ms | | 1 | 2 | 4 | 8", efficiency)}

{machines(kept)}"""


def train_steps_by_link(names: Names = None) -> str:
    """A step, by the link of the switch"""
    places = dict(place(*each) for each in LINKS)
    kept = measure(names or LINKED, places, LINK_TURNS, driver.RESULTS / "train_steps_by_link.json")
    rows = []
    for hosts, rate, c in LINKS:
        where = place(hosts, rate, c)[0]
        for name, found in kept.items():
            seconds = found["seconds"][where]
            steps, settling = found["turns"][where]
            row = [name, f"{hosts} hosts, {rate}", "P" if c is None else c, f"{steps} after {settling}"]
            row += [f"{1e3 * found['compute_s']:.0f}", *(cell(seconds[side], ".0f", 1e3) for side in SIDES)]
            others = [side for side in SIDES if side != "netfold"]
            rows.append([*row, *(cell(paired_ratios(seconds[side], seconds["netfold"])) for side in others)])
    smaller = ", ".join(f"{name}'s tensors are 1/{by} of their size" for name, by in CATALOGUE.items())
    head = f" | where | c | steps | computing, ms | {' | '.join(f'{side}, ms' for side in SIDES)}"
    turns = LINK_TURNS
    return f"""c: the rate of the switch's link over a worker's; P: a port per worker. Milliseconds a step, the slowest
rank's: median (5% .. 95%); ratios step by step. Each side has {turns.rounds} to {turns.at_most} turns in the same
processes, as many as {turns.budget_s:.0f} s suffice for, each with a new group; *steps*: how many of a turn count,
after how many that do not. In the rack a layer's computing is a timer of what it took here; of a model of the planner's
catalogue, of its published speed: {smaller}. Buckets of 25 MB; of smaller tensors smaller ones, so that
their number is the same.

{driver.table(f"{head} | ring / netfold | gloo / netfold", rows)}

{machines(kept)}"""


if __name__ == "__main__":
    driver.run(train_steps, train_steps_by_link)
