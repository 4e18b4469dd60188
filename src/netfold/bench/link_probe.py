"""What a rack's wire does to a plain TCP connection: `python -m netfold.bench.link_probe serve|RESULT.json HOST`.

And the least time that a collective can take over it, the alpha-beta limit (Hockney 1994; Thakur, Rabenseifner, Gropp
2005, table 1): the fewest steps that any algorithm needs, each with half a round trip, and the fewest bytes a rank.
"""

import json
import math
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from netfold.bench.collectives import COLLECTIVES
from netfold.rack import Rack
from netfold.rack.link import parse_link
from netfold.rack.names import host_address
from netfold.rack.processes import supervise

PORT = 7400
TRIPS = 200
STREAM_BYTES = 32 << 20
# Of a packet on the link: Ethernet 14, IPv4 20, TCP 20 with 12 of timestamps (which the MSS leaves room for).
HEADER_BYTES = 66
_TIMEOUT_S = 30


@dataclass(frozen=True)
class Wire:
    """round_trip_s: of 4 bytes, warm; rate_bits: the link's, headers included; mss: payload bytes of a full packet;
    stream_bits: payload a second that one TCP stream reached."""

    round_trip_s: float
    rate_bits: int
    mss: int
    stream_bits: float

    @property
    def payload_bits(self) -> float:
        """Payload a second at line rate: what is left when every full packet has its headers."""
        return self.rate_bits * self.mss / (self.mss + HEADER_BYTES)


def limit_s(wire: Wire, collective: str, size_bytes: int, ranks: int) -> float:
    """The alpha-beta limit. A reduction over all ranks and its way back: two times log2 P steps; else one time."""
    there_and_back = 2 if collective == "all_reduce" else 1
    steps = there_and_back * math.ceil(math.log2(ranks))
    moved = size_bytes * COLLECTIVES[collective].bus_factor(ranks)
    return steps * wire.round_trip_s / 2 + moved * 8 / wire.payload_bits


def probe_rack(rate: str) -> Wire:
    """Measure a rack of two hosts. Raises RackError."""
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder, Rack(2, rate) as rack:
        result = Path(folder, "wire.json")
        argv = [sys.executable, "-m", "netfold.bench.link_probe"]
        processes = [rack.popen(0, [*argv, "serve", host_address(0)])]
        processes.append(rack.popen(1, [*argv, str(result), host_address(0)]))
        outcome = supervise(processes, 2 * _TIMEOUT_S)
        if outcome.exit_code != 0:
            raise RuntimeError(f"the probe of the rack's wire ended with exit code {outcome.exit_code}")
        return Wire(rate_bits=parse_link(rate, "0%").rate_bits, **json.loads(result.read_text()))


def _serve(host: str) -> None:
    with socket.create_server((host, PORT)) as server:
        server.settimeout(_TIMEOUT_S)
        stream = server.accept()[0]
    with stream:
        _prepare(stream)
        for _ in range(TRIPS):
            stream.sendall(_receive(stream, 4))
        _receive(stream, STREAM_BYTES)
        stream.sendall(b"done")


def _measure(result: str, host: str) -> None:
    with _connect(host) as stream:
        _prepare(stream)
        trips = []
        for _ in range(TRIPS):
            started = time.perf_counter()
            stream.sendall(b"ping")
            _receive(stream, 4)
            trips.append(time.perf_counter() - started)
        started = time.perf_counter()
        stream.sendall(bytes(STREAM_BYTES))
        _receive(stream, 4)
        taken_s = time.perf_counter() - started
        mss = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    found = {"round_trip_s": statistics.median(trips), "mss": mss, "stream_bits": STREAM_BYTES * 8 / taken_s}
    Path(result).write_text(json.dumps(found))


def _connect(host: str) -> socket.socket:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return socket.create_connection((host, PORT), timeout=_TIMEOUT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _prepare(stream: socket.socket) -> None:
    stream.settimeout(_TIMEOUT_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(stream: socket.socket, count: int) -> bytes:
    last = b""
    while count > 0:
        last = stream.recv(min(count, 1 << 18))
        if not last:
            raise ConnectionError("the other end of the probe is gone")
        count -= len(last)
    return last


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _measure(sys.argv[1], sys.argv[2])
