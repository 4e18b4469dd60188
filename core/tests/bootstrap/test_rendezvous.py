"""The rendezvous: unauthenticated peers, wrong secrets, absent and duplicate ranks, and ranks whose options differ."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import os
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgpack
import pytest
from load import seconds
from ranks import run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.bootstrap import handshake, listener, rendezvous, tree
from netfold.bootstrap.addresses import Interfaces
from netfold.bootstrap.listener import RegisteredGroup, acquire_listener, release_listener
from netfold.communicator import startup
from netfold.errors import NetfoldError
from netfold.switch_protocol.control_messages import parse_endpoint

pytestmark = pytest.mark.native

SECRET = bytes(range(32))


LANES = 2
LOOPBACK = ("127.0.0.1",)
ANY_PORT = range(1)
TOKEN = handshake.token_of(SECRET)


def meet(
    rank: int,
    size: int,
    folder: str,
    secrets: list[bytes],
    timeout_s: float = 10.0,
    addresses: tuple[str, ...] = LOOPBACK,
    host: str = "",
) -> tuple[list[int], list[list[int]], int]:
    """Connect over loopback; returns what all ranks say in an exchange, each host's ranks, and this rank's streams."""
    deadline = time.monotonic() + timeout_s
    interfaces = Interfaces(addresses, named=True)
    group = RegisteredGroup(secrets[rank], rank, size, LANES, interfaces.rails)
    here = acquire_listener(rank, addresses, ANY_PORT, deadline)
    try:
        here.register(group)
        tree, peers, hosts = rendezvous.connect_tree(FileStore(folder), group, here, interfaces, deadline, host=host)
        assert [len(at) for at in peers.endpoints] == [0 if peer == rank else interfaces.rails for peer in range(size)]
        return tree.all_gather(10 * rank, "they met"), hosts, len(tree.links.streams)
    finally:
        group.close_connections()
        here.deregister(group, None)
        release_listener(here)


def everyone(size: int) -> list[int]:
    return [10 * rank for rank in range(size)]


def exchanged(outcomes: list[Any]) -> list[list[int]]:
    """Of each rank, what all ranks said."""
    return [said for said, *_ in values(outcomes)]


def test_candidate_addresses_are_listed_while_another_thread_records_one_that_worked() -> None:
    class Endpoints(list[list[tuple[str, int]]]):
        """While rank 0's addresses are looked up, another thread records one that worked for rank 2."""

        def __getitem__(self, rank: Any) -> Any:
            if rank == 0:
                addresses.used[2, 0] = ("10.0.0.2", 7)
            return super().__getitem__(rank)

    by_rank = Endpoints([[("10.1.0.9", port), ("10.0.0.2", port)] for port in (5, 6, 7)])
    addresses = rendezvous.PeerAddresses(Interfaces(("10.0.0.9",), named=False), by_rank)
    addresses.used[0, 0] = ("10.1.0.9", 5)
    assert addresses.candidates(1, 0) == [("10.1.0.9", 6), ("10.0.0.2", 6)]


def test_a_failed_try_is_listed_once_however_often_it_is_recorded() -> None:
    addresses = rendezvous.PeerAddresses(Interfaces(("10.0.0.9",), named=False), [])
    addresses.record_failures(["rank 2 did not answer", "rank 1 did not answer", "rank 2 did not answer"])
    addresses.record_failures(["rank 1 did not answer", "rank 3 did not answer"])
    assert list(addresses.failed) == [f"rank {rank} did not answer" for rank in (2, 1, 3)]


def hosts_of(size: int, per_host: int) -> list[list[int]]:
    return [list(range(size))[at : at + per_host] for at in range(0, size, per_host)]


def _meet_on_hosts(rank: int, size: int, folder: str, per_host: int) -> Any:
    """Ranks of a host in a row; where per_host is 1, no rank names its host."""
    return meet(rank, size, folder, [SECRET] * size, host=f"host {rank // per_host}" if per_host > 1 else "")


@pytest.mark.parametrize(("size", "per_host"), [(1, 1), (2, 1), (5, 1), (12, 1), (5, 2), (12, 12), (20, 10), (30, 2)])
def test_all_ranks_exchange_values_over_few_connections(size: int, per_host: int) -> None:
    for said, hosts, streams in values(run_threads(_meet_on_hosts, size, per_host)):
        assert said == everyone(size)
        assert hosts == hosts_of(size, per_host)
        assert streams <= 2 * tree.FAN_OUT + 1


@pytest.mark.parametrize(("size", "per_host"), [(1, 1), (7, 1), (100, 1), (100, 100), (1000, 64), (10_000, 8)])
def test_every_rank_has_one_parent_that_knows_it(size: int, per_host: int) -> None:
    hosts = hosts_of(size, per_host)
    places = dict(tree.places_of(hosts))
    assert sorted(places) == list(range(size))
    for rank, place in places.items():
        if rank % max(1, size // 50) == 0:  # place_of looks a rank's host up
            assert place == tree.place_of(rank, hosts)
        assert (place.parent is None) == (rank == 0)
        if place.parent is not None:
            assert place.parent < rank
            assert rank in places[place.parent].children
        for child in place.children:
            below = places[child]
            assert below.parent == rank and below.height < place.height
            assert below.leads == (child in place.other_hosts)


def test_a_value_for_several_children_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []

    def packb(value: Any) -> bytes:
        encoded.append(value)
        packed: bytes = msgpack.packb(value)
        return packed

    pairs = {child: socket.socketpair() for child in (1, 2, 3)}
    ours = {child: pair[0] for child, pair in pairs.items()}
    root = tree.StartTree(0, tree.place_of(0, [[0, 1, 2, 3]]), tree.SocketLinks(ours), time.monotonic() + 10)
    monkeypatch.setattr(tree, "msgpack", SimpleNamespace(packb=packb, unpackb=msgpack.unpackb))
    assert root.broadcast(lambda: "value", "they met") == "value"
    assert encoded == ["value"]
    for child, (_, theirs) in pairs.items():
        end = tree.StartTree(
            child, tree.place_of(child, [[0, 1, 2, 3]]), tree.SocketLinks({0: theirs}), time.monotonic() + 10
        )
        assert end.broadcast(lambda: None, "they met") == "value"
    for pair in pairs.values():
        for each in pair:
            each.close()


def _family(children: int) -> tuple[tree.StartTree, list[tree.StartTree], list[tuple[socket.socket, socket.socket]]]:
    """Rank 0 and its children on one host; and the two ends of each connection."""
    hosts = [list(range(children + 1))]
    pairs = [socket.socketpair() for _ in range(children)]
    until = time.monotonic() + 10
    root = tree.StartTree(
        0, tree.place_of(0, hosts), tree.SocketLinks({n + 1: ours for n, (ours, _) in enumerate(pairs)}), until
    )
    ends = [
        tree.StartTree(n + 1, tree.place_of(n + 1, hosts), tree.SocketLinks({0: theirs}), until)
        for n, (_, theirs) in enumerate(pairs)
    ]
    return root, ends, pairs


def test_bytes_that_follow_the_last_frame_stay_in_the_connection() -> None:
    root, (first, second), pairs = _family(2)
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(each.end) for each in (root, first)]
        assert not wait(ends, 0.1).done  # nobody ends before the second
        ends.append(pool.submit(second.end))
        for end in ends:
            end.result(seconds(10))
    for ours, theirs in pairs:
        ours.sendall(b"down")
        theirs.sendall(b"up")
        assert (ours.recv(100), theirs.recv(100)) == (b"up", b"down")
        ours.close()
        theirs.close()


def test_a_rank_that_fails_in_the_last_exchange_tells_its_parent_why() -> None:
    root, (child, other), pairs = _family(2)
    with ThreadPoolExecutor() as pool:
        child_ends = pool.submit(child.end)
        other.fail("its memory is full", 2)
        with pytest.raises(rendezvous.RendezvousError, match=r"^its memory is full$") as caught:
            root.end()
        assert caught.value.rank == 2
        root.fail(str(caught.value), 2)
        with pytest.raises(rendezvous.RendezvousError, match=r"^its memory is full$"):
            child_ends.result(seconds(10))
    child.fail("not in the tree any more", 1)
    pairs[0][1].close()
    assert receive_all(pairs[0][0]).count(b"not in the tree") == 0
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_a_child_that_dies_as_the_tree_ends_does_not_keep_its_parent() -> None:
    root, (child,), ((ours, theirs),) = _family(1)
    with mock.patch.object(child, "_receive"):
        child.end()
    theirs.close()
    root.end()
    ours.close()


def receive_all(stream: socket.socket) -> bytes:
    stream.settimeout(seconds(10))
    return b"".join(iter(lambda: stream.recv(1000), b""))


@pytest.mark.parametrize("refused", [False, True])
def test_a_connection_that_comes_after_the_groups_end_is_closed(refused: bool) -> None:
    group = RegisteredGroup(SECRET, 0, 3, LANES, 1)
    if refused:
        group.refuse_later([1], b"why")
    group.close_connections()
    for peer in (1, 2):
        ours, theirs = socket.socketpair()
        group.add_connection((peer, 0, 0), ours)
        with theirs:
            assert receive_all(theirs) == (b"why" if refused and peer == 1 else b"")


def _fail_at_the_end(rank: int, size: int, folder: str) -> str:
    def join_switches(*_: Any) -> Any:
        raise NetfoldError(f"rank {rank}: its memory is full")

    if rank == size - 1:
        startup._join_switches = join_switches
    with pytest.raises(NetfoldError) as caught:
        Communicator(FileStore(folder), rank, size, options=Options(probe="off"), join_timeout_s=20)
    return str(caught.value)


@pytest.mark.native
def test_no_rank_forms_a_group_where_one_fails_last_in_the_start() -> None:
    # Rank 9 is a child of rank 1, and that one of rank 0.
    assert set(values(run_ranks(_fail_at_the_end, 10))) == {"rank 9: its memory is full"}


def test_ranks_of_a_host_exchange_values_among_themselves() -> None:
    def on_host(rank: int, size: int, folder: str) -> list[int]:
        deadline = time.monotonic() + 10
        group = RegisteredGroup(SECRET, rank, size, LANES, 1)
        here = acquire_listener(rank, LOOPBACK, ANY_PORT, deadline)
        here.register(group)
        here_is = Interfaces(LOOPBACK, named=True)
        try:
            store = FileStore(folder)
            met, _, _ = rendezvous.connect_tree(store, group, here, here_is, deadline, host=f"host {rank % 3}")
            found = met.all_gather_on_host(rank, "they met")
            met.all_gather(None, "they left")
            return found
        finally:
            group.close_connections()
            here.deregister(group, None)
            release_listener(here)

    for rank, found in enumerate(values(run_threads(on_host, 14))):
        assert found == [other for other in range(14) if other % 3 == rank % 3]


def _fail(rank: int, size: int, folder: str, how: str) -> Any:
    deadline = time.monotonic() + 10
    group = RegisteredGroup(SECRET, rank, size, LANES, 1)
    here = acquire_listener(rank, LOOPBACK, ANY_PORT, deadline)
    here.register(group)
    try:
        met, *_ = rendezvous.connect_tree(
            FileStore(folder), group, here, Interfaces(LOOPBACK, named=True), deadline, host="one"
        )
        if rank == size - 1:
            if how == "says why":
                met.fail("its disk is full", rank)
            return None
        try:
            return met.all_gather(rank, "they count")
        except rendezvous.RendezvousError as error:
            met.fail(str(error), error.rank)
            raise
    finally:
        group.close_connections()
        here.deregister(group, None)
        release_listener(here)


@pytest.mark.parametrize(
    ("how", "expected"), [("says why", "its disk is full"), ("leaves", "rank 2: rank 19 left while they count (")]
)
def test_every_rank_learns_which_one_failed_and_why(how: str, expected: str) -> None:
    outcomes = run_threads(_fail, 20, how)
    for outcome in outcomes[:-1]:
        assert outcome.error == "RendezvousError"
        assert expected in outcome.text


def _meet_over(rank: int, size: int, folder: str, hosts: list[tuple[str, ...]]) -> Any:
    return meet(rank, size, folder, [SECRET] * size, 2.0, hosts[rank])


def test_ranks_with_different_numbers_of_interfaces_are_refused() -> None:
    for outcome in run_threads(_meet_over, 2, [("127.0.0.1", "127.0.0.2"), ("127.0.0.1",)]):
        assert "rank 1 names 1 interfaces, rank 0 2: every rank needs as many (NETFOLD_INTERFACE)" in outcome.text


def hello(
    purpose: int = 1,
    token: bytes = TOKEN,
    initiator: int = 1,
    at: int = 0,
    size: int = 3,
    lane: int = 0,
    rail: int = 0,
    security: int = 0,
) -> bytes:
    said = purpose, token, initiator, at, size, lane, rail, security
    return struct.pack(">8sB16sIIIBBB32s", b"netfold4", *said, bytes(32))


UNAUTHENTICATED_PEERS: dict[str, list[bytes]] = {
    "says nothing and goes": [],
    "speaks HTTP": [b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n" + bytes(200)],
    "sends half a hello": [b"netfold4\x00\x00"],
    "claims a rank but knows no secret": [hello(), bytes(32)],
    "asks what a rank does but knows no secret": [hello(purpose=2), bytes(32)],
    "claims a rank that does not exist": [hello(initiator=9)],
    "asks for a rank that is not here": [hello(at=2)],
    "claims to be the rank it talks to": [hello(initiator=0)],
    "is of a group of another size": [hello(size=7)],
    "is of another group": [hello(token=bytes(16))],
    "asks for a lane that does not exist": [hello(lane=LANES)],
    "asks for a rail that does not exist": [hello(rail=1)],
    "asks for another security": [hello(security=1)],
    "asks for a security that does not exist": [hello(security=9)],
    "wants something that does not exist": [hello(purpose=9)],
    "sends random bytes": [os.urandom(4096)],
}


def _address_of_rank_0(folder: str) -> tuple[str, int]:
    return parse_endpoint(json.loads(FileStore(folder).get("address/0", 10.0))["at"][0], what="rank 0")


def _visit(folder: str, words: list[bytes], done: threading.Event) -> None:
    with socket.create_connection(_address_of_rank_0(folder), 5) as stream:
        for word in words:
            stream.sendall(word)
            time.sleep(0.02)
    done.set()


def _meet_with_visitor(rank: int, size: int, folder: str, words: list[bytes]) -> Any:
    visited = threading.Event()
    if rank == 1:
        _visit(folder, words, visited)  # before the real ranks: rank 0 must drop it and accept them
    elif rank == 2:
        FileStore(folder).get("address/1", 10.0)
    return meet(rank, size, folder, [SECRET] * size)


@pytest.mark.parametrize("peer", UNAUTHENTICATED_PEERS)
def test_an_unauthenticated_peer_is_dropped_and_the_group_forms(peer: str) -> None:
    assert exchanged(run_threads(_meet_with_visitor, 3, UNAUTHENTICATED_PEERS[peer])) == [everyone(3)] * 3


def _meet_with_a_silent_visitor(rank: int, size: int, folder: str) -> Any:
    if rank == 1:
        with socket.create_connection(_address_of_rank_0(folder), 5):
            return meet(rank, size, folder, [SECRET] * size)
    return meet(rank, size, folder, [SECRET] * size)


def test_a_silent_unauthenticated_peer_delays_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 100.0)  # waiting for the peer would take so long
    began = time.monotonic()
    assert exchanged(run_threads(_meet_with_a_silent_visitor, 2)) == [everyone(2)] * 2
    assert time.monotonic() - began < seconds(5)


def test_a_rank_with_a_wrong_secret_is_refused_by_name() -> None:
    outcomes = run_threads(meet, 2, [SECRET, bytes(32)], 1.5)
    assert outcomes[1].error == "RendezvousError"
    assert "is not rank 0 of this group" in outcomes[1].text
    assert outcomes[0].error == "RendezvousError"
    assert "rank 0: rank 1 of 2 did not connect in time" in outcomes[0].text


def _forward(rank: int, size: int, folder: str) -> Any:
    """Rank 1 is a man in the middle that returns rank 0's own proof to rank 0."""
    if rank == 0:
        return meet(0, 2, folder, [SECRET] * 2, 1.0)
    said = hello(size=2)
    with socket.create_connection(_address_of_rank_0(folder), 5) as stream:
        stream.sendall(said)
        answer = stream.recv(65, socket.MSG_WAITALL)
        proof = hmac.new(SECRET, b"accept" + said + answer[1:33], hashlib.sha256).digest()
        assert hmac.compare_digest(answer[33:], proof)
        stream.sendall(proof)
        stream.settimeout(seconds(5))
        return stream.recv(1)


def test_a_proof_reflected_to_its_sender_is_refused() -> None:
    rank0, reflector = run_threads(_forward, 2)
    assert rank0.error == "RendezvousError"
    assert reflector.value == b"", "the connection must be closed"


def no_neighbour_until(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel finds no neighbour at an address for the first tries to connect."""
    original, tries = rendezvous._connect_socket, itertools.count()

    async def connect_socket(*of: Any) -> None:
        if next(tries) < number:
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        await original(*of)

    monkeypatch.setattr(rendezvous, "_connect_socket", connect_socket)


def test_ranks_meet_over_an_interface_that_finds_its_neighbours_late(monkeypatch: pytest.MonkeyPatch) -> None:
    no_neighbour_until(3, monkeypatch)
    assert exchanged(run_threads(meet, 2, [SECRET] * 2)) == [everyone(2)] * 2


def test_a_neighbour_that_is_never_found_is_named_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_SETTLES_S", 0.2)
    no_neighbour_until(10**9, monkeypatch)
    outcome = run_threads(meet, 2, [SECRET] * 2, 2.0)[1]
    assert outcome.error == "RendezvousError"
    assert "rank 1 cannot reach rank 0 at 127.0.0.1:" in outcome.text
    assert "No route to host (NETFOLD_INTERFACE)" in outcome.text


def join(rank: int, size: int, folder: str, options: list[dict[str, Any]], timeout_s: float) -> float:
    began = time.monotonic()
    own = dict(options[rank])
    if own.pop("absent", False):
        return 0.0
    with Communicator(
        FileStore(folder),
        own.pop("rank", rank),
        own.pop("size", size),
        options=Options(**own),
        join_timeout_s=timeout_s,
        timeout_s=5,
    ) as group:
        group.barrier()
    return time.monotonic() - began


def test_absent_ranks_are_named_at_the_deadline() -> None:
    outcomes = run_threads(join, 4, [{}, {"absent": True}, {}, {"absent": True}], 1.0)
    for rank in (0, 2):
        assert outcomes[rank].error == "RendezvousError"
        assert f"rank {rank}: rank 1, 3 of 4 did not come in time; did every rank start" in outcomes[rank].text


def test_an_absent_rank_0_is_named_by_the_other_ranks() -> None:
    outcomes = run_threads(join, 2, [{"absent": True}, {}], 0.5)
    assert "rank 1: rank 0 did not publish the job in time" in outcomes[1].text


def join_twice(rank: int, size: int, folder: str) -> None:
    for _ in range(2):
        join(rank, size, folder, [{}] * size, 5.0)


def test_the_same_processes_may_make_another_group_on_the_same_store() -> None:
    """Found with torchrun: after destroy_process_group torch reuses the same keys."""
    values(run_threads(join_twice, 3))


def test_a_store_that_served_a_former_run_is_refused(tmp_path: Path) -> None:
    def run(rank: int, size: int, folder: str) -> None:
        join(rank, size, str(tmp_path), [{}] * size, 5.0)

    values(run_threads(run, 2))
    # Another process has another token.
    token, rendezvous._process = rendezvous._process, (os.getpid(), "another")
    try:
        for outcome in run_threads(run, 2):
            assert outcome.error == "RendezvousError"
            assert "a former run's store is being used again" in outcome.text
    finally:
        rendezvous._process = token


def test_ranks_with_different_group_sizes_name_both() -> None:
    outcomes = run_threads(join, 2, [{}, {"size": 3}], 1.0)
    assert "rank 1 was told of 3 ranks, rank 0 of 2 (check WORLD_SIZE)" in outcomes[1].text
    assert outcomes[0].error == "RendezvousError"


def test_a_rank_without_a_switch_is_refused_where_others_have_one() -> None:
    options = [{"switch": "127.0.0.1:1"}, {}]
    outcomes = run_threads(join, 2, options, 1.0)
    assert "rank 1 has NETFOLD_SWITCH=None, rank 0 has 127.0.0.1:1: all ranks need as many, or none" in outcomes[1].text
    assert outcomes[0].error in ("RendezvousError", "SwitchError")


def test_the_error_for_an_unknown_interface_lists_the_existing_interfaces() -> None:
    outcomes = run_threads(join, 1, [{"interface": "nosuch0"}], 1.0)
    assert outcomes[0].error == "RendezvousError"
    assert "NETFOLD_INTERFACE=nosuch0" in outcomes[0].text
    assert "lo" in outcomes[0].text


def test_a_rank_that_cannot_join_sends_the_others_its_reason_at_once() -> None:
    began = time.monotonic()
    outcomes = run_threads(join, 3, [{}, {"interface": "nosuch0"}, {}], 10.0)
    assert time.monotonic() - began < seconds(2)
    for rank in (0, 2):
        assert "rank 1 could not join; it said: NETFOLD_INTERFACE=nosuch0: no such interface" in outcomes[rank].text


def test_an_address_that_is_not_this_hosts_cannot_be_listened_on() -> None:
    outcomes = run_threads(join, 2, [{"interface": "192.0.2.1"}, {"interface": "192.0.2.1"}], 1.0)
    assert "rank 0 cannot listen on 192.0.2.1" in outcomes[0].text


def test_the_loopback_interface_may_be_named() -> None:
    values(run_threads(join, 2, [{"interface": "lo"}, {"interface": "127.0.0.1"}], 5.0))


def _pairs(rank: int, size: int, folder: str, turns: int) -> None:
    pair, place = divmod(rank, 2)
    for turn in range(turns):
        join(place, 2, f"{folder}/{pair}/{turn}", [{}, {}], 10.0)


def test_groups_of_several_threads_open_and_close_independently() -> None:
    """The engine's thread ends with a process's last group and starts with the next: here these overlap."""
    values(run_threads(_pairs, 6, 60, timeout_s=60))


def in_ports(rank: int, size: int, folder: str, first: int) -> list[str]:
    """Three groups, one after the other, with only as many ports as ranks."""
    for turn in range(3):
        options = Options(ports=f"{first}-{first + size - 1}")
        with Communicator(FileStore(f"{folder}/{turn}"), rank, size, options=options, join_timeout_s=20) as group:
            group.barrier()
    return [json.loads(FileStore(f"{folder}/0").get(f"1/address/{peer}", 0))["at"][0] for peer in range(size)]


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below the ephemeral ports."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for first in random.sample(range(10_000, low - count), 200):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def test_ranks_listen_in_the_ports_they_are_given() -> None:
    first = free_ports(3)
    found = values(run_ranks(in_ports, 3, first))[0]
    assert sorted(found) == [f"127.0.0.1:{first + number}" for number in range(3)]
    assert set(values(run_threads(in_ports, 3, first))[0]) == {f"127.0.0.1:{first}"}, "one port per process is enough"


def test_a_range_without_a_free_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            rendezvous.RendezvousError, match=rf"no port of {port}-{port} is free on 127.0.0.1 .NETFOLD_PORTS"
        ):
            acquire_listener(0, LOOPBACK, range(port, port + 1), time.monotonic() + 0.1)


@pytest.mark.parametrize("words", ["x", "0", "7-3", "1-70000", "5-"])
def test_a_malformed_range_of_ports_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match="is no port and no range of ports"):
        Options(ports=words).resolved({})
