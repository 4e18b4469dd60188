"""The time of a small all_reduce and of a barrier through the switch, beside gloo, on one machine's loopback:

    .venv/bin/python lab/bench/small_messages.py

Both sides are groups of the same processes, called through torch.distributed; netfold takes the switch for every
operation. Sides take turns. A call's time is the slowest rank's, and every result is checked.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import driver
import numpy as np
from driver import Place, Rank, cell, take_turns

SIDES = ("netfold", "gloo")
# Bytes of f32 that are summed; 0: a barrier.
CASES = (0, 8, 64, 512, 4096)
ENVIRONMENT = {"NETFOLD_ALGORITHM": "in_network", "NETFOLD_PROBE": "off"}


def serve(me: Rank) -> None:
    import torch
    import torch.distributed as dist

    with me.torch_group():
        groups: dict[str, Any] = {"netfold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        due = float(me.size * (me.size + 1) // 2)

        def run(side: str, nbytes: int, calls: int) -> list[float]:
            tensor, group = torch.empty(nbytes // 4), groups[side]
            seconds = []
            me.line.cross()
            for _ in range(calls):
                tensor.fill_(me.rank + 1)
                began = time.perf_counter()
                if nbytes == 0:
                    dist.barrier(group=group)
                else:
                    dist.all_reduce(tensor, group=group)
                seconds.append(time.perf_counter() - began)
                assert (tensor == due).all(), f"{side}, {nbytes} bytes: {tensor}"
            return seconds

        me.serve(run)


def small_messages(rounds: int = 12, calls: int = 25, ranks: str = "2,4,8,16") -> str:
    """Small messages."""
    rows = []
    for size in map(int, ranks.split(",")):
        with driver.ranks_at(Place(size, switch=True), serve, environment=ENVIRONMENT) as job:
            for nbytes in CASES:
                found = take_turns(SIDES, rounds, lambda side: driver.slowest(job.ask(side, nbytes, calls)))  # noqa: B023
                netfold_us, gloo_us = (np.array(found[side]) * 1e6 for side in SIDES)
                a_round = np.median(gloo_us, axis=1) / np.median(netfold_us, axis=1)
                us = [f"{np.median(of):.0f} | {np.percentile(of, 99):.0f}" for of in (netfold_us, gloo_us)]
                operation = f"all_reduce, {nbytes} B" if nbytes else "barrier"
                ratio = f"{np.median(gloo_us) / np.median(netfold_us):.2f}"
                rows.append([size, operation, *us, ratio, cell(a_round)])
    head = "ranks | operation | netfold us: median | p99 | gloo us: median | p99 | gloo / netfold: medians | by round"
    return f"""Through the software switch on loopback, beside gloo; the slowest rank's time in a call. The last column:
medians of rounds, 5% .. 95%. torch {version("torch")}.

{driver.table(head, rows)}"""


if __name__ == "__main__":
    driver.run(small_messages)
