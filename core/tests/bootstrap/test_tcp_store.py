"""Rank 0's store, and a group that forms from the environment alone."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, values

from netfold import Communicator
from netfold.bootstrap import tcp_store
from netfold.bootstrap.store import MAX_KEYS, PrefixStore, get_first, set_all
from netfold.communicator import RendezvousError, TcpStore
from netfold.switch_protocol import control_messages

pytestmark = pytest.mark.native


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pair(port: int, job: str = "job") -> tuple[TcpStore, TcpStore]:
    served = TcpStore("127.0.0.1", port, job, serve=True, timeout_s=5)
    return served, TcpStore("127.0.0.1", port, job, serve=False, timeout_s=5)


def test_one_rank_gets_a_value_that_another_sets() -> None:
    first, second = pair(free_port())
    first.set("key", b"\x00value")
    assert second.get("key", 1) == b"\x00value"
    second.set("key", b"again")
    assert first.get("key", 1) == b"again"
    assert [first.add("n", 2), second.add("n", 3), first.add("n", 0)] == [2, 5, 5]
    second.close()
    first.close()


def test_many_keys_go_with_a_request_as_far_as_they_are_set() -> None:
    first, second = pair(free_port())
    keys = [f"key {number}" for number in range(300)]
    set_all(PrefixStore(first, "of a group/"), ((key, key.encode()) for key in keys[:200]))
    of_group = PrefixStore(second, "of a group/")
    assert get_first(of_group, keys, 1) == [key.encode() for key in keys[:MAX_KEYS]]
    assert get_first(of_group, keys[150:], 1) == [key.encode() for key in keys[150:200]]
    with pytest.raises(TimeoutError, match=r"key 200 was not set within 0\.1 s"):
        get_first(of_group, keys[200:], 0.1)
    late = threading.Timer(0.2, first.set, ("of a group/key 200", b"late"))
    late.start()
    assert get_first(of_group, keys[200:], 5) == [b"late"]
    # One message holds so many of these.
    large = [(key, bytes(10_000)) for key in keys[:10]]
    set_all(first, large)
    assert get_first(second, keys[:10], 1) == [bytes(10_000)] * 3


def test_a_get_waits_for_its_key_until_its_timeout() -> None:
    first, second = pair(free_port())
    timer = threading.Timer(0.1, first.set, ("late", b"1"))
    timer.start()
    assert second.get("late", 10) == b"1"
    timer.join()
    with pytest.raises(TimeoutError, match=r"never was not set within 0\.1 s"):
        second.get("never", 0.1)
    assert second.get("late", 0) == b"1", "the connection is still in step"
    second.close()
    first.close()


def test_a_waiting_get_does_not_delay_another_thread() -> None:
    """Otherwise two threads that make two groups in opposite order would deadlock."""
    first, second = pair(free_port())
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(second.get("set later", seconds(20))))
    waiting.start()
    time.sleep(0.1)
    second.set("set later", b"1")
    waiting.join(seconds(10))
    assert found == [b"1"]
    second.close()
    first.close()


def test_a_client_may_start_before_the_server() -> None:
    port = free_port()
    found: list[bytes] = []

    def come() -> None:
        early = TcpStore("127.0.0.1", port, "job", serve=False, timeout_s=10)
        found.append(early.get("key", 10))
        early.close()

    thread = threading.Thread(target=come)
    thread.start()
    time.sleep(0.2)
    server = TcpStore("127.0.0.1", port, "job", serve=True, timeout_s=5)
    server.set("key", b"value")
    thread.join(seconds(10))
    server.close()
    assert found == [b"value"]


def test_two_jobs_with_one_port_find_each_its_own_store() -> None:
    port = free_port()
    stores = [pair(port, job) for job in ("a", "b")]
    for (first, _), value in zip(stores, (b"1", b"2"), strict=True):
        first.set("key", value)
    assert [second.get("key", 1) for _, second in stores] == [b"1", b"2"]
    for both in stores:
        for store in both:
            store.close()


def test_a_port_of_another_program_is_skipped() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        first, second = pair(port)
        first.set("key", b"1")
        assert second.get("key", 1) == b"1"
        second.close()
        first.close()


def test_a_missing_store_is_an_error_with_what_to_check() -> None:
    with pytest.raises(RendezvousError, match=r"no store of this job at 127\.0\.0\.1, ports .*did rank 0 start"):
        TcpStore("127.0.0.1", free_port(), "job", serve=False, timeout_s=0.2)


def test_a_waiting_rank_fails_when_rank_0_ends() -> None:
    first, second = pair(free_port())
    timer = threading.Timer(0.1, first.close)
    timer.start()
    start = time.monotonic()
    with pytest.raises((RendezvousError, TimeoutError)):
        second.get("never", 20)
    assert time.monotonic() - start < seconds(10)
    timer.join()
    with pytest.raises(RendezvousError, match=r"rank 0's store at 127\.0\.0\.1 does not answer any more"):
        second.set("key", b"1")
    second.close()


def test_a_full_store_and_a_malformed_request_end_only_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "MAX_BYTES", 1000)
    port = free_port()
    first, second = pair(port)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client.settimeout(seconds(5))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(10) == b""
    with pytest.raises(RendezvousError):
        second.set("large", bytes(2000))
    first.set("small", b"1")
    assert first.get("small", 1) == b"1"
    second.close()
    first.close()


PARTIAL = control_messages.encode({"type": "set", "values": {"key": bytes(60_000)}})[:-1]
WAITS = {"type": "get", "keys": ["never"], "timeout_s": 100.0}
GREEDY: dict[str, list[bytes]] = {
    "counters of short names": [control_messages.encode({"type": "add", "key": str(n), "amount": 1}) for n in range(9)],
    "values of short names": [control_messages.encode({"type": "set", "values": {str(n): b""}}) for n in range(9)],
    "requests before the reply": [control_messages.encode(WAITS), control_messages.encode(WAITS)],
    "two requests at once": [control_messages.encode({"type": "add", "key": "n", "amount": 1}) * 2],
    "parts of requests": [PARTIAL],
    "long requests that wait": [control_messages.encode({**WAITS, "keys": ["x" * 500] * 120})],
    "a second hello": [control_messages.encode({"type": "hello", "job": "job"})],
}


@pytest.mark.parametrize("greedy", GREEDY)
def test_a_client_that_takes_more_than_the_bounds_is_disconnected(monkeypatch: pytest.MonkeyPatch, greedy: str) -> None:
    monkeypatch.setattr(tcp_store, "MAX_BYTES", 4 * tcp_store.ENTRY_BYTES)
    monkeypatch.setattr(tcp_store, "MAX_PENDING_BYTES", 200_000)
    server = tcp_store.TcpStoreServer("127.0.0.1", 0, "job")
    with contextlib.ExitStack() as stack:

        def is_served_after(requests: list[bytes]) -> bool:
            stream = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), seconds(5)))
            control_messages.send(stream, {"type": "hello", "job": "job"})
            with contextlib.suppress(EOFError, ConnectionError):
                assert control_messages.receive(stream)["type"] == "ok"
                for request in requests:
                    stream.sendall(request)
                    stream.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        control_messages.receive(stream)
                return True
            return False

        assert not all(is_served_after(GREEDY[greedy]) for _ in range(5))
        assert server.pending_bytes <= tcp_store.MAX_PENDING_BYTES and server._bytes <= tcp_store.MAX_BYTES
        assert is_served_after([]), "others are served"
    server.close()
    assert server.pending_bytes == 0


def test_a_client_that_reads_no_reply_is_disconnected() -> None:
    server = tcp_store.TcpStoreServer("127.0.0.1", 0, "job")
    with socket.socket() as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.settimeout(seconds(5))
        stream.connect(("127.0.0.1", server.port))
        control_messages.send(stream, {"type": "hello", "job": "job"})
        assert control_messages.receive(stream)["type"] == "ok"
        control_messages.send(stream, {"type": "set", "values": {"key": bytes(60_000)}})
        assert control_messages.receive(stream)["type"] == "ok"
        with pytest.raises(ConnectionError):  # it is disconnected long before as many replies wait
            for _ in range(2000):
                control_messages.send(stream, {"type": "get", "keys": ["key"], "timeout_s": 1.0})
                time.sleep(0.001)
    server.close()


def test_a_long_hello_is_refused_before_it_is_whole() -> None:
    server = tcp_store.TcpStoreServer("127.0.0.1", 0, "job")
    with socket.create_connection(("127.0.0.1", server.port), seconds(5)) as stream:
        stream.sendall(control_messages.encode({"type": "hello", "job": "x" * 60_000})[:-1])
        with contextlib.suppress(ConnectionError):
            assert stream.recv(1) == b""
    server.close()


def launched(rank: int, size: int, folder: str, port: int) -> list[float]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    found = []
    for _ in range(2):  # again on the same port
        with Communicator.from_environment(join_timeout_s=20, timeout_s=20) as group:
            mine = np.array(float(group.rank + 1))
            group.all_reduce(mine)
            half = group.split(rank % 2)
            assert half is not None
            with half:
                found += [float(mine), float(half.all_reduce(np.array(float(rank))))]
            group.barrier()
    return found


def test_ranks_connect_from_their_launchers_variables() -> None:
    port = free_port()
    got = values(run_ranks(launched, 3, port))
    assert got == [[6.0, 2.0] * 2, [6.0, 1.0] * 2, [6.0, 2.0] * 2]


def test_a_store_may_be_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    for _ in range(50):
        tcp_store.TcpStoreServer("127.0.0.1", 0, "job").close()
    assert not raised


def test_hundreds_of_ranks_may_connect_at_once() -> None:
    server = tcp_store.TcpStoreServer("127.0.0.1", 0, "job")
    clients = [socket.socket() for _ in range(300)]
    try:
        server._loop.call_soon_threadsafe(time.sleep, 1.5)  # it accepts none
        began = time.monotonic()
        for client in clients:
            client.settimeout(seconds(1))
            client.connect(("127.0.0.1", server.port))
        assert time.monotonic() - began < 1.5, "a connection was tried again"
    finally:
        for client in clients:
            client.close()
        server.close()


def test_many_waiting_gets_take_no_thread_each_and_a_released_store_connects_again() -> None:
    threads = threading.active_count()
    served = TcpStore("127.0.0.1", free_port(), "job", serve=True, timeout_s=5)
    port = served._port
    clients = [TcpStore("127.0.0.1", port, "job", serve=False, timeout_s=5) for _ in range(40)]
    server = served._server
    assert server is not None
    assert threading.active_count() == threads + 1
    found: list[bytes] = []

    def get(store: TcpStore) -> None:
        found.append(store.get("key", seconds(20)))

    waiting = [threading.Thread(target=get, args=(each,)) for each in clients]
    for thread in waiting:
        thread.start()
    served.set("key", b"1")
    for thread in waiting:
        thread.join(seconds(10))
    assert found == [b"1"] * 40
    for each in [served, *clients]:
        each.release()
    deadline = time.monotonic() + seconds(5)
    while server.connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert clients[3].get("key", 1) == b"1"
    assert served.add("n", 1) == 1
    for each in [*clients, served]:
        each.close()
