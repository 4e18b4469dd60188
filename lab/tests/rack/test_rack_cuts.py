"""A path to the switch that is cut during a job costs no step and no sum; forged ICMP changes nothing. Needs root.

Two ranks and a switch, each in a network namespace on one bridge. Every step's sum is checked in full.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lan import Lan, lan
from load import seconds

from netfold_lab.rack.command import run, why_unavailable
from netfold_lab.rack.processes import stop

LACK = why_unavailable(loss=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

STORE_PORT, SWITCH_PORT = 29700, 7171
FALLBACK_S = 5.0
GOES_ON_S = 4.0

RANK = """
import logging, os, sys, time
import numpy as np
from netfold import Communicator
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
folder = sys.argv[1]
with Communicator.from_environment(timeout_s=60, join_timeout_s=20) as group:
    rank, size, step, longest = group.rank, group.size, 0, 0.0
    values = np.arange(100_000, dtype=np.float32)
    stop = False
    while not stop:
        array = values * (rank + 1) + step
        array[0] = rank == 0 and os.path.exists(f"{folder}/stop")
        began = time.monotonic()
        group.all_reduce(array)
        longest = max(longest, time.monotonic() - began)
        stop = bool(array[0])
        expected = values * (size * (size + 1) / 2) + step * size
        assert (array[1:] == expected[1:]).all(), step
        step = (step + 1) % 1000
        if step == 10:
            print("under way", flush=True)
    print(f"longest {longest:.3f}", flush=True)
"""

# Sends, from a raw socket, an ICMP message that quotes a packet of every port that the switch may use.
FORGE = """
import socket, struct, sys, time
source, target, kinds = sys.argv[1], sys.argv[2], sys.argv[3]
def checksum(data):
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xffff)
    return ~(total + (total >> 16)) & 0xffff
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
for round in range(3):
    for kind, code, rest in ((3, 4, 552), (3, 3, 0), (3, 1, 0), (3, 2, 0), (3, 13, 0), (11, 0, 0), (12, 0, 0)):
        for pair in kinds.split(","):
            mine, theirs = map(int, pair.split(":"))
            quoted = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 1472, 1, 0x4000, 64, 17, 0,
                                 socket.inet_aton(target), socket.inet_aton(source))
            quoted += struct.pack("!HHHH", mine, theirs, 1452, 0)
            body = struct.pack("!BBHHH", kind, code, 0, 0, rest) + quoted
            body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
            raw.sendto(body, (target, 0))
    time.sleep(0.2)
"""


class Job:
    """Two ranks that reduce without pause, and their switch, on hosts 0, 1 and 2."""

    SWITCH = 2

    def __init__(self, there: Lan, folder: Path) -> None:
        self.lan, self.folder = there, folder
        address = there.address(self.SWITCH)
        netfold = [sys.executable, "-m", "netfold.cli"]
        self.switch = there.spawn(self.SWITCH, *netfold, "switch", "--listen", f"{address}:{SWITCH_PORT}", "--open")
        assert self.switch.stdout is not None
        while "listening" not in (line := self.switch.stdout.readline()):
            assert line, "the switch ended"
        self.logs = [folder / f"rank{rank}" for rank in range(2)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            command = f'exec "$0" -c "$1" "$2" >"{log}" 2>&1'
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": there.address(0),
                "MASTER_PORT": str(STORE_PORT),
                "NETFOLD_TRANSPORT": "tcp",
                "NETFOLD_SWITCH": f"{address}:{SWITCH_PORT}",
                "NETFOLD_ALGORITHM": "all_reduce=in_network",
                "NETFOLD_REJOIN_S": "1",
            }
            self.ranks.append(there.spawn(rank, "sh", "-c", command, sys.executable, RANK, str(folder), **environment))

    def output(self, rank: int) -> str:
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def wait_for(self, pattern: str, timeout_s: float) -> float:
        """Wait until rank 0, the leader, has printed the text; return the seconds."""
        began = time.monotonic()
        while not re.search(pattern, self.output(0)):
            for rank in range(2):
                assert self.ranks[rank].poll() is None, self.output(rank)
            assert time.monotonic() - began < seconds(timeout_s), (pattern, self.output(0), self.output(1))
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> list[float]:
        """Stop the ranks; return the longest step of each."""
        (self.folder / "stop").touch()
        for rank, process in enumerate(self.ranks):
            process.wait(seconds(30))
            assert process.returncode == 0, self.output(rank)
        return [float(re.findall(r"longest ([\d.]+)", self.output(rank))[0]) for rank in range(2)]

    def close(self) -> None:
        stop([*self.ranks, self.switch])


@contextlib.contextmanager
def job(folder: Path) -> Iterator[Job]:
    with lan(3) as there:
        running = Job(there, folder)
        try:
            running.wait_for("under way", 30)
            yield running
        finally:
            running.close()


Change = Callable[[Job], None]
UDP = "meta l4proto udp"


def dropping(*rules: str) -> Change:
    return lambda job: job.lan.drop(Job.SWITCH, *rules)


def healed(job: Job) -> None:
    job.lan.heal(Job.SWITCH)


def signalled(number: int) -> Change:
    return lambda job: os.kill(job.switch.pid, number)


TO, FROM = f"tcp dport {SWITCH_PORT}", f"tcp sport {SWITCH_PORT}"
CUTS: dict[str, tuple[Change, Change]] = {
    "UDP": (dropping(f"in {UDP}", f"out {UDP}"), healed),
    "UDP to the switch": (dropping(f"in {UDP}"), healed),
    "UDP from the switch, refused there": (dropping(f"out {UDP}"), healed),
    "TCP": (dropping(f"in {TO}", f"out {FROM}"), healed),
    "TCP to the switch": (dropping(f"in {TO}"), healed),
    "UDP and TCP": (dropping("in meta l4proto { tcp, udp }", "out meta l4proto { tcp, udp }"), healed),
    "the host, without FIN": (lambda job: job.lan.link(Job.SWITCH, "down"), lambda job: job.lan.link(Job.SWITCH, "up")),
    "the switch's process, stopped": (signalled(signal.SIGSTOP), signalled(signal.SIGCONT)),
}


@pytest.mark.parametrize("what", CUTS)
def test_a_cut_path_costs_no_step_and_the_group_returns_to_the_switch(what: str, tmp_path: Path) -> None:
    cut, heal = CUTS[what]
    with job(tmp_path) as running:
        cut(running)
        assert running.wait_for("is gone", FALLBACK_S + 5) <= seconds(FALLBACK_S)
        time.sleep(1)
        heal(running)
        running.wait_for(r"the switch at \S+ has the group again", 40)
        longest = running.end()
        assert max(longest) <= seconds(FALLBACK_S + 1)


def test_forged_icmp_of_every_kind_changes_nothing(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        listing = run(["ip", "netns", "exec", running.lan.names[Job.SWITCH], "ss", "-Hnul"])
        switch_port = int(re.findall(r":(\d+) ", listing)[0])
        ports = [
            int(re.findall(r":(\d+) ", run(["ip", "netns", "exec", running.lan.names[rank], "ss", "-Hnul"]))[0])
            for rank in range(2)
        ]
        for rank, port in enumerate(ports):
            forger = running.lan.spawn(
                1 - rank,
                sys.executable,
                "-c",
                FORGE,
                running.lan.address(Job.SWITCH),
                running.lan.address(rank),
                f"{port}:{switch_port}",
            )
            assert forger.wait(seconds(30)) == 0
            forger = running.lan.spawn(
                rank,
                sys.executable,
                "-c",
                FORGE,
                running.lan.address(rank),
                running.lan.address(Job.SWITCH),
                f"{switch_port}:{port}",
            )
            assert forger.wait(seconds(30)) == 0
        time.sleep(GOES_ON_S)
        assert all("is gone" not in running.output(rank) for rank in range(2))
        running.end()


JOINS = """
import time
from netfold.switch_protocol.data_path import PathError, open_path
admitted = {"port": 9, "job_id": 1, "incarnation": 1, "worker": 0, "nonce": 5}
try:
    open_path(None, "127.0.0.1", 1 << 16).connect("127.0.0.1", admitted, time.monotonic() + 1)
except PathError as error:
    print(error)
"""


def test_a_firewall_on_the_joining_host_is_distinguished_from_one_on_the_path(tmp_path: Path) -> None:
    with lan(1) as there:
        joins = ["ip", "netns", "exec", there.names[0], sys.executable, "-c", JOINS]
        assert "did not leave" not in run(joins)
        there.drop(0, "out udp dport 9")
        assert "(the last packet did not leave: send to 127.0.0.1:9: Operation not permitted)" in run(joins)
