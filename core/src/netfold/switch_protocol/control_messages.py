"""Control messages between workers and a switch: length-prefixed msgpack over a stream.

They carry membership, and no data. A message is a map with a `type`; sizes are bounded, unknown types are an error,
unknown fields are ignored. The first message of each side carries `version`; docs/reference/versions.md says when it
changes. core/native/control speaks the protocol for workers without Python.

    worker -> switch   path      version, below               (below: ids of the switches that ask on its behalf)
    switch -> worker   path      version, switches, error     (id and address of this switch and of each above it, its
                                                               own address empty; why the path ends early, or empty)
    worker -> switch   quota     version
                                 udp                         (true: also test whether UDP passes)
    switch -> worker   quota     version, jobs, workers, memory_bytes, slots   (available to a new job; -1 slots: as
                                                               many as the memory holds)
                                 buffer_bytes, window_bytes  (what the kernel grants a job's packets, and a worker's
                                                              window where that suffices)
                                 udp                         (port, nonce: the switch returns packets that begin with
                                                              this nonce from this UDP port, while the connection lasts)
    worker -> switch   join      version, job, name, rank, ranks, port, window_bytes, timeout_s
                                 (job: a digest; name: for logs and metrics; ranks: of all workers, in worker order;
                                 port: the UDP port that this worker's packets will come from)
                                 tree                        (instead of ranks, where not all join this switch: the
                                                              levels from this switch to the root: job_tree.py)
                                 fabric                      (provider, name, tag: instead of the port, for packets
                                                              over a fabric; tag: of packets to this worker)
                                 encrypt                     (true: packets with values are to be encrypted)
                                 profiles                    (`hardware`, where the worker also speaks that profile)
    switch -> worker   admitted  version, job_id, incarnation, worker, nonce, port   (send hello packets to that UDP
                                                               port as that worker)
                                 fabric                      (name, tag, packet_bytes: instead of the port)
                                 secret, result_secret       (inside TLS only: for the keys of packets)
                                 encrypt                     (inside TLS only: whether values in packets are encrypted)
                                 profile, payload_bytes      (`hardware`, and the one length of a packet's values: the
                                                              switch is a pipeline)
                       refused   reason                      (version: in reply to a first message; switch: the
                                                              address of a lost switch; loop: parents form a circle)
    worker -> switch   ready     payload_bytes                              (the longest that the switch returned)
                                 proof                       (over a fabric: the number that the switch returned)
    switch -> worker   start     epoch, payload_bytes, window               (every rank is ready)
                                 window_shortfall            (why the window is smaller than it should be, and what
                                                              to set)
                                 profile                     (`hardware`: a switch of the job's tree is a pipeline)
    worker -> switch   stragglers  chunk, serial                 (at most 8 open at once)
                       alive     serial
                                 bytes_per_s                 (of tensor, through this switch, as the job's lowest rank
                                                              knows it: shown, and used for nothing)
    switch -> worker   stragglers  ranks, serial
                                 unknown                     (true: no rank was found, and a switch of the tree did not
                                                              answer)
                       alive     serial
                       left      ranks, reason, fault                       (the connections of these ranks ended)
    worker -> switch   leave     reason, fault                              (the rank at fault, as far as known)

`path`, `quota` and `join` carry a `credential` where the switch wants a token, inside TLS only (`credential_of`). After
a path or a quota the connection ends; where UDP is tested, the worker ends it.
A switch's id is its incarnation. A leaf is a worker of its parent, with further fields and messages:

    leaf -> parent     join      switch, endpoint            (its id and address; rank: the lowest below it)
                       ready     window                      (the most chunks that it can grant)
                                 profile                     (`hardware`: it, or one below it, is a pipeline, so
                                                              payload_bytes is the only length)
                       left      ranks, reason, fault        (ranks below it)
                       leave     switch                      (the address of a lost switch, if that is the reason)
    parent -> leaf     stragglers  chunk, serial               (both sides may query)
    leaf -> parent     stragglers  ranks, serial
"""

from __future__ import annotations

import hmac
import io
import ipaddress
import os
import re
import socket
import stat
import struct
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgpack

import netfold

# Covers these messages and all else that a worker and a switch exchange: docs/reference/versions.md.
# core/native/control has the number too.
VERSION = 10
MAX_MESSAGE_BYTES = 1 << 16
# Most switches that a group uses side by side.
MAX_SWITCHES = 8
_LENGTH = struct.Struct(">I")

# Bytes of values in a packet, longest first. The first whose packets come back from the switch is used. With headers
# and MAC, 8880 fit a jumbo frame (MTU 9000), of IPv6 too; 1408 fill an MTU of 1500, and 1152 fit IPv6's least MTU of
# 1280. Longer packets on loopback measured no faster, and a small operation is padded to a whole packet.
PAYLOAD_CANDIDATES = (8880, 1408, 1152)
# How long each length but the last is tried.
PROBE_S = 0.12
# Over a fabric, which has no MTU: the protocol's maximum, less where messages are shorter. A message costs about the
# same at any length: an all_reduce of 1 MB took 2.4 to 2.8 ms with this, and 3.8 to 4.2 ms with 8880 (2 ranks,
# tcp;ofi_rxm, medians of 3 rounds on a machine in use).
FABRIC_PAYLOAD_BYTES = 32768

# Longest file of tokens.
MAX_PRIVATE_BYTES = 1 << 20
_TOKEN = re.compile(r"[\w+/=.-]{32,256}", re.ASCII)

# The profile of the aggregation protocol that a switch in hardware can have: docs/reference/hardware-profile.md.
HARDWARE = "hardware"

Message = dict[str, Any]


class Stream(Protocol):
    """The stream of a control connection: a socket, or a TLS stream over one."""

    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, count: int, /) -> bytes: ...


class ProtectedSocket(socket.socket):
    """The base class of sockets that take over `stream` and protect its bytes, by `sendall` and `recv` alone."""

    def __init__(self, stream: socket.socket) -> None:
        timeout_s = stream.gettimeout()
        super().__init__(stream.family, stream.type, stream.proto, fileno=stream.detach())
        self.settimeout(timeout_s)

    def send(self, *_: Any) -> int:
        raise io.UnsupportedOperation(f"a {type(self).__name__} is written by sendall")

    def recv_into(self, *_: Any) -> int:
        raise io.UnsupportedOperation(f"a {type(self).__name__} is read by recv")


class ProtocolError(ValueError):
    """The peer sent bytes that are not a control message."""


class ReplyError(Exception):
    """The switch refused a request, or this process cannot use its reply. The text is a sentence without its subject.

    loop: the switch's parents form a circle.
    remedy: what to try; "" where the text says it or nobody knows.
    """

    def __init__(self, text: str, *, loop: bool = False, remedy: str = "") -> None:
        super().__init__(text)
        self.loop = loop
        self.remedy = remedy


def encode(message: Message) -> bytes:
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(body)
    except Exception as error:  # the errors of msgpack for malformed input have no common base
        raise ProtocolError(f"not msgpack: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("not a map with a type")
    return message


def version_problem(message: Message, *, them: str, us: str) -> str:
    """Return why this first message's version does not fit, and which side to upgrade; "" where it fits.

    them, us: what to call the sender and this process, such as "the worker" and "this switch".
    """
    version = message.get("version")
    if version == VERSION:
        return ""
    own = f"{us} (netfold {netfold.__version__}) speaks control protocol {VERSION}"
    if not isinstance(version, int):
        return f"{them} does not say which control protocol it speaks, and {own}: run the same netfold on both sides"
    older = them if version < VERSION else us
    return f"{them} speaks control protocol {version}, {own}: upgrade netfold where {older} runs"


def credential_of(token: str, fingerprint: str) -> bytes:
    """The proof that a peer of the switch with this certificate has `token`: HMAC-SHA256, 32 bytes.

    A token never leaves its host. A credential is worth nothing at a switch with another certificate. So a switch that
    a path to the root names, and that is not this operator's, learns nothing with which it could join elsewhere.
    """
    return credential_by(credential_key(token), fingerprint)


def credential_key(token: str) -> hmac.HMAC:
    """The part of a token that a switch keeps. Its text does not have the token."""
    return hmac.new(token.encode(), b"netfold switch credential ", "sha256")


def credential_by(key: hmac.HMAC, fingerprint: str) -> bytes:
    """As `credential_of`, by what a switch keeps of the token."""
    own = key.copy()
    own.update(fingerprint.lower().encode())
    return own.digest()


def first_message(message: Message, credential: bytes | None) -> Message:
    """The first message of a connection to a switch: `message` with the version, and a credential if there is one."""
    return {"version": VERSION, **message, **({} if credential is None else {"credential": credential})}


def check_reply(message: Message, kind: str, *, us: str, is_first: bool = True) -> None:
    """Check a switch's reply, which should have the type `kind`. Raises ReplyError, or ProtocolError for another type.

    us: what to call this process, such as "this worker".
    is_first: the message replies to a first message, so it carries a version.
    """
    # Up to control protocol 5 a refusal has no version field; its text names the version.
    if is_first and ("version" in message or message["type"] == kind):
        problem = version_problem(message, them="it", us=us)
        if problem:
            raise ReplyError(f"cannot be joined: {problem}")
    if message["type"] == "refused":
        remedy = str(message.get("remedy", ""))
        raise ReplyError(f"refused: {message.get('reason')}", loop=bool(message.get("loop")), remedy=remedy)
    if message["type"] != kind:
        raise ProtocolError(f"expected {kind!r}, got {message['type']!r}")


def length_of(prefix: bytes) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes; the bound is {MAX_MESSAGE_BYTES}")
    return int(length)


def send(stream: Stream, message: Message) -> None:
    stream.sendall(encode(message))


def receive(stream: Stream) -> Message:
    """Receive one message. EOFError at an orderly end, TimeoutError after the socket's timeout."""
    return decode(receive_exactly(stream, length_of(receive_exactly(stream, _LENGTH.size))))


def take(received: bytearray) -> Message | None:
    """Take the first message out of received bytes; None where it is not there as a whole."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + length_of(bytes(received[: _LENGTH.size]))
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    return decode(body)


def receive_exactly(stream: Stream, count: int) -> bytes:
    """Receive `count` bytes. EOFError if the stream ends before, TimeoutError after the socket's timeout."""
    parts = bytearray()
    while len(parts) < count:
        part = stream.recv(count - len(parts))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)


def parse_endpoint(text: str, *, what: str) -> tuple[str, int]:
    """Parse `host:port` or `[v6]:port`. ValueError with a sentence that names `what`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) <= 65535 or not host:
        raise ValueError(f"{what} is {text!r}; expected host:port, such as 127.0.0.1:7171 or [::1]:7171")
    return host.removeprefix("[").removesuffix("]"), int(port)


class SwitchAddress(NamedTuple):
    """A switch's address and, where it speaks TLS, the SHA-256 of its certificate in hexadecimal."""

    host: str
    port: int
    fingerprint: str | None


def parse_switch(text: str, *, what: str) -> SwitchAddress:
    """Parse `host:port` or `host:port#fingerprint`. ValueError with a sentence that names `what`.

    One text has both, so that nobody can set the address and forget the fingerprint.
    """
    endpoint, hash_sign, fingerprint = text.strip().partition("#")
    if hash_sign and not re.fullmatch(r"[0-9a-fA-F]{64}", fingerprint):
        raise ValueError(
            f"{what} is {text!r}: behind # stands a certificate's fingerprint, 64 hexadecimal digits, as the switch "
            "prints it when it starts"
        )
    return SwitchAddress(*parse_endpoint(endpoint, what=what), fingerprint.lower() or None)


def switches_of(text: str | None) -> tuple[str, ...]:
    """Parse NETFOLD_SWITCH: one or more switches, separated by commas; none for None.

    ValueError with a sentence for a malformed address, and for too many.
    """
    if text is None:
        return ()
    endpoints = tuple(each.strip() for each in text.split(","))
    for each in endpoints:
        parse_switch(each, what="NETFOLD_SWITCH")
    if len(endpoints) > MAX_SWITCHES:
        raise ValueError(f"NETFOLD_SWITCH names {len(endpoints)} switches; a group goes over up to {MAX_SWITCHES}")
    return endpoints


def read_private(path: Path | str) -> str:
    """Read a file of this user or root that no other user can read. ValueError for other owners or modes."""
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in (0, os.geteuid()):
            raise ValueError(f"{path} is no file of this user or of root: its owner knows its content")
        if about.st_mode & 0o077:
            raise ValueError(f"{path} can be read by others (mode {about.st_mode & 0o777:03o}): chmod 600 {path}")
        content = file.read(MAX_PRIVATE_BYTES + 1)
    if len(content) > MAX_PRIVATE_BYTES:
        raise ValueError(f"{path} is longer than {MAX_PRIVATE_BYTES} bytes")
    return content.decode("utf-8", errors="strict")


def check_token(token: str) -> None:
    """Raise ValueError, whose text does not have the token, for a malformed token."""
    if not _TOKEN.fullmatch(token):
        raise ValueError("a token is 32 to 256 letters and digits, such as `openssl rand -hex 32` prints")


def format_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
