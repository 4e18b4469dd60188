"""The rendezvous: unauthenticated peers, wrong secrets, absent and duplicate ranks, and ranks whose options differ."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import random
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from load import seconds
from ranks import run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.bootstrap import handshake, listener, rendezvous
from netfold.bootstrap.addresses import Interfaces
from netfold.bootstrap.listener import RegisteredGroup, acquire_listener, release_listener
from netfold.switch_protocol.control_messages import parse_endpoint

pytestmark = pytest.mark.native

SECRET = bytes(range(32))


LANES = 2
LOOPBACK = ("127.0.0.1",)
ANY_PORT = range(1)
TOKEN = handshake.token_of(SECRET)


def mesh(
    rank: int, size: int, folder: str, secrets: list[bytes], timeout_s: float = 10.0, hosts: tuple[str, ...] = LOOPBACK
) -> list[list[list[int]]]:
    """Connect over loopback and exchange a byte a connection: 100 * lane + 10 * rail + rank."""
    deadline = time.monotonic() + timeout_s
    interfaces = Interfaces(hosts, named=True)
    registered_group = RegisteredGroup(secrets[rank], rank, size, LANES, interfaces.rails)
    here = acquire_listener(rank, hosts, ANY_PORT, deadline)
    try:
        here.register(registered_group)
        sockets, _ = rendezvous.connect_mesh(FileStore(folder), registered_group, here, interfaces, deadline)
        for lane, peers in enumerate(sockets):
            for rails in peers:
                for rail, stream in enumerate(rails):
                    stream.settimeout(5)
                    stream.sendall(bytes([100 * lane + 10 * rail + rank]))
        met = [[[stream.recv(1)[0] for stream in rails] for rails in peers] for peers in sockets]
        rendezvous.close_all(sockets)
        return met
    finally:
        here.deregister(registered_group, None)
        release_listener(here)


def everyone(size: int, rails: int = 1) -> list[list[list[list[int]]]]:
    return [
        [
            [[100 * lane + 10 * rail + peer for rail in range(rails)] if peer != rank else [] for peer in range(size)]
            for lane in range(LANES)
        ]
        for rank in range(size)
    ]


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


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_is_connected_with_every_other(size: int) -> None:
    assert values(run_threads(mesh, size, [SECRET] * size)) == everyone(size)


def test_each_interface_has_its_own_connection() -> None:
    hosts = ("127.0.0.1", "127.0.0.2")
    assert values(run_threads(mesh, 3, [SECRET] * 3, 10.0, hosts)) == everyone(3, 2)


def _mesh_over(rank: int, size: int, folder: str, hosts: list[tuple[str, ...]]) -> Any:
    return mesh(rank, size, folder, [SECRET] * size, 2.0, hosts[rank])


def test_ranks_with_different_numbers_of_interfaces_are_refused() -> None:
    outcomes = run_threads(_mesh_over, 2, [("127.0.0.1", "127.0.0.2"), ("127.0.0.1",)])
    assert "rank 0 names 2 interfaces, rank 1 1: every rank needs as many (NETFOLD_INTERFACE)" in outcomes[1].text
    assert "rank 1 names 1 interfaces, rank 0 2: every rank needs as many (NETFOLD_INTERFACE)" in outcomes[0].text


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


def _mesh_with_visitor(rank: int, size: int, folder: str, words: list[bytes]) -> Any:
    visited = threading.Event()
    if rank == 1:
        _visit(folder, words, visited)  # before the real ranks: rank 0 must drop it and accept them
    elif rank == 2:
        FileStore(folder).get("address/1", 10.0)
    return mesh(rank, size, folder, [SECRET] * size)


@pytest.mark.parametrize("peer", UNAUTHENTICATED_PEERS)
def test_an_unauthenticated_peer_is_dropped_and_the_group_forms(peer: str) -> None:
    assert values(run_threads(_mesh_with_visitor, 3, UNAUTHENTICATED_PEERS[peer])) == everyone(3)


def _mesh_with_a_silent_visitor(rank: int, size: int, folder: str) -> Any:
    if rank == 1:
        with socket.create_connection(_address_of_rank_0(folder), 5):
            return mesh(rank, size, folder, [SECRET] * size)
    return mesh(rank, size, folder, [SECRET] * size)


def test_a_silent_unauthenticated_peer_delays_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 100.0)  # waiting for the peer would take so long
    began = time.monotonic()
    assert values(run_threads(_mesh_with_a_silent_visitor, 2)) == everyone(2)
    assert time.monotonic() - began < seconds(5)


def test_a_rank_with_a_wrong_secret_is_refused_by_name() -> None:
    outcomes = run_threads(mesh, 2, [SECRET, bytes(32)], 1.5)
    assert outcomes[1].error == "RendezvousError"
    assert "is not rank 0 of this group" in outcomes[1].text
    assert outcomes[0].error == "RendezvousError"
    assert "rank 0: rank 1 of 2 did not connect in time" in outcomes[0].text


def _forward(rank: int, size: int, folder: str) -> Any:
    """Rank 1 is a man in the middle that returns rank 0's own proof to rank 0."""
    if rank == 0:
        return mesh(0, 2, folder, [SECRET] * 2, 1.0)
    said = hello(size=2)
    with socket.create_connection(_address_of_rank_0(folder), 5) as stream:
        stream.sendall(said)
        answer = stream.recv(65, socket.MSG_WAITALL)
        proof = hmac.new(SECRET, b"accept" + said + answer[1:33], hashlib.sha256).digest()
        assert hmac.compare_digest(answer[33:], proof)
        stream.sendall(proof)
        stream.settimeout(5)
        return stream.recv(1)


def test_a_proof_reflected_to_its_sender_is_refused() -> None:
    rank0, reflector = run_threads(_forward, 2)
    assert rank0.error == "RendezvousError"
    assert reflector.value == b"", "the connection must be closed"


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
