"""What a job costs another on one switch: a job of two ranks, alone and beside others that behave badly.

    .venv/bin/python bench/jobs_apart.py [ROUNDS] [CASE ...]

One group, made once, adds the same tensors in every case; cases take turns, round by round, in a new order each time.
On one machine a neighbour takes cores as well as the switch: `a flood to nobody` sends the same packets to a port where
nobody reads, so what a flood costs the switch is its time over that one's. Every sum is checked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold._native import protocol

COUNT = 1 << 20  # f32: 4 MB
TURNS = 8
WARMUPS = 3
ROUNDS = 9
# linux/udp.h; the standard library has no name for it.
UDP_SEGMENT = 103
PACKET_BYTES = protocol.ETHERNET_PAYLOAD_BYTES + protocol.HEADER_BYTES
SEGMENTS = 40

_SPAWN = multiprocessing.get_context("spawn")


def measured(rank: int, endpoint: str, folder: str, orders: Connection) -> None:
    """A rank of the job that is measured: for each order, the seconds of each all_reduce."""
    whole = np.arange(COUNT, dtype=np.float32) % 1000
    with Communicator(FileStore(folder), rank, 2, options=Options(switch=endpoint), timeout_s=60) as group:
        orders.send(None)
        while orders.recv():
            seconds = []
            for turn in range(WARMUPS + TURNS):
                buffer = whole + rank
                group.barrier()
                began = time.monotonic()
                group.all_reduce(buffer)
                took = time.monotonic() - began
                assert (buffer == 2 * whole + 1).all()
                if turn >= WARMUPS:
                    seconds.append(took)
            orders.send(seconds)


def neighbour(rank: int, endpoint: str, folder: str, orders: Connection, restarts: bool) -> None:
    """A rank of another job, which adds as fast as it can, or leaves and joins again for every addition."""
    buffer = np.ones(COUNT if not restarts else 1000, np.float32)
    for life in range(1 << 20):
        with Communicator(
            FileStore(f"{folder}/{life}"), rank, 2, options=Options(switch=endpoint), timeout_s=60
        ) as group:
            if life == 0:
                orders.send(None)
            while True:
                group.all_reduce(buffer, op="max")
                assert buffer[-1] == 1
                if restarts:
                    break


def idle(rank: int, endpoint: str, folder: str, orders: Connection) -> None:
    with Communicator(FileStore(folder), rank, 2, options=Options(switch=endpoint), timeout_s=60) as group:
        group.barrier()
        orders.send(None)
        orders.recv()


def flood(port: int, header: bytes, orders: Connection) -> None:
    """Packets that look like a job's, as fast as one core sends them, 40 a call."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stream:
        stream.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, PACKET_BYTES)
        packets = (header + os.urandom(PACKET_BYTES - len(header))) * SEGMENTS
        orders.send(None)
        while True:
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                stream.sendto(packets, ("127.0.0.1", port))


@contextlib.contextmanager
def running(function: Callable[..., None], *calls: tuple[Any, ...]) -> Iterator[list[Connection]]:
    """The function in a process a call, once all have said that they are ready; killed at the end."""
    ends, processes = [], []
    try:
        for call in calls:
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=function, args=(*call[:3], theirs, *call[3:]), daemon=True)
            process.start()
            processes.append(process)
            ends.append(ours)
        for end in ends:
            if not end.poll(60):
                raise RuntimeError(f"{function.__name__} did not come up")
            end.recv()
        yield ends
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def flood_from(port: int, _: str, __: str, orders: Connection) -> None:
    header = b"NF\x01\x00" + bytes(44)
    flood(port, header, orders)


@contextlib.contextmanager
def switch(log: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", "--drain-s", "0"]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, switch(Path(folder) / "log") as endpoint:

        def ports() -> list[int]:
            return [
                int(port) for port in re.findall(r"event=started .* port=(\d+)", (Path(folder) / "log").read_text())
            ]

        ours = [(rank, endpoint, f"{folder}/a") for rank in range(2)]
        others = [(rank, endpoint, f"{folder}/b") for rank in range(2)]
        with (
            running(measured, *ours) as job,
            running(idle, *others),
            socket.create_server(("127.0.0.1", 0)) as nobody,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink,
        ):
            sink.bind(("127.0.0.1", nobody.getsockname()[1]))
            own, other = ports()

            def one() -> float:
                for end in job:
                    end.send(True)
                found = [end.recv() for end in job]
                return statistics.median(max(pair) for pair in zip(*found, strict=True))

            def fresh() -> str:
                return tempfile.mkdtemp(dir=folder)

            def beside(case: str) -> contextlib.AbstractContextManager[Any]:
                if case == "alone":
                    return contextlib.nullcontext()
                if case in ("another job that adds all the time", "another job that restarts all the time"):
                    where, restarts = fresh(), "restarts" in case
                    return running(neighbour, *[(rank, endpoint, where, restarts) for rank in range(2)])
                port = {"to nobody": sink.getsockname()[1], "at another job's port": other, "at its own port": own}
                return running(flood_from, (port[case.removeprefix("a flood ")], "", ""))

            cases = sys.argv[2:] or [
                "alone",
                "a flood to nobody",
                "a flood at another job's port",
                "a flood at its own port",
                "another job that restarts all the time",
                "another job that adds all the time",
            ]
            for _ in range(rounds):
                for case in random.sample(cases, len(cases)):
                    with beside(case):
                        times.setdefault(case, []).append(one())
            for end in job:
                end.send(False)
    print("| beside | ms, median | lowest..highest | over alone, paired by round |")
    print("|---|---|---|---|")
    for case in cases:
        ratios = [mine / alone for mine, alone in zip(times[case], times["alone"], strict=True)]
        low, high = min(times[case]) * 1e3, max(times[case]) * 1e3
        middle = statistics.median(times[case]) * 1e3
        print(f"| {case} | {middle:.1f} | {low:.1f}..{high:.1f} | {statistics.median(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
