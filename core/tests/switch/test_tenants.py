"""The worst effect of a tenant with a token on the other tenants of its switch."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from load import seconds, slowdown
from ranks import running_switch
from test_admission import JOIN, serves
from test_exhaustion import descriptors

from netfold.switch_protocol import control_messages

CONNECTIONS = 255
# Of another tenant's `alive`, and of its join.
MOST_S = 0.5

FLOODS: dict[str, list[dict[str, object]]] = {
    "alive": [{"type": "alive", "serial": 1}],
    "long alive": [{"type": "alive", "serial": 1, "more": [0] * 60_000}],
    "replies that nobody asked for": [{"type": "stragglers", "ranks": [1], "serial": 1}],
    "queries": [{"type": "stragglers", "chunk": chunk, "serial": chunk} for chunk in range(100)],
}


@contextlib.contextmanager
def _flood(streams: list[socket.socket], block: bytes) -> Iterator[None]:
    """Send as much as the switch takes over all connections, and read all replies."""
    is_over = threading.Event()

    def send() -> None:
        at = [0] * len(streams)
        while not is_over.is_set():
            sent_any = False
            for number, stream in enumerate(streams):
                with contextlib.suppress(OSError):
                    stream.recv(1 << 16)
                with contextlib.suppress(OSError):
                    sent = stream.send(block[at[number] :])
                    at[number] = (at[number] + sent) % len(block)
                    sent_any = True
            is_over.wait(0 if sent_any else 0.001)

    for stream in streams:
        stream.setblocking(False)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        is_over.set()
        sender.join()


def _join(address: tuple[str, int], rank: int, ranks: int, job: str) -> socket.socket:
    stream = socket.create_connection(address, seconds(20))
    join = {**JOIN, "job": job, "rank": rank, "ranks": list(range(ranks)), "timeout_s": 300.0}
    stream.sendall(control_messages.encode(join))
    assert control_messages.receive(stream)["type"] == "admitted"
    return stream


@pytest.mark.parametrize("flood", FLOODS)
def test_a_tenant_that_floods_delays_another_ones_alive_and_join_by_half_a_second_at_most(flood: str) -> None:
    with running_switch() as switch, descriptors(CONNECTIONS + 200), contextlib.ExitStack() as stack:
        serves(switch)
        streams = [
            stack.enter_context(_join(switch.address, rank, CONNECTIONS + 1, "greedy")) for rank in range(CONNECTIONS)
        ]
        victim = stack.enter_context(_join(switch.address, 0, 2, "victim"))
        block = b"".join(map(control_messages.encode, FLOODS[flood])) * 16
        with _flood(streams, block):
            time.sleep(1.0)  # until buffers are full
            longest: dict[str, float] = {}
            for turn in range(10):
                began = time.monotonic()
                control_messages.send(victim, {"type": "alive", "serial": turn})
                assert control_messages.receive(victim) == {"type": "alive", "serial": turn}
                alive_s = time.monotonic() - began
                began = time.monotonic()
                stack.enter_context(_join(switch.address, 0, 2, f"job {turn}"))
                join_s = time.monotonic() - began
                longest["alive"] = max(longest.get("alive", 0.0), alive_s)
                longest["join"] = max(longest.get("join", 0.0), join_s)
            assert max(longest.values()) <= MOST_S * slowdown(), longest


def test_a_reply_that_nobody_asked_for_ends_the_membership() -> None:
    with running_switch() as switch, _join(switch.address, 0, 2, "j") as stream:
        control_messages.send(stream, {"type": "stragglers", "ranks": [], "serial": 1})
        switch.wait_for("event=protocol_error .*a reply that nobody asked for")
        with contextlib.suppress(EOFError, ConnectionError):
            assert control_messages.receive(stream)["type"] == "refused"


def test_the_thread_of_control_messages_goes_behind_the_threads_of_packets() -> None:
    with running_switch() as switch:
        pid = switch.process.pid
        nice = {int(task): os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir(f"/proc/{pid}/task")}
    assert len(nice) > 1
    assert nice.pop(pid) == 10
    assert set(nice.values()) == {os.getpriority(os.PRIO_PROCESS, 0)}
