"""The path of a job's packets from a worker to its switch: UDP, or a provider of libfabric.

Used by ranks, and by switches that are below another. `join` and `admitted` (control_messages.py) carry the address of
each end. A hello packet then shows that packets pass both ways.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Protocol

from netfold._native import auth, fabric, protocol
from netfold._native.transport import DataPort, FabricPort, UdpPort
from netfold.switch_protocol import control_messages, packet_keys

# How long a path is tried whose packets do not come back. A provider connects at the first packet, for which the
# switch's thread must run several times: on busy hosts that takes longer than a UDP packet.
_LAST_S = 5.0
_LAST_FABRIC_S = 15.0
# docs/how-to/fabric.md: a prefix of the provider that is used.
_STRICT = re.compile(r"^strict[^+]*\+")
# With fewer packets in flight, most of a round trip is idle time.
MIN_WINDOW_CHUNKS = 8


def window_chunks(window_bytes: int, payload_bytes: int) -> int:
    """Packets of `payload_bytes` of values in a window of `window_bytes`, MIN_WINDOW_CHUNKS at least."""
    packet_bytes: int = payload_bytes + protocol.HEADER_BYTES
    return max(MIN_WINDOW_CHUNKS, window_bytes // packet_bytes)


@dataclass(frozen=True)
class ReceiveBuffer:
    """The kernel's buffer for a job's packets until the switch reads them.

    It must hold the windows of all workers: all packets may arrive while the switch's thread serves other jobs or waits
    for a core. Packets that do not fit are lost, and a small window costs less than losses in every round trip.
    """

    granted_bytes: int
    """As the kernel reports it: twice what was asked for, since it includes the kernel's overhead. 0: not known."""
    window_bytes: int
    """The bytes that each worker should have in flight."""

    def held_bytes(self, workers: int) -> int:
        """Bytes that each of `workers` can have in flight without loss."""
        if self.granted_bytes == 0:
            return self.window_bytes
        return min(self.window_bytes, self.granted_bytes // (2 * workers))

    def window_shortfall(self, workers: int, payload_bytes: int = protocol.ETHERNET_PAYLOAD_BYTES) -> str:
        """Return why the window of `workers` is smaller than it should be, and what to set; else empty."""
        chunks = window_chunks(self.held_bytes(workers), payload_bytes)
        wanted = window_chunks(self.window_bytes, payload_bytes)
        if chunks >= wanted:
            return ""
        return (
            f"the kernel holds {self.granted_bytes // 2} bytes of a job's packets (net.core.rmem_max), so each of "
            f"{workers} workers has a window of {chunks} packets of {payload_bytes} bytes and not {wanted}: set sysctl "
            f"net.core.rmem_max to {self.window_bytes * workers} on the switch's host, or give the switch CAP_NET_ADMIN"
        )


class PathError(control_messages.ReplyError):
    """Packets do not pass, or this host has no such fabric."""


class DataPath(Protocol):
    """This end of a path. A group or a job then takes over its `port`."""

    port: DataPort

    def join_fields(self) -> control_messages.Message:
        """This end's address, for `join`."""

    def connect(self, host: str, admitted: control_messages.Message, deadline: float) -> control_messages.Message:
        """Test the path to the switch at `host`; returns the fields of `ready`.

        Raises PathError; KeyError, TypeError or ValueError for a malformed `admitted`.
        """


def open_path(provider: str | None, host: str, window_bytes: int) -> DataPath:
    """Open this end on the interface with the address `host`. provider: None for UDP. Raises PathError."""
    return _Udp(host, window_bytes) if provider is None else _Fabric(provider, host, window_bytes)


def without_strict(provider: str) -> str:
    """The provider without a `strict` prefix: this part must be the same at both ends."""
    return _STRICT.sub("", provider)


def fabric_payload(packet_bytes: int) -> int:
    """Bytes of values in a packet of that length beside header and MAC: a multiple of 16, for pairs."""
    space: int = packet_bytes - protocol.HEADER_BYTES - auth.MAC_BYTES
    return min(control_messages.FABRIC_PAYLOAD_BYTES, space // 16 * 16)


class _Udp:
    def __init__(self, host: str, window_bytes: int) -> None:
        self._port = UdpPort(host=host, buffer_bytes=4 * window_bytes)
        self.port: DataPort = self._port

    def join_fields(self) -> control_messages.Message:
        return {"port": self._port.port}

    def connect(self, host: str, admitted: control_messages.Message, deadline: float) -> control_messages.Message:
        self._port.connect(host, int(admitted["port"]))
        candidates: tuple[int, ...] = control_messages.PAYLOAD_CANDIDATES
        if admitted.get("profile") == control_messages.HARDWARE:
            candidates = (int(admitted["payload_bytes"]),)
            if candidates[0] % 8 or not 0 < candidates[0] <= protocol.MAX_PAYLOAD_BYTES:
                raise ValueError(f"packets of {candidates[0]} bytes of values")
        for payload in candidates:
            last = payload == candidates[-1]
            seconds = _LAST_S if last else control_messages.PROBE_S
            if _hello(self.port, admitted, payload, deadline, seconds) is not None:
                return {"payload_bytes": payload}
        raise PathError(
            f"is reached by TCP, but no UDP packet came back from its data port {admitted['port']}: a firewall may "
            f"drop UDP, or an address translation change its port{_send_error(self.port)}"
        )


class _Fabric:
    def __init__(self, provider: str, host: str, window_bytes: int) -> None:
        longest = control_messages.FABRIC_PAYLOAD_BYTES + protocol.HEADER_BYTES + auth.MAC_BYTES
        try:
            self._port = FabricPort(provider, host, packet_bytes=longest, in_flight_bytes=window_bytes)
        except fabric.FabricError as error:
            raise PathError(f"is to be reached over the fabric '{provider}', which this host cannot: {error}") from None
        self.port: DataPort = self._port
        self._address: dict[str, Any] = self._port.address

    def join_fields(self) -> control_messages.Message:
        return {"fabric": {key: self._address[key] for key in ("provider", "name", "tag")}}

    def connect(self, host: str, admitted: control_messages.Message, deadline: float) -> control_messages.Message:
        peer = admitted["fabric"]
        provider = self._address["provider"]
        try:
            self._port.connect(peer["name"], int(peer["tag"]))
        except fabric.FabricError as error:
            raise PathError(f"has no address that provider {provider} knows: {error}") from None
        payload = fabric_payload(min(self._address["packet_bytes"], int(peer["packet_bytes"])))
        proof = _hello(self.port, admitted, payload, deadline, _LAST_FABRIC_S)
        if proof is None:
            raise PathError(
                f"is reached by TCP, but nothing came back from it over provider {provider}: does the interface that "
                "reaches it carry that fabric (netfold doctor fabric), does a firewall drop it, and are the provider's "
                f"own variables (FI_...) the same at both ends?{_send_error(self.port)}"
            )
        return {"payload_bytes": payload, "proof": proof}


def _send_error(port: DataPort) -> str:
    return f" (the last packet did not leave: {port.last_send_error})" if port.last_send_error else ""


def _hello(
    port: DataPort, admitted: control_messages.Message, payload: int, deadline: float, seconds: float
) -> int | None:
    """Exchange a hello packet of that length; the number that the switch returned, None where none came back."""
    proof: int | None = port.hello(
        job=int(admitted["job_id"]),
        incarnation=int(admitted["incarnation"]),
        worker=int(admitted["worker"]),
        nonce=int(admitted["nonce"]),
        packet_bytes=payload + protocol.HEADER_BYTES,
        key=packet_keys.hello_key_of(admitted),
        timeout_ns=int(min(seconds, max(0.0, deadline - time.monotonic())) * 1e9),
    )
    return proof
