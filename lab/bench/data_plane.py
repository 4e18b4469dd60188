"""The switch's data plane alone: contributions a CPU-second of one thread, and what a second thread adds.

    .venv/bin/python lab/bench/data_plane.py [--python PYTHON]      # two cores, no root needed

PYTHON: the interpreter of another tree, whose data plane takes turns with this tree's.

In time slices, because this machine's cores must not be shared with the workers: a process with one plane, or two on a
core each, is stopped (SIGSTOP) while this process writes a whole window of every worker's contributions into the
planes' sockets over loopback, as trains of 64 KB. Then the planes' process goes on, until its threads' clocks stand
still. A second of a thread: that it ran or waited for its core. Each plane has a job of its own, as the switch's
threads have where NETFOLD_SWITCH has the address twice. Trains of different workers are mixed by a seed; a worker's own
stay in order. Nobody reads the results: they are made, sent and dropped by full sockets. The bench checks that every
contribution counted.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import driver
import numpy as np
from driver import Network, Place, Rank, Ranks, cell, open_network, start_ranks, take_turns

from netfold._native import dataplane, protocol
from netfold_lab.bench.spread import paired_ratios, spread

WINDOW = 2048  # chunks: a slice of some 20 ms
PAYLOAD = protocol.ETHERNET_PAYLOAD_BYTES
PACKET = protocol.HEADER_BYTES + PAYLOAD
TRAIN = 65_000 // PACKET  # packets
UDP_SEGMENT, UDP_GRO = 103, 104  # linux/udp.h
JOB = {"job": 1, "epoch": 1, "incarnation": 1}
DTYPES = {"f32": 0, "bf16": 3, "i32": 6}
THIS, OTHER = "this tree", "the other tree"
GOAL_TIMES, GOAL_TWO = 1.3, 1.7
POLL_S = 0.02  # rarely: this process is on one of the cores
DEADLINE_S = 10.0


def serve(me: Rank, planes: int, workers: int) -> None:
    """The process with the planes. Orders: "ports", "threads", "begin" with the workers' ports, and "read"."""
    made, threads = [], []
    for cpu in range(planes):
        before = set(os.listdir("/proc/self/task"))
        made.append(dataplane.DataPlane())
        (thread,) = (int(task) for task in set(os.listdir("/proc/self/task")) - before)
        os.sched_setaffinity(thread, {cpu})
        threads.append(thread)
    nonces = [worker + 1 for worker in range(workers)]
    buffer = 4 * workers * WINDOW * PACKET
    ports = [plane.open(1, 1, "127.0.0.1", nonces, [], buffer) for plane in made]

    def connect(ports: list[list[int]]) -> None:
        for plane, of_plane in zip(made, ports, strict=True):
            for worker, port in enumerate(of_plane):
                plane.set_worker_address(1, worker, "127.0.0.1", port)

    def begin() -> None:
        for plane in made:
            plane.begin(**JOB, workers=workers, window=WINDOW, payload_bytes=PAYLOAD, keys=None)

    orders: dict[str, Callable[..., object]] = {
        "ports": lambda: ports,
        "threads": lambda: threads,
        "connect": connect,
        "begin": begin,
        "read": lambda: [plane.read()[1][1] for plane in made],
    }
    me.serve(lambda order, *arguments: orders[order](*arguments))


class Planes:
    """The planes of one process, and the sockets of their workers."""

    def __init__(self, ranks: Ranks, workers: int, dtype: str) -> None:
        self.ranks, self.pid = ranks, next(iter(ranks.processes.values())).pid
        self.workers, self.chunk, self.contributions = workers, 0, 0
        (ports,), (self.threads,) = ranks.ask("ports"), ranks.ask("threads")
        self.sockets = [[self._socket(port) for _ in range(workers)] for port in ports]
        ranks.ask("connect", [[each.getsockname()[1] for each in row] for row in self.sockets])
        count = PAYLOAD // np.dtype("u2" if dtype == "bf16" else "u4").itemsize
        self.packets = []
        for worker in range(workers):
            header = protocol.Header()
            fields = {**JOB, "operation": 1, "elements": count, "worker": worker, "count": count, "wire": DTYPES[dtype]}
            for name, value in fields.items():
                setattr(header, name, value)
            packet = np.frombuffer(header.pack() + bytes(PAYLOAD), np.uint8)
            self.packets.append(np.tile(packet, (WINDOW, 1)))
            header.flags, header.packet_number, header.count = protocol.FLAGS["hello"], worker + 1, 0
            for row in self.sockets:
                row[worker].send(header.pack() + bytes(PAYLOAD))
        time.sleep(0.1)
        ranks.ask("begin")

    def slice(self, random: np.random.Generator) -> dict[str, float]:
        """A window of every worker at every plane: seconds until all planes are done, and of their threads' time."""
        os.kill(self.pid, signal.SIGSTOP)
        self._fill(random)
        before, deadline = self._clocks(), time.monotonic() + DEADLINE_S
        os.kill(self.pid, signal.SIGCONT)
        expected = len(self.sockets) * self.workers * WINDOW
        self.contributions += expected
        counted = 0
        while counted < self.contributions:
            after = self._stand_still()
            counted = sum(of["contributions"] for of in self.ranks.ask("read")[0])
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.contributions - counted} packets of {expected} were lost: run it as root")
        bits = expected * PAYLOAD * 8 / 1e9
        ran, took = zip(*((a[0] - b[0], sum(a) - sum(b)) for a, b in zip(after, before, strict=True)), strict=True)
        return {"gbit_a_cpu_s": bits / sum(ran) * 1e9, "gbit_a_s": bits / max(took) * 1e9}

    def _stand_still(self) -> list[tuple[int, int]]:
        """The threads' clocks once they stand still."""
        last = self._clocks()
        while True:
            time.sleep(POLL_S)
            now = self._clocks()
            if now == last:
                return last
            last = now

    def _fill(self, random: np.random.Generator) -> None:
        chunks = np.arange(self.chunk, self.chunk + WINDOW, dtype=">u8")
        for packets in self.packets:
            packets[:, 16:24] = chunks.view(np.uint8).reshape(-1, 8)
            packets[:, 24:32] = (chunks + 1).astype(">u8").view(np.uint8).reshape(-1, 8)
        self.chunk += WINDOW
        trains = -(-WINDOW // TRAIN)
        order = random.permutation(np.repeat(np.arange(self.workers), trains))
        ancillary = [(socket.SOL_UDP, UDP_SEGMENT, PACKET.to_bytes(2, "little"))]
        for row in self.sockets:
            sent = [0] * self.workers
            for worker in order:
                some = self.packets[worker][sent[worker] : sent[worker] + TRAIN]
                row[worker].sendmsg([some.reshape(-1)], ancillary)
                sent[worker] += TRAIN

    def _clocks(self) -> list[tuple[int, int]]:
        """By plane, nanoseconds of its thread: on a core, and waiting for a core."""
        files = (Path(f"/proc/{self.pid}/task/{thread}/schedstat") for thread in self.threads)
        return [(int(ran), int(waited)) for ran, waited, _ in (file.read_text().split() for file in files)]

    @staticmethod
    def _socket(port: int) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_UDP, UDP_GRO, 1)  # as workers do; else the switch's core would cut up all results
        made.bind(("127.0.0.1", 0))
        made.connect(("127.0.0.1", port))
        return made


Case = tuple[str, str, int]  # a tree, a dtype, planes


@contextmanager
def start_planes(network: Network, python: str, planes: int, workers: int, dtype: str) -> Iterator[Planes]:
    with start_ranks(network, serve, planes, workers, hosts=[0], python=python) as ranks:
        made = Planes(ranks, workers, dtype)
        yield made
        for row in made.sockets:
            for each in row:
                each.close()


def measure(rounds: int, workers: int, pythons: dict[str, str]) -> dict[Case, list[dict[str, float]]]:
    random = np.random.default_rng(1)
    rows: dict[Case, list[dict[str, float]]] = {}
    with open_network(Place(1)) as network:
        for dtype in DTYPES:
            with ExitStack() as stack:
                made = {
                    (name, dtype, planes): stack.enter_context(start_planes(network, python, planes, workers, dtype))
                    for name, python in pythons.items()
                    for planes in (1, 2)
                }
                rows |= take_turns(list(made), rounds, lambda case: made[case].slice(random), warmups=2)  # noqa: B023
    return rows


def data_plane(rounds: int = 15, workers: int = 8, python: str = "") -> str:
    """The switch's data plane alone"""
    pythons = {THIS: sys.executable, **({OTHER: python} if python else {})}
    found = measure(rounds, workers, pythons)

    def of(name: str, dtype: str, planes: int, what: str) -> list[float]:
        return [row[what] for row in found[name, dtype, planes]]

    rows = []
    for name, dtype, planes in found:
        if planes == 1:
            one, two = (of(name, dtype, count, "gbit_a_s") for count in (1, 2))
            cpu = of(name, dtype, 1, "gbit_a_cpu_s")
            rows.append([name, dtype, *(cell(values) for values in (cpu, one, two, paired_ratios(two, one)))])
    goals = [f"Goal: two threads {GOAL_TWO} times one, in this tree."]
    for dtype in DTYPES if python else ():
        times = paired_ratios(*(of(name, dtype, 1, "gbit_a_cpu_s") for name in (THIS, OTHER)))
        verdict = "met" if spread(times).median >= GOAL_TIMES else "missed"
        goals.append(f"- {dtype}: {cell(times)} times the other tree's per CPU-second; goal {GOAL_TIMES}: {verdict}")
    head = "tree | wire | one thread, a CPU-second | one thread, a second | two threads, a second | two over one"
    return f"""{workers} workers, windows of {WINDOW} packets of {PAYLOAD} bytes each, over loopback, in time slices:
nothing else runs while the planes do. Contributions in Gbit/s: medians (5% .. 95%).

{driver.table(head, rows)}

{chr(10).join(goals)}"""


if __name__ == "__main__":
    driver.run(data_plane)
