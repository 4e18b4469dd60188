"""The CPU cost of a switch: contributions in Gbit/s per CPU-second of its thread and of the softirqs it causes.

    .venv/bin/python lab/bench/switch_cost.py [--python PYTHON]      # as root, two cores

PYTHON: the interpreter of another tree, whose switch takes turns with this tree's, in a rack of its own with workers of
this tree.

A rack with unshaped links of MTU 1500. The switch and all that the kernel does to bring it packets have core 0 to
themselves (its ports' NAPI threads are pinned there, and packets steered there); workers have core 1. So the time that
core 0 is not idle is the switch's cost, GRO and the bridge included. Contributions are always single packets on their
links. Three paths take turns: (1) the switch hands its link super-packets, as to a card that cuts them (USO), with GRO
at its ports; (2) the same without GRO; (3) its kernel cuts them, with GRO. Afterwards each runs once more under `perf`,
for where the time goes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import driver
from driver import CheckedSum, Network, Place, Rank, Ranks, cell, open_network, start_ranks, take_turns

from netfold_lab.bench.spread import paired_ratios, spread
from netfold_lab.rack.aggregator import aggregator_argv
from netfold_lab.rack.command import run
from netfold_lab.rack.names import SWITCH_ADDRESS, SWITCH_PORT, switch_namespace
from netfold_lab.rack.topology import End

SIZE = 16 << 20
CALLS = 6  # all_reduces a round, so that a round is long against the clock of /proc/stat
METRICS = f"{SWITCH_ADDRESS}:9171"
SWITCH_CPU, WORKER_CPU = 0, 1
THIS, OTHER = "this tree", "the other tree"
GOAL_TIMES = 1.3  # of the other tree's


@dataclass(frozen=True)
class PacketPath:
    """uso: links cut the switch's super-packets (tx-udp-segmentation), else its kernel does. gro: its ports use GRO."""

    name: str
    uso: bool
    gro: bool


PATHS = (
    PacketPath("GRO on, results cut by the link", uso=True, gro=True),
    PacketPath("GRO off, results cut by the link", uso=True, gro=False),
    PacketPath("GRO on, results cut by the kernel", uso=False, gro=True),
)

# A sample belongs to the first of these that any frame of its stack matches. Softirqs come first, because a softirq
# may interrupt a system call.
PLACES = (
    ("softirq: packets to the switch's socket, GRO and bridge included", r"net_rx_action|napi_threaded_poll"),
    ("sendmmsg: results, cut up and handed to the links", r"sendmmsg"),
    ("recvmmsg: out of the socket", r"recvmmsg"),
    ("epoll and other system calls", r"do_syscall|entry_SYSCALL|syscall"),
    ("reduce: adding up the contributions", r"kernels::"),
    ("keeping contributions (memcpy)", r"mem(cpy|move)|SwitchJob"),
    ("the rest of the switch's own code", r"netfold|_native|DataPlane"),
)
ELSEWHERE = "everything else on the core"


def serve(me: Rank) -> None:
    """A rank. Each order runs one round and returns its seconds and its number of wrong elements."""
    os.sched_setaffinity(0, {WORKER_CPU})
    add_once = CheckedSum(me, SIZE)
    with me.communicator("job") as group:

        def round_() -> tuple[float, int]:
            seconds, wrong = zip(*(add_once(group.all_reduce) for _ in range(CALLS)), strict=True)
            return sum(seconds), sum(wrong)

        me.serve(round_)


def take_path(network: Network, path: PacketPath) -> None:
    """Make packets take `path` from now on."""
    assert network.rack is not None
    # The switch's end of each link comes first, then the host's.
    for end, of_switch in zip(network.rack.link_ends(), itertools.cycle((True, False)), strict=False):
        offload = "on" if of_switch and path.uso else "off"
        inside(end.namespace, "ethtool", "-K", end.device, "tso", offload, "tx-udp-segmentation", offload)
        if of_switch:
            inside(end.namespace, "ethtool", "-K", end.device, "gro", "on" if path.gro else "off")
            if path.gro:  # without GRO a veth has no NAPI
                write_device(end, "threaded", "1")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if re.fullmatch(r"napi/h\d+-\d+", (process / "comm").read_text().strip()):
                os.sched_setaffinity(int(process.name), {SWITCH_CPU})
        except OSError:
            pass  # the process has ended


def steer(network: Network) -> None:
    """Remove shaping, and handle every packet on its receiver's core."""
    network.remove_shaping()
    assert network.rack is not None
    for end, cpu in zip(network.rack.link_ends(), itertools.cycle((SWITCH_CPU, WORKER_CPU)), strict=False):
        write_device(end, "queues/rx-0/rps_cpus", f"{1 << cpu:x}")


def write_device(end: End, name: str, value: str) -> None:
    inside(end.namespace, "sh", "-c", f"echo {value} > /sys/class/net/{end.device}/{name}")


def inside(namespace: str, *argv: str) -> None:
    run(["ip", "netns", "exec", namespace, *argv])


def seconds(cpu: int) -> tuple[float, float]:
    """Seconds of a core without idle, I/O wait and steal time; and of these, those in softirqs."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{cpu}":
            user, nice, system, _idle, _iowait, irq, softirq = (int(tick) for tick in ticks[:7])
            hertz = os.sysconf("SC_CLK_TCK")
            return (user + nice + system + irq + softirq) / hertz, softirq / hertz
    raise SystemExit(f"there is no core {cpu} here: this bench needs two")


@dataclass
class Bench:
    """The rack, its switch and ranks."""

    network: Network
    ranks: Ranks

    def round(self, path: PacketPath) -> dict[str, float]:
        take_path(self.network, path)
        before = self.status()
        began = seconds(SWITCH_CPU)
        answers = self.ranks.ask()
        busy, softirq = (end - begin for end, begin in zip(seconds(SWITCH_CPU), began, strict=True))
        after = self.status()
        was, now = before["jobs"][0]["counters"], after["jobs"][0]["counters"]
        bits = CALLS * SIZE * 8 * self.network.hosts
        return {
            "gbit_a_cpu_s": bits / busy / 1e9,
            "gbit_a_thread_s": bits / (after["cpu_s"] - before["cpu_s"]) / 1e9,
            "softirq_share": softirq / busy,
            "gbit_a_s": bits / max(took_s for took_s, _ in answers) / 1e9,
            "datagrams": (now["received_datagrams"] - was["received_datagrams"])
            / (now["receive_calls"] - was["receive_calls"]),
            "again": after["jobs"][0]["retransmissions"] - before["jobs"][0]["retransmissions"],
            "wrong": sum(wrong for _, wrong in answers),
        }

    def status(self) -> dict[str, Any]:
        assert self.network.rack is not None
        read = f"import urllib.request as u; print(u.urlopen('http://{METRICS}/status').read().decode())"
        argv = ["ip", "netns", "exec", switch_namespace(self.network.rack.rack_id), sys.executable, "-c", read]
        found: dict[str, Any] = json.loads(subprocess.check_output(argv))
        return found

    def samples(self, path: PacketPath) -> Counter[str]:
        """One more round under `perf`: core 0's samples by place, without the idle ones."""
        data = str(self.ranks.folder / "perf")
        argv = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "1999", "-C", str(SWITCH_CPU), "-g", "-o", data]
        perf = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.5)
        self.round(path)
        perf.send_signal(2)
        perf.wait(60)
        script = ["perf", "script", "-i", data, "-F", "comm,ip,sym,dso"]
        stacks = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split("\n\n")
        places: Counter[str] = Counter()
        for stack in stacks:
            if not stack.strip() or re.search(r"do_idle|pv_native_safe_halt|cpuidle|default_idle", stack):
                continue
            places[next((name for name, pattern in PLACES if re.search(pattern, stack)), ELSEWHERE)] += 1
        return places


# A switch and the path of its packets.
Case = tuple[str, PacketPath]


@contextmanager
def bench_of(python: str, hosts: int) -> Iterator[Bench]:
    """A rack whose switch runs under `python`, with workers of this tree."""
    with open_network(Place(hosts, "10gbit")) as network:
        steer(network)
        assert network.rack is not None
        aggregator = [python, *aggregator_argv(f"{SWITCH_ADDRESS}:{SWITCH_PORT}")[1:], "--metrics", METRICS]
        network.rack.start_switch(network.switch_lines.append, ["taskset", "-c", str(SWITCH_CPU), *aggregator])
        environment = {"NETFOLD_ALGORITHM": "all_reduce=in_network"}
        with start_ranks(network, serve, environment=environment) as ranks:
            yield Bench(network, ranks)


def switch_cost(rounds: int = 10, hosts: int = 8, python: str = "") -> str:
    """The CPU cost of a switch"""
    os.sched_setaffinity(0, {WORKER_CPU})
    pythons = {THIS: sys.executable, **({OTHER: python} if python else {})}
    with ExitStack() as stack:
        benches = {name: stack.enter_context(bench_of(each, hosts)) for name, each in pythons.items()}
        cases: list[Case] = [(name, path) for path in PATHS for name in benches]
        found = take_turns(cases, rounds, lambda case: benches[case[0]].round(case[1]))
        samples = {case: benches[case[0]].samples(case[1]) for case in cases}
    rows = []
    for (name, path), taken in found.items():
        column = {key: [row[key] for row in taken] for key in taken[0]}
        thread, softirq, gbit, datagrams = (
            spread(column[key]).median for key in ("gbit_a_thread_s", "softirq_share", "gbit_a_s", "datagrams")
        )
        medians = [f"{thread:.2f}", f"{softirq:.0%}", f"{gbit:.2f}", f"{datagrams:.1f}"]
        sums = [f"{sum(column[key]):.0f}" for key in ("again", "wrong")]
        rows.append([name, path.name, cell(column["gbit_a_cpu_s"], apart=" | "), *medians, *sums])
    places = []
    for place in [*(place for place, _ in PLACES), ELSEWHERE]:
        ratios = (counted[place] / max(1, sum(counted.values())) for counted in samples.values())
        places.append([place, *(f"{ratio:.1%}" for ratio in ratios)])
    goals = []
    for path in PATHS if python else ():
        costs = ([row["gbit_a_cpu_s"] for row in found[name, path]] for name in (THIS, OTHER))
        times = paired_ratios(*costs)
        verdict = "met" if spread(times).median >= GOAL_TIMES else "missed"
        ratio = f"{cell(times)} times the other tree's contributions a CPU-second"
        goals.append(f"- {path.name}: {ratio}; goal {GOAL_TIMES}: {verdict}")
    head = (
        "switch | packets | contributions, Gbit/s per CPU-second | 5% .. 95% | of the thread alone | softirq's share "
        "| Gbit/s as it ran | datagrams a receive | sent again | wrong"
    )
    shares_head = " | ".join(["", *(f"{name}: {path.name}" for name, path in found)])
    return f"""{CALLS} all_reduces of {SIZE >> 20} MB f32 a round, {hosts} workers on one core, the switch on the other;
unshaped links of MTU 1500. Contributions cross as single packets (workers' tso and tx-udp-segmentation off); the
switch's own are on where its link cuts, else off.

{driver.table(head, rows)}

Where the switch's core spends its time (perf's samples of one more round each):

{driver.table(shares_head, places)}

{chr(10).join(goals)}"""


if __name__ == "__main__":
    driver.run(switch_cost)
