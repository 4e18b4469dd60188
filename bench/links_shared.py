"""What shares the links of a switch and its workers: a second job that comes and goes, and a TCP flow. As root:

    .venv/bin/python bench/links_shared.py [CALLS [RATE [HOSTS [C ...]]]]      # 24 200mbit 4 1 4; some four minutes

A rack whose switch is a host behind a link of C times a worker's. Two jobs have a rank on every host each, and groups
that take `auto` and a ring; 16 MB of f32, every element checked. One job alone, both at once, the first alone again;
then beside a TCP flow from one host to another (the kernel's congestion control), which is counted where it arrives.
Times are the slowest rank's, medians of the second half of a series of calls, when the split has found its parts.
Writes bench/results/links_shared.md.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from told_ranks import Orders, ToldRanks, told_ranks

from netfold import Communicator, FileStore, Options
from netfold.bench.machine import spoken
from netfold.rack import Rack
from netfold.rack.link import parse_link
from netfold.rack.names import HOST_INTERFACE, host_address
from netfold.rack.processes import exit_on_signals

SIZE = 16 << 20
SIDES = ("auto", "ring")
RESULT = Path(__file__).parent / "results" / "links_shared.md"
DEADLINE_S = 900
PORT = 5999
LEAST_SUM = 0.95


def serve(folder: str) -> None:
    """A rank of one job: so many all_reduces of a side for each order."""
    orders = Orders(folder)
    tensor = np.empty(SIZE // 4, np.float32)
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    total = pattern * orders.size + sum(range(orders.size))
    for side in SIDES:
        Path(folder, side).mkdir(exist_ok=True)
    groups = {
        side: Communicator(
            FileStore(f"{folder}/{side}"),
            orders.rank,
            orders.size,
            options=Options(interface=HOST_INTERFACE, algorithm=side),
        )
        for side in SIDES
    }
    for order in orders:
        side, calls = order.split()
        took = []
        for _ in range(int(calls)):
            np.add(pattern, float(orders.rank), out=tensor)
            began = time.perf_counter()
            groups[side].all_reduce(tensor)
            took.append(time.perf_counter() - began)
            if not (tensor == total).all():
                raise SystemExit(f"rank {orders.rank}: {side} gave wrong sums")
        orders.answer({"took": took})
    for group in groups.values():
        group.close()


def flow(counts: str, to: str) -> None:
    """A TCP flow without end: to `to`, or, where that is empty, from whoever connects, its bytes kept in a file."""
    if to:
        with socket.create_connection((to, PORT), 10) as stream:
            while True:
                stream.sendall(bytes(1 << 16))
    with socket.create_server(("", PORT)) as server:
        stream, _ = server.accept()
        total, written = 0, 0.0
        while data := stream.recv(1 << 18):
            total += len(data)
            if time.monotonic() - written > 0.05:
                written = time.monotonic()
                Path(counts).write_text(str(total))


class Job:
    def __init__(self, rack: Rack, ranks: ToldRanks, hosts: int) -> None:
        self.ranks = ranks
        for host in range(hosts):
            rack.popen(host, ranks.argv(__file__), {"NETFOLD_INTERFACE": HOST_INTERFACE})
        ranks.wait()

    def run(self, side: str, calls: int) -> float:
        """Seconds of a call."""
        answers = [answer["took"] for answer in self.ranks.tell(f"{side} {calls}")]
        slowest = [max(times) for times in zip(*answers, strict=True)]
        return statistics.median(slowest[calls // 2 :])


@contextmanager
def traffic(rack: Rack, folder: str) -> Iterator[Path]:
    """A flow from the first host to the last; where its bytes are counted."""
    counts = Path(folder, "counts")
    argv = [sys.executable, os.path.abspath(__file__), "flow", str(counts)]
    ends = [rack.popen(rack.hosts - 1, [*argv, ""], {})]
    time.sleep(1)
    ends.append(rack.popen(0, [*argv, host_address(rack.hosts - 1)], {}))
    while not counts.exists():
        time.sleep(0.1)
    try:
        yield counts
    finally:
        for end in reversed(ends):
            end.kill()
            end.wait()


def measure(rate: str, hosts: int, c: float, calls: int) -> dict[tuple[str, str], Any]:
    of_switch = f"{parse_link(rate, '0%').rate_bits * c / 1e6:g}mbit"
    found: dict[tuple[str, str], Any] = {}
    with (
        told_ranks(hosts, DEADLINE_S) as first,
        told_ranks(hosts, DEADLINE_S) as second,
        Rack(hosts, rate, switch_rate=of_switch) as rack,
        ThreadPoolExecutor(2) as pool,
    ):
        rack.start_switch(lambda line: None)
        jobs = [Job(rack, first, hosts), Job(rack, second, hosts)]
        for side in SIDES:
            found[side, "alone"] = jobs[0].run(side, calls)
            found[side, "both"] = list(pool.map(Job.run, jobs, [side] * 2, [calls] * 2))
            found[side, "again"] = jobs[0].run(side, calls)
        for side in SIDES:
            with traffic(rack, first.folder) as counts:
                began, before = time.monotonic(), int(counts.read_text())
                found[side, "beside tcp"] = jobs[0].run(side, calls)
                found[side, "tcp"] = (int(counts.read_text()) - before) * 8 / (time.monotonic() - began) / 1e6
    return found


def render(found: dict[float, dict[tuple[str, str], Any]], what: str, load: tuple[float, float]) -> str:
    lines = [
        "# What shares a switch's link",
        "",
        f"`bench/links_shared.py`: {what}; all_reduce of {SIZE >> 20} MB of f32; c: the switch's link over a worker's. "
        "The sum: of what both jobs do at once, over what one does alone. TCP's rate is that of one flow from the "
        "first host to the last, beside the job.",
        "",
        "| c | | one job, ms | both at once, ms | sum | the first alone again, ms | beside TCP, ms | TCP, Mbit/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for c, of in found.items():
        for side in SIDES:
            both = of[side, "both"]
            total = sum(of[side, "alone"] / each for each in both)
            lines.append(
                f"| {c:g} | {side} | {of[side, 'alone'] * 1e3:.0f} | {both[0] * 1e3:.0f} and {both[1] * 1e3:.0f} "
                f"| {total:.2f} | {of[side, 'again'] * 1e3:.0f} | {of[side, 'beside tcp'] * 1e3:.0f} "
                f"| {of[side, 'tcp']:.0f} |"
            )
            if side == "auto":
                verdict = "met" if total >= LEAST_SUM else "missed"
                verdicts.append(f"c = {c:g}: the sum of two jobs at least {LEAST_SUM}: {verdict}")
    return "\n".join([*lines, "", "; ".join(verdicts) + ".", "", spoken(load)]) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(arguments[1])
    if arguments[:1] == ["flow"]:
        return flow(*arguments[1:])
    calls, rate, hosts = [*arguments[:3], *("24", "200mbit", "4")[len(arguments[:3]) :]]
    load = os.getloadavg()[0]
    with exit_on_signals():
        found = {float(c): measure(rate, int(hosts), float(c), int(calls)) for c in arguments[3:] or ("1", "4")}
    what = f"{hosts} hosts at {rate}, {calls} calls a series"
    text = render(found, what, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
