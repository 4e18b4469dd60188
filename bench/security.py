"""What NETFOLD_SECURITY costs an all_reduce, between ranks and through the switch; as root:

    .venv/bin/python bench/security.py [ROUNDS] [RATE]      # 15 1gbit

Every rank has a group for each security: what an operation of each takes is measured in turns, round by round, in a new
order each time: between hosts of a rack, over TCP and through two switches there, of which the one without security is
open; with shaped links, and with links that carry what the machine can; then over TCP on this machine's loopback. Times
are the slowest rank's; every element is checked. Writes bench/results/security.md.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from told_ranks import Orders, told_ranks

from netfold import Communicator, FileStore, Options
from netfold.bench.machine import spoken
from netfold.bench.spread import paired_ratios, spread
from netfold.options import SECURITIES
from netfold.rack import Rack
from netfold.rack.aggregator import Aggregator, start_aggregator
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
WARMUPS = 2
GOAL = 1.02
# Header and values of packets for MTUs of 1500 and 9000.
PACKETS = (48 + 1408, 48 + 8880)
ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "security.md"
# For a whole run: a rank that is missing must not leave the other waiting for ever.
DEADLINE_S = 900


@dataclass(frozen=True)
class Place:
    """The links between the ranks. rate: of shaped links; None: not shaped; "": this machine's loopback, no rack."""

    ranks: int
    rate: str | None
    switch: bool = False

    def __str__(self) -> str:
        link = "not shaped" if self.rate is None else self.rate or "loopback"
        return f"{link}, {'switch' if self.switch else 'TCP'}"


Taken = dict[str, list[dict[str, Any]]]
Rows = dict[Place, Taken]


def serve(folder: str, *switches: str) -> None:
    """A rank: for each order one all_reduce, by one of its groups."""
    orders = Orders(folder)
    rank, size = orders.rank, orders.size
    tensor = np.empty(SIZE // 4, np.float32)
    # Whole numbers that a float sum keeps exactly, another one in every element of a chunk.
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    with contextlib.ExitStack() as stack:
        groups = {}
        for security in SECURITIES:
            options = Options(transport="tcp", security=security, probe="off")
            if switches:
                endpoint = switches[security != SECURITIES[0]]
                options = replace(options, switch=endpoint, token_file=f"{folder}/token" if "#" in endpoint else None)
            store = FileStore(f"{folder}/{security}")
            groups[security] = stack.enter_context(Communicator(store, rank, size, options=options))
        for order in orders:
            turn, security = order.split()
            np.add(pattern, float(rank + int(turn)), out=tensor)
            orders.line.cross()
            began, used = time.perf_counter(), time.process_time()
            groups[security].all_reduce(tensor)
            took_s, cpu_s = time.perf_counter() - began, time.process_time() - used
            expected = pattern * size + float(sum(range(size)) + size * int(turn))
            orders.answer(
                {
                    "took_s": took_s,
                    "cpu_s": cpu_s,
                    "wrong": int(np.count_nonzero(tensor != expected)),
                    "again": int(groups[security].group.events()[-1]["retransmissions"]),
                }
            )


@contextlib.contextmanager
def ranks_at(place: Place, argv: list[str], folder: str) -> Iterator[dict[str, int]]:
    """Start the ranks, and switches for them; the process of the switch that has the packets of each security."""
    if place.rate == "":
        environment = {**os.environ, "WORLD_SIZE": str(place.ranks), "NETFOLD_INTERFACE": "lo"}
        started = [subprocess.Popen(argv, env={**environment, "RANK": str(rank)}) for rank in range(place.ranks)]
        try:
            yield {}
        finally:
            for process in started:
                process.kill()
                process.wait()
        return
    with Rack(place.ranks, place.rate or "1gbit") as rack:
        if place.rate is None:
            unshape(rack)
        pids = {}
        if place.switch:
            switches = start_switches(rack, folder)
            argv = [*argv, *(switch.address for switch in switches)]
            pids = {security: switches[security != SECURITIES[0]].process.pid for security in SECURITIES}
        for host in range(place.ranks):
            rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE})
        yield pids


def unshape(rack: Rack) -> None:
    """Let every link carry what the machine can."""
    for host in range(rack.hosts):
        for namespace, interface in (
            (switch_namespace(rack.rack_id), port_name(host)),
            (host_namespace(rack.rack_id, host), HOST_INTERFACE),
        ):
            run(["tc", "-netns", namespace, "qdisc", "del", "dev", interface, "root"])


def start_switches(rack: Rack, folder: str) -> list[Aggregator]:
    """An open switch and one with a token."""
    token = secrets.token_hex(32)
    for name, text in (("token", token), ("tokens", f"bench {token}\n")):
        path = Path(folder, name)
        path.touch(0o600)
        path.write_text(text)
    found = []
    for place, words in enumerate((["--open"], ["--token-file", f"{folder}/tokens"])):
        listen = f"{SWITCH_ADDRESS}:{SWITCH_PORT + place}"
        argv = [sys.executable, "-m", "netfold.cli", "switch", "--listen", listen, *words]
        found.append(start_aggregator(rack.popen_switch, argv, lambda line: None))
    return found


def cpu_s(pid: int | None) -> float:
    """CPU seconds of all threads of a process so far."""
    if pid is None:
        return 0.0
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure(place: Place, rounds: int) -> Taken:
    """For each security a round each: the slowest rank's time, CPU time of all, wrong elements, repeats."""
    taken: Taken = {security: [] for security in SECURITIES}
    with (
        told_ranks(place.ranks, DEADLINE_S) as ranks,
        ranks_at(place, ranks.argv(__file__), ranks.folder) as switches,
    ):
        ranks.wait()
        for turn in range(-WARMUPS, rounds):
            for security in random.sample(SECURITIES, len(SECURITIES)):
                before_s = cpu_s(switches.get(security))
                answers = ranks.tell(f"{turn + WARMUPS} {security}")
                if turn < 0:
                    continue
                row = {name: sum(answer[name] for answer in answers) for name in ("cpu_s", "wrong", "again")}
                row["cpu_s"] += cpu_s(switches.get(security)) - before_s
                taken[security].append({**row, "took_s": max(answer["took_s"] for answer in answers)})
    return taken


def auth_costs() -> list[tuple[int, float, float, float]]:
    """Bytes, and the median, lowest and highest nanoseconds of a tag over so many."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "auth_cost"
        auth = ROOT / "native/auth"
        sources = [
            str(ROOT / "bench/auth_cost.cpp"),
            str(auth / "packet_authenticator.cpp"),
            str(auth / "libcrypto.cpp"),
        ]
        include = f"-I{auth / 'include'}"
        subprocess.run(["c++", "-std=c++20", "-O2", include, *sources, "-o", str(program), "-ldl"], check=True)
        said = subprocess.run([program, *map(str, PACKETS)], check=True, capture_output=True, text=True).stdout
    return [(int(each[0]), *map(float, each[1:])) for each in map(str.split, said.splitlines())]  # type: ignore[misc]


def render(rows: Rows, load: tuple[float, float]) -> str:
    lines = [
        f"{SIZE >> 20} MB f32 all_reduce with each value of NETFOLD_SECURITY, in turns, on links of MTU 1500. The goal",
        f"at 1 Gbit/s: at most {GOAL} of the time of `none`. CPU is what the ranks and the switch use of the cores for",
        "one all_reduce, together.",
        "",
        "| link | ranks | NETFOLD_SECURITY | ms: median | 5% .. 95% | of none, paired: median | 25% .. 75% "
        "| CPU, ms: median | of none | sent again | wrong |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for place, taken in rows.items():
        times = {security: [row["took_s"] for row in taken[security]] for security in SECURITIES}
        cpu = {security: [row["cpu_s"] for row in taken[security]] for security in SECURITIES}
        for security in SECURITIES:
            of = spread(times[security])
            paired = ("", "", "")
            if security != SECURITIES[0]:
                ratio = spread(paired_ratios(times[security], times[SECURITIES[0]]))
                cpu_ratio = spread(paired_ratios(cpu[security], cpu[SECURITIES[0]]))
                paired = (f"{ratio.median:.3f}", f"{ratio.p25:.3f} .. {ratio.p75:.3f}", f"{cpu_ratio.median:.2f}")
            again, wrong = (sum(row[name] for row in taken[security]) for name in ("again", "wrong"))
            lines.append(
                f"| {place} | {place.ranks} | {security} | {of.median * 1e3:.1f} "
                f"| {of.p5 * 1e3:.1f} .. {of.p95 * 1e3:.1f} | {paired[0]} | {paired[1]} "
                f"| {statistics.median(cpu[security]) * 1e3:.0f} | {paired[2]} | {again} | {wrong} |"
            )
    lines += [
        "",
        "Through a switch with n workers a tag is made or checked 3n + 1 times for each chunk: by each worker for its",
        "contribution and for the answer, by the switch for each contribution and once for the answer. Shaped links",
        "leave the cores room for that; where nothing is shaped the cores are the limit, and all of it shows. What one",
        "tag takes, which is also what checking one takes (medians of 31 runs of 4000, lowest .. highest):",
        "",
        "| packet without its tag, bytes | ns | ns a byte |",
        "|---|---|---|",
    ]
    for size, middle, low, high in auth_costs():
        lines.append(f"| {size} | {middle:.0f} ({low:.0f} .. {high:.0f}) | {middle / size:.3f} |")
    rounds = len(next(iter(rows.values()))[SECURITIES[0]])
    lines += ["", f"{rounds} interleaved rounds a link; {spoken(load)}"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(*arguments[1:])
    given = [*arguments, *("15", "1gbit")[len(arguments) :]]
    rounds, rate = int(given[0]), given[1]
    load = os.getloadavg()[0]
    places = (
        Place(2, rate),
        Place(2, rate, switch=True),
        Place(4, rate, switch=True),
        Place(4, None, switch=True),
        Place(2, ""),
    )
    with exit_on_signals():
        rows = {place: measure(place, rounds) for place in places}
    text = render(rows, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
