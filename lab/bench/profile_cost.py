"""The cost of recording for the job that is recorded:

    .venv/bin/python lab/bench/profile_cost.py

Two ranks. A window of steps is recorded and the next window is not, in the same processes; in the next pair the order
is reversed. A step of the first kind computes and sums 1 KB ten times, with as much computing as makes a thousand
collectives a second while the machine is as it was at the start. A step of the second kind is DDP's, of a model of 3
MB. A window is long enough for other backends' records to be read within it; starting and stopping are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version

import driver
import numpy as np
from driver import Place, Rank, cell, take_turns

RANKS = 2
KINDS = {"small": "10 all_reduces of 1 KB per step", "ddp": "DDP, 3 MB of gradients"}
GOALS = {"netfold": 1.0, "gloo": 3.0}  # percent
CALLS, ELEMENTS = 10, 256
CALLS_A_SECOND = 1000
# At least so long: several windows of records are read within one.
WINDOW_S = 2.5


def make_small() -> Callable[[], int]:
    """A step; it returns how many collectives it has called."""
    import torch
    import torch.distributed as dist

    left, right = torch.ones(256, 256), torch.ones(256, 256)
    tensor = torch.empty(ELEMENTS)
    expected = float(RANKS * (RANKS + 1) // 2)
    products = [1]

    def step() -> int:
        for _ in range(CALLS):
            for _ in range(products[0]):
                torch.mm(left, right)
            tensor.fill_(dist.get_rank() + 1)
            dist.all_reduce(tensor)
        assert (tensor == expected).all()
        return CALLS

    def seconds_a_step(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / steps

    # As much computing as gives CALLS_A_SECOND, the same on all ranks.
    seconds = []
    for products[0] in (1, 2):
        step()
        seconds.append(min(seconds_a_step(20) for _ in range(10)))
    of_rank = torch.tensor([CALLS / CALLS_A_SECOND - seconds[0], seconds[1] - seconds[0]])
    dist.all_reduce(of_rank)
    left_s, product_s = of_rank.tolist()
    products[0] = 1 + max(0, round(left_s / product_s))
    return step


def make_ddp() -> Callable[[], int]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.ones(64, 512)

    def step() -> int:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        return len(layers)

    return step


def serve(me: Rank, backend: str, kind: str) -> None:
    """A rank. An order is a window, recorded or not: seconds of wall and CPU a step, and calls per second."""
    import torch
    import torch.distributed as dist

    import netfold

    recordings = iter(range(1 << 20))

    def run(steps: int, boundary: Callable[[], None] = lambda: None) -> tuple[float, float, float]:
        me.line.cross()
        calls = 0
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            calls += step()
            boundary()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall / steps, cpu / steps, calls / wall

    def window(recorded: bool) -> tuple[float, float, float]:
        if not recorded:
            return run(steps)
        profile = netfold.profile(f"{me.folder}/run-{next(recordings)}").start()
        # DDP has an optimizer, whose steps count.
        found = run(steps, netfold.profile.step) if kind == "small" else run(steps)
        profile.stop()
        return found

    with me.torch_group(backend):
        step = {"small": make_small, "ddp": make_ddp}[kind]()
        run(50)
        # The same number on all ranks, of the slowest of two short windows.
        seconds = torch.tensor([max(run(50)[0] for _ in range(2))])
        dist.all_reduce(seconds, op=dist.ReduceOp.MIN)
        steps = int(WINDOW_S / seconds.item())
        me.serve(window)


def profile_cost(pairs: int = 10) -> str:
    """The cost of a recording."""
    rows = []
    for backend in GOALS:
        for kind in KINDS:
            with driver.ranks_at(Place(RANKS), serve, backend, kind, deadline_s=600) as ranks:
                found = take_turns([False, True], pairs, lambda recorded: np.mean(ranks.ask(recorded), axis=0))
            off, on = np.array(found[False]), np.array(found[True])
            wall = 100 * (on[:, 0] / off[:, 0] - 1)
            # What else the machine does moves wall time; the CPU time of the ranks' processes, all threads, much less.
            cpu = 100 * (on[:, 1] - off[:, 1]) / off[:, 0]
            calls_a_s, ms = f"{np.median(off[:, 2]):.0f}", f"{1e3 * np.median(off[:, 0]):.2f}"
            added = (cell(wall, "+.1f"), cell(cpu, "+.2f"))
            rows.append([backend, KINDS[kind], calls_a_s, ms, *added, f"{GOALS[backend]:.0f}%"])
    head = "backend | step | calls per second | ms per step, off | wall time added, % | CPU added, % of a step | goal"
    return f"""Recorded windows beside others, in the same processes: {RANKS} ranks, windows of some {WINDOW_S} s;
medians of pairs (5% .. 95%). CPU: of the ranks' processes, all their threads, over the wall time of a step that is not
recorded. torch {version("torch")}.

{driver.table(head, rows)}"""


if __name__ == "__main__":
    driver.run(profile_cost)
