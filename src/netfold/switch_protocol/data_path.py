"""How packets of a job go from who joins a switch to that switch: by UDP, or over a provider of libfabric.

Shared by workers and by switches that are below another. What each says of its place on the network travels in `join`
and `admitted` (control_messages.py); a hello then shows that packets pass both ways.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Protocol

from netfold._native import auth, fabric, protocol
from netfold._native.transport import DataPort, FabricPort, UdpPort
from netfold.switch_protocol import control_messages, packet_keys

# Longest that a way is tried whose packets do not come back. A provider connects at the first packet, for which the
# switch's thread must run several times: on hosts with much other work that takes longer than a packet of UDP.
_LAST_S = 5.0
_LAST_FABRIC_S = 15.0
# As in docs/how-to/fabric.md: what may stand before the provider that is really used.
_STRICT = re.compile(r"^strict[^+]*\+")


# Fewer packets in flight from a worker than this, and a round trip is mostly waiting.
MIN_WINDOW_CHUNKS = 8


def window_chunks(window_bytes: int, payload_bytes: int) -> int:
    """Packets of `payload_bytes` of values in a window of `window_bytes`, MIN_WINDOW_CHUNKS at least."""
    packet_bytes: int = payload_bytes + protocol.HEADER_BYTES
    return max(MIN_WINDOW_CHUNKS, window_bytes // packet_bytes)


@dataclass(frozen=True)
class ReceiveBuffer:
    """What a switch's kernel holds of a job's packets until the switch reads them.

    granted_bytes: as the kernel reports it, twice what it was asked for, since it counts its own overhead in. 0 where
    it is not known.
    window_bytes: what each worker should have in flight.

    The buffer must hold the windows of all workers: all of them may come while the switch's thread serves other jobs or
    waits for a core. What does not fit is lost, and a small window costs less than losses in every round trip.
    """

    granted_bytes: int
    window_bytes: int

    def held_bytes(self, workers: int) -> int:
        """In flight from each of `workers`."""
        if self.granted_bytes == 0:
            return self.window_bytes
        return min(self.window_bytes, self.granted_bytes // (2 * workers))

    def window_shortfall(self, workers: int, payload_bytes: int = protocol.ETHERNET_PAYLOAD_BYTES) -> str:
        """A sentence, with what to set, where `workers` have a smaller window than they should; else empty."""
        chunks = window_chunks(self.held_bytes(workers), payload_bytes)
        whole = window_chunks(self.window_bytes, payload_bytes)
        if chunks >= whole:
            return ""
        return (
            f"the kernel holds {self.granted_bytes // 2} bytes of a job's packets (net.core.rmem_max), so each of "
            f"{workers} workers has a window of {chunks} packets of {payload_bytes} bytes and not {whole}: set sysctl "
            f"net.core.rmem_max to {self.window_bytes * workers} on the switch's host, or give the switch CAP_NET_ADMIN"
        )


class PathError(Exception):
    """Packets do not pass, or there is no such place here; a sentence without its subject."""


class DataPath(Protocol):
    """One end, until `port` is given to a group or a job."""

    port: DataPort

    def join_fields(self) -> control_messages.Message:
        """What `join` says of this end."""

    def connect(self, host: str, admitted: control_messages.Message, deadline: float) -> control_messages.Message:
        """Try the way to the switch at `host`; what `ready` says of it. PathError, and what a bad `admitted` raises."""


def open_path(provider: str | None, host: str, window_bytes: int) -> DataPath:
    """This end, on the interface with the address `host`; provider: None for UDP. PathError."""
    return _Udp(host, window_bytes) if provider is None else _Fabric(provider, host, window_bytes)


def without_strict(provider: str) -> str:
    """The provider below the strict one: both ends of a way need the same."""
    return _STRICT.sub("", provider)


def fabric_payload(packet_bytes: int) -> int:
    """Bytes of values in a packet of that length, of pairs too, with room for a tag."""
    room: int = packet_bytes - protocol.HEADER_BYTES - auth.MAC_BYTES
    return min(control_messages.FABRIC_PAYLOAD_BYTES, room // 16 * 16)


class _Udp:
    def __init__(self, host: str, window_bytes: int) -> None:
        self._port = UdpPort(host=host, buffer_bytes=4 * window_bytes)
        self.port: DataPort = self._port

    def join_fields(self) -> control_messages.Message:
        return {"port": self._port.port}

    def connect(self, host: str, admitted: control_messages.Message, deadline: float) -> control_messages.Message:
        self._port.connect(host, int(admitted["port"]))
        for payload in control_messages.PAYLOAD_CANDIDATES:
            last = payload == control_messages.PAYLOAD_CANDIDATES[-1]
            if (
                _hello(self.port, admitted, payload, deadline, _LAST_S if last else control_messages.PROBE_S)
                is not None
            ):
                return {"payload_bytes": payload}
        raise PathError(
            f"is reached by TCP, but no UDP packet came back from its data port {admitted['port']}: a firewall may "
            f"drop UDP, or an address translation change its port{_refused(self.port)}"
        )


class _Fabric:
    def __init__(self, provider: str, host: str, window_bytes: int) -> None:
        longest = control_messages.FABRIC_PAYLOAD_BYTES + protocol.HEADER_BYTES + auth.MAC_BYTES
        try:
            self._port = FabricPort(provider, host, packet_bytes=longest, in_flight_bytes=window_bytes)
        except fabric.FabricError as error:
            raise PathError(f"is to be reached over the fabric '{provider}', which this host cannot: {error}") from None
        self.port: DataPort = self._port
        self._place: dict[str, Any] = self._port.address

    def join_fields(self) -> control_messages.Message:
        return {"fabric": {key: self._place[key] for key in ("provider", "name", "tag")}}

    def connect(self, host: str, admitted: control_messages.Message, deadline: float) -> control_messages.Message:
        theirs = admitted["fabric"]
        provider = self._place["provider"]
        try:
            self._port.connect(theirs["name"], int(theirs["tag"]))
        except fabric.FabricError as error:
            raise PathError(f"has no place that provider {provider} knows: {error}") from None
        payload = fabric_payload(min(self._place["packet_bytes"], int(theirs["packet_bytes"])))
        proof = _hello(self.port, admitted, payload, deadline, _LAST_FABRIC_S)
        if proof is None:
            raise PathError(
                f"is reached by TCP, but nothing came back from it over provider {provider}: does the interface that "
                "reaches it carry that fabric (netfold doctor fabric), does a firewall drop it, and are the provider's "
                f"own variables (FI_...) the same at both ends?{_refused(self.port)}"
            )
        return {"payload_bytes": payload, "proof": proof}


def _refused(port: DataPort) -> str:
    return f" (the last packet did not leave: {port.last_send_error})" if port.last_send_error else ""


def _hello(
    port: DataPort, admitted: control_messages.Message, payload: int, deadline: float, seconds: float
) -> int | None:
    found: int | None = port.hello(
        job=int(admitted["job_id"]),
        incarnation=int(admitted["incarnation"]),
        worker=int(admitted["worker"]),
        nonce=int(admitted["nonce"]),
        packet_bytes=payload + protocol.HEADER_BYTES,
        key=packet_keys.hello_key_of(admitted),
        timeout_ns=int(min(seconds, max(0.0, deadline - time.monotonic())) * 1e9),
    )
    return found
