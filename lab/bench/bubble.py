"""A pipeline's idle time beside the formulas, and the gain of a cut by measured cost:

    .venv/bin/python lab/bench/bubble.py

Stages sleep, so that more ranks than cores can run at once: a forward, a gradient of the inputs and a gradient of the
weights take a rank `unit_ms` each for a microbatch, however many stages it holds. Idle time is a step's time
minus the sleep: it includes the cost of the schedule and of the messages. Then a GPT with a heavy
head is cut into two stages, of as many layers each and by measured cost: the step, and the processor time of the rank
that takes more of it, which is the step's time where each rank has a core to itself. Schedules and cuts take turns.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import driver
import numpy as np
from driver import Place, Rank, cell, take_turns

from netfold_train.recipe import Recipe

# By schedule: idle time over all time, of N ranks, K microbatches, v stages per rank.
FORMULAS = {
    "gpipe": "(N-1) / (N-1 + K)",
    "1f1b": "(N-1) / (N-1 + K)",
    "interleaved": "(N-1) / (N-1 + Kv)",
    "zero-bubble": "(N-1) / (N-1 + 3Kv)",
    "zero-bubble-v": "(N-1) / (N-1 + 3Kv)",
}
INTERLEAVE = 2
RANKS = (2, 4)
MICROBATCHES_PER_RANK = (1, 2, 4)
WIDTH = 8
GPT = {"name": "gpt", "vocabulary": 4096, "width": 128, "layers": 4, "context": 128}
CUTS = ("by layers", "by cost")


def formula(schedule: str, ranks: int, microbatches: int) -> float:
    """Idle time over all time, where a forward, a gradient of inputs and one of weights take equally long."""
    passes = {"gpipe": 1, "1f1b": 1, "interleaved": INTERLEAVE}.get(schedule, 3 * INTERLEAVE)
    return (ranks - 1) / (ranks - 1 + passes * microbatches)


def idle_of_order(order: dict[int, list[Any]], stages: int) -> float:
    """Idle time over all time of torch's own order of actions, by their dependencies; messages take no time."""
    each = len(order) / stages
    # The first stage needs no gradients of its inputs: torch runs its whole backward pass at BACKWARD_WEIGHT.
    takes = {
        "FORWARD": lambda stage: 1,
        "FULL_BACKWARD": lambda stage: 2,
        "BACKWARD_INPUT": lambda stage: int(stage > 0),
        "BACKWARD_WEIGHT": lambda stage: 1 + int(stage == 0),
    }
    left = {
        rank: [
            (action.computation_type.name, action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None and action.computation_type.name in takes
        ]
        for rank, actions in order.items()
    }
    ended: dict[tuple[str, int, int], float] = {}
    free, busy = dict.fromkeys(order, 0.0), 0.0
    while any(left.values()):
        # min() of an empty list raises where an order has a deadlock.
        able = [rank for rank, actions in left.items() if actions and ended.keys() >= set(_needs(actions[0], stages))]
        rank = min(able)
        action = left[rank].pop(0)
        kind, stage, part = action
        took = each * takes[kind](stage)
        busy += took
        free[rank] = max([free[rank], *(ended[need] for need in _needs(action, stages))]) + took
        ended["back" if kind in ("FULL_BACKWARD", "BACKWARD_INPUT") else kind, stage, part] = free[rank]
    return 1.0 - busy / (len(order) * max(free.values()))


def _needs(action: tuple[str, int, int], stages: int) -> list[tuple[str, int, int]]:
    kind, stage, part = action
    if kind == "FORWARD":
        return [("FORWARD", stage - 1, part)] if stage else []
    if kind == "BACKWARD_WEIGHT":
        return [("back", stage, part)]
    return [("FORWARD", stage, part), *([("back", stage + 1, part)] if stage + 1 < stages else [])]


def sleepers(ranks: int, schedule: str, unit_s: float, slept: list[float]) -> Any:
    """A model of as many layers as stages, which add the seconds that they sleep to `slept`."""
    import torch
    from torch import nn
    from torch.nn import functional

    from netfold_train import Chain, Model

    def sleep(seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        slept[0] += time.perf_counter() - began

    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, forward_s: float, backward_s: float) -> Any:
            ctx.backward_s = backward_s
            if forward_s:
                sleep(forward_s)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            sleep(ctx.backward_s)
            return gradient, None, None

    class Layer(nn.Module):
        def __init__(self, seconds: float, first: bool) -> None:
            super().__init__()
            self.seconds, self.weight = seconds, nn.Parameter(torch.ones(WIDTH))
            # With a parameter before it, the first layer too has to compute its input's gradient, as in a stage of
            # several layers.
            self.before = nn.Parameter(torch.ones(WIDTH)) if first else None

        def forward(self, x: Any) -> Any:
            x = x if self.before is None else x * self.before
            return Sleeps.apply(x, self.seconds, self.seconds) + Sleeps.apply(self.weight, 0.0, self.seconds)

    each = INTERLEAVE if schedule in ("interleaved", "zero-bubble", "zero-bubble-v") else 1
    layers = [(f"layer{number}", Layer(unit_s / each, number == 0)) for number in range(ranks * each)]
    return Model(Chain(layers), functools.partial(functional.mse_loss, reduction="none"))


def sleep_in_stages(me: Rank, microbatches: int, unit_s: float) -> None:
    """A rank. Orders: "idle" and a schedule: idle time of torch's order (None: not known); or "step" and a schedule:
    when a step began and ended, and what was slept."""
    import torch

    from netfold_train import Batch
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    class Ones:
        def __len__(self) -> int:
            return 64

        def batch(self, indices: Any, seeds: Any) -> Any:
            return Batch((torch.ones(len(indices), WIDTH),), torch.zeros(len(indices), WIDTH))

    with me.torch_group():
        pipelines: dict[str, tuple[Any, list[float]]] = {}
        for schedule in FORMULAS:
            slept = [0.0]
            parallel = {"pipeline": me.size, "microbatches": microbatches}
            recipe = Recipe.model_validate(
                {"model": {"name": "own"}, "data": {"name": "own"}, "training": {"steps": 1, "batch": microbatches}}
                | {"parallel": {**parallel, "schedule": schedule, "interleave": INTERLEAVE}}
            )
            model = sleepers(me.size, schedule, unit_s, slept)
            pipelines[schedule] = parallelise(model, recipe, Mesh(recipe.parallel), Ones()), slept
        batch = Ones().batch(range(microbatches), ())

        def run(what: str, schedule: str) -> Any:
            replica, slept = pipelines[schedule]
            if what == "idle":
                # 1f1b runs by code, and the list that it shows beside it is not what it does (torch 2.13).
                stages = me.size * len(replica.modules)
                return None if schedule == "1f1b" else idle_of_order(replica._schedule.pipeline_order, stages)
            slept[0] = 0.0
            me.line.cross()
            began = time.perf_counter()
            replica.gradients(batch)
            return began, time.perf_counter(), slept[0]

        me.serve(run)


def cut_gpt(me: Rank) -> None:
    """A rank of a GPT in two stages. Orders: "cut" and a cut: its stages and what each costs; or "step" and a cut:
    seconds of a step, by the clock and of the processor."""
    import torch

    from netfold_train.data import make_data
    from netfold_train.models import make_model
    from netfold_train.models.model import Chain
    from netfold_train.parallel.mesh import Mesh
    from netfold_train.parallel.pipeline import Pipelined
    from netfold_train.parallel.pipeline_plan import Plan
    from netfold_train.parallel.stages import Cut

    recipe = Recipe.model_validate(
        {"model": GPT, "data": {"name": "source", "context": 128}, "training": {"steps": 1, "batch": 16}}
        | {"parallel": {"pipeline": 2, "microbatches": 8}}
    )
    with me.torch_group():
        data, mesh = make_data(recipe.data), Mesh(recipe.parallel)
        batch = data.train.batch(range(16), range(16))
        replicas, cuts = {}, {}
        for name in CUTS:
            torch.manual_seed(0)
            model = make_model(recipe.model)
            assert isinstance(model.module, Chain)
            names = list(model.module.layers)
            plan = Plan(model, recipe, mesh, data.train)
            if name == "by layers":
                bounds, costs = (0, len(names) // 2, len(names)), plan.measured.costs_ns
                plan.cut = Cut(bounds, tuple(sum(costs[first:end]) for first, end in itertools.pairwise(bounds)))
            replicas[name] = Pipelined(model, recipe, mesh, plan)
            total = sum(plan.cut.costs)
            ends = [(names[layers[0]], names[layers[-1]]) for layers in map(plan.cut.layers, range(2))]
            cuts[name] = " + ".join(
                f"{first} to {last} ({cost / total:.0%})"
                for (first, last), cost in zip(ends, plan.cut.costs, strict=True)
            )

        def run(what: str, name: str) -> Any:
            if what == "cut":
                return cuts[name]
            me.line.cross()
            began, busy = time.perf_counter(), time.process_time()
            replicas[name].gradients(batch)
            return time.perf_counter() - began, time.process_time() - busy

        me.serve(run)


def idle_ratio(ask: Callable[..., list[Any]], schedule: str) -> float:
    """The part of one step's time that the ranks are idle."""
    began, ended, slept = zip(*ask("step", schedule), strict=True)
    return float(1.0 - sum(slept) / (len(slept) * (max(ended) - min(began))))


def bubble(rounds: int = 7, unit_ms: int = 20) -> str:
    """The bubble of a pipeline"""
    rows = []
    for size in RANKS:
        for microbatches in (times * size for times in MICROBATCHES_PER_RANK):
            with driver.ranks_at(Place(size), sleep_in_stages, microbatches, unit_ms / 1e3) as ranks:
                orders = {schedule: ranks.ask("idle", schedule)[0] for schedule in FORMULAS}
                idle = take_turns(list(FORMULAS), rounds, lambda schedule: idle_ratio(ranks.ask, schedule))
            for schedule, ratios in idle.items():
                stages = 1 if schedule in ("gpipe", "1f1b") else INTERLEAVE
                order = "" if orders[schedule] is None else f"{orders[schedule]:.1%}"
                predicted = f"{formula(schedule, size, microbatches):.1%}"
                rows.append([schedule, size, microbatches, stages, predicted, order, cell(ratios, ".1%")])
    with driver.ranks_at(Place(2), cut_gpt) as ranks:
        cuts = {name: ranks.ask("cut", name)[0] for name in CUTS}
        found = take_turns(CUTS, 3 * rounds, lambda name: np.max(ranks.ask("step", name), axis=0))
    seconds = np.array([found[name] for name in CUTS])  # [cut, round, clock]
    of_cuts = [
        [name, cuts[name], *(cell(seconds[number, :, clock], ".0f", 1e3) for clock in range(2))]
        for number, name in enumerate(CUTS)
    ]
    rows.sort(key=lambda row: list(FORMULAS).index(str(row[0])))
    step, busy = (cell(seconds[0, :, clock] / seconds[1, :, clock]) for clock in range(2))
    return f"""Idle time of a pipeline's ranks, over all of their time in a step (N ranks, K microbatches, v stages a
rank). {unit_ms} ms a pass of a microbatch, slept; medians (5% .. 95%).

{driver.table("schedule | N | K | v | formula | torch's order | measured", rows)}

Formulas: {"; ".join(f"{name}: {text}" for name, text in FORMULAS.items())}. They hold where a forward, a gradient of
the inputs and one of the weights take equally long, as here; the formula of zero-bubble-v from K = 2N - 1 on. torch's
order: what its list of actions would leave idle if messages and Python took no time (1f1b follows no list).

A GPT of 4 blocks of 128 features over 4096 tokens, in 2 stages (1f1b, 8 microbatches):

{driver.table("cut | stages, and what each costs | step ms | busier rank's processor ms", of_cuts)}

By layers over by cost, step by step in turn, {3 * rounds} pairs: the step {step}, the busier rank's processor time
{busy}. Where other programs load the machine, the two ranks share what is left of it, and a step does not show how long
one rank waits for the other. Four sleeping ranks add little load; what is beyond that is other programs' work, which
delays every wake-up. torch {version("torch")}."""


if __name__ == "__main__":
    driver.run(bubble)
