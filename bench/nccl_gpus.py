"""NCCL over netfold's plugin and over its own sockets, two ranks on one GPU. Needs a GPU and torch with NCCL 2.30:

    .venv/bin/python bench/nccl_gpus.py                  # under two minutes

Each rank counts as a host of its own (NCCL_HOSTID), without peer access and shared memory: NCCL sends everything over
its network. It has not run yet, for want of a GPU.
"""

from __future__ import annotations

import driver
import numpy as np
from driver import Place, Rank, cell

from netfold.bench.spread import paired_ratios
from netfold.cli.nccl_env import plugin

SIZES = (4, 1 << 20, 64 << 20)
OVER_THE_NETWORK = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NETFOLD_INTERFACE": "lo",
    "NCCL_DEBUG": "WARN",
}
SIDES = {
    "netfold": {"LD_LIBRARY_PATH": str(plugin().parent), "NCCL_NET_PLUGIN": "netfold", "NCCL_NET": "netfold"},
    "sockets": {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"},
}


def reduce_on_gpu(me: Rank) -> None:
    """A rank of NCCL. An order: bytes of f32; the answer: seconds of an all_reduce whose sum was checked."""
    import os

    os.environ["NCCL_HOSTID"] = f"host{me.rank}"  # before NCCL is loaded
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    with me.torch_group("nccl"):

        def run(size: int) -> float:
            tensor = torch.full((size // 4,), float(me.rank + 1), device="cuda")
            torch.cuda.synchronize()

            def call() -> None:
                dist.all_reduce(tensor)
                torch.cuda.synchronize()

            (seconds,) = me.time(call)
            assert bool((tensor == 3).all()), "a wrong sum"
            return seconds

        me.serve(run)


def nccl_gpus(rounds: int = 20) -> str:
    """NCCL on a GPU over netfold and over its sockets."""
    took: dict[tuple[str, int], list[float]] = {}
    for _ in range(2):
        for side, environment in SIDES.items():
            settings = {**OVER_THE_NETWORK, **environment}
            with driver.ranks_at(Place(2), reduce_on_gpu, environment=settings) as ranks:
                for size in SIZES:
                    ranks.ask(size)  # warms up
                    took.setdefault((side, size), []).extend(max(ranks.ask(size)) for _ in range(rounds))
    rows = []
    for size in SIZES:
        ours, sockets = took["netfold", size], took["sockets", size]
        times = [f"{np.median(each) * 1e6:,.1f}" for each in (ours, sockets)]
        rows.append([f"{size:,}", *times, cell(paired_ratios(sockets, ours))])
    return f"""all_reduce of f32, every element checked, 2 ranks on one GPU; {rounds} rounds in each of 2 launches
a side.

{driver.table("bytes | netfold us | sockets us | speed against sockets", rows)}"""


if __name__ == "__main__":
    driver.run(nccl_gpus)
