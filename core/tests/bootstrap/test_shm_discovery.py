"""The ranks that share memory, found by trying."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from load import seconds, settles
from ranks import run_ranks, run_threads, values

import netfold
from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.bootstrap import shm_discovery as discovery
from netfold.bootstrap.shm_discovery import Exchange
from netfold.bootstrap.tree import SocketLinks, StartTree, place_of
from netfold.communicator import RendezvousError
from netfold.communicator.startup import HostExchange

pytestmark = pytest.mark.native


def nodes(rank: int, size: int, folder: str, apart: set[int], algorithm: str = "auto") -> tuple[tuple[int, ...], str]:
    """The nodes found, and how all_reduce runs."""
    options = Options(transport="tcp" if rank in apart else "auto", algorithm=algorithm)
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        buffer = np.full(100_000, rank + 1.0)
        group.all_reduce(buffer)
        assert (buffer == size * (size + 1) / 2).all()
        return group.group.nodes, group.group.why("all_reduce", buffer.nbytes)


def divided_pair_by_pair(size: int, unreached: list[int]) -> list[list[int]]:
    nodes: list[list[int]] = []
    for place in range(size):
        for node in nodes:
            reaches = all(not unreached[place] >> each & 1 and not unreached[each] >> place & 1 for each in node)
            if len(node) < engine.MAX_NODE_SIZE and reaches:
                node.append(place)
                break
        else:
            nodes.append([place])
    return nodes


@pytest.mark.parametrize(("size", "pairs"), [(1, 0), (5, 3), (40, 30), (40, 700), (600, 0), (600, 200)])
def test_ranks_are_divided_as_a_look_at_each_pair_would_divide_them(size: int, pairs: int) -> None:
    chance = random.Random(size + pairs)
    unreached = [0] * size
    for _ in range(pairs):
        place, other = chance.sample(range(size), 2)
        unreached[place] |= 1 << other
    candidates = [3 * place for place in range(size)]
    expected = [[candidates[place] for place in node] for node in divided_pair_by_pair(size, unreached)]
    assert discovery._divide(candidates, unreached) == expected


def steps_to_divide(size: int) -> int:
    steps = 0

    def trace(*_: Any) -> Any:
        nonlocal steps
        steps += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        discovery._divide(range(size), [0] * size)
    finally:
        sys.settrace(before)
    return steps


def test_dividing_ranks_that_all_reach_each_other_takes_as_many_steps_as_ranks() -> None:
    assert steps_to_divide(1024) < 20 * steps_to_divide(64)


@pytest.mark.parametrize(
    ("size", "apart", "expected"),
    [
        (1, set(), (0,)),
        (4, set(), (0, 0, 0, 0)),
        (4, {0}, (0, 1, 1, 1)),
        (4, {1, 2}, (0, 1, 2, 0)),
        (3, {0, 1, 2}, (0, 1, 2)),
    ],
)
def test_ranks_that_reach_each_others_memory_agree_on_their_node(
    size: int, apart: set[int], expected: tuple[int, ...]
) -> None:
    for found, why in values(run_threads(nodes, size, apart)):
        assert found == expected
        if size > 1:
            assert why.startswith("shared_memory") == (not apart), why


def without_folder(rank: int, size: int, folder: str) -> tuple[int, ...]:
    os.environ["TMPDIR"] = str(Path(folder, "absent"))
    tempfile.tempdir = None
    with Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20) as group:
        group.barrier()
        return group.group.nodes


def test_no_folder_for_temporary_files_is_needed() -> None:
    assert values(run_ranks(without_folder, 2)) == [(0, 0)] * 2


def open_descriptors() -> list[str]:
    """The target of each descriptor of this process."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return found


def mappings() -> set[str]:
    """The inodes of the nodes' memories that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:netfold (deleted)" in line}


@pytest.mark.parametrize("algorithm", ["shared_memory", "ring"])
def test_a_closed_group_leaves_no_descriptor_or_mapping(algorithm: str) -> None:
    """With a ring, the last event that the connection manager's thread had is one of a closed group."""
    before = mappings()  # of earlier tests
    values(run_threads(nodes, 3, set(), algorithm))  # resources that are made once a process
    descriptors = open_descriptors()
    for _ in range(3):
        values(run_threads(nodes, 3, set(), algorithm))

    def is_gone() -> bool:
        gc.collect()
        return len(open_descriptors()) <= len(descriptors) and mappings() <= before

    # Tests before this one may have left connections that close a moment later.
    assert settles(is_gone, 20), (sorted(open_descriptors()), sorted(descriptors), mappings() - before)
    assert threading.active_count() < 10


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_rank_that_leaves_during_the_exchange_is_named(rank: int, steps: int) -> None:
    """The other rank sends the first `steps` values, and leaves."""
    peer = 1 - rank
    mine, theirs = socket.socketpair()
    own, other = (discovery.NodeSocket(each, SECRET) for each in (rank, peer))
    with mine, contextlib.closing(own), contextlib.closing(other):
        with theirs:
            for value in (b"\0", None)[:steps]:
                frame = msgpack.packb({0: value, 1: value})
                theirs.sendall(struct.pack(">Ic", len(frame), b"V") + frame)
        tree = StartTree(rank, place_of(rank, [[0, 1]]), SocketLinks({peer: mine}), time.monotonic() + 1)
        exchange = HostExchange(tree)
        with pytest.raises(RendezvousError, match=f"rank {rank}: rank {peer} (left|did not answer in time)") as found:
            discovery.form_node(own, (0, 1), exchange)
    assert found.value.rank == peer


SECRET = b"a secret of a test"


class Meeting:
    """The exchange of threads, each of which is a rank."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def of(self, place: int) -> Exchange:
        def all_gather(value: Any) -> list[Any]:
            self._values[place] = value
            self._barrier.wait(seconds(30))
            found = list(self._values)
            self._barrier.wait(seconds(30))
            return found

        return SimpleNamespace(all_gather=all_gather)


def form(sockets: list[discovery.NodeSocket]) -> tuple[list[tuple[int, ...]], list[discovery.Node | None]]:
    """Form the nodes of as many threads; returns what each thread was told."""
    meeting = Meeting(len(sockets))

    def one(place: int) -> tuple[tuple[int, ...], discovery.Node | None]:
        return discovery.form_node(sockets[place], [own.rank for own in sockets], meeting.of(place))

    with ThreadPoolExecutor(len(sockets)) as threads:
        leaders, nodes = zip(*threads.map(one, range(len(sockets))), strict=True)
    return list(leaders), list(nodes)


@contextlib.contextmanager
def sockets_of(ranks: Sequence[int]) -> Iterator[list[discovery.NodeSocket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(discovery.NodeSocket(rank, SECRET))) for rank in ranks]


def test_all_ranks_of_a_node_have_one_memory() -> None:
    with sockets_of((3, 5, 9)) as sockets:
        leaders, nodes = form(sockets)
        assert leaders == [(3, 3, 3)] * 3
        memories = set()
        for position, node in enumerate(nodes):
            assert node is not None and node.ranks == (3, 5, 9) and node.position == position
            about = os.fstat(node.memory)
            assert about.st_size == engine.node_bytes(3)
            assert not os.get_inheritable(node.memory)
            memories.add(about.st_ino)
            node.close()
        assert len(memories) == 1


def test_more_ranks_than_a_node_holds_are_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_NODE_SIZE", 2)
    with sockets_of(range(5)) as sockets:
        leaders, nodes = form(sockets)
        assert leaders == [(0, 0, 2, 2, 4)] * 5
        assert [node and node.ranks for node in nodes] == [(0, 1), (0, 1), (2, 3), (2, 3), None]
        for node in nodes:
            if node is not None:
                node.close()


def test_a_node_of_the_most_ranks_forms() -> None:
    size = int(engine.MAX_NODE_SIZE)
    with sockets_of(range(size)) as sockets:
        leaders, nodes = form(sockets)
        assert leaders == [(0,) * size] * size
        for node in nodes:
            assert node is not None and len(node.ranks) == size
            node.close()


@pytest.mark.parametrize(
    ("closed", "expected"),
    [(0, (0, 1, 1, 1)), (1, (0, 1, 0, 0)), (3, (0, 0, 0, 3))],
)
def test_a_rank_whose_socket_is_not_reached_is_alone(closed: int, expected: tuple[int, ...]) -> None:
    with sockets_of(range(4)) as sockets:
        sockets[closed].close()
        leaders, nodes = form(sockets)
        assert leaders == [expected] * 4
        for rank, node in enumerate(nodes):
            assert (node is None) == (rank == closed)
            if node is not None:
                assert node.ranks == tuple(rank for rank in range(4) if rank != closed)
                node.close()


def test_ranks_that_do_not_reach_each_other_are_on_different_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may forbid messages in one direction, between some ranks only."""
    monkeypatch.setattr(discovery.NodeSocket, "reaches", lambda own, peer: (own.rank, peer) != (3, 1))
    with sockets_of(range(5)) as sockets:
        leaders, nodes = form(sockets)
        assert leaders == [(0, 0, 0, 3, 0)] * 5
        assert nodes[3] is None
        for node in nodes:
            if node is not None:
                node.close()


def test_a_rank_that_does_not_receive_the_memory_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = discovery.NodeSocket.receive_memory

    def none_for_one(own: discovery.NodeSocket, expected_bytes: int) -> int | None:
        return None if own.rank == 1 else receive(own, expected_bytes)

    monkeypatch.setattr(discovery.NodeSocket, "receive_memory", none_for_one)
    with sockets_of(range(3)) as sockets:
        leaders, nodes = form(sockets)
        assert leaders == [(0, 1, 0)] * 3
        assert [node and node.ranks for node in nodes] == [(0, 2), None, (0, 2)]
        for node in nodes:
            if node is not None:
                node.close()
    with sockets_of(range(2)) as sockets:
        assert form(sockets) == ([(0, 1)] * 2, [None, None])


@pytest.fixture(params=["filter", "no filter"])
def maybe_filter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets with the kernel's filter, and sockets of a kernel that has no such filter."""
    if request.param == "no filter":

        def refuse(*_: Any) -> None:
            raise OSError("no filter")

        monkeypatch.setattr(discovery, "_pass_only", refuse)


def send_garbage(address: str) -> int:
    """Send messages that no rank of the group sent, some with a descriptor; returns how many were taken."""
    packets = [b"", b"x", bytes(16), bytes(40), os.urandom(40), os.urandom(4000)]
    sent = 0
    # A closed socket refuses: the descriptor is closed then, too.
    with open(os.memfd_create("intruder"), "wb") as file, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as intruder:
        memory = file.fileno()
        intruder.setblocking(False)
        for fds in ([], [memory], [memory] * 3):
            descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            for packet in packets:
                with contextlib.suppress(BlockingIOError):  # the queue is full
                    intruder.sendmsg([packet], descriptors, 0, address)
                    sent += 1
    return sent


def descriptors_of_intruder() -> list[str]:
    return [each for each in open_descriptors() if "memfd:intruder" in each]


def test_messages_without_the_token_do_not_prevent_a_node(maybe_filter: None) -> None:
    with sockets_of(range(2)) as sockets:
        fits = not send_garbage(f"\0{sockets[1].name}1") < 18
        leaders, nodes = form(sockets)
        # Without the filter they may fill the queue, so that nothing else arrives.
        assert leaders == [(0, 0) if fits else (0, 1)] * 2
        assert not descriptors_of_intruder()
        for node in nodes:
            if node is not None:
                node.close()


def among_garbage(rank: int, size: int, folder: str, barrier: threading.Barrier) -> None:
    with Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20) as group:
        group.barrier()
        buffer = netfold.empty(100_000, np.float64)
        for number in range(20):
            barrier.wait(seconds(20))
            if rank == 0:
                names = [line.split("@")[1] for line in Path("/proc/net/unix").read_text().splitlines() if "@" in line]
                for name in names:
                    if name.startswith("netfold-"):
                        with contextlib.suppress(ConnectionRefusedError):
                            send_garbage(f"\0{name}")
            if rank == number % size:
                time.sleep(0.002)  # the other ranks sleep by then
            buffer[:] = rank + number
            group.all_reduce(buffer)
            assert (buffer == sum(range(size)) + size * number).all()


def test_messages_without_the_token_change_nothing_and_leave_no_descriptor(maybe_filter: None) -> None:
    values(run_threads(among_garbage, 3, threading.Barrier(3)))
    assert not descriptors_of_intruder()


def with_full_queues(rank: int, size: int, folder: str, barrier: threading.Barrier) -> None:
    with Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20) as group:
        made = MADE[rank]
        message = made.token + bytes(24)
        for number in range(10):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
                other.setblocking(False)
                while True:
                    other.sendto(message, f"\0{made.name}{rank}")
            barrier.wait(seconds(20))
            if rank == number % size:
                time.sleep(0.05)
            began = time.monotonic()
            group.barrier()
            assert time.monotonic() - began < seconds(5)


MADE: dict[int, discovery.NodeSocket] = {}


def test_a_full_queue_loses_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    make = discovery.NodeSocket.__init__

    def noted(own: discovery.NodeSocket, rank: int, secret: bytes) -> None:
        MADE[rank] = own
        make(own, rank, secret)

    monkeypatch.setattr(discovery.NodeSocket, "__init__", noted)
    values(run_threads(with_full_queues, 3, threading.Barrier(3)))


def count_of_node(size: int) -> int:
    """This process's datagram sockets, memory and events."""
    local = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    kinds = [each in local or "memfd:netfold" in each or "eventfd" in each for each in open_descriptors()]
    return sum(kinds)


def counts(rank: int, size: int, folder: str) -> tuple[int, int]:
    """Before this rank's first call, and after calls that wake every rank."""
    store = FileStore(folder)
    with Communicator(store, rank, size, timeout_s=20, join_timeout_s=20) as group:
        before = count_of_node(size)
        store.set(f"counted/{rank}", b"1")
        for other in range(size):
            store.get(f"counted/{other}", seconds(20))
        for number in range(3 * size):
            if rank == number % size:
                time.sleep(0.02)
            group.barrier()
        return before, count_of_node(size)


def test_descriptors_do_not_grow_with_the_ranks_before_they_wake_each_other() -> None:
    few, more = values(run_ranks(counts, 2)), values(run_ranks(counts, 6))
    assert {before for before, _ in few} == {before for before, _ in more}
    for before, after in more:
        assert after <= before + 5  # an event of each other rank


def among_many(rank: int, size: int, folder: str) -> tuple[int, ...]:
    with Communicator(FileStore(folder), rank, size, timeout_s=60, join_timeout_s=60) as group:
        total = size * (size + 1) // 2
        for count in (1, 5_000, 100_000):
            buffer = np.full(count, rank + 1.0)
            group.all_reduce(buffer)
            assert (buffer == total).all()
        into = [np.zeros(3, np.int64) for _ in range(size)]
        group.all_to_all([np.full(3, rank * 1000 + reader, np.int64) for reader in range(size)], into)
        assert all((each == source * 1000 + rank).all() for source, each in enumerate(into))
        got = np.zeros(1, np.int64)
        work = group.send(np.full(1, rank), (rank + 1) % size, asynchronous=True)
        group.receive(got, (rank - 1) % size)
        work.wait(seconds(60))
        assert got[0] == (rank - 1) % size
        return group.group.nodes


def test_more_ranks_than_bits_of_a_word_share_memory() -> None:
    assert values(run_threads(among_many, 70, timeout_s=120)) == [(0,) * 70] * 70
