"""A job beside floods at its switch and at its ranks, by a tenant and by peers without a token; no root needed:

.venv/bin/python lab/bench/floods.py          # ten minutes
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import secrets
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import driver
import psutil
from driver import CheckedSum, Place, Rank, open_network, start_ranks

from netfold.switch_protocol import control_messages
from netfold_lab.rack.aggregator import start_aggregator

SIZE_BYTES = 4 << 20
CALLS, WARMUPS = 8, 3
MEMBERS = 256
IDLE = 2000
GOAL, MEMORY_GOAL = 0.9, 1.5
SETTLE_S = 5.0

Address = tuple[str, int]


def trained(me: Rank) -> None:
    """A rank of the job. An order: seconds of each of CALLS all_reduces through the switch, every element checked."""
    add_once = CheckedSum(me, SIZE_BYTES)
    with me.communicator("job", algorithm="all_reduce=in_network") as group:

        def run() -> list[float]:
            seconds, wrong = zip(*(add_once(group.all_reduce) for _ in range(WARMUPS + CALLS)), strict=True)
            assert not any(wrong)
            return list(seconds[WARMUPS:])

        me.serve(run)


def tenant(block: bytes) -> Callable[[Address, str], Iterator[None]]:
    """Join as all but one of a job's MEMBERS workers, and send `block` over all connections as fast as it is taken."""

    def attack(switch: Address, token: str) -> Iterator[None]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        join = {"type": "join", "version": control_messages.VERSION, "job": secrets.token_hex(8), "port": 9}
        join |= {"ranks": list(range(MEMBERS)), "window_bytes": 1 << 20, "timeout_s": 300.0}
        streams: dict[int, ssl.SSLSocket] = {}
        for rank in itertools.cycle(range(1, MEMBERS)):  # the job never starts
            if rank not in streams:
                with contextlib.suppress(OSError):
                    stream = context.wrap_socket(socket.create_connection(switch, timeout=5))
                    fingerprint = hashlib.sha256(stream.getpeercert(binary_form=True) or b"").hexdigest()
                    credential = control_messages.credential_of(token, fingerprint)
                    stream.sendall(control_messages.encode({**join, "rank": rank, "credential": credential}))
                    if not streams:
                        control_messages.check_reply(control_messages.receive(stream), "admitted", us="the attacker")
                    stream.setblocking(False)
                    streams[rank] = stream
            if (member := streams.get(rank)) is not None:
                with contextlib.suppress(ssl.SSLWantReadError):
                    member.recv(1 << 16)
                try:
                    member.send(block)
                except (ssl.SSLWantWriteError, BlockingIOError):
                    pass
                except OSError:
                    streams.pop(rank).close()
            yield

    return attack


def hellos(switch: Address, token: str) -> Iterator[None]:
    """Begin TLS, and leave after the first message."""
    out = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    hello, open_ones = out.read(), []
    while True:
        with contextlib.suppress(OSError):
            open_ones.append(socket.create_connection(switch, timeout=1))
            open_ones[-1].sendall(hello)
        if len(open_ones) > 64:
            open_ones.pop(0).close()
        yield


def idle(address: Address, token: str, first: bytes = b"") -> Iterator[None]:
    """Hold IDLE connections that send `first` and nothing more, and make those anew that the other end closes."""
    streams: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            streams.append(socket.create_connection(address, timeout=1))
            streams[-1].sendall(first)
        if len(streams) > IDLE:
            streams.pop(0).close()
        yield


def readers(metrics: Address, token: str) -> Iterator[None]:
    """Ask for the metrics again and again, and read nothing."""
    return idle(metrics, token, b"GET /metrics HTTP/1.1\r\n\r\n" * 100)


def message(**fields: Any) -> bytes:
    return control_messages.encode(fields)


# Name: where it goes, and the flood.
FLOODS: dict[str, tuple[str, Callable[[Address, str], Iterator[None]]]] = {
    "a tenant's `alive`, 256 workers": ("switch", tenant(message(type="alive", serial=1) * 16)),
    "a tenant's unasked replies": ("switch", tenant(message(type="stragglers", ranks=[1], serial=1) * 16)),
    "a tenant's queries": ("switch", tenant(message(type="stragglers", chunk=1, serial=1) * 16)),
    "TLS hellos at the switch": ("switch", hellos),
    "idle connections to the switch": ("switch", idle),
    "idle connections to a rank": ("rank", idle),
    "readers of /metrics that never read": ("metrics", readers),
}


def attacker(me: Rank, name: str, host: str, port: int, token: str) -> None:
    """Runs one flood with the lowest priority, since a real one has cores of its own. An order: its rounds so far."""
    os.nice(19)
    rounds = [0]

    def run() -> None:
        for _ in FLOODS[name][1]((host, port), token):
            rounds[0] += 1

    threading.Thread(target=run, daemon=True).start()
    me.serve(lambda: rounds[0])
    os._exit(0)


def facts(pid: int) -> tuple[float, int]:
    """The memory in MB and the open descriptors of a process."""
    process = psutil.Process(pid)
    return process.memory_info().rss / (1 << 20), process.num_fds()


def listening(pid: int) -> int:
    (port,) = {
        each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN
    }
    return int(port)


def floods(rounds: int = 3, seconds: float = 24.0) -> str:
    """A job beside floods"""
    ratios: dict[str, list[float]] = {name: [] for name in FLOODS}
    sent = dict.fromkeys(FLOODS, 0)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        tokens = {name: secrets.token_hex(32) for name in ("job", "attacker")}
        for name, text in [
            ("tokens", "".join(f"{tenant_} {token}\n" for tenant_, token in tokens.items())),
            ("token", tokens["job"]),
        ]:
            path = Path(folder, name)
            path.touch(0o600)
            path.write_text(text)
        metrics = free.getsockname()[:2]
        free.close()
        argv = [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", "--log", "error"]
        argv += ["--token-file", f"{folder}/tokens", "--metrics", "{}:{}".format(*metrics)]
        with open_network(Place(2)) as network:
            started = start_aggregator(network.spawn_here, argv, print)
            job = {"NETFOLD_SWITCH": started.address, "NETFOLD_TOKEN_FILE": f"{folder}/token"}
            with start_ranks(network, trained, environment=job) as ranks:
                host, port = started.address.partition("#")[0].rsplit(":", 1)
                rank = next(iter(ranks.processes.values())).pid
                watched = {"the switch": started.process.pid, "rank 0": rank}
                addresses = {"switch": (host, int(port)), "metrics": metrics, "rank": (host, listening(rank))}

                def step_s() -> float:
                    return statistics.median(driver.slowest(ranks.ask()))

                step_s()
                before = {name: facts(pid) for name, pid in watched.items()}
                for _ in range(rounds):
                    for name in random.sample(list(FLOODS), len(FLOODS)):
                        alone = [step_s() for _ in range(5)]
                        address = addresses[FLOODS[name][0]]
                        with start_ranks(network, attacker, name, *address, tokens["attacker"], hosts=[0]) as attackers:
                            until = time.monotonic() + seconds
                            beside = []
                            while time.monotonic() < until:
                                beside.append(step_s())
                            sent[name] += attackers.ask()[0]
                        alone += [step_s() for _ in range(5)]
                        ratios[name].append(statistics.median(alone) / statistics.median(beside))
                time.sleep(SETTLE_S)
                after = {name: facts(pid) for name, pid in watched.items()}
    rows = [
        [
            name,
            f"{sent[name] / (rounds * seconds):.0f}",
            f"{statistics.median(of):.2f} ({min(of):.2f}..{max(of):.2f})",
            "yes" if statistics.median(of) >= GOAL else "**no**",
        ]
        for name, of in ratios.items()
    ]
    kept = [
        [
            name,
            f"{before[name][0]:.0f}, {before[name][1]}",
            f"{after[name][0]:.0f}, {after[name][1]}",
            f"{after[name][0] / before[name][0]:.2f}",
            "yes" if after[name][0] <= MEMORY_GOAL * before[name][0] else "**no**",
        ]
        for name in watched
    ]
    return f"""A job of two ranks adds {SIZE_BYTES >> 20} MB of f32 through a switch with tokens over loopback.
Beside it one process floods the switch, its metrics or rank 0's listener for {seconds:.0f} s, {rounds} times each, in a
new order each time. That process runs at the lowest priority, on the same cores as the job and the switch. Speed: the
median of the job's times just before and after a flood over the median beside it. Every sum is checked. A round is one
attempt to send to a connection, or to make one. Goals: {GOAL} of the speed, and memory within {MEMORY_GOAL} times of
before.

{driver.table("flood | rounds a second | speed beside it, median (least..most) | met", rows)}

Memory and descriptors before the first flood, and {SETTLE_S:.0f} s after the last:

{driver.table("process | before: MB, descriptors | after | memory, ratio | met", kept)}"""


if __name__ == "__main__":
    driver.run(floods)
