"""GPUs' memory: what CUDA IPC brings on one GPU, and training over netfold, NCCL and gloo. Needs a GPU:

    python bench/gpus.py [ROUNDS] [STEPS]      # 15 10, by a python whose torch has CUDA

all_reduce of 64 MB between two processes on one GPU, by IPC and staged through pinned host memory: groups of the same
two processes, in turns, round by round, the slowest rank's time from a synchronised start to a synchronised end, every
result checked. Then DDP steps of ResNet-50 and EDSR (the paper's large one), one rank a GPU, or two on one where there
is one: over netfold, NCCL and gloo, in turns of STEPS steps. What a side does not do is a sentence in the table (NCCL
takes one rank a GPU). Writes bench/results/gpus.md; without a GPU it says so, writes nothing, and exits with 2.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from own_ranks import run_own_ranks

import netfold
import netfold.torch
from netfold.bench.machine import spoken
from netfold.bench.start_line import StartLine

RESULT = Path(__file__).parent / "results" / "gpus.md"
DEADLINE_S = 1800
ALL_REDUCE_BYTES = 64 << 20
WAYS = {"IPC": "auto", "staged": "off"}
SIDES = ("netfold", "nccl", "gloo")
# Samples a rank and step, and their shape.
MODELS = {"ResNet-50": (32, (3, 224, 224)), "EDSR": (4, (3, 48, 48))}


def serve(rank: int, size: int, folder: str, part: str, rounds: int, steps: int) -> None:
    """A rank of one part of the bench: what it found into a file."""
    signal.alarm(DEADLINE_S)
    device = torch.device("cuda", rank % torch.cuda.device_count() if part == "train" else 0)
    torch.cuda.set_device(device)
    line = StartLine(Path(folder, "line"), rank, size)
    store = dist.FileStore(f"{folder}/store", size)
    found: Any
    if part == "train":
        dist.init_process_group("netfold", store=store, rank=rank, world_size=size)
        found = train(line, device, rounds, steps)
    else:
        options = netfold.Options(intra_host="auto")
        dist.init_process_group("netfold", store=store, rank=rank, world_size=size, pg_options=options)
        found = reduce_both_ways(line, device, rounds)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    line.cross()
    dist.destroy_process_group()


def reduce_both_ways(line: StartLine, device: torch.device, rounds: int) -> tuple[dict[str, list[float]], str]:
    """Seconds of each call by way, the first ones left out; and what the ranks say of IPC."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {
        name: dist.new_group(backend="netfold", pg_options=netfold.Options(intra_host=inside))
        for name, inside in WAYS.items()
    }
    tensor = torch.empty(ALL_REDUCE_BYTES // 4, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(rounds + 2):
        for name in groups if turn % 2 else reversed(groups):
            tensor.fill_(rank + 1)
            torch.cuda.synchronize(device)
            line.cross()
            began = time.perf_counter()
            dist.all_reduce(tensor, group=groups[name])
            torch.cuda.synchronize(device)
            took = time.perf_counter() - began
            assert bool(tensor.eq(size * (size + 1) / 2).all()), f"{name}: a wrong sum"
            if turn >= 2:
                seconds[name].append(took)
    return seconds, netfold.torch.device_paths(groups["IPC"])


def train(line: StartLine, device: torch.device, rounds: int, steps: int) -> dict[str, dict[str, list[float] | str]]:
    """By model and side: seconds of a step in each round, or why there are none."""
    from torch.nn.parallel import DistributedDataParallel

    from netfold.train.models import edsr, resnet

    rank = dist.get_rank()
    groups: dict[str, Any] = {"netfold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    refused = ""
    if not dist.is_nccl_available():
        refused = "this torch has no NCCL"
    elif torch.cuda.device_count() < dist.get_world_size():
        refused = f"NCCL takes one rank a GPU; here are {dist.get_world_size()} ranks on {torch.cuda.device_count()}"
    else:
        groups["nccl"] = dist.new_group(backend="nccl")
    made = {"ResNet-50": lambda: resnet.resnet50(classes=1000), "EDSR": lambda: edsr.large(scale=2)}
    found: dict[str, dict[str, list[float] | str]] = {}
    for name, (samples, shape) in MODELS.items():
        torch.manual_seed(rank)
        inputs = torch.rand(samples, *shape, device=device)
        sides: dict[str, tuple[Any, Any]] = {}
        for side, group in groups.items():
            torch.manual_seed(1)
            module = made[name]().module.to(device)
            ddp = DistributedDataParallel(module, process_group=group)
            sides[side] = ddp, torch.optim.SGD(ddp.parameters(), lr=1e-4)
        seconds: dict[str, list[float] | str] = {side: [] for side in groups}
        for turn in range(rounds + 1):  # the first is not counted
            for side in sides if turn % 2 else reversed(sides):
                ddp, optimizer = sides[side]
                torch.cuda.synchronize(device)
                line.cross()
                began = time.perf_counter()
                for _ in range(steps):
                    optimizer.zero_grad(set_to_none=False)
                    ddp(inputs).square().mean().backward()
                    optimizer.step()
                torch.cuda.synchronize(device)
                took = (time.perf_counter() - began) / steps
                times = seconds[side]
                if turn and isinstance(times, list):
                    times.append(took)
        if refused:
            seconds["nccl"] = refused
        found[name] = seconds
    return found


def measure(size: int, part: str, rounds: int, steps: int) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="netfold-cuda-") as folder:
        StartLine.draw(Path(folder, "line"), size)
        run_own_ranks(__file__, size, size, folder, part, rounds, steps, deadline_s=DEADLINE_S)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]


def spread(values: Any) -> str:
    low, high = np.percentile(values, (5, 95))
    return f"{np.median(values):.4g} ({low:.4g} .. {high:.4g})"


def render(reduced: list[Any], trained: list[Any], rounds: int, steps: int, load: tuple[float, float]) -> str:
    by_way = {name: np.max([rank[0][name] for rank in reduced], axis=0) for name in WAYS}
    ipc = "IPC disabled" not in reduced[0][1]
    lines = [
        f"all_reduce of {ALL_REDUCE_BYTES >> 20} MB of f32 between two processes on one GPU; the slowest rank's time.",
        f"The ranks said: {reduced[0][1]}.",
        "",
        "| way | ms | staged's time over it |",
        "|---|---|---|",
    ]
    for name, times in by_way.items():
        if name == "IPC" and not ipc:
            lines.append("| IPC | not done: see what the ranks said | |")
        else:
            lines.append(f"| {name} | {spread(times * 1e3)} | {spread(by_way['staged'] / times)} |")
    size = len(trained)
    lines += [
        "",
        f"DDP, {size} ranks on {min(size, torch.cuda.device_count())} GPU(s): milliseconds of a step, the slowest "
        "rank's; netfold's time over it.",
        "",
        "| model | side | ms | netfold's time over it |",
        "|---|---|---|---|",
    ]
    for name in MODELS:
        ours = np.max([rank[name]["netfold"] for rank in trained], axis=0)
        for side in SIDES:
            times = trained[0][name][side]
            if isinstance(times, str):
                lines.append(f"| {name} | {side} | {times} | |")
                continue
            slowest = np.max([rank[name][side] for rank in trained], axis=0)
            lines.append(f"| {name} | {side} | {spread(slowest * 1e3)} | {spread(ours / slowest)} |")
    batches = ", ".join(f"{name} {count} x {'x'.join(map(str, shape))}" for name, (count, shape) in MODELS.items())
    lines += [
        "",
        f"Medians, 5% .. 95% of {rounds} interleaved rounds; a round of training is {steps} steps. Batches a rank: "
        f"{batches}. {torch.cuda.get_device_name(0)}, torch {version('torch')}, CUDA {torch.version.cuda}; "
        f"{spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device here; nothing was measured")
        raise SystemExit(2)
    if arguments[:1] == ["rank"]:
        rank, size, folder, part, *turns = arguments[1:]
        return serve(int(rank), int(size), folder, part, *map(int, turns))
    rounds, steps = (int(each) for each in [*arguments[:2], *("15", "10")[len(arguments[:2]) :]])
    load = os.getloadavg()[0]
    reduced = measure(2, "reduce", rounds, steps)
    trained = measure(max(2, torch.cuda.device_count()), "train", rounds, steps)
    text = render(reduced, trained, rounds, steps, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
