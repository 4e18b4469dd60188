"""Collectives between hosts against the alpha-beta limit of the link; run by every host of a rack:

    netfold rack run --hosts 4 --rate 1gbit -- .venv/bin/python bench/between_hosts.py FOLDER [operation=algorithm ...]

FOLDER is fresh and seen by all hosts. The limit of a case: what its formula in netfold.plan says with the round trip
that was measured here, the link's rate less its headers, and nothing else. Times are the slowest rank's, medians.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import replace

import numpy as np

from netfold import Communicator, FileStore, Options, units
from netfold.rack.names import HOST_INTERFACE
from netfold.tuning import DEFAULT_LINKS, Link, Links, Topology
from netfold.tuning.cost import predict

# A packet's 1448 bytes of tensor travel as 1514 in a rack, whose links count Ethernet's own header and no gap.
RATE_BYTES_PER_S = 125e6 * 1448 / 1514
SIZES = (1 << 20, 16 << 20)
CASES = (
    "all_reduce=auto",
    "reduce_scatter=auto",
    "all_gather=auto",
    "broadcast=auto",
    "all_to_all=auto",
    "reduce=auto",
    "all_reduce=halving_doubling",
    "all_reduce=ring",
    "all_reduce=tree",
    "reduce_scatter=direct",
    "reduce_scatter=ring",
    "all_gather=direct",
    "all_gather=ring",
    "all_gather=bruck",
    "broadcast=chain",
    "broadcast=tree",
    "all_to_all=direct",
    "all_to_all=pairwise",
    "reduce=tree",
)
ROUNDS = {1 << 20: 15, 16 << 20: 5}
WARMUPS = 3


def call(group: Communicator, operation: str, buffers: list[np.ndarray], whole: np.ndarray) -> None:
    """`whole` is the tensor, `buffers` P blocks of it and P more."""
    ranks = group.size
    first, second = buffers[:ranks], buffers[ranks:]
    if operation == "all_reduce":
        group.all_reduce(whole, op="max")
    elif operation == "reduce":
        group.reduce(whole, op="max")
    elif operation == "broadcast":
        group.broadcast(whole)
    elif operation == "all_gather":
        group.all_gather(first[0], second)
    elif operation == "reduce_scatter":
        group.reduce_scatter(first, second[0], op="max")
    else:
        group.all_to_all(first, second)


def measure(group: Communicator, operation: str, size: int) -> list[float]:
    """Seconds a round, the slowest rank's."""
    whole = np.ones(size // 4, np.float32)
    buffers = [np.ones(size // 4 // group.size, np.float32) for _ in range(2 * group.size)]
    seconds = []
    for turn in range(WARMUPS + ROUNDS[size]):
        group.barrier()
        began = time.perf_counter()
        call(group, operation, buffers, whole)
        took = np.array([time.perf_counter() - began])
        group.all_reduce(took, op="max")
        if turn >= WARMUPS:
            seconds.append(float(took[0]))
    return seconds


def main(folder: str, cases: tuple[str, ...]) -> None:
    os.environ.pop("NETFOLD_SWITCH", None)  # a rack has a switch; this is about what hosts do without it
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for index, case in enumerate(cases):
        operation = case.partition("=")[0]
        options = Options(algorithm=case, interface=HOST_INTERFACE)
        with Communicator(FileStore(f"{folder}/{index}"), rank, size, options=options, join_timeout_s=20) as group:
            measured = group.group.links.network
            if rank == 0 and index == 0:
                print(f"link: {measured.text()}", flush=True)
            ideal: Links = replace(
                DEFAULT_LINKS,
                network=Link(measured.latency_s, RATE_BYTES_PER_S),
                reduce_bytes_per_s=float("inf"),
                message_s=0.0,
                crowding=0.0,
                restarts=0.0,
            )
            for tensor in SIZES:
                seconds = measure(group, operation, tensor)
                algorithm = group.group.table.choose(operation, tensor).algorithm
                limit = predict(operation, algorithm, tensor, Topology.apart(size), ideal)
                if rank == 0:
                    middle = statistics.median(seconds)
                    print(
                        f"{case:28} {algorithm:16} {tensor >> 20:3} MB  {units.seconds(middle):>8} "
                        f"({units.seconds(min(seconds))}..{units.seconds(max(seconds))})  "
                        f"limit {units.seconds(limit):>8}  {100 * (middle / limit - 1):+.1f}%",
                        flush=True,
                    )


if __name__ == "__main__":
    main(sys.argv[1], tuple(sys.argv[2:]) or CASES)
