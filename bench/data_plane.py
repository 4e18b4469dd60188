"""The switch's data plane alone: contributions a CPU-second of one thread, and what a second thread adds.

    .venv/bin/python bench/data_plane.py [ROUNDS] [WORKERS] [PYTHON]      # 15 8; two cores, no root needed

PYTHON: of another tree, whose data plane takes turns with this one's.

In time slices, since this machine's cores must not be shared with the workers: a process with one plane, or two on a
core each, is stopped (SIGSTOP) while this one writes a whole window of every worker's contributions into the planes'
sockets over loopback, as trains of 64 KB; then it goes on, until its threads' clocks stand still. A second of a
thread: that it ran or waited for its core. Each plane has a job of its own, as the switch's threads have where
NETFOLD_SWITCH has the address twice. Trains of different workers are mixed by a seed; a worker's own stay in order.
Nobody reads the results: they are made, sent and dropped by full sockets. That every contribution counted is checked.
Writes bench/results/data_plane.md.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from netfold._native import dataplane, protocol
from netfold.bench.machine import spoken
from netfold.bench.spread import paired_ratios, spread

RESULT = Path(__file__).parent / "results" / "data_plane.md"
WINDOW = 2048  # chunks: a slice of some 20 ms
PAYLOAD = protocol.ETHERNET_PAYLOAD_BYTES
PACKET = protocol.HEADER_BYTES + PAYLOAD
TRAIN = 65_000 // PACKET  # packets
UDP_SEGMENT, UDP_GRO = 103, 104  # linux/udp.h
LIFE = {"job": 1, "epoch": 1, "incarnation": 1}
DTYPES = {"f32": 0, "bf16": 3, "i32": 6}
THIS, OTHER = "this tree", "the other tree"
GOAL_TIMES, GOAL_TWO = 1.3, 1.7
POLL_S = 0.02  # rarely: this process is on one of the cores
DEADLINE_S = 10.0


def serve(planes: int, workers: int) -> None:
    """The process with the planes: says where they are, begins, and says what they counted when it is asked."""
    made, threads = [], []
    for cpu in range(planes):
        before = set(os.listdir("/proc/self/task"))
        made.append(dataplane.DataPlane())
        (thread,) = (int(task) for task in set(os.listdir("/proc/self/task")) - before)
        os.sched_setaffinity(thread, {cpu})
        threads.append(thread)
    nonces = [worker + 1 for worker in range(workers)]
    buffer = 4 * workers * WINDOW * PACKET
    print(json.dumps({"ports": [plane.open(1, 1, "127.0.0.1", nonces, [], buffer) for plane in made]}), flush=True)
    for plane, ports in zip(made, json.loads(input()), strict=True):
        for worker, port in enumerate(ports):
            plane.set_worker_address(1, worker, "127.0.0.1", port)
    print(json.dumps({"threads": threads}), flush=True)
    input()
    for plane in made:
        plane.begin(**LIFE, workers=workers, window=WINDOW, payload_bytes=PAYLOAD, keys=None)
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps([plane.read()[1][1] for plane in made]), flush=True)


class Planes:
    """So many of them in a process of `python`, and the sockets of their workers."""

    def __init__(self, python: str, planes: int, workers: int, dtype: str) -> None:
        argv = [python, os.path.abspath(__file__), "serve", str(planes), str(workers)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.workers, self.chunk, self.contributions = workers, 0, 0
        ports = self._answer()["ports"]
        self.sockets = [[self._socket(port) for _ in range(workers)] for port in ports]
        own = [[each.getsockname()[1] for each in row] for row in self.sockets]
        self.threads = self._ask(own)["threads"]
        count = PAYLOAD // np.dtype("u2" if dtype == "bf16" else "u4").itemsize
        self.packets = []
        for worker in range(workers):
            header = protocol.Header()
            said = {**LIFE, "operation": 1, "elements": count, "worker": worker, "count": count}
            for name, value in {**said, "wire": DTYPES[dtype]}.items():
                setattr(header, name, value)
            packet = np.frombuffer(header.pack() + bytes(PAYLOAD), np.uint8)
            self.packets.append(np.tile(packet, (WINDOW, 1)))
            header.flags, header.packet_number, header.count = protocol.FLAGS["hello"], worker + 1, 0
            for row in self.sockets:
                row[worker].send(header.pack() + bytes(PAYLOAD))
        time.sleep(0.1)
        self._ask("begin")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for row in self.sockets:
            for each in row:
                each.close()

    def slice(self, random: np.random.Generator) -> dict[str, float]:
        """A window of every worker at every plane: seconds until all planes are done, and of their threads' time."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self._fill(random)
        before, deadline = self._clocks(), time.monotonic() + DEADLINE_S
        os.kill(self.process.pid, signal.SIGCONT)
        expected = len(self.sockets) * self.workers * WINDOW
        self.contributions += expected
        counted = 0
        while counted < self.contributions:
            after = self._stand_still()
            counted = sum(of["contributions"] for of in self._ask("read"))
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.contributions - counted} packets of {expected} were lost: run it as root")
        bits = expected * PAYLOAD * 8 / 1e9
        ran, took = zip(*((a[0] - b[0], sum(a) - sum(b)) for a, b in zip(after, before, strict=True)), strict=True)
        return {"gbit_a_cpu_s": bits / sum(ran) * 1e9, "gbit_a_s": bits / max(took) * 1e9}

    def _stand_still(self) -> list[tuple[int, int]]:
        """The threads' clocks when they move no more."""
        seen = self._clocks()
        while True:
            time.sleep(POLL_S)
            now = self._clocks()
            if now == seen:
                return seen
            seen = now

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
        """Of each plane's thread, in nanoseconds: on a core, and waiting for one."""
        files = (Path(f"/proc/{self.process.pid}/task/{thread}/schedstat") for thread in self.threads)
        return [(int(ran), int(waited)) for ran, waited, _ in (file.read_text().split() for file in files)]

    @staticmethod
    def _socket(port: int) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_UDP, UDP_GRO, 1)  # as workers do: else the switch's core would cut up all results
        made.bind(("127.0.0.1", 0))
        made.connect(("127.0.0.1", port))
        return made

    def _ask(self, what: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


Case = tuple[str, str, int]  # a tree, a dtype, planes


@contextmanager
def planes_of(python: str, planes: int, workers: int, dtype: str) -> Iterator[Planes]:
    made = Planes(python, planes, workers, dtype)
    try:
        yield made
    finally:
        made.close()


def measure(rounds: int, workers: int, pythons: dict[str, str]) -> dict[Case, list[dict[str, float]]]:
    random = np.random.default_rng(1)
    rows: dict[Case, list[dict[str, float]]] = {}
    for dtype in DTYPES:
        with ExitStack() as stack:
            made = {
                (name, dtype, planes): stack.enter_context(planes_of(python, planes, workers, dtype))
                for name, python in pythons.items()
                for planes in (1, 2)
            }
            for turn in range(-2, rounds):
                for case in list(made)[:: 1 if turn % 2 else -1]:
                    row = made[case].slice(random)
                    if turn >= 0:
                        rows.setdefault(case, []).append(row)
    return rows


def render(rows: dict[Case, list[dict[str, float]]], workers: int, load: tuple[float, float]) -> str:
    lines = [
        "# The switch's data plane alone",
        "",
        f"`bench/data_plane.py`: {workers} workers, windows of {WINDOW} packets of {PAYLOAD} bytes each, over "
        "loopback, in time slices: nothing else runs while the planes do. Contributions in Gbit/s: medians, 5% .. 95%.",
        "",
        "| tree | wire | one thread, a CPU-second | one thread, a second | two threads, a second | two over one |",
        "|---|---|---|---|---|---|",
    ]

    def of(case: Case, what: str) -> list[float]:
        return [row[what] for row in rows[case]]

    def words(values: list[float]) -> str:
        found = spread(values)
        return f"{found.median:.2f}, {found.p5:.2f} .. {found.p95:.2f}"

    for name, dtype, planes in rows:
        if planes == 2:
            continue
        one, two = (name, dtype, 1), (name, dtype, 2)
        lines.append(
            f"| {name} | {dtype} | {words(of(one, 'gbit_a_cpu_s'))} | {words(of(one, 'gbit_a_s'))} "
            f"| {words(of(two, 'gbit_a_s'))} | {words(paired_ratios(of(two, 'gbit_a_s'), of(one, 'gbit_a_s')))} |"
        )
    lines += ["", f"Goal: two threads {GOAL_TWO} times one, in this tree."]
    for dtype in DTYPES if (OTHER, "f32", 1) in rows else ():
        times = paired_ratios(*(of((name, dtype, 1), "gbit_a_cpu_s") for name in (THIS, OTHER)))
        verdict = "met" if spread(times).median >= GOAL_TIMES else "missed"
        lines.append(f"- {dtype}: {words(times)} times the other tree's a CPU-second; goal {GOAL_TIMES}: {verdict}")
    slices = len(next(iter(rows.values())))
    lines += ["", f"{slices} slices each, in turns; {spoken(load)}"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["serve"]:
        return serve(int(arguments[1]), int(arguments[2]))
    pythons = {THIS: sys.executable, **({OTHER: arguments.pop(2)} if len(arguments) > 2 else {})}
    rounds, workers = (int(given) for given in [*arguments, *("15", "8")[len(arguments) :]])
    load = os.getloadavg()[0]
    text = render(measure(rounds, workers, pythons), workers, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
