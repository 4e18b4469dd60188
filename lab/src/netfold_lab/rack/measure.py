"""Measure the path between two hosts of a rack: `python -m netfold_lab.rack.measure serve|measure ...`.

One end serves, the other measures: round trips of 4 bytes, one TCP stream, and single datagrams, counted each way.
"""

import json
import socket
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from netfold_lab.rack.command import RackError
from netfold_lab.rack.processes import Process, supervise
from netfold_lab.rack.rack import Rack

PORT = 7400
TRIPS = 200
# Duration of each test, and the least and the most that it sends, whatever the rate.
STREAM_S = 1.0
STREAM_BYTES = (1 << 20, 64 << 20)
DATAGRAMS_S = 2.0
DATAGRAMS = (2_000, 40_000)
DATAGRAM_BYTES = 1000
# Datagrams leave in super-packets of this many, at half the rate: that fills no queue, so a missing one was lost
# on the link.
BATCH = 16
# Headers of a packet on the link: Ethernet 14, IPv4 20, TCP 20 and 12 of timestamps (which the MSS excludes).
HEADER_BYTES = 66
_TIMEOUT_S = 30
_SILENCE_S = 0.5
# Linux socket options that Python does not name.
_UDP_SEGMENT = 103
_RECEIVE_BUFFER_FORCE = 33
_END = struct.pack("!I", 0xFFFFFFFF)


@dataclass(frozen=True)
class Measurement:
    """The properties of a path."""

    round_trip_s: float  # of 4 bytes on a warm connection, the median
    mss: int  # payload bytes of a full TCP packet
    stream_bits: float  # payload of one TCP stream, per second
    sent: int  # datagrams sent each way
    there: int  # of them, those that arrived at the serving end
    back: int  # of them, those that arrived at the measuring end


def payload_share(mss: int) -> float:
    """Return the share of payload in a link's rate when every TCP packet is full."""
    return mss / (mss + HEADER_BYTES)


def measure(rack: Rack, host: int, other: int | None, rate_bits: int) -> Measurement:
    """Measure between `host` and `other`, or the aggregator (None). It takes about 6 s. Raises RackError.

    rate_bits: of the path, per second; it decides how much is sent.
    """
    argv = [sys.executable, "-m", "netfold_lab.rack.measure"]
    with tempfile.TemporaryDirectory(prefix="netfold-wire-") as folder:
        result = Path(folder, "measured.json")
        address = rack.address(other)
        serving = [*argv, "serve", address, str(rate_bits)]
        processes: list[Process] = [rack.popen_switch(serving) if other is None else rack.popen(other, serving)]
        processes.append(rack.popen(host, [*argv, "measure", address, str(rate_bits), str(result)]))
        outcome = supervise(processes, 3 * _TIMEOUT_S)
        if outcome.exit_code != 0:
            output = "\n".join(process.communicate()[0] for process in processes)
            raise RackError(f"the measurement from host {host} to {address} failed; its output: {output}")
        return Measurement(**json.loads(result.read_text()))


def _serve(host: str, rate_bits: int) -> None:
    with socket.create_server((host, PORT)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind((host, PORT))
        server.settimeout(_TIMEOUT_S)
        stream, client = server.accept()
        with stream:
            _prepare(stream, datagrams)
            for _ in range(TRIPS):
                stream.sendall(_receive(stream, 4))
            _receive(stream, _within(STREAM_BYTES, rate_bits * STREAM_S / 8))
            stream.sendall(b"done")
            stream.sendall(struct.pack("!I", _count(datagrams)))
            _receive(stream, 4)
            _send_datagrams(datagrams, (client[0], PORT), rate_bits)
            _receive(stream, 4)


def _measure(host: str, rate_bits: int, result: str) -> None:
    with _connect(host) as stream, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("", PORT))
        _prepare(stream, datagrams)
        trips = []
        for _ in range(TRIPS):
            started = time.perf_counter()
            stream.sendall(b"ping")
            _receive(stream, 4)
            trips.append(time.perf_counter() - started)
        size = _within(STREAM_BYTES, rate_bits * STREAM_S / 8)
        started = time.perf_counter()
        stream.sendall(bytes(size))
        _receive(stream, 4)
        taken_s = time.perf_counter() - started
        mss = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        sent = _send_datagrams(datagrams, (host, PORT), rate_bits)
        (there,) = struct.unpack("!I", _receive(stream, 4))
        stream.sendall(b"turn")
        back = _count(datagrams)
        stream.sendall(b"done")
    found = Measurement(statistics.median(trips), mss, size * 8 / taken_s, sent, there, back)
    Path(result).write_text(json.dumps(found.__dict__))


def _send_datagrams(datagrams: socket.socket, to: tuple[str, int], rate_bits: int) -> int:
    """Send numbered datagrams at half the rate, then 20 end marks; return the number of datagrams."""
    datagrams.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, DATAGRAM_BYTES)
    count = _within(DATAGRAMS, rate_bits / 2 * DATAGRAMS_S / 8 / DATAGRAM_BYTES) // BATCH * BATCH
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        numbers = range(first, first + BATCH)
        datagrams.sendto(b"".join(struct.pack("!I", n).ljust(DATAGRAM_BYTES, b".") for n in numbers), to)
        ahead_s = (first + BATCH) * DATAGRAM_BYTES * 8 * 2 / rate_bits - (time.perf_counter() - began)
        if ahead_s > 0:
            time.sleep(ahead_s)
    for _ in range(20):
        time.sleep(0.02)
        datagrams.sendto(_END, to)
    return count


def _count(datagrams: socket.socket) -> int:
    """Count arriving datagrams, each number once, until an end mark or _SILENCE_S without a datagram."""
    numbers: set[bytes] = set()
    datagrams.settimeout(_TIMEOUT_S)
    while True:
        try:
            number = datagrams.recv(2048)[:4]
        except TimeoutError:
            return len(numbers)
        if number == _END:
            return len(numbers)
        numbers.add(number)
        datagrams.settimeout(_SILENCE_S)


def _within(bounds: tuple[int, int], wanted: float) -> int:
    return max(bounds[0], min(bounds[1], int(wanted)))


def _connect(host: str) -> socket.socket:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return socket.create_connection((host, PORT), timeout=_TIMEOUT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _prepare(stream: socket.socket, datagrams: socket.socket) -> None:
    stream.settimeout(_TIMEOUT_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Only root may force the size. No datagram may be lost in the socket buffer.
    datagrams.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, 1 << 26)


def _receive(stream: socket.socket, count: int) -> bytes:
    last = b""
    while count > 0:
        last = stream.recv(min(count, 1 << 18))
        if not last:
            raise ConnectionError("the other end of the measurement is gone")
        count -= len(last)
    return last


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2], int(sys.argv[3]))
    else:
        _measure(sys.argv[2], int(sys.argv[3]), sys.argv[4])
