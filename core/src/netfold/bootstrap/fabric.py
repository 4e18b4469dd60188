"""This process's ports on a fabric, for NETFOLD_TRANSPORT=fabric:PROVIDER, and what ranks agree on before their use.

A group opens no stream at its start. The native group makes a stream to a rank when an algorithm first needs that rank,
over the authenticated connection to it (fabric_pipe.hpp). Only the probe of links opens one here, and closes it.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from netfold._native import fabric
from netfold.bootstrap.addresses import interfaces_before_job
from netfold.bootstrap.tree import StartTree
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import receive_exactly

_LENGTH = struct.Struct("<I")
_MAX_OFFER_BYTES = 64 << 10

# One for each provider and set of interfaces, for all groups of this process. Closed when the process ends.
_ports: dict[tuple[int, str, tuple[str, ...]], Any] = {}
_lock = threading.Lock()


def port_of(provider: str, hosts: Sequence[str]) -> Any:
    """This process's port on that fabric. Raises FabricError where none can be opened."""
    key = os.getpid(), provider, tuple(hosts)
    with _lock:
        if not any(pid == os.getpid() for pid, _, _ in _ports):
            # Not `atexit`, which processes of multiprocessing do not run.
            Finalize(None, release_ports, exitpriority=0)
        # A port whose endpoint had to be closed serves only its remaining streams.
        if key not in _ports or not _ports[key].is_open:
            _ports[key] = fabric.StreamMux(provider, list(hosts))
        return _ports[key]


def release_ports() -> None:
    """At the end of the process, let providers remove external resources, such as shm's file in /dev/shm.

    A group that was not closed keeps its port.
    """
    with _lock:
        _ports.clear()


def describe_port(port: Any) -> str:
    """In words: provider, version, and the device of each rail."""
    return f"provider {port.provider} {port.version} of libfabric {fabric.version()} on {', '.join(port.domains)}"


def preview_transport(options: Options) -> tuple[str, str]:
    """Return the fabric that a group with these options would use on this host instead of TCP, and why it cannot.

    One of the two is empty; both are for TCP. Opens the port of a fabric.
    """
    why = f"NETFOLD_TRANSPORT={options.transport}"
    if options.fabric is None:
        return "", ""
    try:
        interfaces = interfaces_before_job(options)
        return f"{describe_port(port_of(options.fabric, interfaces.hosts[: interfaces.rails]))} ({why})", ""
    except (fabric.FabricError, RendezvousError) as error:
        return "", f"{why}: {error}"


class FabricTerms(NamedTuple):
    """Agreed by the ranks of a group before any of them opens a stream."""

    port: Any
    rma_min_bytes: int
    """The smallest chunk that is written to the peer's memory; 0: none is."""


def agree(
    tree: StartTree, provider: str, hosts: Sequence[str], rank: int, *, settings: Mapping[str, int]
) -> FabricTerms:
    """Open the port over this host's interfaces `hosts`, and compare it with those of all ranks. No stream is opened.

    settings: the options rma_min_bytes, registration_cache_entries, registration_cache_bytes.
    Raises RendezvousError, on every rank, with the provider's reason, or the rank that has another port.
    """
    try:
        port = port_of(provider, hosts)
    except fabric.FabricError as error:
        text = f"rank {rank} cannot use the fabric '{provider}' (NETFOLD_TRANSPORT): {error}"
        raise RendezvousError(text, rank=rank) from None
    port.set(**settings)
    own = [port.provider, len(port.domains), port.segment_bytes, port.rma_min_bytes]
    ports = tree.all_gather(own, "the ranks agreed on their fabric")
    for peer, (name, rails, segment_bytes, _) in enumerate(ports):
        if [name, rails, segment_bytes] != ports[0][:3]:
            raise RendezvousError(
                f"rank {peer} has provider {name} with {rails} rails and messages of {segment_bytes} bytes, rank 0 "
                f"provider {ports[0][0]} with {ports[0][1]} rails and messages of {ports[0][2]} bytes: all ranks need "
                "the same provider and like interfaces (NETFOLD_TRANSPORT, NETFOLD_INTERFACE)",
                rank=peer,
            )
    least = [rma_min_bytes for *_, rma_min_bytes in ports]
    return FabricTerms(port, max(least) if min(least) > 0 else 0)


def stream_beside(connection: socket.socket, port: Any) -> FabricByteStream:
    """A stream to the rank at the other end of an authenticated connection, which carries nothing else until then.

    Both ranks call this, each with its end. Raises FabricError, OSError, EOFError.
    """
    stream = port.open(fabric.make_doorbell())
    try:
        offer = stream.offer
        connection.sendall(_LENGTH.pack(len(offer)) + offer)
        (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
        if length > _MAX_OFFER_BYTES:
            raise fabric.FabricError(f"the peer's offer of a stream has {length} bytes; at most {_MAX_OFFER_BYTES}")
        stream.connect(receive_exactly(connection, length))
    except BaseException:
        stream.close()
        raise
    return FabricByteStream(stream)


class FabricByteStream:
    """A fabric stream with the methods of a socket that the probe uses."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._timeout_ns = 0

    def settimeout(self, seconds: float) -> None:
        self._timeout_ns = int(seconds * 1e9)

    def setsockopt(self, *option: int) -> None:
        """Has no effect: a fabric stream sends at once."""

    def sendall(self, data: bytes) -> None:
        if self._stream.send(data, self._timeout_ns) < len(data) or not self._stream.flush(self._timeout_ns):
            raise TimeoutError("the fabric did not accept the data in time")

    def recv(self, count: int) -> bytes:
        data: bytes = self._stream.receive(count, self._timeout_ns)
        if not data:
            raise TimeoutError("nothing came over the fabric in time")
        return data

    def close(self) -> None:
        self._stream.close()
