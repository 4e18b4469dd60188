"""The cost of DiLoCo in loss, and its saving in bytes:

    .venv/bin/python lab/bench/outer.py

A small GPT learns Python's source on four data-parallel ranks, over a switch, in rounds of different lengths. Every
configuration has its turn with every seed (weights, and the order of samples), in the same processes. Bytes are what a
rank sends for weights or gradients (`wire_bytes` of the event records).
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import driver
from driver import Place, Rank

from netfold_lab.bench.spread import spread

RANKS, STEPS = 4, 192
RECIPE: dict[str, Any] = {
    "model": {"name": "gpt", "width": 64, "heads": 4, "layers": 2, "context": 64},
    "data": {"name": "source", "context": 64, "held_out": 0.01},
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "schedule": {"warmup": 16},
    "parallel": {"data": RANKS},
}
# Rounds of so many steps; the outer optimizer's lr and momentum.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "DiLoCo, 8": {"diloco": {"every": 8}},
    "DiLoCo, 32": {"diloco": {"every": 32}},
    "models averaged, 8": {"diloco": {"every": 8, "lr": 1.0, "momentum": 0.0}},
    "models averaged, 32": {"diloco": {"every": 32, "lr": 1.0, "momentum": 0.0}},
    "models averaged at the end alone": {"diloco": {"every": STEPS, "lr": 1.0, "momentum": 0.0}},
}


def train(me: Rank) -> None:
    """A rank. An order is a run: bits per byte, bytes sent, calls, seconds per step, the baseline, the parameters."""
    import netfold.torch
    from netfold._native import engine
    from netfold_train import Recipe, Trainer

    def run(configuration: str, seed: int) -> tuple[float, int, int, float, float, int]:
        training = {"steps": STEPS, "batch": 32, "seed": seed}
        trainer = Trainer(Recipe.model_validate({**RECIPE, "training": training, **CONFIGURATIONS[configuration]}))
        began_ns = time.perf_counter_ns()
        outcome = trainer.fit()
        step_s = (time.perf_counter_ns() - began_ns) / 1e9 / STEPS
        records = netfold.torch.events(trainer.mesh.data.group)
        assert records["queued_ns"][0] < began_ns, "records of this run were overwritten"
        records = records[(records["queued_ns"] >= began_ns) & (records["operation"] == engine.KINDS["all_reduce"])]
        records = records[records["dtype"] == engine.DTYPES["f32"]]
        parameters = sum(weight.numel() for _, weight in trainer.replica.named_parameters())
        sent = int(records["wire_bytes"].sum())
        return outcome.metric, sent, len(records), step_s, trainer.data.metric.baseline, parameters

    with me.torch_group():
        me.serve(run)


def outer(seeds: int = 3) -> str:
    """Steps of DiLoCo"""
    environment = {"NETFOLD_ALGORITHM": "in_network"}
    # A loaded machine takes ten times as long as a quiet one.
    with driver.ranks_at(Place(RANKS, switch=True), train, environment=environment, deadline_s=1500) as ranks:
        found: dict[str, list[Any]] = {name: [] for name in CONFIGURATIONS}
        for seed in range(seeds):
            for name in CONFIGURATIONS:
                found[name].append(ranks.ask(name, seed)[0])
    plain = spread([run[1] for run in found["data parallel"]]).median
    rows = []
    for name, runs in found.items():
        bits, sent = [run[0] for run in runs], spread([run[1] for run in runs]).median
        around = f"{min(bits):.3f} .. {max(bits):.3f}"
        rows.append(
            [name, f"{spread(bits).median:.3f}", around, f"{sent / STEPS:.0f}", f"{sent / plain:.4f}", runs[0][2]]
        )
    every = [run for runs in found.values() for run in runs]
    baseline, parameters = every[0][4:]
    unreached = ", which so few steps do not reach" if min(run[0] for run in every) > baseline else ""
    of_step = spread([1e3 * run[3] for run in every])
    head = "ranks | bits per byte, held out: median | lowest .. highest | bytes per rank and step | of plain | calls"
    return f"""A GPT of {parameters} parameters learns Python's source for {STEPS} steps on {RANKS} data-parallel ranks,
over a switch: in plain data parallel, or by DiLoCo.

{driver.table(head, rows)}

A table of byte pairs alone gives {baseline:.3f} bits{unreached}. {seeds} seeds, interleaved; AdamW with a cosine and 16
steps of warm-up, the same rate for all; DiLoCo: outer rate 0.7, momentum 0.9, which is meant for many more rounds. A
step took {of_step.p5:.0f} to {of_step.p95:.0f} ms: four ranks shared these cores, and no network was slow; losses and
bytes do not depend on the time. torch {version("torch")}."""


if __name__ == "__main__":
    driver.run(outer)
