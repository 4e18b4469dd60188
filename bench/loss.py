"""What lost packets cost an all_reduce through the switch; as root:

    .venv/bin/python bench/loss.py [ROUNDS] [HOSTS] [RATE] [LOSS ...]      # 50 4 200mbit 0.01% 0.1% 1%

One rack and one group for all of it. Between rounds the loss of every link is set anew, and every loss has its turn in
every round, none among them: whatever else the machine does meets them alike. A loss takes single packets, each way
(netfold/rack/link.py). Times are the slowest rank's; every element is checked. Writes bench/results/loss.md.
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

from netfold import Communicator, FileStore
from netfold.bench.machine import spoken
from netfold.bench.spread import spread
from netfold.bench.start_line import StartLine
from netfold.rack import Rack
from netfold.rack.command import run
from netfold.rack.link import loss_rules, parse_link
from netfold.rack.names import HOST_INTERFACE, host_namespace, port_name, switch_namespace
from netfold.rack.processes import exit_on_signals

SIZE = 16 << 20
WARMUPS = 2
RESULT = Path(__file__).parent / "results" / "loss.md"
# For a whole run: a rank that is missing must not leave the others waiting for ever.
DEADLINE_S = 900


def serve(control: str, folder: str) -> None:
    """A rank: an all_reduce a line that comes, and what it took as a line back."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    line = StartLine(Path(folder, "line"), rank, size)
    tensor = np.empty(SIZE // 4, np.float32)
    # Whole numbers that a float sum keeps exactly, another one in every element of a chunk.
    pattern = (np.arange(len(tensor)) % 4093).astype(np.float32)
    with socket.socket(socket.AF_UNIX) as connection, Communicator(FileStore(folder), rank, size) as group:
        connection.connect(control)
        stream = connection.makefile("rw")
        for turn in stream:
            np.add(pattern, float(rank + int(turn)), out=tensor)
            line.cross()
            began = time.perf_counter()
            group.all_reduce(tensor)
            took_s = time.perf_counter() - began
            expected = pattern * size + float(sum(range(size)) + size * int(turn))
            record = group.group.events()[-1]
            answer = {
                "took_s": took_s,
                "wrong": int(np.count_nonzero(tensor != expected)),
                "again": int(record["retransmissions"]),
            }
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


def set_loss(rack: Rack, rate: str, loss: str) -> None:
    """Let every link lose so much from now on, both ways."""
    for host in range(rack.hosts):
        for namespace, interface in (
            (switch_namespace(rack.rack_id), port_name(host)),
            (host_namespace(rack.rack_id, host), HOST_INTERFACE),
        ):
            rules = loss_rules(interface, parse_link(rate, loss))
            run(["ip", "netns", "exec", namespace, "nft", "-f", "-"], f"delete table netdev loss_{interface}\n{rules}")


def measure(rounds: int, hosts: int, rate: str, losses: list[str]) -> dict[str, list[dict[str, Any]]]:
    """For each loss a round each: what the slowest rank took, wrong elements, and packets sent again by all."""
    rows: dict[str, list[dict[str, Any]]] = {loss: [] for loss in losses}
    with (
        tempfile.TemporaryDirectory(prefix="netfold-loss-") as folder,
        socket.socket(socket.AF_UNIX) as server,
        # Lossy from the start: such a link cuts packets first, and must do so in every round.
        Rack(hosts, rate, losses[-1]) as rack,
    ):
        control = f"{folder}/control"
        server.bind(control)
        server.listen(hosts)
        server.settimeout(DEADLINE_S)
        StartLine.draw(Path(folder, "line"), hosts)
        set_loss(rack, rate, "0%")
        rack.start_switch(lambda line: None)
        argv = [sys.executable, str(Path(__file__).resolve()), "rank", control, folder]
        for host in range(hosts):
            rack.popen(host, argv, {"NETFOLD_INTERFACE": HOST_INTERFACE})
        streams = []
        for _ in range(hosts):
            connection = server.accept()[0]
            connection.settimeout(DEADLINE_S)
            streams.append(connection.makefile("rw"))
        for turn in range(-WARMUPS, rounds):
            for place in range(len(losses)):
                loss = losses[(turn + place) % len(losses)]
                set_loss(rack, rate, loss)
                for stream in streams:
                    stream.write(f"{turn + WARMUPS}\n")
                    stream.flush()
                answers = [json.loads(stream.readline()) for stream in streams]
                if turn >= 0:
                    rows[loss].append(
                        {
                            "took_s": max(answer["took_s"] for answer in answers),
                            "wrong": sum(answer["wrong"] for answer in answers),
                            "again": sum(answer["again"] for answer in answers),
                        }
                    )
    return rows


def render(rows: dict[str, list[dict[str, Any]]], hosts: int, rate: str, load: tuple[float, float]) -> str:
    chunks = hosts * -(-SIZE // 1408)
    clean = spread([row["took_s"] for row in rows["0%"]])
    lines = [
        f"{SIZE >> 20} MB f32 all_reduce through the software switch, {hosts} hosts, {rate} links.",
        "",
        "| loss of a packet, each way | ms: median | 5% .. 95% | slowest | median / no loss | slowest / no loss "
        "| sent again | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for loss, taken in rows.items():
        times = [row["took_s"] for row in taken]
        of = spread(times)
        again = sum(row["again"] for row in taken) / (chunks * len(taken))
        lines.append(
            f"| {loss} | {of.median * 1e3:.0f} | {of.p5 * 1e3:.0f} .. {of.p95 * 1e3:.0f} | {max(times) * 1e3:.0f} "
            f"| {of.median / clean.median:.3f} | {max(times) / clean.median:.2f} | {again:.2%} "
            f"| {sum(row['wrong'] for row in taken)} |"
        )
    lines += [
        "",
        f"{len(rows['0%'])} interleaved rounds; goodput without loss {SIZE * 8 / clean.median / 1e6:.0f} Mbit/s; "
        f"{spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["rank"]:
        return serve(*arguments[1:])
    given = [*arguments, *("50", "4", "200mbit")[len(arguments) :]]
    rounds, hosts, rate = int(given[0]), int(given[1]), given[2]
    losses = ["0%", *(given[3:] or ["0.01%", "0.1%", "1%"])]
    load = os.getloadavg()[0]
    with exit_on_signals():
        rows = measure(rounds, hosts, rate, losses)
    text = render(rows, hosts, rate, (load, os.getloadavg()[0]))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
