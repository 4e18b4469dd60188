"""What the switch costs its host: contributions in Gbit/s a CPU-second of its thread and of the softirqs it causes.

    .venv/bin/python bench/switch_cost.py [ROUNDS] [HOSTS] [PYTHON]      # 10 8; as root, two cores

PYTHON: of another tree, whose switch takes turns with this one's, in a rack of its own with workers of this tree.

A rack with unshaped links of MTU 1500. The switch and all that the kernel does to bring it packets have core 0 to
themselves (its ports' NAPI threads are pinned there, and packets steered there); workers have core 1. So what core 0
is not idle is the switch's cost, GRO and the bridge included. Contributions are single packets on their links, always.
Three ways, in turn: the switch hands its link super-packets, as to a card that cuts them (USO), with GRO at its ports
on, and off; or its kernel cuts them, too. Afterwards each once more under `perf`, for where the time goes. Writes
bench/results/switch_cost.md.
"""

from __future__ import annotations

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

import numpy as np
from told_ranks import Orders, ToldRanks, told_ranks

from netfold import Communicator, FileStore
from netfold.bench.machine import spoken
from netfold.bench.spread import paired_ratios, spread
from netfold.rack import Rack
from netfold.rack.aggregator import aggregator_argv
from netfold.rack.command import run
from netfold.rack.names import (
    HOST_INTERFACE,
    SWITCH_ADDRESS,
    SWITCH_PORT,
    host_namespace,
    port_name,
    switch_namespace,
)
from netfold.rack.processes import exit_on_signals

SIZE = 16 << 20
CALLS = 6  # all_reduces a round, so that a round is long against the clock of /proc/stat
METRICS = f"{SWITCH_ADDRESS}:9171"
RESULT = Path(__file__).parent / "results" / "switch_cost.md"
DEADLINE_S = 600
SWITCH_CPU, WORKER_CPU = 0, 1
THIS, OTHER = "this tree", "the other tree"
GOAL_TIMES = 1.3  # of the other tree's


@dataclass(frozen=True)
class Way:
    """Who cuts the switch's super-packets: its links (tx-udp-segmentation) or its kernel; and its ports' GRO."""

    name: str
    uso: bool
    gro: bool


WAYS = (
    Way("GRO on, results cut by the link", uso=True, gro=True),
    Way("GRO off, results cut by the link", uso=True, gro=False),
    Way("GRO on, results cut by the kernel", uso=False, gro=True),
)

# Where a sample belongs: the first of these that any frame of its stack matches. What interrupts a system call is what
# it interrupted it for, so softirqs come first.
PLACES = (
    ("softirq: packets to the switch's socket, GRO and bridge included", r"net_rx_action|napi_threaded_poll"),
    ("sendmmsg: results, cut up and handed to the links", r"sendmmsg"),
    ("recvmmsg: out of the socket", r"recvmmsg"),
    ("epoll and other system calls", r"do_syscall|entry_SYSCALL|syscall"),
    ("fold: adding up the contributions", r"kernels::"),
    ("keeping contributions (memcpy)", r"mem(cpy|move)|SwitchJob"),
    ("the rest of the switch's own code", r"netfold|_native|DataPlane"),
)
ELSEWHERE = "everything else on the core"


def serve(folder: str) -> None:
    """A rank: one round for each order."""
    os.sched_setaffinity(0, {WORKER_CPU})
    orders = Orders(folder)
    rank, size = orders.rank, orders.size
    tensor = np.empty(SIZE // 4, np.float32)
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    with Communicator(FileStore(folder), rank, size) as group:
        for _ in orders:
            took_s = 0.0
            wrong = 0
            for call in range(CALLS):
                np.add(pattern, float(rank + call), out=tensor)
                orders.line.cross()
                began = time.perf_counter()
                group.all_reduce(tensor)
                took_s += time.perf_counter() - began
                wrong += int(np.count_nonzero(tensor != pattern * size + float(sum(range(size)) + size * call)))
            orders.answer({"took_s": took_s, "wrong": wrong})


def ends(rack: Rack) -> list[tuple[str, str, int]]:
    """Each end of each link: its namespace, its device, and the core of who receives there."""
    return [
        end
        for host in range(rack.hosts)
        for end in (
            (switch_namespace(rack.rack_id), port_name(host), SWITCH_CPU),
            (host_namespace(rack.rack_id, host), HOST_INTERFACE, WORKER_CPU),
        )
    ]


def go(rack: Rack, way: Way) -> None:
    for namespace, device, cpu in ends(rack):
        offload = "on" if cpu == SWITCH_CPU and way.uso else "off"
        inside(namespace, "ethtool", "-K", device, "tso", offload, "tx-udp-segmentation", offload)
        if cpu == SWITCH_CPU:
            inside(namespace, "ethtool", "-K", device, "gro", "on" if way.gro else "off")
            if way.gro:  # without it a veth has no NAPI
                write_device(namespace, device, "threaded", "1")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if re.fullmatch(r"napi/h\d+-\d+", (process / "comm").read_text().strip()):
                os.sched_setaffinity(int(process.name), {SWITCH_CPU})
        except OSError:
            pass  # it ended meanwhile


def steer(rack: Rack) -> None:
    """No shaping, and every packet handled on the core of who receives it."""
    for namespace, device, cpu in ends(rack):
        run(["tc", "-netns", namespace, "qdisc", "del", "dev", device, "root"])
        write_device(namespace, device, "queues/rx-0/rps_cpus", f"{1 << cpu:x}")


def write_device(namespace: str, device: str, name: str, value: str) -> None:
    inside(namespace, "sh", "-c", f"echo {value} > /sys/class/net/{device}/{name}")


def inside(namespace: str, *argv: str) -> None:
    run(["ip", "netns", "exec", namespace, *argv])


def status(rack: Rack) -> dict[str, Any]:
    read = f"import urllib.request as u; print(u.urlopen('http://{METRICS}/status').read().decode())"
    argv = ["ip", "netns", "exec", switch_namespace(rack.rack_id), sys.executable, "-c", read]
    found: dict[str, Any] = json.loads(subprocess.check_output(argv))
    return found


def seconds(cpu: int) -> tuple[float, float]:
    """That a core has not been idle, nor taken away from this machine; and of these, those in softirqs."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{cpu}":
            user, nice, system, _idle, _iowait, irq, softirq = (int(tick) for tick in ticks[:7])
            hertz = os.sysconf("SC_CLK_TCK")
            return (user + nice + system + irq + softirq) / hertz, softirq / hertz
    raise SystemExit(f"there is no core {cpu} here: this bench needs two")


class Bench:
    """The rack, its switch and ranks; `round` is one round."""

    def __init__(self, rack: Rack, ranks: ToldRanks) -> None:
        self.rack, self.ranks = rack, ranks

    def round(self, way: Way) -> dict[str, float]:
        go(self.rack, way)
        before = status(self.rack)
        began = seconds(SWITCH_CPU)
        answers = self.ranks.tell("go")
        busy, softirq = (end - begin for end, begin in zip(seconds(SWITCH_CPU), began, strict=True))
        after = status(self.rack)
        was, now = before["jobs"][0]["counters"], after["jobs"][0]["counters"]
        bits = CALLS * SIZE * 8 * self.rack.hosts
        return {
            "gbit_a_cpu_s": bits / busy / 1e9,
            "gbit_a_thread_s": bits / (after["cpu_s"] - before["cpu_s"]) / 1e9,
            "softirq_share": softirq / busy,
            "gbit_a_s": bits / max(answer["took_s"] for answer in answers) / 1e9,
            "datagrams": (now["received_datagrams"] - was["received_datagrams"])
            / (now["receive_calls"] - was["receive_calls"]),
            "again": after["jobs"][0]["retransmissions"] - before["jobs"][0]["retransmissions"],
            "wrong": sum(answer["wrong"] for answer in answers),
        }


# A switch and a way that its packets go.
Case = tuple[str, Way]


@contextmanager
def bench_of(python: str, hosts: int) -> Iterator[Bench]:
    """A rack whose switch that Python runs, with workers of this one."""
    with told_ranks(hosts, DEADLINE_S) as ranks, Rack(hosts, "10gbit") as rack:
        steer(rack)
        aggregator = [python, *aggregator_argv(f"{SWITCH_ADDRESS}:{SWITCH_PORT}")[1:]]
        rack.start_switch(lambda line: None, ["taskset", "-c", str(SWITCH_CPU), *aggregator, "--metrics", METRICS])
        for host in range(hosts):
            environment = {"NETFOLD_INTERFACE": HOST_INTERFACE, "NETFOLD_ALGORITHM": "all_reduce=in_network"}
            rack.popen(host, ranks.argv(__file__), environment)
        ranks.wait()
        yield Bench(rack, ranks)


def measure(
    rounds: int, hosts: int, pythons: dict[str, str]
) -> tuple[dict[Case, list[dict[str, float]]], dict[Case, Counter[str]]]:
    """Rounds of every switch and way; and where core 0's time went, in samples. pythons: by the switch's name."""
    with ExitStack() as stack:
        benches = {name: stack.enter_context(bench_of(python, hosts)) for name, python in pythons.items()}
        cases = [(name, way) for way in WAYS for name in benches]
        rows: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
        for turn in range(-1, rounds):
            for name, way in cases[:: 1 if turn % 2 else -1]:
                row = benches[name].round(way)
                if turn >= 0:
                    rows[name, way].append(row)
        return rows, {(name, way): where(benches[name], way) for name, way in cases}


def where(bench: Bench, way: Way) -> Counter[str]:
    """One more round under `perf`: core 0's samples by place, what is idle left out."""
    data = Path(bench.ranks.folder, "perf")
    argv = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "1999", "-C", str(SWITCH_CPU), "-g", "-o", str(data)]
    perf = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.5)
    bench.round(way)
    perf.send_signal(2)
    perf.wait(60)
    script = ["perf", "script", "-i", str(data), "-F", "comm,ip,sym,dso"]
    stacks = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split("\n\n")
    places: Counter[str] = Counter()
    for stack in stacks:
        if not stack.strip() or re.search(r"do_idle|pv_native_safe_halt|cpuidle|default_idle", stack):
            continue
        places[next((name for name, pattern in PLACES if re.search(pattern, stack)), ELSEWHERE)] += 1
    return places


def render(
    rows: dict[Case, list[dict[str, float]]], places: dict[Case, Counter[str]], hosts: int, load: tuple[float, float]
) -> str:
    lines = [
        f"{CALLS} all_reduces of {SIZE >> 20} MB f32 a round, {hosts} workers on one core, the switch on the other; "
        "unshaped links of MTU 1500. Contributions cross as single packets (workers' tso and tx-udp-segmentation off); "
        "the switch's own are on where its link cuts, else off.",
        "",
        "| switch | packets | contributions, Gbit/s a CPU-second | 5% .. 95% | of the thread alone | softirq's share "
        "| Gbit/s as it ran | datagrams a receive | sent again | wrong |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, way), taken in rows.items():
        cost = spread([row["gbit_a_cpu_s"] for row in taken])
        rest = [
            spread([row[name] for row in taken]).median
            for name in ("gbit_a_thread_s", "softirq_share", "gbit_a_s", "datagrams")
        ]
        lines.append(
            f"| {name} | {way.name} | {cost.median:.2f} | {cost.p5:.2f} .. {cost.p95:.2f} | {rest[0]:.2f} "
            f"| {rest[1]:.0%} | {rest[2]:.2f} | {rest[3]:.1f} | {sum(row['again'] for row in taken):.0f} "
            f"| {sum(row['wrong'] for row in taken):.0f} |"
        )
    head = " | ".join(f"{name}: {way.name}" for name, way in rows)
    lines += ["", "Where the switch's core spends its time (perf's samples of one more round each):", ""]
    lines += [f"| | {head} |", "|---" * (len(rows) + 1) + "|"]
    for place in [*(place for place, _ in PLACES), ELSEWHERE]:
        shares = (counted[place] / max(1, sum(counted.values())) for counted in places.values())
        lines.append(f"| {place} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    lines.append("")
    for way in WAYS if (OTHER, WAYS[0]) in rows else ():
        costs = {name: [row["gbit_a_cpu_s"] for row in rows[name, way]] for name in (THIS, OTHER)}
        times = spread(paired_ratios(costs[THIS], costs[OTHER]))
        verdict = "met" if times.median >= GOAL_TIMES else "missed"
        lines.append(
            f"- {way.name}: {times.median:.2f} ({times.p5:.2f} .. {times.p95:.2f}) times the other tree's "
            f"contributions a CPU-second; goal {GOAL_TIMES}: {verdict}"
        )
    lines += ["", f"{len(rows[THIS, WAYS[0]])} interleaved rounds; {spoken(load)}"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(*arguments[1:])
    pythons = {THIS: sys.executable, **({OTHER: arguments.pop(2)} if len(arguments) > 2 else {})}
    rounds, hosts = (int(given) for given in [*arguments, *("10", "8")[len(arguments) :]])
    load = os.getloadavg()[0]
    os.sched_setaffinity(0, {WORKER_CPU})
    with exit_on_signals():
        rows, places = measure(rounds, hosts, pythons)
    text = render(rows, places, hosts, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
