"""GPUs' memory: the parts of lab/bench/gpus.py that measure, one a command. Each needs a GPU:

    python lab/bench/gpu_parts.py paths           # by a Python whose torch has CUDA
    python lab/bench/gpu_parts.py steps
    python lab/bench/gpu_parts.py between-hosts   # needs root

`paths`: all_reduce of 64 MB between two processes on one GPU, by IPC and staged through pinned host memory. `steps`:
DDP steps of ResNet-50 and EDSR (the paper's large one), one rank per GPU, or two ranks where there is one GPU, over
netfold, NCCL and gloo. `between-hosts`: all_reduce between two processes on one GPU in two network namespaces, over a
shaped link. A time is the slowest rank's, from a synchronised start to a synchronised end; every sum is checked. The
table has a sentence for a side that cannot run (NCCL takes one rank per GPU). Without a GPU nothing is written, and the
exit code is 2. `--device cpu` runs `steps` and `between-hosts` on the CPU, to try the script.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import driver
import torch
import torch.distributed as dist
from driver import Place, Rank, cell, take_turns

import netfold
import netfold.torch
from netfold_lab.bench.spread import paired_ratios

ALL_REDUCE_BYTES = 64 << 20
LINK_BYTES = 16 << 20
# A part that takes longer is ended, and reported so. lab/bench/gpus.py has limits of its own.
DEADLINE_S = 600.0
PATHS = {"IPC": "auto", "staged": "off"}
SIDES = ("netfold", "nccl", "gloo")
# Samples a rank and step, and their shape.
MODELS = {"ResNet-50": (32, (3, 224, 224)), "EDSR": (4, (3, 48, 48))}


def reduce(me: Rank) -> None:
    """A rank on GPU 0. An order: the seconds of an all_reduce, and the paths that the ranks report."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with me.torch_group(pg_options=netfold.Options(intra_host="auto")):
        groups = {
            name: dist.new_group(backend="netfold", pg_options=netfold.Options(intra_host=inside))
            for name, inside in PATHS.items()
        }
        tensor = torch.empty(ALL_REDUCE_BYTES // 4, device=device)

        def call(name: str) -> None:
            dist.all_reduce(tensor, group=groups[name])
            torch.cuda.synchronize(device)

        def run(name: str) -> tuple[float, str]:
            tensor.fill_(me.rank + 1)
            torch.cuda.synchronize(device)
            (seconds,) = me.time(lambda: call(name))
            assert bool(tensor.eq(me.size * (me.size + 1) / 2).all()), f"{name}: a wrong sum"
            return seconds, netfold.torch.device_paths(groups["IPC"])

        me.serve(run)


def train(me: Rank, kind: str) -> None:
    """A rank on a GPU of its own where possible. An order: the seconds of a step, or why there are none."""
    from torch.nn.parallel import DistributedDataParallel

    from netfold_train.zoo.models import edsr, resnet

    made: dict[str, Any] = {
        "ResNet-50": lambda: resnet.resnet50(classes=1000),
        "EDSR": lambda: edsr.large(scale=2),
    }
    gpus = torch.cuda.device_count()
    device = _device(kind, me.rank)
    with me.torch_group():
        groups: dict[str, Any] = {"netfold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        refused = ""
        if kind == "cpu":
            refused = "NCCL takes tensors of GPUs"
        elif not dist.is_nccl_available():
            refused = "this torch has no NCCL"
        elif gpus < me.size:
            refused = f"NCCL takes one rank per GPU; here are {me.size} ranks on {gpus}"
        else:
            groups["nccl"] = dist.new_group(backend="nccl")
        prepared: dict[tuple[str, str], Any] = {}

        def steps_of(model: str, side: str, steps: int) -> None:
            if (model, side) not in prepared:
                samples, shape = MODELS[model]
                torch.manual_seed(me.rank)
                inputs = torch.rand(samples, *shape, device=device)
                torch.manual_seed(1)
                ddp = DistributedDataParallel(made[model]().module.to(device), process_group=groups[side])
                prepared[model, side] = ddp, torch.optim.SGD(ddp.parameters(), lr=1e-4), inputs
                _synchronize(device)
            ddp, optimizer, inputs = prepared[model, side]
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=False)
                ddp(inputs).square().mean().backward()
                optimizer.step()
            _synchronize(device)

        def run(model: str, side: str, steps: int) -> float | str:
            if side == "nccl" and refused:
                return refused
            return me.time(lambda: steps_of(model, side, steps))[0] / steps

        me.serve(run)


def over_link(me: Rank, kind: str) -> None:
    """A rank in a namespace of its own, on GPU 0. An order: the seconds of an all_reduce."""
    device = _device(kind, 0)
    with me.torch_group():
        groups: dict[str, Any] = {"netfold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        tensor = torch.empty(LINK_BYTES // 4, device=device)

        def call(name: str) -> None:
            dist.all_reduce(tensor, group=groups[name])
            _synchronize(device)

        def run(name: str) -> float:
            tensor.fill_(me.rank + 1)
            _synchronize(device)
            (seconds,) = me.time(lambda: call(name))
            assert bool(tensor.eq(me.size * (me.size + 1) / 2).all()), f"{name}: a wrong sum"
            return seconds

        me.serve(run)


def _device(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _card(kind: str) -> str:
    """The card and CUDA's version. Ends the process with code 2 where `kind` is cuda and there is none."""
    if kind == "cpu":
        return f"CPU tensors, torch {version('torch')}"
    if not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device here; nothing was measured")
        raise SystemExit(2)
    return f"{torch.cuda.get_device_name(0)}, torch {version('torch')}, CUDA {torch.version.cuda}"


def paths(rounds: int = 15) -> str:
    """IPC against staged copies between two processes on one GPU"""
    card = _card("cuda")
    with driver.ranks_at(Place(2), reduce, deadline_s=DEADLINE_S) as ranks:
        reduced = take_turns(list(PATHS), rounds, ranks.ask, warmups=2)
    report = reduced["IPC"][0][0][1]
    seconds = {name: [max(took for took, _ in answers) for answers in of] for name, of in reduced.items()}
    rows = []
    for name, took in seconds.items():
        if name == "IPC" and "IPC disabled" in report:
            rows.append(["IPC", "not done: see what the ranks report", ""])
        else:
            rows.append([name, cell(took, ".4g", 1e3), cell(paired_ratios(seconds["staged"], took), ".4g")])
    return f"""all_reduce of {ALL_REDUCE_BYTES >> 20} MB of f32. {card}. The ranks report:
{report}.

{driver.table("path | ms | staged's time over it", rows)}"""


def steps(rounds: int = 7, steps: int = 5, device: str = "cuda", models: str = "ResNet-50,EDSR") -> str:
    """DDP steps over netfold, NCCL and gloo"""
    card = _card(device)
    size = max(2, torch.cuda.device_count())
    trained = []
    with driver.ranks_at(Place(size), train, device, deadline_s=DEADLINE_S) as ranks:
        for model in models.split(","):
            found = take_turns(SIDES, rounds, lambda side, model=model: max(ranks.ask(model, side, steps)))  # type: ignore[misc]
            for side, took in found.items():
                if isinstance(took[0], str):
                    trained.append([model, side, took[0], ""])
                else:
                    ratios = paired_ratios(found["netfold"], took)
                    trained.append([model, side, cell(took, ".4g", 1e3), cell(ratios, ".4g")])
    batches = ", ".join(f"{name} {count} x {'x'.join(map(str, shape))}" for name, (count, shape) in MODELS.items())
    return f"""DDP, {size} ranks on {min(size, torch.cuda.device_count())} GPU(s): milliseconds of a step, the slowest
rank's. A round of training is {steps} steps. Batches a rank: {batches}. {card}.

{driver.table("model | side | ms | netfold's time over it", trained)}"""


def between_hosts(rounds: int = 9, rate: str = "1gbit", device: str = "cuda") -> str:
    """Two processes on one GPU in two network namespaces"""
    card = _card(device)
    with driver.ranks_at(Place(2, rate=rate), over_link, device, deadline_s=DEADLINE_S) as ranks:
        found = take_turns(["netfold", "gloo"], rounds, lambda name: max(ranks.ask(name)))
    rows = [
        [name, cell(took, ".4g", 1e3), cell(paired_ratios(found["gloo"], took), ".4g")] for name, took in found.items()
    ]
    return f"""all_reduce of {LINK_BYTES >> 20} MB of f32 over links of {rate} each way. {card}.

{driver.table("side | ms | gloo's time over it", rows)}"""


if __name__ == "__main__":
    driver.run(paths, steps, between_hosts)
