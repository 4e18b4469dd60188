"""Peers that connect and prove nothing: every listener of netfold bounds them, and they keep no other peer out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import http.client
import os
import resource
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
from load import seconds, settles
from ranks import RunningSwitch, private, running_switch
from test_admission import JOIN, serves
from test_exhaustion import FEW, descriptors, usage

from netfold.bootstrap import handshake
from netfold.bootstrap.tcp_store import OUTLIVING, TcpStore
from netfold.switch import http as switch_http
from netfold.switch.http import MAX_READERS, HttpServer
from netfold.switch_protocol import acceptor, control_messages
from netfold.switch_protocol.acceptor import MAX_UNAUTHENTICATED, Acceptor, Peer

SECRET = bytes(range(32))

LISTENS = """
import signal
from netfold.bootstrap.listener import RegisteredGroup, acquire_listener
from netfold.switch_protocol.open_files import allow_open_files, files_needed
allow_open_files(files_needed(2))
listener = acquire_listener(0, ["127.0.0.1"], range(1), 1e9)
listener.register(RegisteredGroup(bytes(range(32)), 0, 2, 1, 1, handler=lambda rank, request: (request, None)))
print(listener.port, flush=True)
signal.pause()
"""


class Listening(NamedTuple):
    pid: int
    address: tuple[str, int]
    most: int  # peers that are not authenticated
    serves: Callable[[], None]  # a peer that may be here

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextlib.contextmanager
def _process(*command: str) -> Iterator[tuple[int, str]]:
    """A process and the first line that it prints."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(seconds(60))
        process.stdout.close()


@contextlib.contextmanager
def _rank() -> Iterator[Listening]:
    with _process("-c", LISTENS) as (pid, line):
        address = "127.0.0.1", int(line)

        def is_answered() -> None:
            token = handshake.token_of(SECRET)
            fields = handshake.CALL, token, 1, 0, 2, 0, 0, 0
            hello = struct.pack(">8sB16sIIIBBB32s", b"netfold4", *fields, os.urandom(32))
            with socket.create_connection(address, seconds(10)) as stream:
                stream.sendall(hello)
                answer = stream.recv(65, socket.MSG_WAITALL)
                stream.sendall(hmac.new(SECRET, b"initiate" + hello + answer[1:33], hashlib.sha256).digest())
                assert stream.recv(1) == b"+"
                control_messages.send(stream, {"type": "asks"})
                assert control_messages.receive(stream) == {"type": "asks"}

        yield Listening(pid, address, MAX_UNAUTHENTICATED, is_answered)


@contextlib.contextmanager
def _store() -> Iterator[Listening]:
    with _process("-m", "netfold.cli", "store", "--listen", "127.0.0.1:0") as (pid, line):
        host, port = control_messages.parse_endpoint(line.split()[-1], what="store")

        def is_answered() -> None:
            store = TcpStore(host, port, OUTLIVING, serve=False, timeout_s=seconds(10))
            store.set("key", b"value")
            assert store.get("key", 1.0) == b"value"
            store.close()

        yield Listening(pid, (host, port), MAX_UNAUTHENTICATED, is_answered)


@contextlib.contextmanager
def _switch() -> Iterator[Listening]:
    with running_switch() as switch:
        yield Listening(switch.process.pid, switch.address, MAX_UNAUTHENTICATED, lambda: serves(switch))


def _metrics_of(switch: RunningSwitch) -> tuple[str, int]:
    (address,) = switch.wait_for(r"event=metrics address=(\S+)")
    return control_messages.parse_endpoint(address, what="metrics")


@contextlib.contextmanager
def _metrics() -> Iterator[Listening]:
    with running_switch("--metrics", "127.0.0.1:0") as switch:
        address = _metrics_of(switch)

        def is_healthy() -> None:
            connection = http.client.HTTPConnection(*address, timeout=seconds(5))
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b"serving\n"
            connection.close()

        yield Listening(switch.process.pid, address, MAX_READERS, is_healthy)


LISTENERS: dict[str, Callable[[], AbstractContextManager[Listening]]] = {
    "a rank's listener": _rank,
    "the store": _store,
    "a switch": _switch,
    "a switch's metrics": _metrics,
}


@pytest.mark.parametrize("listener", LISTENERS)
def test_idle_peers_are_bounded_and_keep_no_other_peer_out(listener: str) -> None:
    with LISTENERS[listener]() as listening, contextlib.ExitStack() as stack:
        listening.serves()
        files, count = listening.files(), 2 * listening.most + 100
        stack.enter_context(descriptors(count + 200))
        for _ in range(count):
            stack.enter_context(socket.create_connection(listening.address, seconds(10)))
        listening.serves()
        assert listening.files() <= files + listening.most + FEW


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_process_without_descriptors_drops_idle_peers(listener: str) -> None:
    with LISTENERS[listener]() as listening, contextlib.ExitStack() as stack:
        listening.serves()
        most = listening.files() + 24
        resource.prlimit(listening.pid, resource.RLIMIT_NOFILE, (most, most))
        idle = [stack.enter_context(socket.create_connection(listening.address, seconds(10))) for _ in range(28)]
        listening.serves()
        # A peer went for each descriptor that was needed. All of the first 24 would have gone when their time was over.
        ended = [each for each in idle if select.select([each], [], [], 0)[0]]
        assert 0 < len(ended) < 20, len(ended)


def test_a_switch_raises_its_soft_limit_of_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 64 * 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with running_switch(prefix=["env"]) as switch:
            found = resource.prlimit(switch.process.pid, resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found >= (wanted if hard == resource.RLIM_INFINITY else min(hard, wanted))


def test_a_reader_that_does_not_read_is_disconnected_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_http, "REQUEST_S", 1.0)

    async def status() -> dict[str, str]:
        return {"long": "x" * (16 << 20)}

    async def run() -> None:
        server = HttpServer("127.0.0.1", 0, status)
        address = control_messages.parse_endpoint(await server.start(), what="metrics")
        files = len(os.listdir("/proc/self/fd"))
        reader, writer = await asyncio.open_connection(*address, limit=1)
        writer.write(b"GET /status HTTP/1.1\r\n\r\n")
        await reader.readexactly(1)
        deadline = asyncio.get_running_loop().time() + seconds(10)
        # This end's descriptor stays; the server's must not.
        while len(os.listdir("/proc/self/fd")) > files + 1 and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) == files + 1
        writer.transport.abort()
        await server.stop()

    asyncio.run(run())


def test_a_peer_has_its_time_before_it_is_dropped_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "LEAST_S", 1.0)
    ends: dict[int, float] = {}

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def serve(peer: Peer) -> None:
            try:
                if await loop.sock_recv(peer.stream, 1) == b"a":
                    peer.authenticated()
                    await loop.sock_recv(peer.stream, 1)
            finally:
                ends[peer.port] = loop.time() - peer.accepted_s
                peer.stream.close()

        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        accepting = Acceptor(serve, timeout_s=100.0, most=2)
        accepting.start(listener)
        with contextlib.ExitStack() as stack:

            def connect() -> socket.socket:
                return stack.enter_context(socket.create_connection(listener.getsockname()))

            proves, idle = connect(), [connect() for _ in range(4)]
            proves.sendall(b"a")
            while len(ends) < 2:
                await asyncio.sleep(0.01)
            assert list(ends) == [each.getsockname()[1] for each in idle[:2]], "the oldest go, and none that has proved"
            assert all(lasted_s >= 1.0 for lasted_s in ends.values())
            assert accepting.unauthenticated == 2 and accepting.connections == 3
        await accepting.stop()
        listener.close()

    asyncio.run(run())


def test_a_burst_of_workers_larger_than_the_bound_drops_none() -> None:
    count = 2 * MAX_UNAUTHENTICATED
    with running_switch("--max-jobs", "4") as switch, descriptors(count + 200), contextlib.ExitStack() as stack:
        streams = []
        for number in range(count):
            stream = stack.enter_context(socket.create_connection(switch.address, seconds(10)))
            streams.append(stream)
            join = {**JOIN, "job": f"j{number // 256}", "rank": number % 256, "ranks": list(range(256))}
            stream.sendall(control_messages.encode({**join, "timeout_s": 300.0}))
        for stream in streams:
            stream.settimeout(seconds(10))
            assert control_messages.receive(stream)["type"] == "admitted"
        assert settles(lambda: switch.log().count("event=joined") == count)


def tls_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(("begins", "open_at_once"), [(True, 1), (False, 600), (True, 600)])
def test_peers_that_never_finish_tls_leave_no_memory_behind(begins: bool, open_at_once: int, tmp_path: Path) -> None:
    first, tokens = tls_hello() if begins else b"", private(tmp_path / "tokens", "a " + "1" * 32)
    # A process of its own: one that this process forks has all that the tests have imported.
    with running_switch("--token-file", tokens, prefix=["env"]) as switch:
        address = control_messages.parse_switch(switch.endpoint, what="switch")
        usage(switch)
        before = usage(switch)
        with contextlib.ExitStack() as streams:
            kept: deque[socket.socket] = deque()
            for _ in range(4000):
                kept.append(streams.enter_context(socket.create_connection(address[:2], seconds(10))))
                with contextlib.suppress(OSError):  # the switch may have dropped it
                    kept[-1].sendall(first)
                if len(kept) == open_at_once:
                    kept.popleft().close()
        assert settles(lambda: usage(switch)[0] <= before[0] + FEW)
        assert settles(lambda: usage(switch)[1] <= 1.5 * before[1]), (before[1] >> 20, usage(switch)[1] >> 20)
