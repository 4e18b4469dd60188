"""What registered memory and the direct path bring to the gradients of EDSR: the experiment of MVAPICH2-GDR's talk
(default, with a registration cache, with direct paths), redrawn on what this machine has.

    .venv/bin/python bench/registrations.py [--rounds 5] [--steps 12] [--write]

Two ranks train EDSR (32 blocks of 256 features: 163 MB of gradients, in buckets of 64 MB as Horovod's) under DDP, in
the ways of WAYS one after the other in every round, on patches so small that computing does not hide what is measured:
the time in all_reduce a step, by netfold's own records, once DDP has laid out its buckets. Figures are medians of the
rounds, quotients those of the ways within a round, with their p5 and p95.

What a cache spares depends on what registering costs: that is measured beside it, with libfabric's providers of this
machine, and for the shared memory of one host as what the first use of a bucket by its new address costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from netfold._native import fabric

_SPAWN = multiprocessing.get_context("spawn")
_FABRIC = {"NETFOLD_ALGORITHM": "ring", "NETFOLD_INTERFACE": "127.0.0.1", "NETFOLD_PROBE": "off"}
WAYS = {
    "segments, copied (default of the talk)": {**_FABRIC, "NETFOLD_RMA_MIN_BYTES": "0"},
    "direct, registered by each operation": {**_FABRIC, "NETFOLD_REGISTRATION_CACHE_BYTES": "0"},
    "direct, with the registration cache": _FABRIC,
}
PROVIDERS = ("tcp;ofi_rxm", "net")
MEMORY = "shared memory of the host"
# Before these, DDP's buckets are not in their places.
_WARM_STEPS = 4
_BUCKET_MB = 64
RESULTS = Path(__file__).parent / "results" / "registrations.md"


def _rank_of(control: Connection, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from netfold.communicator.group import KINDS
    from netfold.train.models.edsr import large

    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = large().module
    patch = torch.rand(1, 3, 6, 6)
    while (task := control.recv()) is not None:
        folder, environment, steps = task
        for name in [name for name in os.environ if name.startswith("NETFOLD_")]:
            del os.environ[name]
        os.environ.update(environment)
        dist.init_process_group("netfold", init_method=f"file://{folder}", rank=rank, world_size=2)
        ddp = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=_BUCKET_MB, gradient_as_bucket_view=True)
        began_ns = []
        for _ in range(steps):
            began_ns.append(time.monotonic_ns())
            ddp.zero_grad(set_to_none=False)
            ddp(patch).square().mean().backward()
        backend: Any = dist.group.WORLD
        records = backend.netfold.events()
        records = records[(records["operation"] == KINDS["all_reduce"]) & (records["bytes"] > 1 << 20)]
        spent = records["finished_ns"] - records["started_ns"]
        by_step = np.searchsorted(began_ns, records["queued_ns"]) - 1
        seconds = [float(spent[by_step == step].sum()) / 1e9 for step in range(steps)]
        hits, misses = (int(records[f"registration_{what}"].sum()) for what in ("hits", "misses"))
        control.send((seconds, hits, misses))
        del ddp
        dist.destroy_process_group()


class Ranks:
    """Two that train, as often as they are asked."""

    def __init__(self, folder: str) -> None:
        self._folder, self._runs = folder, 0
        self._controls, self._processes = [], []
        for rank in range(2):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_rank_of, args=(theirs, rank), daemon=True)
            process.start()
            self._controls.append(ours)
            self._processes.append(process)

    def train(self, environment: dict[str, str], steps: int) -> tuple[list[float], int, int]:
        """Seconds in all_reduce, a step, of the slower rank; hits and misses of one rank."""
        self._runs += 1
        for control in self._controls:
            control.send((f"{self._folder}/{self._runs}", environment, steps))
        found = [control.recv() for control in self._controls]
        return [max(pair) for pair in zip(*(each[0] for each in found), strict=True)], found[0][1], found[0][2]

    def close(self) -> None:
        for control, process in zip(self._controls, self._processes, strict=True):
            control.send(None)
            process.join()


def registering_us(provider: str, size: int, times: int) -> float:
    """Microseconds to register so many bytes: what it takes to expect a piece in memory that nobody holds."""
    port, other = (fabric.StreamMux(provider, ["127.0.0.1"]) for _ in range(2))
    stream, peer = port.open(fabric.make_doorbell(), 1), other.open(fabric.make_doorbell(), 1)
    stream.connect(other.names, peer.params)
    peer.connect(port.names, stream.params)
    memory = np.ones(size, np.uint8)
    took = []
    for name in range(times):
        began = time.perf_counter()
        assert stream.post_receive(name, memory.ctypes.data, size)
        took.append(time.perf_counter() - began)
    return float(np.median(took)) * 1e6


def spread(quotients: list[float]) -> str:
    low, middle, high = np.percentile(quotients, (5, 50, 95))
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def measure(rounds: int, steps: int) -> list[str]:
    lines = [
        f"EDSR, 163 MB of gradients in buckets of {_BUCKET_MB} MB, 2 ranks on one machine, libfabric "
        f"{fabric.version()}; {rounds} rounds of {steps} steps a way.",
        "",
        "| provider | way | ms in all_reduce a step | time against the first way, median (p5..p95) | hits |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(folder)
        for provider in PROVIDERS:
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            counted = {way: [0, 0] for way in WAYS}
            for turn in range(rounds):
                for way in list(WAYS) if turn % 2 == 0 else list(WAYS)[::-1]:
                    found, hits, misses = ranks.train({**WAYS[way], "NETFOLD_TRANSPORT": f"fabric:{provider}"}, steps)
                    seconds[way].append(float(np.median(found[_WARM_STEPS:])))
                    counted[way][0] += hits
                    counted[way][1] += hits + misses
            first = seconds[next(iter(WAYS))]
            for way, mine in seconds.items():
                quotients = [a / b for a, b in zip(mine, first, strict=True)]
                hits, all_of = counted[way]
                share = f"{100 * hits / all_of:.0f}%" if all_of else "-"
                lines.append(f"| {provider} | {way} | {np.median(mine) * 1e3:.1f} | {spread(quotients)} | {share} |")
                print(lines[-1], file=sys.stderr)
        attach = []
        later = []
        for _ in range(rounds):
            found, _, _ = ranks.train({"NETFOLD_PROBE": "off", "NETFOLD_SINGLE_COPY": "off"}, steps)
            attach.append(found[_WARM_STEPS - 1])
            later.append(float(np.median(found[_WARM_STEPS:])))
        ranks.close()
    lines += [
        "",
        "A bucket misses until it has come from the same place in three steps; from then on every use hits.",
        "",
        "| what is cached | costs |",
        "|---|---|",
    ]
    for provider in PROVIDERS:
        cost = registering_us(provider, _BUCKET_MB << 20, times=15)
        lines.append(f"| registering {_BUCKET_MB} MB with {provider} | {cost:.1f} us |")
    quotients = [a / b for a, b in zip(attach, later, strict=True)]
    lines.append(
        f"| {MEMORY}: all_reduce of a step's buckets when they are attached, against a later step | "
        f"{np.median(attach) * 1e3:.1f} ms against {np.median(later) * 1e3:.1f} ms, {spread(quotients)} |"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="replace bench/results/registrations.md")
    given: Any = parser.parse_args()
    lines = measure(given.rounds, given.steps)
    print("\n".join(lines))
    if given.write:
        head = "# Registered memory and the direct path, for the gradients of EDSR\n\n`bench/registrations.py`\n\n"
        RESULTS.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
