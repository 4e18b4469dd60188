"""Measure the shares of a TCP flow and of a job on a switch on one link; as root:

    .venv/bin/python bench/shares.py [SECONDS]      # 48 a row; some six minutes

An emulated rack. All hosts add 16 MB of f32 through the switch without pause, and host 0 sends host 1 one TCP flow: it
shares one queue with the contributions of host 0, and one, of a megabyte and 4 ms, with the answers to host 1. Both
sides are counted where they arrive, from the fourth second on, in parts of 4 s. The job's rate is the tensor's bits.
Writes bench/results/shares.md.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from netfold.bench.machine import spoken
from netfold.rack import Rack
from netfold.rack.names import HOST_INTERFACE
from netfold.rack.processes import Process, exit_on_signals

SIZE = 16 << 20
PORT = 5555
SECONDS = 48.0
PART_S = 4.0
DEADLINE_S = 120.0
RESULT = Path(__file__).parent / "results" / "shares.md"
PLACES = (("200mbit", 4), ("200mbit", 8), ("1gbit", 4))
CONTROLS = ("cubic", "bbr")


def rank(folder: str) -> None:
    """Add until told to stop; rank 0 writes when each all_reduce ended, and the bytes so far."""
    from netfold import Communicator, FileStore, Options

    options = Options(interface=HOST_INTERFACE, algorithm="all_reduce=in_network", transport="tcp")
    mine, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    buffer = np.zeros(SIZE // 4, np.float32)
    with (
        Communicator(FileStore(f"{folder}/store"), mine, size, options=options, timeout_s=DEADLINE_S) as group,
        open(f"{folder}/rank{mine}", "w", buffering=1) as marks,
    ):
        operations = 0
        while not buffer[0]:
            buffer[:] = 1
            buffer[0] = mine == 0 and os.path.exists(f"{folder}/stop")
            group.all_reduce(buffer)
            assert (buffer[1:] == size).all()
            operations += 1
            marks.write(f"{time.monotonic()} {operations * SIZE}\n")


def receive(path: str) -> None:
    """One TCP connection to its end; when how many bytes had come."""
    with socket.create_server(("0.0.0.0", PORT)) as server, open(path, "w", buffering=1) as marks:
        stream, _ = server.accept()
        count, following = 0, 0.0
        while data := stream.recv(1 << 20):
            count += len(data)
            if (now := time.monotonic()) >= following:
                following = now + 0.1
                marks.write(f"{now} {count}\n")


def send(control: str, address: str, seconds: float) -> None:
    with socket.socket() as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        stream.connect((address, PORT))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stream.send(bytes(65536))


def rates(path: str, begin_s: float, parts: int) -> list[float]:
    """Bits a second in each part, from times and bytes so far; between two marks bytes come evenly."""
    marks = [tuple(map(float, line.split())) for line in Path(path).read_text().splitlines()]
    times, counts = [mark[0] for mark in marks], [mark[1] for mark in marks]

    def bytes_at(now: float) -> float:
        after = min(max(1, bisect(times, now)), len(times) - 1)
        share = (now - times[after - 1]) / (times[after] - times[after - 1])
        return counts[after - 1] + share * (counts[after] - counts[after - 1])

    edges = [bytes_at(begin_s + part * PART_S) for part in range(parts + 1)]
    return [8 * (later - earlier) / PART_S for earlier, later in pairwise(edges)]


def wait_for(ready: Callable[[], bool], processes: list[Process]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise SystemExit("bench/shares.py: a rank ended, or did not begin")
        time.sleep(0.1)


def measure(rate: str, hosts: int, control: str, seconds: float) -> tuple[float, list[float], list[float]]:
    """The job's rate alone, and by part TCP's and the job's."""
    script = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder, Rack(hosts, rate) as rack:
        rack.start_switch(lambda line: None)
        ranks = [rack.popen(host, [*script, "rank", folder]) for host in range(hosts)]
        first = Path(folder, "rank0")
        wait_for(lambda: first.exists() and len(first.read_text().splitlines()) > 1, ranks)
        alone_s = time.monotonic()
        time.sleep(PART_S)
        sink = rack.popen(1, [*script, "receive", f"{folder}/tcp"])
        time.sleep(1)
        began_s = time.monotonic()
        sender = rack.popen(0, [*script, "send", control, rack.address(1), str(seconds)])
        if sender.wait(seconds + DEADLINE_S) != 0 or sink.wait(DEADLINE_S) != 0:
            raise SystemExit("bench/shares.py: the TCP flow failed")
        Path(folder, "stop").touch()
        for process in ranks:
            process.wait(DEADLINE_S)
        parts = int(seconds / PART_S) - 1
        begin_s = began_s + PART_S
        (alone,) = rates(str(first), alone_s, 1)
        return alone, rates(f"{folder}/tcp", begin_s, parts), rates(str(first), begin_s, parts)


def main(seconds: float) -> None:
    load, rows = os.getloadavg()[0], []
    for rate, hosts in PLACES:
        for control in CONTROLS:
            alone, tcp, job = measure(rate, hosts, control, seconds)
            ratios = sorted(theirs / ours for theirs, ours in zip(tcp, job, strict=True))
            numbers = (alone, sum(tcp) / len(tcp), sum(job) / len(job))
            cells = " | ".join(f"{number / 1e6:.0f}" for number in numbers)
            rows.append(
                f"| {rate} | {hosts} | {control} | {cells} | {sum(tcp) / sum(job):.2f} | {ratios[0]:.2f} .. "
                f"{ratios[-1]:.2f} |"
            )
            print(rows[-1], flush=True)
    RESULT.write_text(
        "# Shares of a TCP flow and of a job on one link\n\n"
        f"`.venv/bin/python bench/shares.py`: a rack whose hosts add {SIZE >> 20} MB of f32 through the switch without "
        "pause, beside one TCP\nflow from host 0 to host 1. Mbit/s over "
        f"{seconds - PART_S:.0f} s, after {PART_S:.0f} s;\nthe last column is of parts of {PART_S:.0f} s.\n\n"
        "| links | hosts | TCP's control | the job alone | TCP | the job | TCP / job | in parts |\n"
        "|---|---|---|---|---|---|---|---|\n" + "\n".join(rows) + f"\n\n{spoken((load, os.getloadavg()[0]))}\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2])
    elif sys.argv[1:2] == ["receive"]:
        receive(sys.argv[2])
    elif sys.argv[1:2] == ["send"]:
        send(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        with exit_on_signals():
            main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
