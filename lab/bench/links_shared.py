"""Other traffic on the links of a switch and its workers: a second job that comes and goes, and a TCP flow. As root:

    .venv/bin/python lab/bench/links_shared.py links-shared      # some four minutes
    .venv/bin/python lab/bench/links_shared.py shares            # some six minutes

Jobs have a rank on every host and add 16 MB of f32, every element checked. A TCP flow is counted where it arrives.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import driver
import numpy as np
from driver import Network, Place, Rank, Ranks, open_network, start_ranks

from netfold_lab.bench.spread import paired_ratios
from netfold_lab.rack.link import parse_link

SIZE = 16 << 20
SIDES = {"auto": "auto", "ring": "ring", "switch": "all_reduce=in_network"}
PORT = 5999
LEAST_SUM = 0.95
PART_S = 4.0
PLACES = (("200mbit", 4), ("200mbit", 8), ("1gbit", 4))
CONTROLS = ("cubic", "bbr")

Marks = list[tuple[float, int]]
"""Moments of the monotonic clock, and the bytes that had come by then."""


def add(me: Rank, sides: Sequence[str]) -> None:
    """A rank of a job, with a group for each side. An order is a run of all_reduces by one side."""
    tensor = np.empty(SIZE // 4, np.float32)
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    total = pattern * me.size + sum(range(me.size))
    groups = {side: me.communicator(side, algorithm=SIDES[side], transport="tcp") for side in sides}

    def run(side: str, calls: int, seconds: float) -> tuple[list[float], Marks]:
        """Add `calls` times, or until rank 0 has added for `seconds`: what each call took, and when each ended."""
        took: list[float] = []
        marks = [(time.monotonic(), 0)]
        over = False
        while not over:
            np.add(pattern, float(me.rank), out=tensor)
            # Every rank reads in the last sum whether rank 0 asks for the end.
            tensor[0] = me.rank == 0 and (len(took) + 1 == calls or time.monotonic() - marks[0][0] > seconds)
            began = time.perf_counter()
            groups[side].all_reduce(tensor)
            took.append(time.perf_counter() - began)
            marks.append((time.monotonic(), len(took) * SIZE))
            over = bool(tensor[0])
            if not (tensor[1:] == total[1:]).all():
                raise SystemExit(f"rank {me.rank}: {side} gave wrong sums")
        return took, marks

    me.serve(run)
    for group in groups.values():
        group.close()


def receive(me: Rank) -> None:
    """The end of a TCP flow. An order asks for the bytes that have come, by time."""
    server = socket.create_server(("", PORT))
    marks: Marks = []

    def read() -> None:
        stream, _ = server.accept()
        total, due = 0, 0.0
        while data := stream.recv(1 << 18):
            total += len(data)
            if (now := time.monotonic()) > due:
                due = now + 0.05
                marks.append((now, total))

    threading.Thread(target=read, daemon=True).start()
    me.serve(lambda: marks)


def send(me: Rank, address: str, control: str) -> None:
    """The beginning of a TCP flow, which ends with the process. control: congestion control; "": the kernel's
    default."""

    def write() -> None:
        with socket.socket() as stream:
            if control:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            stream.connect((address, PORT))
            while True:
                stream.sendall(bytes(1 << 16))

    threading.Thread(target=write, daemon=True).start()
    me.serve(lambda: None)


@contextmanager
def tcp_flow(network: Network, source: int, sink: int, control: str = "") -> Iterator[Ranks]:
    """A flow between two hosts; `ask()` of what is yielded returns the marks of its bytes."""
    assert network.rack is not None
    with (
        start_ranks(network, receive, hosts=[sink]) as receiver,
        start_ranks(network, send, network.rack.address(sink), control, hosts=[source]) as sender,
    ):
        while not receiver.ask()[0]:
            sender.ask()
            time.sleep(0.1)
        yield receiver


def rates(marks: Marks, edges: Sequence[float]) -> list[float]:
    """Bits a second between each two moments of `edges`. Bytes come evenly between two marks."""
    times, counts = zip(*marks, strict=True)
    return [float(each) for each in 8 * np.diff(np.interp(edges, times, counts)) / np.diff(edges)]


def seconds_of(job: Ranks, side: str, calls: int) -> float:
    """The median of the second half of a series of calls, when the split has found its parts; the slowest rank's."""
    return statistics.median(driver.slowest(took for took, _ in job.ask(side, calls, float("inf")))[calls // 2 :])


def beside_each_other(rate: str, hosts: int, c: float, calls: int) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    sides = ("auto", "ring")
    switch_rate = f"{parse_link(rate).rate_bits * c / 1e6:g}mbit"
    with (
        open_network(Place(hosts, rate, switch=True, switch_rate=switch_rate)) as network,
        start_ranks(network, add, sides) as first,
        start_ranks(network, add, sides) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        for side in sides:
            found[side, "alone"] = seconds_of(first, side, calls)
            found[side, "both"] = list(pool.map(lambda job, side=side: seconds_of(job, side, calls), (first, second)))
            found[side, "again"] = seconds_of(first, side, calls)
        for side in sides:
            with tcp_flow(network, 0, hosts - 1) as flow:
                began = time.monotonic()
                found[side, "beside tcp"] = seconds_of(first, side, calls)
                ended = time.monotonic()
                (found[side, "tcp"],) = rates(flow.ask()[0], (began, ended))
    return found


def links_shared(calls: int = 24, rate: str = "200mbit", hosts: int = 4, cs: str = "1,4") -> str:
    """Traffic that shares a switch's link."""
    rows, verdicts = [], []
    for c in map(float, cs.split(",")):
        of = beside_each_other(rate, hosts, c, calls)
        for side in ("auto", "ring"):
            both = of[side, "both"]
            total = sum(of[side, "alone"] / each for each in both)
            alone, again, beside = (f"{of[side, when] * 1e3:.0f}" for when in ("alone", "again", "beside tcp"))
            both_ms = f"{both[0] * 1e3:.0f} and {both[1] * 1e3:.0f}"
            rows.append([f"{c:g}", side, alone, both_ms, f"{total:.2f}", again, beside, f"{of[side, 'tcp'] / 1e6:.0f}"])
            if side == "auto":
                verdict = "met" if total >= LEAST_SUM else "missed"
                verdicts.append(f"c = {c:g}: the sum of two jobs at least {LEAST_SUM}: {verdict}")
    head = "c | | one job, ms | both at once, ms | sum | the first alone again, ms | beside TCP, ms | TCP, Mbit/s"
    return f"""all_reduce of {SIZE >> 20} MB of f32, the slowest rank's median of the second half of a series of calls;
c: the switch's link over a worker's. The sum: of what both jobs do at once, over what one does alone. The TCP flow goes
from the first host to the last, by the kernel's congestion control.

{driver.table(head, rows)}

{"; ".join(verdicts)}."""


def shares(seconds: float = 48.0) -> str:
    """Shares of a TCP flow and of a job on one link."""
    rows = []
    parts = int(seconds / PART_S) - 1
    for rate, hosts in PLACES:
        for control in CONTROLS:
            with (
                open_network(Place(hosts, rate, switch=True)) as network,
                start_ranks(network, add, ("switch",)) as job,
            ):
                # In the first second the job warms up.
                marks = job.ask("switch", 0, 1 + PART_S)[0][1]
                (alone,) = rates(marks, (marks[-1][0] - PART_S, marks[-1][0]))
                with tcp_flow(network, 0, 1, control) as flow:
                    began = time.monotonic()
                    marks = job.ask("switch", 0, seconds)[0][1]
                    edges = [began + part * PART_S for part in range(1, parts + 2)]
                    tcp, of_job = rates(flow.ask()[0], edges), rates(marks, edges)
            ratios = sorted(paired_ratios(tcp, of_job))
            numbers = (alone, statistics.fmean(tcp), statistics.fmean(of_job))
            cells = [f"{number / 1e6:.0f}" for number in numbers]
            in_parts = f"{ratios[0]:.2f} .. {ratios[-1]:.2f}"
            rows.append([rate, hosts, control, *cells, f"{sum(tcp) / sum(of_job):.2f}", in_parts])
    head = "links | hosts | TCP's control | the job alone | TCP | the job | TCP / job | in parts"
    return f"""All hosts add {SIZE >> 20} MB of f32 through the switch without pause, beside one TCP flow from host 0 to
host 1. The flow shares one queue with the contributions of host 0 and another queue, of a megabyte and 4 ms, with the
results to host 1. Mbit/s over {seconds - PART_S:.0f} s, after {PART_S:.0f} s; the last column is of parts of
{PART_S:.0f} s. The job's rate is the tensor's bits.

{driver.table(head, rows)}"""


if __name__ == "__main__":
    driver.run(links_shared, shares)
