"""What recording costs the job that is recorded:

    .venv/bin/python bench/profile_cost.py [PAIRS]      # 10

Two ranks; a window of steps is recorded, the next is not, in the same processes and the other way round in the next
pair. A step of the first kind computes and sums 1 KB ten times, in turn, with as much computing as makes a thousand
collectives a second while the machine is as it was at the start. One of the second kind is DDP's, of a model of 3 MB. A
window is long enough for other backends' records to be read within it; starting and stopping are not timed. Writes
bench/results/profile_cost.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from own_ranks import run_own_ranks

from netfold.bench.machine import spoken
from netfold.bench.start_line import StartLine

RANKS = 2
CASES = {"netfold": ("small", "ddp"), "gloo": ("small", "ddp")}
WORDS = {"small": "10 all_reduces of 1 KB a step", "ddp": "DDP, 3 MB of gradients"}
GOALS = {"netfold": 1.0, "gloo": 3.0}  # percent
CALLS, ELEMENTS = 10, 256
CALLS_A_SECOND = 1000
# So long at least, so many windows of records are read within one.
WINDOW_S = 2.5
RESULT = Path(__file__).parent / "results" / "profile_cost.md"
DEADLINE_S = 600


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

    # So much computing that there are CALLS_A_SECOND; the same on all ranks.
    took = []
    for products[0] in (1, 2):
        step()
        took.append(min(seconds_a_step(20) for _ in range(10)))
    one = torch.tensor([CALLS / CALLS_A_SECOND - took[0], took[1] - took[0]])
    dist.all_reduce(one)
    left_s, product_s = one.tolist()
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


def serve(rank: int, folder: str, backend: str, case: str, pairs: int) -> None:
    """A rank: seconds of wall and CPU a step, off and on, pair by pair, and calls a second, into a file."""
    import torch
    import torch.distributed as dist

    import netfold

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    step = {"small": make_small, "ddp": make_ddp}[case]()
    line = StartLine(Path(folder, "line"), rank, RANKS)

    def run(steps: int, boundary: Callable[[], None]) -> tuple[float, float, float]:
        line.cross()
        calls = 0
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            calls += step()
            boundary()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall / steps, cpu / steps, calls / wall

    run(50, lambda: None)
    # The same number on all ranks, of the slowest of two short windows.
    seconds = torch.tensor([max(run(50, lambda: None)[0] for _ in range(2))])
    dist.all_reduce(seconds, op=dist.ReduceOp.MIN)
    steps = int(WINDOW_S / seconds.item())
    found = np.zeros((pairs + 1, 2, 3))
    for pair in range(pairs + 1):  # the first is not counted
        for on in (False, True) if pair % 2 else (True, False):
            if not on:
                found[pair, 0] = run(steps, lambda: None)
                continue
            profile = netfold.profile(f"{folder}/run-{pair}").start()
            by_hand = (
                netfold.profile.step if case == "small" else lambda: None
            )  # DDP has an optimizer, whose steps count
            found[pair, 1] = run(steps, by_hand)
            profile.stop()
    np.save(f"{folder}/{rank}.npy", found[1:])
    line.cross()
    dist.destroy_process_group()


def measure(backend: str, case: str, pairs: int) -> Any:
    """[pairs, off and on, wall and CPU seconds a step and calls a second], the mean over ranks."""
    with tempfile.TemporaryDirectory(prefix="netfold-profile-cost-") as folder:
        StartLine.draw(Path(folder, "line"), RANKS)
        run_own_ranks(__file__, RANKS, folder, backend, case, pairs, deadline_s=DEADLINE_S)
        return np.mean([np.load(f"{folder}/{rank}.npy") for rank in range(RANKS)], axis=0)


def render(found: dict[tuple[str, str], Any], pairs: int, load: tuple[float, float]) -> str:
    lines = [
        "What recording costs a step: recorded windows beside others, in the same processes.",
        "",
        "| backend | step | calls a second | ms a step, off | wall time added | 5% to 95% | CPU added, of a step "
        "| 5% to 95% | goal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (backend, case), windows in found.items():
        off, on = windows[:, 0], windows[:, 1]
        wall = 100 * (on[:, 0] / off[:, 0] - 1)
        # What the machine does besides moves wall time; the CPU time of the ranks' processes, all threads, much less.
        cpu = 100 * (on[:, 1] - off[:, 1]) / off[:, 0]
        lines.append(
            f"| {backend} | {WORDS[case]} | {np.median(off[:, 2]):.0f} | {1e3 * np.median(off[:, 0]):.2f} "
            f"| {np.median(wall):+.1f}% | {np.percentile(wall, 5):+.1f} .. {np.percentile(wall, 95):+.1f} "
            f"| {np.median(cpu):+.2f}% | {np.percentile(cpu, 5):+.2f} .. {np.percentile(cpu, 95):+.2f} "
            f"| {GOALS[backend]:.0f}% |"
        )
    lines += [
        "",
        f"{RANKS} ranks, {pairs} pairs of windows of some {WINDOW_S} s; medians of pairs. CPU: of the ranks' "
        "processes, all their threads, over the wall time of a step that is not recorded. "
        f"torch {version('torch')}; {spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        rank, folder, backend, case, count = arguments[1:]
        return serve(int(rank), folder, backend, case, int(count))
    pairs = int(arguments[0]) if arguments else 10
    load = os.getloadavg()[0]
    found = {(backend, case): measure(backend, case, pairs) for backend, cases in CASES.items() for case in cases}
    text = render(found, pairs, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
