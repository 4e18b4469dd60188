"""What training apart costs in loss, and saves in bytes:

    .venv/bin/python bench/outer.py [SEEDS]      # 3

A small GPT learns Python's source on four data-parallel ranks, over a switch, in rounds of different lengths; every way
has its turn with every seed (weights, and the order of samples), in the same processes. Bytes are what a rank sends for
weights or gradients (`wire_bytes` of their records). Writes bench/results/outer.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from own_ranks import run_own_ranks

from netfold.bench.machine import spoken
from netfold.bench.spread import spread
from netfold.rack.processes import exit_on_signals

RANKS, STEPS = 4, 192
RECIPE: dict[str, Any] = {
    "model": {"name": "gpt", "width": 64, "heads": 4, "layers": 2, "context": 64},
    "data": {"name": "source", "context": 64, "held_out": 0.01},
    "training": {"steps": STEPS, "batch": 32},
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "schedule": {"warmup": 16},
    "parallel": {"data": RANKS},
}
# Rounds of so many steps; the outer optimizer's lr and momentum.
WAYS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "DiLoCo, 8": {"diloco": {"every": 8}},
    "DiLoCo, 32": {"diloco": {"every": 32}},
    "models averaged, 8": {"diloco": {"every": 8, "lr": 1.0, "momentum": 0.0}},
    "models averaged, 32": {"diloco": {"every": 32, "lr": 1.0, "momentum": 0.0}},
    "models averaged at the end alone": {"diloco": {"every": STEPS, "lr": 1.0, "momentum": 0.0}},
}
RESULT = Path(__file__).parent / "results" / "outer.md"
# A loaded machine takes ten times as long as a quiet one.
DEADLINE_S = 1500


def serve(rank: int, folder: str, seeds: int) -> None:
    """A rank. The first one leaves a line of JSON a run: way, bits per byte, bytes sent, calls, seconds a step."""
    import torch
    import torch.distributed as dist

    import netfold.torch
    from netfold._native import engine
    from netfold.train import Recipe, Trainer

    torch.set_num_threads(1)
    dist.init_process_group("netfold", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    runs = []
    for seed in range(seeds):
        for way, outer in WAYS.items():
            training = {**RECIPE["training"], "seed": seed}
            trainer = Trainer(Recipe.model_validate({**RECIPE, "training": training, **outer}))
            began_ns = time.perf_counter_ns()
            outcome = trainer.fit()
            took_s = (time.perf_counter_ns() - began_ns) / 1e9
            told = netfold.torch.events(trainer.mesh.data.group)
            assert told["queued_ns"][0] < began_ns, "records of this run were overwritten"
            told = told[(told["queued_ns"] >= began_ns) & (told["operation"] == engine.KINDS["all_reduce"])]
            told = told[told["dtype"] == engine.DTYPES["f32"]]
            runs.append((way, outcome.metric, int(told["wire_bytes"].sum()), len(told), took_s / STEPS))
    if rank == 0:
        baseline = trainer.data.metric.baseline
        parameters = sum(w.numel() for _, w in trainer.replica.named_parameters())
        Path(folder, "runs").write_text(json.dumps([baseline, parameters, runs]))
    dist.destroy_process_group()


def measure(seeds: int) -> Any:
    command = [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", "--drain-s", "0"]
    with (
        tempfile.TemporaryDirectory(prefix="netfold-outer-") as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as switch,
    ):
        assert switch.stdout is not None
        env = {"NETFOLD_SWITCH": switch.stdout.readline().split()[-1], "NETFOLD_ALGORITHM": "in_network"}
        try:
            run_own_ranks(__file__, RANKS, folder, seeds, deadline_s=DEADLINE_S, env=env)
        finally:
            switch.kill()
        return json.loads(Path(folder, "runs").read_text())


def render(baseline: float, parameters: int, runs: list[Any], load: tuple[float, float]) -> str:
    lines = [
        f"A GPT of {parameters} parameters learns Python's source for {STEPS} steps on {RANKS} data-parallel ranks, "
        "over a switch: in plain data parallel, or apart in rounds.",
        "",
        "| ranks | bits per byte, held out: median | lowest .. highest | bytes sent a rank a step | of plain | calls |",
        "|---|---|---|---|---|---|",
    ]
    of_way = {way: [run for run in runs if run[0] == way] for way in WAYS}
    plain = spread([run[2] for run in of_way["data parallel"]]).median
    for way, found in of_way.items():
        bits, sent = [run[1] for run in found], spread([run[2] for run in found]).median
        lines.append(
            f"| {way} | {spread(bits).median:.3f} | {min(bits):.3f} .. {max(bits):.3f} | {sent / STEPS:.0f} "
            f"| {sent / plain:.4f} | {found[0][3]} |"
        )
    unreached = ", which so few steps do not reach" if min(run[1] for run in runs) > baseline else ""
    of_step = spread([1e3 * run[4] for run in runs])
    lines += [
        "",
        f"Which byte follows which, alone: {baseline:.3f} bits{unreached}. {len(of_way['data parallel'])} seeds, "
        "interleaved; "
        "AdamW with a cosine and 16 steps of warm-up, the same rate for all; DiLoCo: outer rate 0.7, momentum 0.9, "
        f"which is meant for many more rounds. A step took {of_step.p5:.0f} to {of_step.p95:.0f} ms: four ranks shared "
        "these cores, and no network was slow; losses and bytes do not depend on it. "
        f"torch {version('torch')}; {spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(int(arguments[1]), arguments[2], int(arguments[3]))
    load = os.getloadavg()[0]
    with exit_on_signals():
        baseline, parameters, runs = measure(int(arguments[0]) if arguments else 3)
    text = render(baseline, parameters, runs, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
