"""NCCL over netfold's plugin and over its own sockets, several ranks on one GPU. Needs a GPU and torch with NCCL:

    .venv/bin/python lab/bench/nccl_gpus.py                  # under four minutes

The sides: netfold's network; NCCL's own sockets; netfold's network with a recording, which is read afterwards; with the
tuner, by the model's table for the link of --latency-us and --bytes-per-s, which `netfold doctor check` measures; with
messages in the GPU's memory, which the plugin copies (NETFOLD_NCCL_CUDA=staged), where NCCL's kernels otherwise write
into the host's; and with a switch, once for each of NCCL's CollNet algorithms. Each side also trains a small model by
DDP. NCCL's log of that launch says which network and which algorithms were used.

Each rank counts as a host of its own (NCCL_HOSTID), without peer access and shared memory: NCCL sends everything over
its network. NCCL 2.30 takes several ranks on one GPU by NCCL_MULTI_RANK_GPU_ENABLE, an older one by NCCL_HOSTID alone.
Without CUDA's MPS (nvidia-cuda-mps-control -d) the processes use the GPU in turns, and the times of small tensors are
those of the turns.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import driver
import numpy as np
from driver import Place, Rank, cell

from netfold.cli.nccl_env import TUNER, plugin
from netfold.profile.run import read_run
from netfold.tuning.nccl import table_text
from netfold.tuning.topology import Link
from netfold_lab.bench.ranks import Ranks
from netfold_lab.bench.spread import paired_ratios

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
STEPS = 20
OVER_THE_NETWORK = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NETFOLD_INTERFACE": "lo",
}
QUIET = {"NCCL_DEBUG": "WARN"}
LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,TUNING"}
# A launch ends after this time, since NCCL's kernels wait for ever.
DEADLINE_S = 60.0
NETFOLD = {"LD_LIBRARY_PATH": str(plugin().parent), "NCCL_NET_PLUGIN": "netfold", "NCCL_NET": "netfold"}
SOCKETS = {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"}
# NCCL then takes the path to the network for one that may reach GPUs, however far it is.
STAGED = {"NETFOLD_NCCL_CUDA": "staged", "NCCL_NET_GDR_LEVEL": "SYS", "NCCL_NET_GDR_READ": "1"}
COLLNET = {**NETFOLD, "NCCL_COLLNET_ENABLE": "1", "NETFOLD_NCCL_REQUIRE_SWITCH": "1"}
ALGORITHMS = {"CollNet chain": "CollnetChain", "CollNet direct": "CollnetDirect"}


def reduce_on_gpu(me: Rank) -> None:
    """A rank of NCCL. An order: bytes of f32, answered by the seconds of an all_reduce whose sum was checked; or 0,
    answered by the losses of a small model that trained by DDP."""
    os.environ["NCCL_HOSTID"] = f"host{me.rank}"  # before NCCL is loaded
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    with me.torch_group("nccl"):

        def run(size: int) -> float | list[float]:
            if not size:
                return _losses(me.rank)
            tensor = torch.full((size // 4,), float(me.rank + 1), device="cuda")
            torch.cuda.synchronize()

            def call() -> None:
                dist.all_reduce(tensor)
                torch.cuda.synchronize()

            (seconds,) = me.time(call)
            assert bool((tensor == me.size * (me.size + 1) // 2).all()), "a wrong sum"
            return seconds

        me.serve(run)


def _losses(rank: int) -> list[float]:
    import torch

    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).cuda()
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer, losses = torch.optim.SGD(ddp.parameters(), lr=1e-1), []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        loss = ddp(torch.randn(32, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def _started(ranks: int, environment: dict[str, str], log: dict[str, str]) -> Iterator[Ranks]:
    place = Place(ranks, switch="NCCL_COLLNET_ENABLE" in environment)
    settings = {**OVER_THE_NETWORK, **log, **environment}
    with driver.ranks_at(place, reduce_on_gpu, environment=settings, deadline_s=DEADLINE_S) as job:
        yield job


def nccl_gpus(
    ranks: int = 2,
    rounds: int = 20,
    latency_us: float = 20,
    bytes_per_s: float = 2e9,
    only: str = "",
    logs: str = "",
) -> str:
    """NCCL on a GPU over netfold and over its sockets.

    only: sides that begin with one of these words, by comma. logs: a folder that keeps NCCL's logs and the recording.
    """
    took: dict[tuple[str, int], list[float]] = {}
    trained, problems = dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        table, recording = Path(folder, "table"), Path(logs or folder, "recording")
        table.write_text(table_text([(ranks, ranks)], Link(latency_us * 1e-6, bytes_per_s)))
        sides: dict[str, dict[str, str]] = {
            "netfold": NETFOLD,
            "sockets": SOCKETS,
            "recorded": {**NETFOLD, "NCCL_PROFILER_PLUGIN": plugin().name, "NETFOLD_PROFILE": str(recording)},
            "tuned": {**NETFOLD, "NCCL_TUNER_PLUGIN": TUNER, "NETFOLD_NCCL_TUNER": str(table)},
            "staged": {**NETFOLD, **STAGED},
            **{side: {**COLLNET, "NCCL_ALGO": f"allreduce:{name}"} for side, name in ALGORITHMS.items()},
        }
        sides = {side: each for side, each in sides.items() if side.startswith(tuple(only.split(",")))}
        for launch, side in itertools.product(("DDP", 1, 2), list(sides)):
            if side not in sides:
                continue
            name = side.replace(" ", "-")
            log = {**LOGGED, "NCCL_DEBUG_FILE": f"{logs or folder}/{name}.%p"} if launch == "DDP" else QUIET
            try:
                with _started(ranks, sides[side], log) as job:
                    if launch == "DDP":
                        trained[side] = job.ask(0)
                        for size in SIZES:
                            job.ask(size)
                        continue
                    for size in SIZES:
                        job.ask(size)  # warms up
                        took.setdefault((side, size), []).extend(max(job.ask(size)) for _ in range(rounds))
            except Exception as error:
                problems.append(f"{side}, launch {launch}: {error}")
                del sides[side]
        said = {
            side: "".join(path.read_text() for path in Path(logs or folder).glob(f"{side.replace(' ', '-')}.*"))
            for side in trained
        }
        run = read_run(recording) if "recorded" in sides else None
    kinds = Counter(
        f"{trace.metadata.name_of('operation', record['operation'])} "
        f"{'timed' if trace.metadata.groups[str(record['group'])].is_timed else 'submitted only'}"
        for trace in (run.traces if run else ())
        for record in trace.operations
    )
    rows = []
    pairs = [(base, side) for base, side in _PAIRS if base in sides and side in sides]
    for size in SIZES:
        times = [f"{np.median(took[side, size]) * 1e6:,.1f}" for side in sides]
        rows.append([f"{size:,}", *times, *(cell(paired_ratios(took[a, size], took[b, size])) for a, b in pairs)])
    head = ["bytes", *(f"{side} us" for side in sides), *(f"{side}'s speed, {base} 1" for base, side in pairs)]
    return f"""all_reduce of f32, every element checked, {ranks} ranks on one GPU; {rounds} rounds in each of 2 launches
a side. The processes use the GPU {"at the same time (MPS)" if _has_mps() else "in turns, a few milliseconds each"}. The
recording holds {", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing"}.

{driver.table(" | ".join(head), rows)}

NCCL's choices, from its log:

{driver.table(" | ".join(["bytes", *trained]), _choices(said))}

A model of six layers trained {STEPS} steps by DDP:

{driver.table("side | NCCL | network | last loss of rank 0", _trained(trained, said))}

{" ".join(problems) or "Every side ran."}"""


_PAIRS = (
    ("sockets", "netfold"),
    ("netfold", "recorded"),
    ("netfold", "tuned"),
    ("netfold", "staged"),
    *(("netfold", side) for side in ALGORITHMS),
)


def _has_mps() -> bool:
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def _choices(said: dict[str, str]) -> list[list[str]]:
    rows = []
    for size in SIZES:
        pattern = rf"AllReduce: {size} Bytes -> Algo (\S+) proto (\S+) channel{{Lo..Hi}}={{(\S+)}}"
        found = [re.search(pattern, text) for text in said.values()]
        rows.append([f"{size:,}", *(" ".join(each.groups()) if each else "?" for each in found)])
    return rows


def _trained(trained: dict[str, Any], said: dict[str, str]) -> list[list[str]]:
    rows = []
    for side, losses in trained.items():
        version = re.search(r"NCCL version ([^\s]+)", said[side])
        networks = sorted(set(re.findall(r"via (NET\S+|COLLNET\S+)", said[side])))
        rows.append([side, version[1] if version else "?", " ".join(networks), repr(losses[0][-1])])
    return rows


if __name__ == "__main__":
    driver.run(nccl_gpus)
