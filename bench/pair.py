"""What a user can measure before a job: all_reduces between two hosts, by each way. A rank of it:

    python bench/pair.py FOLDER SWITCH_PID

Two ranks, one a host; or four, two a host that talk over the network too, which show what a ring's further steps cost
a core. Rank 0 writes FOLDER/pair.json: by way and size, the seconds of a call, median and quickest, and a core's
seconds for it on each rank, and on the switch.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from closed_loop_rank import WAYS, chosen

# Bytes of the tensor: one that only shows what a call costs, and two to tell a rate from.
SIZES = {64: 60, 2 << 20: 5, 8 << 20: 4}
SETTLING = 2
RANKS = 2


def main(folder: str, switch_pid: int) -> None:
    torch.set_num_threads(1)
    rank, size, switch = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["NETFOLD_SWITCH"]
    store = dist.FileStore(f"{folder}/store", size)
    found: dict[str, list[dict[str, float]]] = {}
    for way in WAYS:
        backend = chosen(way, switch)
        made = dist.PrefixStore(way, store)
        dist.init_process_group(backend, store=made, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        sizes = SIZES if size == RANKS else {min(SIZES): SIZES[min(SIZES)]}
        found[way] = [measure(tensor_bytes, calls, switch_pid) for tensor_bytes, calls in sizes.items()]
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, "pair.json").write_text(json.dumps(found))


def measure(size_bytes: int, calls: int, switch_pid: int) -> dict[str, float]:
    tensor = torch.zeros(size_bytes // 4)
    seconds = []
    for call in range(-SETTLING, calls):
        if call == 0:
            rank_s, switch_s = time.process_time(), _used_s(switch_pid)
        # Apart from one another, as they are in training.
        time.sleep(0.005)
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if call >= 0:
            seconds.append(time.perf_counter() - began)
    return {
        "size_bytes": size_bytes,
        "seconds": statistics.median(seconds),
        "quickest_s": min(seconds),
        "core_s": (time.process_time() - rank_s) / calls,
        "switch_s": (_used_s(switch_pid) - switch_s) / calls,
    }


def _used_s(pid: int) -> float:
    """Of a process until now, all its threads: what the scheduler counted, in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
