"""What tags on packets cost an all_reduce through the switch; as root:

    .venv/bin/python bench/authentication.py [ROUNDS] [HOSTS] [RATE]      # 40 4 1gbit

One rack with two switches in it, one open and one with a token, and every rank in a group on each: what either takes is
measured in turns, round by round, in a new order each time, first over shaped links, then with no shaping at all. Times
are the slowest rank's; every element is checked. Writes bench/results/authentication.md.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold.bench.machine import spoken
from netfold.bench.spread import paired_ratios, spread
from netfold.bench.start_line import StartLine
from netfold.rack import Rack
from netfold.rack.aggregator import start_aggregator
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
SIDES = ("off", "on")
GOAL = 1.15
UNSHAPED = "none"
# Header and values of packets for MTUs of 1500 and 9000.
PACKETS = (48 + 1408, 48 + 8880)
ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "authentication.md"
# For a whole run: a rank that is missing must not leave the others waiting for ever.
DEADLINE_S = 900


def serve(control: str, folder: str, off: str, on: str) -> None:
    """A rank: an all_reduce by one of its groups a line that comes, and what it took as a line back."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    line = StartLine(Path(folder, "line"), rank, size)
    tensor = np.empty(SIZE // 4, np.float32)
    # Whole numbers that a float sum keeps exactly, another one in every element of a chunk.
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    plain = Options(switch=off)
    tagged = Options(switch=on, token_file=f"{folder}/token")
    with (
        socket.socket(socket.AF_UNIX) as connection,
        Communicator(FileStore(f"{folder}/off"), rank, size, options=plain) as first,
        Communicator(FileStore(f"{folder}/on"), rank, size, options=tagged) as second,
    ):
        groups = dict(zip(SIDES, (first, second), strict=True))
        for side, group in groups.items():
            membership = group.group.membership
            assert membership is not None and membership.authenticated == (side == "on")
        connection.connect(control)
        stream = connection.makefile("rw")
        for order in stream:
            turn, side = order.split()
            np.add(pattern, float(rank + int(turn)), out=tensor)
            line.cross()
            began, used = time.perf_counter(), time.process_time()
            groups[side].all_reduce(tensor)
            took_s, cpu_s = time.perf_counter() - began, time.process_time() - used
            expected = pattern * size + float(sum(range(size)) + size * int(turn))
            record = groups[side].group.events()[-1]
            answer = {
                "took_s": took_s,
                "cpu_s": cpu_s,
                "wrong": int(np.count_nonzero(tensor != expected)),
                "again": int(record["retransmissions"]),
            }
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


def unshape(rack: Rack) -> None:
    """Let every link carry what the machine can."""
    for host in range(rack.hosts):
        for namespace, interface in (
            (switch_namespace(rack.rack_id), port_name(host)),
            (host_namespace(rack.rack_id, host), HOST_INTERFACE),
        ):
            run(["tc", "-netns", namespace, "qdisc", "del", "dev", interface, "root"])


def cpu_s(pid: int) -> float:
    """What all threads of a process have used of a core so far."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


Rows = dict[str, dict[str, list[dict[str, Any]]]]


def measure(rounds: int, hosts: int, rate: str) -> Rows:
    """For each link and side a round each: the slowest rank's time, CPU time of all, wrong elements, repeats."""
    rows: Rows = {link: {side: [] for side in SIDES} for link in (rate, UNSHAPED)}
    with (
        tempfile.TemporaryDirectory(prefix="netfold-authentication-") as folder,
        socket.socket(socket.AF_UNIX) as server,
        Rack(hosts, rate) as rack,
    ):
        control, token = f"{folder}/control", secrets.token_hex(32)
        server.bind(control)
        server.listen(hosts)
        server.settimeout(DEADLINE_S)
        StartLine.draw(Path(folder, "line"), hosts)
        for name, text in (("token", token), ("tokens", f"bench {token}\n")):
            path = Path(folder, name)
            path.touch(0o600)
            path.write_text(text)
        endpoints, switches = [], {}
        for place, words in enumerate((["--open"], ["--token-file", f"{folder}/tokens"])):
            listen = f"{SWITCH_ADDRESS}:{SWITCH_PORT + place}"
            argv = [sys.executable, "-m", "netfold.cli", "switch", "--listen", listen, *words]
            started = start_aggregator(rack.popen_switch, argv, lambda line: None)
            endpoints.append(started.address)
            switches[SIDES[place]] = started.process.pid
        argv = [sys.executable, str(Path(__file__).resolve()), "rank", control, folder, *endpoints]
        for host in range(hosts):
            rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE})
        streams = []
        for _ in range(hosts):
            connection = server.accept()[0]
            connection.settimeout(DEADLINE_S)
            streams.append(connection.makefile("rw"))
        for link, taken in rows.items():
            if link == UNSHAPED:
                unshape(rack)
            for turn in range(-WARMUPS, rounds):
                for side in random.sample(SIDES, len(SIDES)):
                    before_s = cpu_s(switches[side])
                    for stream in streams:
                        stream.write(f"{turn + WARMUPS} {side}\n")
                        stream.flush()
                    answers = [json.loads(stream.readline()) for stream in streams]
                    if turn >= 0:
                        taken[side].append(
                            {
                                "took_s": max(answer["took_s"] for answer in answers),
                                "cpu_s": sum(answer["cpu_s"] for answer in answers) + cpu_s(switches[side]) - before_s,
                                "wrong": sum(answer["wrong"] for answer in answers),
                                "again": sum(answer["again"] for answer in answers),
                            }
                        )
    return rows


def tag_costs() -> list[tuple[int, float, float, float]]:
    """Bytes, and the median, lowest and highest nanoseconds of a tag over so many."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "seal_cost"
        seal = ROOT / "native/seal"
        sources = [str(ROOT / "bench/seal_cost.cpp"), str(seal / "sealer.cpp"), str(seal / "libcrypto.cpp")]
        include = f"-I{seal / 'include'}"
        subprocess.run(["c++", "-std=c++20", "-O2", include, *sources, "-o", str(program), "-ldl"], check=True)
        said = subprocess.run([program, *map(str, PACKETS)], check=True, capture_output=True, text=True).stdout
    return [(int(each[0]), *map(float, each[1:])) for each in map(str.split, said.splitlines())]  # type: ignore[misc]


def render(rows: Rows, hosts: int, load: tuple[float, float]) -> str:
    lines = [
        f"{SIZE >> 20} MB f32 all_reduce through the software switch, {hosts} hosts on namespaced links of MTU 1500,",
        f"with tags on packets (a switch with a token) and without (`--open`), in turns. The goal: at most {GOAL} of",
        "the time without. CPU is what the ranks and the switch use of the cores for one all_reduce, together.",
        "",
        "| links | tags | ms: median | 5% .. 95% | on / off, paired: median | 25% .. 75% | CPU, ms: median | on / off "
        "| sent again | wrong |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for link, taken in rows.items():
        times = {side: [row["took_s"] for row in taken[side]] for side in SIDES}
        cpu = {side: [row["cpu_s"] for row in taken[side]] for side in SIDES}
        ratio = spread(paired_ratios(times["on"], times["off"]))
        cpu_ratio = spread(paired_ratios(cpu["on"], cpu["off"]))
        for side in SIDES:
            of = spread(times[side])
            paired = ("", "", "")
            if side == "on":
                paired = (f"{ratio.median:.3f}", f"{ratio.p25:.3f} .. {ratio.p75:.3f}", f"{cpu_ratio.median:.3f}")
            lines.append(
                f"| {'not shaped' if link == UNSHAPED else link} | {side} | {of.median * 1e3:.1f} "
                f"| {of.p5 * 1e3:.1f} .. {of.p95 * 1e3:.1f} | {paired[0]} | {paired[1]} "
                f"| {statistics.median(cpu[side]) * 1e3:.0f} | {paired[2]} "
                f"| {sum(row['again'] for row in taken[side])} | {sum(row['wrong'] for row in taken[side])} |"
            )
    lines += [
        "",
        f"For each chunk a tag is made or checked {3 * hosts + 1} times: by each worker for its contribution and for",
        "the answer, by the switch for each contribution and once for the answer. Shaped links leave the cores room",
        "for that; where nothing is shaped the cores are the limit, and all of it shows. What one tag takes, which is",
        "also what checking one takes (medians of 31 runs of 4000, lowest .. highest):",
        "",
        "| packet without its tag, bytes | ns | ns a byte |",
        "|---|---|---|",
    ]
    for size, middle, low, high in tag_costs():
        lines.append(f"| {size} | {middle:.0f} ({low:.0f} .. {high:.0f}) | {middle / size:.3f} |")
    rounds = len(next(iter(rows.values()))["off"])
    lines += [
        "",
        f"{rounds} interleaved rounds a link; {spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(*arguments[1:])
    given = [*arguments, *("40", "4", "1gbit")[len(arguments) :]]
    rounds, hosts, rate = int(given[0]), int(given[1]), given[2]
    load = os.getloadavg()[0]
    with exit_on_signals():
        rows = measure(rounds, hosts, rate)
    text = render(rows, hosts, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
