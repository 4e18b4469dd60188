"""Admission of a job to a tree of switches, by its number of workers; no root needed, about a minute:

    .venv/bin/python lab/bench/tree_admission.py [--workers 256,1024,4096]

The switches are real daemons, a root and as many leaves as there are times 256 workers. The workers are not ranks: one
process plays all of them, with a control connection and a UDP socket for each. Every worker asks its leaf for the path
to the root, joins, shows its data path, and waits for the start. Then all workers add one chunk of i32, whose values
are checked. Then all but one contribute, and every worker asks which rank is missing. Then all leave.

CPU seconds are those of a switch's process; memory is what it has in RAM, without the slots that the job was granted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import driver
import msgpack
import numpy as np

from netfold._native import protocol
from netfold.communicator.switch_tree import PathToRoot, trees_of
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.open_files import allow_open_files

MOST_BELOW = protocol.MAX_WORKERS
PAYLOAD = protocol.ETHERNET_PAYLOAD_BYTES
I32 = 6
AGAIN_S, DEADLINE_S = 1.0, 120.0
WINDOW = "16K"


class Daemon:
    """A switch in a process of its own."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", "--window", WINDOW]
        # Its log goes to a file: nobody reads a pipe meanwhile.
        self.log = open(os.memfd_create("log"), "w+b", buffering=0)  # noqa: SIM115
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().split()[-1]

    @property
    def cpu_s(self) -> float:
        return driver.cpu_seconds(self.process.pid)

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10

    def granted_bytes(self) -> int:
        """Memory for slots of the job that started last."""
        self.log.seek(0)
        return int(re.findall(rb"event=started .*memory_bytes=(\d+)", self.log.read())[-1])

    def count(self, pattern: str) -> int:
        """Matches in its log so far."""
        self.log.seek(0)
        return len(re.findall(pattern.encode(), self.log.read()))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


@contextlib.contextmanager
def running_tree(leaves: int) -> Iterator[list[Daemon]]:
    """The root and its leaves; without leaves, one switch."""
    with contextlib.ExitStack() as stack:
        tree = [Daemon()]
        stack.callback(tree[0].close)
        for _ in range(leaves):
            tree.append(Daemon("--parent", tree[0].endpoint))
            stack.callback(tree[-1].close)
        yield tree


class Worker:
    """A worker without a rank: the messages and packets of admission, and of one chunk after another."""

    def __init__(self, number: int, endpoint: str) -> None:
        self.number, self.endpoint = number, endpoint
        self.path: dict[str, Any] = {}
        self.join_bytes = 0
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.setblocking(False)
        self.udp.bind(("127.0.0.1", 0))
        self._identity: dict[str, int] = {}
        self._sent = 0

    async def ask_path(self) -> None:
        reader, writer = await self._connect()
        await self._send(writer, {"type": "path", "version": control_messages.VERSION, "below": []})
        reply = await self._receive(reader, "path")
        writer.close()
        self.path = {"type": "path_to_root", **PathToRoot.parse(reply, self.endpoint)._asdict()}

    async def join(self, job: str, workers: int, tree: list[Any] | None) -> None:
        """Join, show the data path, and wait for the start."""
        self.reader, self.writer = await self._connect()
        where: dict[str, Any] = {"ranks": list(range(workers))} if tree is None else {"tree": tree}
        port = self.udp.getsockname()[1]
        join = {"type": "join", "version": control_messages.VERSION, "job": job, "rank": self.number, "port": port}
        join |= {**where, "window_bytes": 1 << 20, "timeout_s": DEADLINE_S}
        self.join_bytes = len(control_messages.encode(join))
        await self._send(self.writer, join)
        admitted = await self._receive(self.reader, "admitted")
        self.udp.connect(("127.0.0.1", admitted["port"]))
        self._identity = {name: admitted[name] for name in ("incarnation", "worker")}
        self._identity["job"] = admitted["job_id"]
        await self._exchange(
            lambda: self._packet(flags=protocol.FLAGS["hello"], packet_number=admitted["nonce"]),
            lambda header: True,
        )
        await self._send(self.writer, {"type": "ready", "payload_bytes": PAYLOAD})
        self._identity["epoch"] = (await self._receive(self.reader, "start"))["epoch"]

    async def contribute(self, chunk: int, values: Any) -> Any:
        """Send the contribution until its result is here, and return that."""
        call = {"operation": chunk, "elements": len(values), "count": len(values), "wire": I32, "chunk": chunk}

        def packet() -> bytes:
            self._sent += 1
            return self._packet(values.tobytes(), packet_number=self._sent, **call)

        found = await self._exchange(packet, lambda bytes_: int.from_bytes(bytes_[16:24], "big") == chunk)
        return np.frombuffer(found[protocol.HEADER_BYTES :], np.int32)[: len(values)]

    async def ask_stragglers(self, chunk: int) -> dict[str, Any]:
        """The reply of its switch: `ranks` that are missing, and perhaps `unknown`."""
        await self._send(self.writer, {"type": "stragglers", "chunk": chunk, "serial": 1})
        return await self._receive(self.reader, "stragglers")

    async def leave(self) -> None:
        with contextlib.suppress(OSError):
            await self._send(self.writer, {"type": "leave", "reason": "the group has ended", "fault": -1})
        self.close()

    def close(self) -> None:
        self.writer.close()
        self.udp.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = control_messages.parse_endpoint(self.endpoint, what="the switch")
        return await asyncio.open_connection(host, port)

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        writer.write(control_messages.encode(message))
        await writer.drain()

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
        length = control_messages.length_of(await reader.readexactly(4))
        return control_messages.decode(await reader.readexactly(length))

    async def _receive(self, reader: asyncio.StreamReader, kind: str) -> dict[str, Any]:
        while (message := await self._read(reader))["type"] != kind:
            if message["type"] == "refused":
                raise SystemExit(f"refused: {message['reason']}")
        return message

    def _packet(self, payload: bytes = b"", **fields: int) -> bytes:
        header = protocol.Header()
        for name, value in {**self._identity, **fields}.items():
            setattr(header, name, value)
        packet: bytes = header.pack() + payload.ljust(PAYLOAD, b"\0")
        return packet

    async def _exchange(self, packet: Callable[[], bytes], is_answer: Callable[[bytes], bool]) -> bytes:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(BlockingIOError):
                self.udp.send(packet())
            try:
                while True:
                    found = await asyncio.wait_for(loop.sock_recv(self.udp, 1 << 16), AGAIN_S)
                    if is_answer(found):
                        return found
            except (TimeoutError, asyncio.TimeoutError):
                continue


def values_of(worker: int, chunk: int = 0) -> Any:
    """A worker's contribution: another value in every element."""
    return ((worker + 7 * chunk) * np.arange(1, PAYLOAD // 4 + 1) % 4096).astype(np.int32)


async def admit(workers: Sequence[Worker]) -> dict[str, float]:
    """Ask for the paths, make the tree, join. Returns seconds, and sizes in bytes."""
    began = time.perf_counter()
    await together(workers, lambda each: each.ask_path())
    asked = time.perf_counter()
    messages = {each.number: each.path for each in workers}
    trees = trees_of(messages, range(len(workers)), 0)
    made = time.perf_counter()
    job = secrets.token_hex(16)
    await together(workers, lambda each: each.join(job, len(workers), trees[each.number]))
    paths_bytes = len(msgpack.packb(messages))
    return {
        "paths_s": asked - began,
        "tree_s": made - asked,
        "join_s": time.perf_counter() - made,
        "paths_bytes": paths_bytes,
        "join_bytes": max(each.join_bytes for each in workers),
    }


async def add(workers: Sequence[Worker], chunk: int) -> float:
    """One chunk of all workers, every value checked. Returns seconds."""
    began = time.perf_counter()
    results = await together(workers, lambda each: each.contribute(chunk, values_of(each.number, chunk)))
    took_s = time.perf_counter() - began
    expected = sum(values_of(each.number, chunk).astype(np.int64) for each in workers)
    assert all((result == expected).all() for result in results), "a sum is wrong"
    return took_s


async def find_straggler(workers: Sequence[Worker], chunk: int) -> float:
    """All but the last contribute to the chunk; within a second all ask who is missing. Returns the longest seconds."""
    last = workers[-1]
    others = [
        asyncio.ensure_future(each.contribute(chunk, values_of(each.number, chunk))) for each in workers if each != last
    ]
    deadline = time.monotonic() + DEADLINE_S
    while (missing := (await workers[0].ask_stragglers(chunk))["ranks"]) != [last.number]:
        if time.monotonic() > deadline:
            raise SystemExit(f"ranks {missing} are missing, and only {last.number} should be")
        await asyncio.sleep(0.1)

    async def ask(worker: Worker) -> float:
        await asyncio.sleep(worker.number * 0.618 % 1)
        began = time.perf_counter()
        reply = await worker.ask_stragglers(chunk)
        assert reply["ranks"] == [last.number], reply
        return time.perf_counter() - began

    took_s = max(await together(workers, ask))
    await last.contribute(chunk, values_of(last.number, chunk))
    await asyncio.gather(*others)
    return took_s


async def leave(workers: Sequence[Worker], tree: Sequence[Daemon]) -> float:
    """Seconds until all switches have closed the job."""
    began = time.perf_counter()
    await together(workers, lambda each: each.leave())
    while not all(each.count("event=closed") for each in tree):
        if time.perf_counter() - began > DEADLINE_S:
            raise SystemExit("a switch still has the job")
        await asyncio.sleep(0.02)
    return time.perf_counter() - began


async def together(workers: Sequence[Worker], what: Callable[[Worker], Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.wait_for(asyncio.gather(*map(what, workers)), DEADLINE_S))


async def run_job(tree: Sequence[Daemon], count: int) -> dict[str, Any]:
    """A whole job of `count` workers, the same number at each leaf."""
    leaves = list(tree[1:]) or [tree[0]]
    each_leaf = -(-count // len(leaves))
    workers = [Worker(number, leaves[number // each_leaf].endpoint) for number in range(count)]
    before = [(each.cpu_s, each.memory_bytes()) for each in tree]
    found: dict[str, Any] = await admit(workers)
    found["cpu_s"] = [each.cpu_s - cpu for each, (cpu, _) in zip(tree, before, strict=True)]
    found["sum_s"] = await add(workers, 0)
    found["granted"] = [each.granted_bytes() for each in tree]
    grown = (each.memory_bytes() - memory for each, (_, memory) in zip(tree, before, strict=True))
    found["memory"] = [all_of - granted for all_of, granted in zip(grown, found["granted"], strict=True)]
    asking = [each.cpu_s for each in tree]
    found["straggler_s"] = await find_straggler(workers, 1)
    found["straggler_cpu_s"] = [each.cpu_s - cpu for each, cpu in zip(tree, asking, strict=True)]
    leaving = [each.cpu_s for each in tree]
    found["end_s"] = await leave(workers, tree)
    found["end_cpu_s"] = [each.cpu_s - cpu for each, cpu in zip(tree, leaving, strict=True)]
    return found


def tree_admission(workers: str = "256,1024,4096") -> str:
    """Admission to a tree of switches"""
    allow_open_files(1 << 14)
    times, switches = [], []
    for count in map(int, workers.split(",")):
        leaves = -(-count // MOST_BELOW)
        with running_tree(leaves if leaves > 1 else 0) as tree:
            found = asyncio.run(run_job(tree, count))
        steps = ("paths_s", "tree_s", "join_s", "sum_s", "straggler_s", "end_s")
        sizes = (f"{found['paths_bytes'] / 1e3:.0f}", f"{found['join_bytes'] / 1e3:.1f}")
        times.append([count, len(tree), *(f"{found[step]:.2f}" for step in steps), *sizes])
        rows = {"root": [0], "a leaf": range(1, len(tree))} if len(tree) > 1 else {"the switch": [0]}
        for name, of in rows.items():
            largest = [max(found[key][each] for each in of) for key in ("cpu_s", "straggler_cpu_s", "end_cpu_s")]
            memory = [max(found[key][each] for each in of) / 2**20 for key in ("granted", "memory")]
            below = len(tree) - 1 if name == "root" else -(-count // max(1, len(tree) - 1))
            cells = (*(f"{each:.2f}" for each in largest), *(f"{each:.1f}" for each in memory))
            switches.append([count, name, below, *cells])
    steps_head = "paths | the tree, at a rank | join to start | a chunk added | stragglers answered | end"
    head = f"workers | switches | s: {steps_head} | kB: paths of all | longest join"
    second = "workers | | contributors | CPU s: admission | stragglers | end | MiB: slots | beside the slots"
    return f"""Up to {MOST_BELOW} workers at a leaf. Every switch is a process, and one more process plays all workers.
All share the machine's cores, so the seconds are upper bounds. The second table has what a switch itself takes, of the
leaves the largest.

{driver.table(head, times)}

{driver.table(second, switches)}

Every worker asks for its path, joins, is tested with a hello, and adds {PAYLOAD // 4} i32. All sums are checked.
*Stragglers*: all workers but one have contributed, and within a second every worker asks which rank is missing; the
longest time of an answer. The window is {WINDOW} here, so that the slots of all leaves fit into this machine. Below 0
MiB: the slots fit into memory that the process had before.
"""


if __name__ == "__main__":
    driver.run(tree_admission)
