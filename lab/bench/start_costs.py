"""CPU seconds of every step of a start-up, measured on this machine with production's code, for start_simulation.py.

Each is the least of several measurements: other programs only add to it. What depends on P is measured at that P.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import driver
import msgpack
from start_simulation import Costs, address, identity

from netfold import Communicator, FileStore
from netfold._native import engine
from netfold.bootstrap import handle, rendezvous
from netfold.bootstrap.addresses import Interfaces
from netfold.bootstrap.listener import RegisteredGroup, acquire_listener, release_listener
from netfold.bootstrap.probe import BUDGET_S, TableChoice
from netfold.bootstrap.rendezvous import PeerAddresses, hosts_of
from netfold.bootstrap.shm_discovery import NodeSocket
from netfold.bootstrap.store import Store
from netfold.bootstrap.tcp_store import TcpStore, TcpStoreServer
from netfold.bootstrap.tree import Send, SocketLinks, StartTree, place_of
from netfold.communicator.startup import native_rows
from netfold.communicator.switch_tree import trees_of
from netfold.options import Options
from netfold.switch_protocol.control_messages import parse_endpoint
from netfold.tuning import DEFAULT_LINKS, Topology, build_table

TURNS = 5
CALLS = 200
CLIENTS = 50
PORTS = range(1)
LOOPBACK = ("127.0.0.1",)
_FAR_S = 3600.0


@contextmanager
def child(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, int]]:
    """A process that runs `function(connection, *arguments)`. Killed at the end. `recv`: EOFError once it has ended."""
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        yield ours, process.pid
    finally:
        process.kill()
        process.join()
        ours.close()


class Both(NamedTuple):
    """CPU seconds of a call at the server, and at its client."""

    server_s: float
    client_s: float


def each(pid: int, calls: int, work: Callable[[], Any]) -> Both:
    before, began = driver.cpu_seconds(pid), time.process_time()
    for _ in range(calls):
        work()
    client_s = time.process_time() - began
    time.sleep(0.02)  # the server's last work
    return Both((driver.cpu_seconds(pid) - before) / calls, client_s / calls)


def least(measure: Callable[[], Both]) -> Both:
    found = [measure() for _ in range(TURNS)]
    return Both(min(of.server_s for of in found), min(of.client_s for of in found))


def _serve_store(orders: Connection, port: int) -> None:
    orders.send(TcpStoreServer("127.0.0.1", port, "job").port)
    orders.recv()


def own_store() -> tuple[Both, Both]:
    """A connection to netfold's store, and a request."""
    with child(_serve_store, _free_port()) as (orders, pid):
        port = orders.recv()
        kept: list[TcpStore] = []

        def connect() -> None:
            kept.append(TcpStore("127.0.0.1", port, "job", serve=False, timeout_s=30.0))

        connection = least(lambda: each(pid, CLIENTS, connect))
        request = least(lambda: _requests(pid, kept))
        for store in kept:
            store.close()
        return connection, request


def _serve_torch(orders: Connection, port: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    orders.send(store.port)
    orders.recv()


def torch_store() -> tuple[Both, Both]:
    """The same of torch's, whose server is native."""
    from torch.distributed import TCPStore

    from netfold.torch.store import TorchStore

    with child(_serve_torch, _free_port()) as (orders, pid):
        port, kept = orders.recv(), []

        def connect() -> None:
            store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
            kept.append(TorchStore(store))

        connection = least(lambda: each(pid, 8, connect))  # torch takes 0.2 s for each
        return connection, least(lambda: _requests(pid, kept))


def _requests(pid: int, stores: Sequence[Store]) -> Both:
    """As many of each kind, over one connection after the other: none is in a cache."""
    value = secrets.token_bytes(150)
    own = {id(store): f"key {number}" for number, store in enumerate(stores)}
    kinds: list[Callable[[Store], Any]] = [
        lambda store: store.set(own[id(store)], value),
        lambda store: store.get(own[id(store)], 10.0),
        lambda store: store.add("number", 1),
    ]
    found = []
    for kind in kinds:
        of = iter(stores)
        found.append(each(pid, len(stores), lambda kind=kind, of=of: kind(next(of))))  # type: ignore[misc]
    return Both(*(statistics.fmean(values) for values in zip(*found, strict=True)))


def _listen(orders: Connection, secret: bytes, size: int) -> None:
    listener = acquire_listener(0, LOOPBACK, PORTS, time.monotonic() + _FAR_S)
    group = RegisteredGroup(secret, 0, size, 2, 1)
    listener.register(group)
    orders.send(listener.port)
    orders.recv()


def handshakes() -> Both:
    """A connection between ranks: at the listener, and at the rank that connects."""
    secret, size = secrets.token_bytes(32), 4096
    with child(_listen, secret, size) as (orders, pid):
        addresses = PeerAddresses(Interfaces(LOOPBACK, named=False), [[("127.0.0.1", orders.recv())]])
        numbers = iter(range(1, size))
        own = acquire_listener(0, LOOPBACK, PORTS, time.monotonic() + _FAR_S)

        def join() -> None:
            group = RegisteredGroup(secret, next(numbers), size, 2, 1)
            own.register(group)
            rendezvous.join(group, addresses, 0, time.monotonic() + 30.0)
            own.deregister(group, None)
            group.close_connections()

        try:
            return least(lambda: each(pid, CLIENTS, join))
        finally:
            release_listener(own)


def _form_alone(answer: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        began = time.process_time()
        group = Communicator(FileStore(folder), 0, 1)
        answer.send(time.process_time() - began)
        group.close()


def alone_s() -> float:
    """A group of one rank: listener, engine, sockets, the first use of modules; in a process that was just forked."""
    found: list[float] = []
    for _ in range(TURNS):
        with child(_form_alone) as (answer, _):
            found.append(answer.recv())
    return min(found)


def frames() -> Both:
    """A frame of the tree without its bytes: received, and sent."""
    found = []
    ends = socket.socketpair()
    trees = [
        StartTree(rank, place_of(rank, [[0], [1]]), SocketLinks({1 - rank: ends[rank]}), time.monotonic() + _FAR_S)
        for rank in (0, 1)
    ]
    for _ in range(TURNS):
        spent = [0.0, 0.0]
        for _ in range(CALLS):
            began = time.process_time()
            trees[0]._send(Send((1,), 1), "measured")
            sent = time.process_time()
            trees[1]._receive(0, "measured")
            spent[0] += time.process_time() - sent
            spent[1] += sent - began
        found.append(Both(*(of / CALLS for of in spent)))
    for end in ends:
        end.close()
    return Both(min(of.server_s for of in found), min(of.client_s for of in found))


def copied_byte_s(size: int = 8 << 20) -> float:
    """A byte into a socket of the loopback, or out of one: half of both."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    data, seconds = bytes(size), []

    def receive() -> None:
        left = size
        while left:
            left -= len(receiver.recv(1 << 18))

    for _ in range(TURNS):
        thread = threading.Thread(target=receive)
        began = time.process_time()
        thread.start()
        sender.sendall(data)
        thread.join()
        seconds.append(time.process_time() - began)
    for each_ in (listener, sender, receiver):
        each_.close()
    return min(seconds) / size / 2


def _echo(orders: Connection, listener: socket.socket) -> None:
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := stream.recv(1):
        stream.sendall(data)


def loopback_s() -> float:
    """One way of a byte between two processes over TCP on the loopback, both asleep until it comes."""
    listener = socket.create_server(("127.0.0.1", 0))
    with child(_echo, listener):
        stream = socket.create_connection(listener.getsockname())
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            stream.sendall(b"x")
            stream.recv(1)
            times.append(time.perf_counter() - began)
        stream.close()
    listener.close()
    return statistics.quantiles(times, n=20)[0] / 2


class AtSize(NamedTuple):
    """A rank's own work at some P: seconds by phase, and figures."""

    work_s: dict[str, float]
    addresses_bytes: int  # the frame with all addresses
    encode_byte_s: float
    decode_byte_s: float
    addresses_memory_bytes: int
    native_memory_bytes: int
    handle_bytes: int
    handles_s: float  # to check the handles of all members
    tree_of_switches_s: float


def at_size(hosts: list[list[int]], leaves: int) -> AtSize:
    """Run a rank's own work of a start-up at this P, in a child so that its memory can be told."""
    with child(_at_size, hosts, leaves) as (answer, _):
        found: AtSize = answer.recv()
        return found


def _at_size(answer: Connection, hosts: list[list[int]], leaves: int) -> None:
    size = sum(map(len, hosts))
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    published = [([address(host_of[rank], rank)], identity(host_of[rank])) for rank in range(size)]
    packed = msgpack.packb(published)
    _, encode_s = _timed(lambda: msgpack.packb(published))
    _, decode_s = _timed(lambda: msgpack.unpackb(packed, strict_map_key=False))

    def read_addresses() -> Any:  # connect_tree, and meeting._hosts
        everyone = msgpack.unpackb(packed, strict_map_key=False)
        published = [(list(addresses), host) for addresses, host in everyone]
        endpoints = [[parse_endpoint(one, what="an address") for one in addresses] for addresses, _ in everyone]
        names = frozenset(host for those in endpoints for host, _ in those)
        return published, endpoints, hosts_of([host for _, host in everyone]), names

    before = _resident_bytes()
    kept, addresses_s = _timed(read_addresses, turns=1)
    addresses_memory = _resident_bytes() - before
    with_socket = NodeSocket(0, secrets.token_bytes(32))
    _, memory_s = _timed(lambda: [with_socket.reaches(0) for _ in hosts[0]])
    with_socket.close()
    nodes, nodes_s = _timed(lambda: tuple(host_of[rank] for rank in range(size)))
    topology = Topology(nodes)
    table, build_s = _timed(lambda: build_table(ranks=size, switch="a:1", topology=topology), turns=1)
    text = TableChoice(table, DEFAULT_LINKS).to_json()
    read, read_s = _timed(lambda: TableChoice.from_json(text).table)
    rows, rows_s = _timed(lambda: (native_rows(read), read.hash16, read.workers(topology)))
    leaders = topology.leaders
    paths = {rank: {"ids": (1 + at % leaves, 0), "endpoints": ("", ""), "error": ""} for at, rank in enumerate(leaders)}
    _, tree_s = _timed(lambda: trees_of(paths, leaders, 0))
    own = handle.of_rank(b"x" * 32, 0, *kept[0][0], rails=1, security_level="none", options=Options().resolved({}))
    _, handle_s = _timed(lambda: [handle.parse(own.text) for _ in range(100)])
    before = _resident_bytes()
    began = time.process_time()
    group = engine.add_group(
        rank=0,
        nodes=list(nodes),
        lanes=2,
        rails=1,
        connections=[],
        resumable=True,
        id=1,
        job="simulated",
        spin_us=0,
        spins_for_sockets=False,
        yields=True,
        table=rows[0],
        table_hash=rows[1],
        fabric=None,
        rma_min_bytes=0,
    )
    native_s, native_memory = time.process_time() - began, _resident_bytes() - before
    engine.remove_group(group)
    work_s = {
        # The frame's own decoding is part of receiving it.
        "addresses": max(0.0, addresses_s - decode_s),
        "memory": memory_s,
        "probe": BUDGET_S + build_s,
        "table": nodes_s + read_s + rows_s,
        "switch": tree_s,
        "native": native_s,
    }
    found = (len(packed), encode_s / len(packed), decode_s / len(packed), addresses_memory, native_memory)
    answer.send(AtSize(work_s, *found, len(own.text), handle_s / 100 * size, tree_s))
    answer.recv()


def measure_costs(of: AtSize, base: Costs, places_s: float) -> Costs:
    """`base` with what depends on P. places_s: rank 0's, of `Rendezvous`."""
    work = (*base.alike_s, *of.work_s.items(), ("places", places_s))
    return replace(base, encode_byte_s=of.encode_byte_s, decode_byte_s=of.decode_byte_s, alike_s=work)


def costs(
    connection: Both, request: Both, join: Both, frame: Both, byte_s: float, alone: float, *, is_rank_0: bool
) -> Costs:
    return Costs(
        *connection,
        *request,
        accept_s=join.server_s,
        join_s=join.client_s,
        receive_s=frame.server_s,
        send_s=frame.client_s,
        copy_byte_s=byte_s,
        encode_byte_s=0.0,
        decode_byte_s=0.0,
        alike_s=(("alone", alone),),
        store_is_rank_0=is_rank_0,
    )


def real_starts(found: str, size: int) -> list[tuple[float, float]]:
    """By launch of bench/scale.py --data: seconds until the last rank had its group, and CPU s of the median rank."""
    launches = json.loads(found)[str(size)]["sides"]["netfold"]
    return [(launch["start_s"], launch["start_cpu_s"][0]) for launch in launches if "start_s" in launch]


def _timed(work: Callable[[], Any], turns: int = 3) -> tuple[Any, float]:
    """The result, and the least CPU seconds."""
    best = float("inf")
    for _ in range(turns):
        began = time.process_time()
        result = work()
        best = min(best, time.process_time() - began)
    return result, best


def _resident_bytes() -> int:
    # Else what was freed before is used again, and does not count.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
