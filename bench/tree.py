"""What a leaf in each rack saves where racks share an uplink; as root:

    .venv/bin/python bench/tree.py [ROUNDS] [RATE]      # 20 200mbit; some two minutes

Two racks of four hosts, every link of that rate, each rack's uplink to the core too. Through one switch at the core
four tensors cross an uplink each way; through a leaf in each rack's switch, one sum does; a ring between hosts
crosses it once, too, and sends almost twice as much. One group a shape, in the same processes; the shapes take turns
in every round. Times are the slowest rank's; every element is checked. Writes bench/results/tree.md.
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
from netfold.bench.machine import spoken
from netfold.bench.spread import spread
from netfold.bench.start_line import StartLine
from netfold.rack import Rack
from netfold.rack.names import HOST_INTERFACE
from netfold.rack.processes import exit_on_signals

SIZE = 16 << 20
WORKERS = 8
RACKS = 2
WARMUPS = 2
# And how many tensors cross an uplink, each way.
SHAPES = {"one switch, at the core": "4", "a leaf in each rack, a root": "1", "no switch: a ring": "1.75"}
RESULT = Path(__file__).parent / "results" / "tree.md"
# For a whole run: a rank that is missing must not leave the others waiting for ever.
DEADLINE_S = 600


def serve(control: str, folder: str, root: str) -> None:
    """A rank: an all_reduce through the shape that a line names, and what it took as a line back."""
    rank, size = int(os.environ["RANK"]), WORKERS
    line = StartLine(Path(folder, "line"), rank, size)
    tensor = np.empty(SIZE // 4, np.float32)
    # Whole numbers that a float sum keeps exactly in any order, another one in every element of a chunk.
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    leaf = os.environ.pop("NETFOLD_SWITCH")
    ways = (Options(switch=root), Options(switch=leaf), Options(algorithm="all_reduce=ring"))
    groups = [
        Communicator(FileStore(f"{folder}/{shape}"), rank, size, options=options) for shape, options in enumerate(ways)
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


def measure(rounds: int, rate: str) -> list[list[dict[str, Any]]]:
    """By shape, a round each: what the slowest rank took, wrong elements, and packets sent again by all."""
    rows: list[list[dict[str, Any]]] = [[] for _ in SHAPES]
    with (
        tempfile.TemporaryDirectory(prefix="netfold-tree-") as folder,
        socket.socket(socket.AF_UNIX) as server,
        Rack(WORKERS, rate, racks=RACKS, uplink=rate) as rack,
    ):
        control = f"{folder}/control"
        server.bind(control)
        server.listen(WORKERS)
        server.settimeout(DEADLINE_S)
        StartLine.draw(Path(folder, "line"), WORKERS)
        rack.start_switch(lambda line: None)
        rack.start_leaves(lambda line: None)
        argv = [sys.executable, str(Path(__file__).resolve()), "rank", control, folder, str(rack.switch_address)]
        for host in range(WORKERS):
            rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE})
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
        f"{SIZE >> 20} MB f32 all_reduce of {WORKERS} workers in {RACKS} racks; links and uplinks of {rate}.",
        "",
        "| | ms: median | 5% .. 95% | slowest | median / one switch | goodput Mbit/s | tensors over an uplink "
        "| sent again | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (shape, crossing), taken in zip(SHAPES.items(), rows, strict=True):
        times = [row["took_s"] for row in taken]
        of = spread(times)
        again = sum(row["again"] for row in taken) / (chunks * len(taken))
        lines.append(
            f"| {shape} | {of.median * 1e3:.0f} | {of.p5 * 1e3:.0f} .. {of.p95 * 1e3:.0f} "
            f"| {max(times) * 1e3:.0f} | {of.median / one.median:.3f} | {SIZE * 8 / of.median / 1e6:.0f} "
            f"| {crossing} | {again:.2%} | {sum(row['wrong'] for row in taken)} |"
        )
    lines += [
        "",
        f"{len(rows[0])} interleaved rounds; {spoken(load)}",
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
