"""Results leave in as few kernel messages as possible: the switch splits runs where its socket does."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys

import numpy as np
import pytest
from load import seconds
from ranks import stop

from netfold._native import protocol

SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
JOB, INCARNATION, EPOCH, NONCE = 1, 2, 3, 77
# The most that the kernel takes in one message; the bounds are in netfold/transport/udp/udp_socket.hpp.
MOST_BYTES, MOST_SEGMENTS = 65_000, 64

# The data plane in a process of its own, so that a test can stop it.
PLANE = """
import sys
from netfold._native.dataplane import DataPlane
job, incarnation, epoch, nonce, payload_bytes, window = map(int, sys.argv[1:])
plane = DataPlane()
print(plane.open(job, incarnation, "127.0.0.1", [nonce], [], 8 << 20), flush=True)
plane.set_worker_address(job, 0, "127.0.0.1", int(sys.stdin.readline()))
print("expects", flush=True)
sys.stdin.readline()
shape = {"workers": 1, "window": window, "payload_bytes": payload_bytes}
plane.begin(job=job, epoch=epoch, incarnation=incarnation, keys=None, **shape)
print("begun", flush=True)
sys.stdin.readline()
"""


def packet(payload_bytes: int, **fields: int) -> bytes:
    header = protocol.Header()
    for name, value in {"job": JOB, "incarnation": INCARNATION, **fields}.items():
        setattr(header, name, value)
    return bytes(header.pack()) + np.full(payload_bytes // 4, fields.get("chunk", 0), np.float32).tobytes()


@pytest.mark.parametrize("payload_bytes", [1408, 8880, 1000, 512], ids=lambda each: f"{each} bytes")
def test_a_backlog_of_results_leaves_in_whole_messages(payload_bytes: int) -> None:
    packet_bytes = payload_bytes + protocol.HEADER_BYTES
    per_message = min(MOST_SEGMENTS, MOST_BYTES // packet_bytes)
    count = 3 * per_message
    arguments = map(str, (JOB, INCARNATION, EPOCH, NONCE, payload_bytes, count))
    switch = subprocess.Popen(
        [sys.executable, "-c", PLANE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert switch.stdin is not None and switch.stdout is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        try:
            ours.bind(("127.0.0.1", 0))
            ours.settimeout(seconds(10))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            ours.setsockopt(SOL_UDP, UDP_GRO, 1)
            there = ("127.0.0.1", int(switch.stdout.readline()))

            def go_on(line: str, expected: str) -> None:
                assert switch.stdin is not None and switch.stdout is not None
                switch.stdin.write(f"{line}\n")
                switch.stdin.flush()
                assert switch.stdout.readline().strip() == expected

            go_on(str(ours.getsockname()[1]), "expects")
            hello = packet(payload_bytes, flags=protocol.FLAGS["hello"], packet_number=NONCE)
            ours.sendto(hello, there)
            assert ours.recv(65536) == hello
            go_on("", "begun")
            # The switch finds all contributions at once, so it has all results to send at once.
            stop(switch.pid)
            call = {"epoch": EPOCH, "operation": 1, "elements": count * payload_bytes // 4, "count": payload_bytes // 4}
            chunks = [packet(payload_bytes, chunk=chunk, packet_number=chunk + 1, **call) for chunk in range(count)]
            for first in range(0, count, per_message):
                segment = [(SOL_UDP, UDP_SEGMENT, struct.pack("H", packet_bytes))]
                ours.sendmsg([b"".join(chunks[first : first + per_message])], segment, 0, there)
            os.kill(switch.pid, signal.SIGCONT)
            received = []
            while sum(received) < count:
                data, *_ = ours.recvmsg(65536, 64)
                received.append(len(data) // packet_bytes)
            assert received == [per_message] * 3
        finally:
            switch.kill()
            switch.wait()
            switch.stdin.close()
            switch.stdout.close()
