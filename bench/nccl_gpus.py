"""NCCL over netfold's plugin and over its own sockets, two ranks on one GPU. Needs a GPU and torch with NCCL 2.30:

    .venv/bin/python bench/nccl_gpus.py                  # under four minutes

Also over the plugin with its profiler, whose recording is read afterwards, and with its tuner, by the model's table for
the link of --latency-us and --bytes-per-s, which `netfold doctor check` measures.

Each rank counts as a host of its own (NCCL_HOSTID), without peer access and shared memory: NCCL sends everything over
its network. It has not run yet, for want of a GPU.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import driver
import numpy as np
from driver import Place, Rank, cell

from netfold.bench.spread import paired_ratios
from netfold.cli.nccl_env import TUNER, plugin
from netfold.profile.run import read_run
from netfold.tuning.nccl import table_text
from netfold.tuning.topology import Link

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 64 << 20)
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


def nccl_gpus(rounds: int = 20, latency_us: float = 20, bytes_per_s: float = 2e9) -> str:
    """NCCL on a GPU over netfold and over its sockets."""
    took: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        table, recording = Path(folder, "table"), Path(folder, "run")
        table.write_text(table_text([(2, 2)], Link(latency_us * 1e-6, bytes_per_s)))
        ours = SIDES["netfold"]
        sides = {
            **SIDES,
            "recorded": {**ours, "NCCL_PROFILER_PLUGIN": plugin().name, "NETFOLD_PROFILE": str(recording)},
            "tuned": {**ours, "NCCL_TUNER_PLUGIN": TUNER, "NETFOLD_NCCL_TUNER": str(table)},
        }
        for _ in range(2):
            for side, environment in sides.items():
                settings = {**OVER_THE_NETWORK, **environment}
                with driver.ranks_at(Place(2), reduce_on_gpu, environment=settings) as ranks:
                    for size in SIZES:
                        ranks.ask(size)  # warms up
                        took.setdefault((side, size), []).extend(max(ranks.ask(size)) for _ in range(rounds))
        found = read_run(recording)
    kinds = Counter(
        f"{trace.metadata.name_of('operation', record['operation'])} "
        f"{'timed' if trace.metadata.groups[str(record['group'])].is_timed else 'submitted only'}"
        for trace in found.traces
        for record in trace.operations
    )
    rows = []
    for size in SIZES:
        times = [f"{np.median(took[side, size]) * 1e6:,.1f}" for side in sides]
        pairs = (("sockets", "netfold"), ("netfold", "recorded"), ("netfold", "tuned"))
        rows.append([f"{size:,}", *times, *(cell(paired_ratios(took[a, size], took[b, size])) for a, b in pairs)])
    head = "bytes | netfold us | sockets us | recorded us | tuned us | speed against sockets | recorded | tuned"
    return f"""all_reduce of f32, every element checked, 2 ranks on one GPU; {rounds} rounds in each of 2 launches
a side. The last two columns: the speed against netfold's network alone, to be 0.98 or more. The recording holds
{", ".join(f"{count} {kind}" for kind, count in kinds.items())}.

{driver.table(head, rows)}"""


if __name__ == "__main__":
    driver.run(nccl_gpus)
