"""Peers that open as much as a switch allows: connections, jobs, queries, tenants. Memory and descriptors stay bounded.

The bounds: acceptor.MAX_UNAUTHENTICATED, --max-jobs, stragglers.MAX_QUERIES, tokens.MAX_TENANTS. The buffers of one
connection bound the replies that its peer does not read.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from load import seconds
from ranks import RunningSwitch, running_switch
from test_admission import JOIN, serves

from netfold.switch.tokens import MAX_TENANTS, Tokens
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.acceptor import MAX_UNAUTHENTICATED

# Far above what the bounded number takes, and far below what an unbounded one would.
MORE_BYTES = 48 << 20
# Descriptors of the loop, threads and log, opened at the first use.
FEW = 8
CONNECTIONS = 1500
JOBS, MOST_JOBS = 200, 8
BLOCK = control_messages.encode({"type": "alive", "serial": 1}) * 4096
# What a sender can send while the other end does not read: two socket buffers and a reader's.
UNREAD_BYTES = 64 << 20


def usage(switch: RunningSwitch) -> tuple[int, int]:
    """Descriptors, and bytes of memory."""
    status = Path(f"/proc/{switch.process.pid}/status").read_text()
    rss_bytes = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))
    return len(os.listdir(f"/proc/{switch.process.pid}/fd")), rss_bytes


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[None]:
    """Raise this process's limit of descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < count:
        pytest.skip(f"a process may have {before[1]} descriptors here, and this takes {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], count), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def settled(switch: RunningSwitch, most: int) -> tuple[int, int]:
    """The switch's usage once it has at most `most` descriptors, or after 20 s."""
    until = time.monotonic() + seconds(20)
    while (found := usage(switch))[0] > most and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "first_message",
    [b"", b"\0\0", control_messages.encode({"type": "quota", "version": control_messages.VERSION, "udp": True})],
)
def test_unauthenticated_peers_stay_within_their_bound(first_message: bytes) -> None:
    # A peer that checks UDP has a port beside its connection.
    each = 2 if len(first_message) > 2 else 1
    with descriptors(CONNECTIONS + 200), contextlib.ExitStack() as stack:
        switch = stack.enter_context(running_switch())
        serves(switch)
        count, rss_bytes = usage(switch)
        highest = 0
        for number in range(CONNECTIONS):
            stream = stack.enter_context(socket.create_connection(switch.address, seconds(10)))
            with contextlib.suppress(OSError):
                stream.sendall(first_message)
            if number % 100 == 0:
                highest = max(highest, usage(switch)[0])
        found = settled(switch, count + each * MAX_UNAUTHENTICATED + FEW)
        assert max(found[0], highest) <= count + each * MAX_UNAUTHENTICATED + FEW
        assert found[1] <= rss_bytes + MORE_BYTES
        # Check the test itself: it opened more connections than the bound.
        assert highest >= count + MAX_UNAUTHENTICATED // 2
        serves(switch)


def test_jobs_that_never_start_stay_within_their_bound_and_release_everything() -> None:
    with running_switch("--max-jobs", str(MOST_JOBS)) as switch:
        serves(switch)
        count, rss_bytes = usage(switch)
        with contextlib.ExitStack() as stack:
            admitted = 0
            for number in range(JOBS):
                stream = stack.enter_context(socket.create_connection(switch.address, seconds(10)))
                stream.settimeout(seconds(10))
                stream.sendall(control_messages.encode({**JOIN, "job": f"job {number}", "timeout_s": 300.0}))
                answer = control_messages.receive(stream)
                admitted += answer["type"] == "admitted"
                if answer["type"] == "refused":
                    assert f"it serves {MOST_JOBS} jobs (--max-jobs)" in answer["reason"]
            assert admitted == MOST_JOBS
            # Each job has a connection and a port.
            found = settled(switch, count + 2 * MOST_JOBS + FEW)
            assert found[0] <= count + 2 * MOST_JOBS + FEW
            assert found[1] <= rss_bytes + MORE_BYTES
        assert settled(switch, count + FEW)[0] <= count + FEW
        serves(switch)


def test_the_switch_stops_reading_from_a_member_that_never_reads() -> None:
    with running_switch() as switch, socket.create_connection(switch.address, 5) as stream:
        serves(switch)
        stream.settimeout(seconds(5))
        stream.sendall(control_messages.encode(JOIN))
        assert control_messages.receive(stream)["type"] == "admitted"
        count, rss_bytes = usage(switch)
        sent = 0
        stream.settimeout(seconds(1))
        with contextlib.suppress(OSError):  # a timeout: the switch reads no more
            while sent < UNREAD_BYTES:
                sent += stream.send(BLOCK)
        assert sent < UNREAD_BYTES, "the switch has read all queries, although the peer reads no reply"
        found = usage(switch)
        assert found[0] <= count + FEW
        assert found[1] <= rss_bytes + MORE_BYTES
        serves(switch)


def test_a_token_file_has_a_bounded_number_of_tenants(tmp_path: Path) -> None:
    path = tmp_path / "tokens"

    def write(tenants: int) -> None:
        path.write_text("".join(f"t{number} {number:032}\n" for number in range(tenants)))
        path.chmod(0o600)

    write(MAX_TENANTS)
    assert len(Tokens.read(path).tenants) == MAX_TENANTS
    write(MAX_TENANTS + 1)
    with pytest.raises(ValueError, match=f"has {MAX_TENANTS + 1} tenants; expected 1 to {MAX_TENANTS}"):
        Tokens.read(path)
