"""What NETFOLD_SECURITY costs an all_reduce, between ranks and through the switch; as root:

    .venv/bin/python bench/security.py [ROUNDS] [RATE]      # 15 1gbit

Two ranks with a group for each security: what an operation of each takes is measured in turns, round by round, in a new
order each time: as two hosts of a rack with shaped links, over TCP and through two switches there, of which the one
without security is open; then over TCP on this machine's loopback. Times are the slowest rank's; every element is
checked. Writes bench/results/security.md.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold.bench.machine import spoken
from netfold.bench.spread import paired_ratios, spread
from netfold.bench.start_line import StartLine
from netfold.communicator.options import SECURITIES
from netfold.rack import Rack
from netfold.rack.aggregator import start_aggregator
from netfold.rack.names import HOST_INTERFACE, SWITCH_ADDRESS, SWITCH_PORT
from netfold.rack.processes import exit_on_signals

SIZE = 16 << 20
RANKS = 2
WARMUPS = 2
GOAL = 1.02
LOOPBACK = "loopback, TCP"
RESULT = Path(__file__).parent / "results" / "security.md"
# For a whole run: a rank that is missing must not leave the other waiting for ever.
DEADLINE_S = 900

Rows = dict[str, dict[str, list[dict[str, Any]]]]


def serve(control: str, folder: str, *switches: str) -> None:
    """A rank: an all_reduce by one of its groups a line that comes, and what it took as a line back."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    line = StartLine(Path(folder, "line"), rank, size)
    tensor = np.empty(SIZE // 4, np.float32)
    # Whole numbers that a float sum keeps exactly, another one in every element of a chunk.
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        groups = {}
        for security in SECURITIES:
            options = Options(transport="tcp", security=security, probe="off")
            if switches:
                endpoint = switches[security != SECURITIES[0]]
                options = replace(options, switch=endpoint, token_file=f"{folder}/token" if "#" in endpoint else None)
            store = FileStore(f"{folder}/{security}")
            groups[security] = stack.enter_context(Communicator(store, rank, size, options=options))
        connection.connect(control)
        stream = connection.makefile("rw")
        for order in stream:
            turn, security = order.split()
            np.add(pattern, float(rank + int(turn)), out=tensor)
            line.cross()
            began, used = time.perf_counter(), time.process_time()
            groups[security].all_reduce(tensor)
            took_s, cpu_s = time.perf_counter() - began, time.process_time() - used
            expected = pattern * size + float(sum(range(size)) + size * int(turn))
            answer = {"took_s": took_s, "cpu_s": cpu_s, "wrong": int(np.count_nonzero(tensor != expected))}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


@contextlib.contextmanager
def ranks_on(link: str, argv: list[str], folder: str) -> Iterator[None]:
    if link == LOOPBACK:
        environment = {**os.environ, "WORLD_SIZE": str(RANKS), "NETFOLD_INTERFACE": "lo"}
        started = [subprocess.Popen(argv, env={**environment, "RANK": str(rank)}) for rank in range(RANKS)]
        try:
            yield
        finally:
            for process in started:
                process.kill()
                process.wait()
        return
    rate, _, over = link.partition(", ")
    with Rack(RANKS, rate) as rack:
        if over == "switch":
            argv = [*argv, *start_switches(rack, folder)]
        for host in range(RANKS):
            rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE})
        yield


def start_switches(rack: Rack, folder: str) -> list[str]:
    """An open switch and one with a token, by their addresses."""
    token = secrets.token_hex(32)
    for name, text in (("token", token), ("tokens", f"bench {token}\n")):
        path = Path(folder, name)
        path.touch(0o600)
        path.write_text(text)
    found = []
    for place, words in enumerate((["--open"], ["--token-file", f"{folder}/tokens"])):
        listen = f"{SWITCH_ADDRESS}:{SWITCH_PORT + place}"
        argv = [sys.executable, "-m", "netfold.cli", "switch", "--listen", listen, *words]
        found.append(start_aggregator(rack.popen_switch, argv, lambda line: None).address)
    return found


def measure(link: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """For each security a round each: the slowest rank's time, CPU time of both, wrong elements."""
    taken: dict[str, list[dict[str, Any]]] = {security: [] for security in SECURITIES}
    with (
        tempfile.TemporaryDirectory(prefix="netfold-security-") as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        control = f"{folder}/control"
        server.bind(control)
        server.listen(RANKS)
        server.settimeout(DEADLINE_S)
        StartLine.draw(Path(folder, "line"), RANKS)
        with ranks_on(link, [sys.executable, str(Path(__file__).resolve()), "rank", control, folder], folder):
            streams = []
            for _ in range(RANKS):
                connection = server.accept()[0]
                connection.settimeout(DEADLINE_S)
                streams.append(connection.makefile("rw"))
            for turn in range(-WARMUPS, rounds):
                for security in random.sample(SECURITIES, len(SECURITIES)):
                    for stream in streams:
                        stream.write(f"{turn + WARMUPS} {security}\n")
                        stream.flush()
                    answers = [json.loads(stream.readline()) for stream in streams]
                    if turn >= 0:
                        row = {name: sum(answer[name] for answer in answers) for name in ("cpu_s", "wrong")}
                        taken[security].append({**row, "took_s": max(answer["took_s"] for answer in answers)})
    return taken


def render(rows: Rows, load: tuple[float, float]) -> str:
    lines = [
        f"{SIZE >> 20} MB f32 all_reduce of {RANKS} ranks, with each value of NETFOLD_SECURITY, in turns. The",
        f"goal on a shaped link: at most {GOAL} of the time of `none`. CPU is what both ranks use of the cores for one",
        "all_reduce, together; the switch's is not in it.",
        "",
        "| link | NETFOLD_SECURITY | ms: median | 5% .. 95% | of none, paired: median | 25% .. 75% | CPU, ms: median "
        "| of none | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for link, taken in rows.items():
        times = {security: [row["took_s"] for row in taken[security]] for security in SECURITIES}
        cpu = {security: [row["cpu_s"] for row in taken[security]] for security in SECURITIES}
        for security in SECURITIES:
            of = spread(times[security])
            paired = ("", "", "")
            if security != SECURITIES[0]:
                ratio = spread(paired_ratios(times[security], times[SECURITIES[0]]))
                cpu_ratio = spread(paired_ratios(cpu[security], cpu[SECURITIES[0]]))
                paired = (f"{ratio.median:.3f}", f"{ratio.p25:.3f} .. {ratio.p75:.3f}", f"{cpu_ratio.median:.2f}")
            lines.append(
                f"| {link} | {security} | {of.median * 1e3:.1f} | {of.p5 * 1e3:.1f} .. {of.p95 * 1e3:.1f} "
                f"| {paired[0]} | {paired[1]} | {statistics.median(cpu[security]) * 1e3:.0f} | {paired[2]} "
                f"| {sum(row['wrong'] for row in taken[security])} |"
            )
    rounds = len(next(iter(rows.values()))[SECURITIES[0]])
    lines += ["", f"{rounds} interleaved rounds a link; {spoken(load)}"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(*arguments[1:])
    given = [*arguments, *("15", "1gbit")[len(arguments) :]]
    rounds, rate = int(given[0]), given[1]
    load = os.getloadavg()[0]
    with exit_on_signals():
        rows = {link: measure(link, rounds) for link in (f"{rate}, TCP", f"{rate}, switch", LOOPBACK)}
    text = render(rows, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
