"""An all_reduce through one switch against one through two leaves and a root; as root:

    .venv/bin/python bench/tree.py [ROUNDS] [RATE]      # 20 200mbit

Eight workers, each on a link of that rate. Four of them are before each leaf, and each leaf has a link of the same rate
to the root: there a leaf's sum takes the place of its workers' tensors. One group a shape, in the same processes; the
shapes take turns in every round. Times are the slowest rank's; every element is checked. Writes bench/results/tree.md.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, FileStore, Options
from netfold.bench.machine import describe_machine, describe_versions
from netfold.bench.spread import spread
from netfold.bench.start_line import StartLine
from netfold.rack import Rack
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.command import run
from netfold.rack.link import parse_link, shape_command
from netfold.rack.names import HOST_INTERFACE, host_address, host_namespace, port_name, switch_namespace
from netfold.rack.processes import exit_on_signals

SIZE = 16 << 20
WORKERS = 8
LEAVES = (8, 9)  # hosts, after those of the workers
ROOT = "10.78.0.254"
PORT = 7172
WARMUPS = 2
SHAPES = ("one switch", "two leaves, a root")
RESULT = Path(__file__).parent / "results" / "tree.md"
# For a whole run: a rank that is missing must not leave the others waiting for ever.
DEADLINE_S = 600


def serve(control: str, folder: str, leaf: str) -> None:
    """A rank: an all_reduce through the shape that a line names, and what it took as a line back."""
    rank, size = int(os.environ["RANK"]), WORKERS
    line = StartLine(Path(folder, "line"), rank, size)
    tensor = np.empty(SIZE // 4, np.float32)
    # Whole numbers that a float sum keeps exactly in any order, another one in every element of a chunk.
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    switches = (os.environ["NETFOLD_SWITCH"], leaf)
    groups = [
        Communicator(FileStore(f"{folder}/{shape}"), rank, size, options=Options(switch=switch))
        for shape, switch in enumerate(switches)
    ]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(control)
        stream = connection.makefile("rw")
        for words in stream:
            shape, turn = map(int, words.split())
            np.add(pattern, float(rank + turn), out=tensor)
            line.cross()
            began = time.perf_counter()
            groups[shape].all_reduce(tensor)
            took_s = time.perf_counter() - began
            expected = pattern * size + float(sum(range(size)) + size * turn)
            record = groups[shape].group.events()[-1]
            answer = {
                "took_s": took_s,
                "wrong": int(np.count_nonzero(tensor != expected)),
                "again": int(record["retransmissions"]),
            }
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    for group in groups:
        group.close()


def start_tree(rack: Rack, rate: str) -> None:
    """Two leaves on hosts without a limit, and a root that each reaches over a link with one."""
    link = parse_link(rate, "0%")
    root = switch_namespace(rack.rack_id)
    run(["ip", "-n", root, "link", "add", "br1", "type", "bridge"])
    run(["ip", "-n", root, "addr", "add", f"{ROOT}/24", "dev", "br1"])
    run(["ip", "-n", root, "link", "set", "br1", "up"])
    for number, host in enumerate(LEAVES):
        leaf, above, below = host_namespace(rack.rack_id, host), f"leaf{number}", "up0"
        run(["tc", "-netns", leaf, "qdisc", "del", "dev", HOST_INTERFACE, "root"])
        run(["tc", "-netns", root, "qdisc", "del", "dev", port_name(host), "root"])
        run(["ip", "-n", root, "link", "add", above, "type", "veth", "peer", "name", below, "netns", leaf])
        run(["ip", "-n", leaf, "addr", "add", f"10.78.0.{number + 1}/24", "dev", below])
        run(["ip", "-n", root, "link", "set", above, "master", "br1"])
        for namespace, interface in ((root, above), (leaf, below)):
            run(["ip", "-n", namespace, "link", "set", interface, "up"])
            run(shape_command(namespace, interface, link))
    start_aggregator(rack.popen_switch, aggregator_argv(f"{ROOT}:{PORT}"), lambda line: None)
    for host in LEAVES:
        argv = [*aggregator_argv(f"{host_address(host)}:{PORT}"), "--parent", f"{ROOT}:{PORT}"]
        start_aggregator(lambda argv, host=host: rack.popen(host, argv), argv, lambda line: None)


def measure(rounds: int, rate: str) -> list[list[dict[str, Any]]]:
    """By shape, a round each: what the slowest rank took, wrong elements, and packets sent again by all."""
    rows: list[list[dict[str, Any]]] = [[] for _ in SHAPES]
    with (
        tempfile.TemporaryDirectory(prefix="netfold-tree-") as folder,
        socket.socket(socket.AF_UNIX) as server,
        Rack(WORKERS + len(LEAVES), rate) as rack,
    ):
        control = f"{folder}/control"
        server.bind(control)
        server.listen(WORKERS)
        server.settimeout(DEADLINE_S)
        StartLine.draw(Path(folder, "line"), WORKERS)
        rack.start_switch(lambda line: None)
        start_tree(rack, rate)
        for host in range(WORKERS):
            leaf = f"{host_address(LEAVES[host * len(LEAVES) // WORKERS])}:{PORT}"
            argv = [sys.executable, str(Path(__file__).resolve()), "rank", control, folder, leaf]
            rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE, "WORLD_SIZE": str(WORKERS)})
        streams = []
        for _ in range(WORKERS):
            connection = server.accept()[0]
            connection.settimeout(DEADLINE_S)
            streams.append(connection.makefile("rw"))
        for turn in range(-WARMUPS, rounds):
            for place in range(len(SHAPES)):
                shape = (turn + place) % len(SHAPES)
                for stream in streams:
                    stream.write(f"{shape} {turn + WARMUPS}\n")
                    stream.flush()
                answers = [json.loads(stream.readline()) for stream in streams]
                if turn >= 0:
                    rows[shape].append(
                        {
                            "took_s": max(answer["took_s"] for answer in answers),
                            "wrong": sum(answer["wrong"] for answer in answers),
                            "again": sum(answer["again"] for answer in answers),
                        }
                    )
    return rows


def render(rows: list[list[dict[str, Any]]], rate: str, load: tuple[float, float]) -> str:
    one = spread([row["took_s"] for row in rows[0]])
    chunks = WORKERS * -(-SIZE // 1408)
    lines = [
        f"{SIZE >> 20} MB f32 all_reduce of {WORKERS} workers, {rate} links; a leaf has one such link to the root.",
        "",
        "| | ms: median | 5% .. 95% | slowest | median / one switch | goodput Mbit/s | tensors into the topmost switch "
        "| sent again | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape, taken in enumerate(rows):
        times = [row["took_s"] for row in taken]
        of = spread(times)
        again = sum(row["again"] for row in taken) / (chunks * len(taken))
        lines.append(
            f"| {SHAPES[shape]} | {of.median * 1e3:.0f} | {of.p5 * 1e3:.0f} .. {of.p95 * 1e3:.0f} "
            f"| {max(times) * 1e3:.0f} | {of.median / one.median:.3f} | {SIZE * 8 / of.median / 1e6:.0f} "
            f"| {(WORKERS, len(LEAVES))[shape]} | {again:.2%} | {sum(row['wrong'] for row in taken)} |"
        )
    machine, versions = describe_machine(), describe_versions({})
    lines += [
        "",
        f"{len(rows[0])} interleaved rounds; {machine['cores']} cores of {machine['cpu']} for all of it, "
        f"Linux {machine['kernel']}, load {load[0]:.1f} to {load[1]:.1f}; netfold {versions['netfold']}, commit "
        f"{versions['commit']}.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(*arguments[1:])
    given = [*arguments, *("20", "200mbit")[len(arguments) :]]
    rounds, rate = int(given[0]), given[1]
    load = os.getloadavg()[0]
    with exit_on_signals():
        rows = measure(rounds, rate)
    text = render(rows, rate, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
