"""Control messages between workers and a switch: length-prefixed msgpack over a stream.

Membership lives here, data does not. A message is a map with a `type`; sizes are bounded, unknown types are an error.

    worker -> switch   join      version, job, name, rank, ranks, window_bytes, timeout_s
                                 (job: a digest; name: what people call it; ranks: of all workers, in worker order)
    switch -> worker   admitted  job_id, incarnation, nonce, port           (send hello packets to that UDP port)
                       refused   reason
    worker -> switch   ready     payload_bytes                              (the longest that came back)
    switch -> worker   start     epoch, payload_bytes, window               (every rank is ready)
    worker -> switch   missing   chunk, serial
    switch -> worker   missing   ranks, serial
                       left      rank, reason, fault                        (a rank's connection ended)
    worker -> switch   leave     reason, fault                              (the rank that it holds to be at fault)
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Any

import msgpack

VERSION = 2
MAX_MESSAGE_BYTES = 1 << 16
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class ProtocolError(ValueError):
    """The peer sent something that is no control message."""


def encode(message: Message) -> bytes:
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(body)
    except Exception as error:  # msgpack has no common base for what malformed input raises
        raise ProtocolError(f"not msgpack: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("not a map with a type")
    return message


def length_of(prefix: bytes) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes; the bound is {MAX_MESSAGE_BYTES}")
    return int(length)


def send(stream: socket.socket, message: Message) -> None:
    stream.sendall(encode(message))


def receive(stream: socket.socket) -> Message:
    """One message; EOFError at an orderly end, TimeoutError by the socket's timeout."""
    return decode(receive_exactly(stream, length_of(receive_exactly(stream, _LENGTH.size))))


def receive_exactly(stream: socket.socket, count: int) -> bytes:
    """`count` bytes; EOFError when the stream ends before, TimeoutError by the socket's timeout."""
    parts = bytearray()
    while len(parts) < count:
        part = stream.recv(count - len(parts))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)


def parse_endpoint(text: str, *, what: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` into its parts; ValueError with a sentence that names `what`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) <= 65535 or not host:
        raise ValueError(f"{what} is {text!r}; expected host:port, such as 127.0.0.1:7171 or [::1]:7171")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
