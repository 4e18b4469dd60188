"""How much of a pipeline's time its ranks are idle, beside what the schedules' formulas say; what a measured cut gains:

    .venv/bin/python bench/bubble.py [ROUNDS] [UNIT_MS]      # 7 20

Stages that sleep: a forward, a gradient of the inputs and a gradient of the weights take a rank UNIT_MS each for a
microbatch, however many stages it holds, so that more ranks than cores can run at once. Idle is what remains of the
ranks' time in a step beside the sleep, the schedule's and the messages' own cost included. Then a GPT with a heavy
head, cut into two stages of as many layers each and by measured cost: the step, and the processor time of the rank that
takes more of it, which is what the step comes to where each rank has a core to itself. Schedules and cuts take turns,
round by round. Writes bench/results/bubble.md.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from own_ranks import run_own_ranks

from netfold.bench.machine import spoken
from netfold.bench.start_line import StartLine
from netfold.train.recipe import Recipe

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")
INTERLEAVE = 2
RANKS = (2, 4)
TIMES_RANKS = (1, 2, 4)  # microbatches, as many times the ranks
WIDTH = 8
DEADLINE_S = 900
RESULT = Path(__file__).parent / "results" / "bubble.md"
GPT = {"name": "gpt", "vocabulary": 4096, "width": 128, "layers": 4, "context": 128}
FORMULAS = {
    "gpipe": "(N-1) / (N-1 + K)",
    "1f1b": "(N-1) / (N-1 + K)",
    "interleaved": "(N-1) / (N-1 + Kv)",
    "zero-bubble": "(N-1) / (N-1 + 3Kv)",
    "zero-bubble-v": "(N-1) / (N-1 + 3Kv)",
}


def formula(schedule: str, ranks: int, microbatches: int) -> float:
    """Idle time over all, where a forward, a gradient of inputs and one of weights take equally long."""
    passes = {"gpipe": 1, "1f1b": 1, "interleaved": INTERLEAVE}.get(schedule, 3 * INTERLEAVE)
    return (ranks - 1) / (ranks - 1 + passes * microbatches)


def idle_of_the_order(order: dict[int, list[Any]], stages: int) -> float:
    """Idle time over all of torch's own order of actions, by what must wait for what; messages take no time."""
    each = len(order) / stages
    # torch leaves all of the first stage's backward to where the gradients of its weights are due.
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
        # An order in which nobody can go on would end here, by the empty minimum.
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
    """A model of as many layers as stages. What they sleep is added to `slept`."""
    import torch
    from torch import nn
    from torch.nn import functional

    from netfold.train import Chain, Model

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
            # So that the gradient of what it takes is asked for, as in a stage of several layers.
            self.before = nn.Parameter(torch.ones(WIDTH)) if first else None

        def forward(self, x: Any) -> Any:
            x = x if self.before is None else x * self.before
            return Sleeps.apply(x, self.seconds, self.seconds) + Sleeps.apply(self.weight, 0.0, self.seconds)

    each = INTERLEAVE if schedule in ("interleaved", "zero-bubble", "zero-bubble-v") else 1
    layers = [(f"layer{number}", Layer(unit_s / each, number == 0)) for number in range(ranks * each)]
    return Model(Chain(layers), functional.mse_loss)


def serve(rank: int, size: int, folder: str, rounds: int, unit_s: float) -> None:
    """A rank. Rank 0 writes what all have found."""
    import torch
    import torch.distributed as dist

    from netfold.train import Batch
    from netfold.train.mesh import Mesh
    from netfold.train.parallel import parallelise

    class Ones:
        def __len__(self) -> int:
            return 64

        def batch(self, indices: Any, seeds: Any) -> Any:
            return Batch((torch.ones(len(indices), WIDTH),), torch.zeros(len(indices), WIDTH))

    torch.set_num_threads(1)
    dist.init_process_group("netfold", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    line = StartLine(Path(folder, "line"), rank, size)
    found: dict[str, Any] = {"measured": {}, "order": {}}
    for microbatches in (times * size for times in TIMES_RANKS):
        pipelines = {}
        for schedule in SCHEDULES:
            slept = [0.0]
            parallel = {"pipeline": size, "microbatches": microbatches, "schedule": schedule, "interleave": INTERLEAVE}
            recipe = Recipe.model_validate(
                {"model": {"name": "own"}, "data": {"name": "own"}, "training": {"steps": 1, "batch": microbatches}}
                | {"parallel": parallel}
            )
            replica: Any = parallelise(sleepers(size, schedule, unit_s, slept), recipe, Mesh(recipe.parallel), Ones())
            stages = size * len(replica.modules)
            # 1f1b runs by code, and the list that it shows beside it is not what it does (torch 2.13).
            if schedule != "1f1b":
                found["order"][schedule, microbatches] = idle_of_the_order(replica._schedule.pipeline_order, stages)
            pipelines[schedule] = replica, slept
        batch = Ones().batch(range(microbatches), ())
        spans = np.zeros((rounds + 1, len(SCHEDULES), 3))
        for turn in range(rounds + 1):  # the first is not counted
            for place, (replica, slept) in enumerate(pipelines.values()):
                slept[0] = 0.0
                line.cross()
                began = time.perf_counter()
                replica.gradients(batch)
                spans[turn, place] = began, time.perf_counter(), slept[0]
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, spans[1:])
        began, ended, busy = np.moveaxis(np.stack(everybody), -1, 0)
        idle = 1.0 - busy.sum(0) / (size * (ended.max(0) - began.min(0)))
        for place, schedule in enumerate(SCHEDULES):
            found["measured"][schedule, microbatches] = idle[:, place]
    if size == 2:
        found["gpt"] = gpt(line, 3 * rounds)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    line.cross()
    dist.destroy_process_group()


def gpt(line: StartLine, rounds: int) -> dict[str, Any]:
    """Steps of both cuts, in turn: the slower rank's seconds, by the clock and of a processor; and the cuts."""
    import torch
    import torch.distributed as dist

    from netfold.train.datasets import make_data
    from netfold.train.mesh import Mesh
    from netfold.train.model import Chain
    from netfold.train.models import make_model
    from netfold.train.parallel.pipeline import Pipelined
    from netfold.train.parallel.pipeline_plan import Plan
    from netfold.train.parallel.shards import Shards
    from netfold.train.parallel.stages import Cut

    recipe = Recipe.model_validate(
        {"model": GPT, "data": {"name": "source", "context": 128}, "training": {"steps": 1, "batch": 16}}
        | {"parallel": {"pipeline": 2, "microbatches": 8}}
    )
    data, mesh = make_data(recipe.data), Mesh(recipe.parallel)
    replicas, cuts = [], {}
    for name in ("by layers", "by cost"):
        torch.manual_seed(0)
        model = make_model(recipe.model)
        assert isinstance(model.module, Chain)
        names = list(model.module.layers)
        plan = Plan(model, recipe, mesh, data.train)
        if name == "by layers":
            bounds, costs = (0, len(names) // 2, len(names)), plan.measured.costs_ns
            plan.cut = Cut(bounds, tuple(sum(costs[first:end]) for first, end in itertools.pairwise(bounds)))
        replicas.append(Pipelined(model, recipe, mesh, Shards(), plan))
        total = sum(plan.cut.costs)
        ends = [(names[layers[0]], names[layers[-1]]) for layers in map(plan.cut.layers, range(2))]
        cuts[name] = " + ".join(
            f"{first} to {last} ({cost / total:.0%})" for (first, last), cost in zip(ends, plan.cut.costs, strict=True)
        )
    batch = data.train.batch(range(16), range(16))
    seconds = np.zeros((rounds + 1, 2, 2))
    for turn in range(rounds + 1):
        for place, replica in enumerate(replicas):
            line.cross()
            began, busy = time.perf_counter(), time.process_time()
            replica.gradients(batch)
            seconds[turn, place] = time.perf_counter() - began, time.process_time() - busy
    both: list[Any] = [None, None]
    dist.all_gather_object(both, seconds[1:])
    return {"cuts": cuts, "seconds": np.max(both, axis=0)}


def measure(size: int, rounds: int, unit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="netfold-bubble-") as folder:
        StartLine.draw(Path(folder, "line"), size)
        run_own_ranks(__file__, size, size, folder, rounds, unit_s, deadline_s=DEADLINE_S)
        found: dict[str, Any] = pickle.loads(Path(folder, "found").read_bytes())
        return found


def render(worlds: dict[int, dict[str, Any]], rounds: int, unit_s: float, load: tuple[float, float]) -> str:
    lines = [
        "Idle time of a pipeline's ranks, over all of their time in a step (N ranks, K microbatches, v stages a rank).",
        "",
        "| schedule | N | K | v | formula | torch's order | measured: median | 5% .. 95% |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for schedule in SCHEDULES:
        for size, world in worlds.items():
            for microbatches in (times * size for times in TIMES_RANKS):
                idle, order = world["measured"][schedule, microbatches], world["order"].get((schedule, microbatches))
                low, high = np.percentile(idle, (5, 95))
                lines.append(
                    f"| {schedule} | {size} | {microbatches} | {1 if schedule in ('gpipe', '1f1b') else INTERLEAVE} "
                    f"| {formula(schedule, size, microbatches):.1%} | {'' if order is None else f'{order:.1%}'} "
                    f"| {np.median(idle):.1%} | {low:.1%} .. {high:.1%} |"
                )
    gpt = worlds[2]["gpt"]
    formulas = "; ".join(f"{name}: {text}" for name, text in FORMULAS.items())
    lines += [
        "",
        f"Formulas: {formulas}. They hold where a forward, a gradient of the inputs and one of the weights take "
        "equally long, as here; zero-bubble-v's from K = 2N - 1 on. torch's order: what its list of actions would "
        "leave idle if messages and Python took no time (1f1b has none that it goes by).",
        "",
        f"{rounds} interleaved rounds, {unit_s * 1e3:.0f} ms a pass of a microbatch, slept.",
        "",
        "A GPT of 4 blocks of 128 features over 4096 tokens, in 2 stages (1f1b, 8 microbatches):",
        "",
        "| cut | stages, and what each costs | step ms: median | 5% .. 95% | busier rank's processor ms | 5% .. 95% |",
        "|---|---|---|---|---|---|",
    ]
    for place, name in enumerate(gpt["cuts"]):
        cells = [_spread(gpt["seconds"][:, place, kind] * 1e3, "{:.0f}") for kind in range(2)]
        lines.append(f"| {name} | {gpt['cuts'][name]} | {' | '.join(' | '.join(cell) for cell in cells)} |")
    ratios = gpt["seconds"][:, 0] / gpt["seconds"][:, 1]
    (step, step_spread), (busy, busy_spread) = (_spread(ratios[:, kind], "{:.2f}") for kind in range(2))
    lines += [
        "",
        f"By layers over by cost, step by step in turn, {len(gpt['seconds'])} pairs: "
        f"the step {step} ({step_spread}), the busier rank's processor time {busy} ({busy_spread}). "
        "Where others load the machine, the two ranks share what is left of it, and a step does not show what one "
        "waits for the other.",
        "",
        f"torch {version('torch')}; {spoken(load)} Beyond that of 4 sleeping ranks, the load is others' work, which "
        "delays every wake-up.",
    ]
    return "\n".join(lines) + "\n"


def _spread(values: Any, form: str) -> tuple[str, str]:
    """The median, and 5% to 95%."""
    low, high = np.percentile(values, (5, 95))
    return form.format(np.median(values)), f"{form.format(low)} .. {form.format(high)}"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        rank, size, folder, count, unit_s = arguments[1:]
        return serve(int(rank), int(size), folder, int(count), float(unit_s))
    rounds, unit_ms = (int(each) for each in [*arguments, *("7", "20")[len(arguments) :]])
    load = os.getloadavg()[0]
    worlds = {size: measure(size, rounds, unit_ms / 1e3) for size in RANKS}
    text = render(worlds, rounds, unit_ms / 1e3, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
