"""A training step by netfold.horovod.torch beside one by DDP over netfold, in turns in the same processes.

    .venv/bin/python examples/launch.py 2 bench/horovod_step.py [--rounds 30] [--steps 10] [--width 512]

Prints, per round, the ratio of the two times (Horovod's interface over DDP): median, 5th and 95th percentile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import netfold.horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("netfold")
    hvd.init()
    inputs = torch.randn(8, 1, 28, 28)
    targets = torch.randint(10, (8,))

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU(),
            nn.Linear(args.width, 10),
        )  # fmt: skip

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return step

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.01, foreach=True)

    plain = network()
    ddp = DistributedDataParallel(network())
    ours = network()
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    steps = {
        "alone": step_of(plain, sgd(plain)),
        "ddp": step_of(ddp, sgd(ddp)),
        "hvd": step_of(ours, hvd.DistributedOptimizer(sgd(ours), ours.named_parameters())),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 2):
        names = list(steps) if round_ % 2 else list(steps)[::-1]
        for name in names:
            hvd.barrier()
            begin = time.perf_counter()
            for _ in range(args.steps):
                steps[name]()
            if round_ >= 2:  # the first rounds lay buckets out
                times[name].append((time.perf_counter() - begin) / args.steps)
    if hvd.rank() == 0:
        size = sum(each.numel() for each in ours.parameters())
        ratios = torch.tensor(times["hvd"]) / torch.tensor(times["ddp"])
        low, middle, high = torch.quantile(ratios, torch.tensor([0.05, 0.5, 0.95])).tolist()
        medians = {name: sorted(each)[len(each) // 2] * 1e3 for name, each in times.items()}
        print(
            f"{hvd.size()} ranks, {size} parameters, {args.rounds} rounds of {args.steps} steps: hvd/ddp {middle:.3f} "
            f"({low:.3f}..{high:.3f}); medians in ms: "
            + ", ".join(f"{name} {median:.2f}" for name, median in medians.items())
        )
    hvd.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
