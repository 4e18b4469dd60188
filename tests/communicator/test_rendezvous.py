"""Coming together: strangers, wrong secrets, ranks that are absent, double, or told different things."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.communicator import rendezvous

pytestmark = pytest.mark.native

SECRET = bytes(range(32))


LANES = 2


def mesh(rank: int, size: int, folder: str, secrets: list[bytes], timeout_s: float = 10.0) -> list[list[int]]:
    """Meet over loopback; exchange a byte a connection; lane by lane who answered: 10 * lane + rank."""
    sockets = rendezvous.connect_mesh(
        FileStore(folder), rank, size, "127.0.0.1", secrets[rank], time.monotonic() + timeout_s, LANES
    )
    for lane, peers in enumerate(sockets):
        for peer in peers:
            if peer is not None:
                peer.settimeout(5)
                peer.sendall(bytes([10 * lane + rank]))
    met = [[-1 if peer is None else peer.recv(1)[0] for peer in peers] for peers in sockets]
    rendezvous.close_all(sockets)
    return met


def everyone(size: int) -> list[list[list[int]]]:
    return [
        [[-1 if peer == rank else 10 * lane + peer for peer in range(size)] for lane in range(LANES)]
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_is_connected_with_every_other(size: int) -> None:
    assert values(run_threads(mesh, size, [SECRET] * size)) == everyone(size)


STRANGERS: dict[str, list[bytes]] = {
    "says nothing and goes": [],
    "speaks HTTP": [b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n" + bytes(200)],
    "sends half a hello": [b"netfold2\x00\x00"],
    "claims a rank but knows no secret": [struct.pack(">8sIII32s", b"netfold2", 1, 3, 0, bytes(32)), bytes(32)],
    "claims a rank that does not exist": [struct.pack(">8sIII32s", b"netfold2", 9, 3, 0, bytes(32))],
    "is of a group of another size": [struct.pack(">8sIII32s", b"netfold2", 1, 7, 0, bytes(32))],
    "asks for a lane that does not exist": [struct.pack(">8sIII32s", b"netfold2", 1, 3, LANES, bytes(32))],
    "sends random bytes": [os.urandom(4096)],
}


def _visit(folder: str, words: list[bytes], done: threading.Event) -> None:
    host, _, port = FileStore(folder).get("address/0", 10.0).decode().rpartition(":")
    with socket.create_connection((host, int(port)), 5) as stream:
        for word in words:
            stream.sendall(word)
            time.sleep(0.02)
    done.set()


def _mesh_with_visitor(rank: int, size: int, folder: str, words: list[bytes]) -> list[list[int]]:
    visited = threading.Event()
    if rank == 1:
        _visit(folder, words, visited)  # before the real ranks: rank 0 must let it go and meet them
    elif rank == 2:
        FileStore(folder).get("address/1", 10.0)
    return mesh(rank, size, folder, [SECRET] * size)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_at_the_rendezvous_port_is_dropped_and_the_group_comes_together(stranger: str) -> None:
    assert values(run_threads(_mesh_with_visitor, 3, STRANGERS[stranger])) == everyone(3)


def _mesh_with_a_silent_visitor(rank: int, size: int, folder: str) -> list[int]:
    if rank == 1:
        host, _, port = FileStore(folder).get("address/0", 10.0).decode().rpartition(":")
        with socket.create_connection((host, int(port)), 5):
            return mesh(rank, size, folder, [SECRET] * size)
    return mesh(rank, size, folder, [SECRET] * size)


def test_a_stranger_that_stays_and_says_nothing_delays_the_group_by_no_more_than_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_TIMEOUT_S", 0.3)
    assert values(run_threads(_mesh_with_a_silent_visitor, 2)) == everyone(2)


def test_a_rank_with_a_wrong_secret_is_refused_by_name() -> None:
    outcomes = run_threads(mesh, 2, [SECRET, bytes(32)], 1.5)
    assert outcomes[1].error == "RendezvousError"
    assert "is not rank 0 of this job: it does not know the job's secret" in outcomes[1].text
    assert outcomes[0].error == "RendezvousError"
    assert "rank 0: rank 1 of 2 did not connect in time" in outcomes[0].text


def _forward(rank: int, size: int, folder: str) -> Any:
    """Rank 1 is a man in the middle: it passes rank 0's own proof back to it."""
    store = FileStore(folder)
    if rank == 0:
        return rendezvous.connect_mesh(store, 0, 2, "127.0.0.1", SECRET, time.monotonic() + 1.0)
    host, _, port = store.get("address/0", 5.0).decode().rpartition(":")
    with socket.create_connection((host, int(port)), 5) as stream:
        stream.sendall(struct.pack(">8sIII32s", b"netfold2", 1, 2, 0, bytes(32)))
        answer = stream.recv(64, socket.MSG_WAITALL)
        assert hmac.compare_digest(
            answer[32:],
            hmac.new(
                SECRET, b"accept" + bytes(32) + answer[:32] + struct.pack(">III", 1, 0, 0), hashlib.sha256
            ).digest(),
        )
        stream.sendall(answer[32:])
        stream.settimeout(5)
        return stream.recv(1)


def test_a_proof_reflected_to_its_maker_proves_nothing() -> None:
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


def test_absent_ranks_are_named_when_the_time_to_join_is_over() -> None:
    outcomes = run_threads(join, 4, [{}, {"absent": True}, {}, {"absent": True}], 1.0)
    assert "rank 0: rank 1, 3 of 4 did not connect in time; did every rank start" in outcomes[0].text
    assert outcomes[2].error == "RendezvousError"
    assert "rank 1" in outcomes[2].text


def test_without_rank_0_the_others_say_so() -> None:
    outcomes = run_threads(join, 2, [{"absent": True}, {}], 0.5)
    assert "rank 1: rank 0 did not publish the job in time" in outcomes[1].text


def join_twice(rank: int, size: int, folder: str) -> None:
    for _ in range(2):
        join(rank, size, folder, [{}] * size, 5.0)


def test_the_same_processes_may_make_another_group_on_the_same_store() -> None:
    """Found by torchrun: after destroy_process_group torch hands out the very same keys."""
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


def test_ranks_that_were_told_different_sizes_say_which() -> None:
    outcomes = run_threads(join, 2, [{}, {"size": 3}], 1.0)
    assert "rank 1 was told of 3 ranks, rank 0 of 2 (check WORLD_SIZE)" in outcomes[1].text
    assert outcomes[0].error == "RendezvousError"


def test_ranks_with_different_switches_are_told_so() -> None:
    options = [{"switch": "127.0.0.1:1"}, {"switch": "127.0.0.1:2"}]
    outcomes = run_threads(join, 2, options, 1.0)
    assert "rank 1 has NETFOLD_SWITCH=127.0.0.1:2, rank 0 has 127.0.0.1:1: all ranks need the same" in outcomes[1].text
    assert outcomes[0].error in ("RendezvousError", "SwitchError")


def test_an_interface_that_does_not_exist_is_named_beside_those_that_do() -> None:
    outcomes = run_threads(join, 1, [{"interface": "nosuch0"}], 1.0)
    assert outcomes[0].error == "RendezvousError"
    assert "NETFOLD_INTERFACE=nosuch0" in outcomes[0].text
    assert "lo" in outcomes[0].text


def test_an_address_that_is_not_this_hosts_cannot_be_listened_on() -> None:
    outcomes = run_threads(join, 2, [{"interface": "192.0.2.1"}, {"interface": "192.0.2.1"}], 1.0)
    assert "rank 0 cannot listen on 192.0.2.1" in outcomes[0].text


def test_the_loopback_interface_may_be_named() -> None:
    values(run_threads(join, 2, [{"interface": "lo"}, {"interface": "127.0.0.1"}], 5.0))


def _pairs(rank: int, size: int, folder: str, turns: int) -> None:
    pair, place = divmod(rank, 2)
    for turn in range(turns):
        join(place, 2, f"{folder}/{pair}/{turn}", [{}, {}], 10.0)


def test_groups_that_come_and_go_on_several_threads_do_not_stop_each_other() -> None:
    """The engine's thread ends with a process's last group and starts with the next: these overlap all the time."""
    values(run_threads(_pairs, 6, 60, timeout_s=60))


def in_ports(rank: int, size: int, folder: str, first: int) -> list[str]:
    """Three groups, one after the other, in as few ports as there are ranks."""
    for turn in range(3):
        options = Options(ports=f"{first}-{first + size - 1}")
        with Communicator(FileStore(f"{folder}/{turn}"), rank, size, options=options, join_timeout_s=20) as group:
            group.barrier()
    return [FileStore(f"{folder}/0").get(f"1/address/{peer}", 0).decode() for peer in range(size)]


def test_ranks_listen_in_the_ports_they_are_given() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = min(probe.getsockname()[1], 65000)
    found = values(run_threads(in_ports, 3, first))[0]
    assert sorted(found) == [f"127.0.0.1:{first + number}" for number in range(3)]


def test_a_range_without_a_free_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            rendezvous.RendezvousError, match=rf"no port of {port}-{port} is free on 127.0.0.1 .NETFOLD_PORTS"
        ):
            rendezvous._listen(0, "127.0.0.1", range(port, port + 1), 1, time.monotonic() + 0.1)


@pytest.mark.parametrize("words", ["x", "0", "7-3", "1-70000", "5-"])
def test_what_is_no_range_of_ports_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match="is no port and no range of ports"):
        Options(ports=words).resolved({})
