"""Mutual authentication of a connection, by HMAC over fresh nonces, before the connection is used for anything else.

    initiator  hello: magic, purpose, group's token, from, to, size, lane, rail, security, nonce
    acceptor   + nonce, proof        or -: that group and rank are not registered here
    initiator  proof
    acceptor   +                     or -: the acceptor does not want this connection

The token names the group and is no secret. The proofs show that each end knows the group's secret. They cover the
hello, both nonces and the side that sends the proof, so a proof cannot be replayed or reflected. Where the security is
more than none, both ends derive the keys of this connection from the group's secret and both nonces (HKDF, RFC 5869).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from netfold._native import auth
from netfold.bootstrap.secure_stream import Secrets, Session
from netfold.options import SECURITIES

# The purpose of a connection: of a starting group; a request to a running group; of a running group, at its first use.
JOIN, CALL, FIRST = 1, 2, 3

_MAGIC = b"netfold4"
_HELLO = struct.Struct(">8sB16sIIIBBB32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_YES, _NO = b"+", b"-"


class Hello(NamedTuple):
    """The rank that connects, the one it connects to, and the purpose. In the order of _HELLO's fields."""

    purpose: int
    token: bytes  # 16 bytes
    initiator: int
    target: int
    size: int
    lane: int = 0
    rail: int = 0
    security: int = 0  # index into SECURITIES, for all bytes after the handshake


class GroupNotFoundError(Exception):
    """The listener has no such group or rank."""


class WrongSecretError(Exception):
    """The listener does not know the group's secret."""


class RefusedError(ConnectionError):
    """The listener knows the group, and does not want this connection."""


def token_of(secret: bytes) -> bytes:
    return hashlib.sha256(b"netfold listener" + secret).digest()[:16]


async def initiate(stream: socket.socket, hello: Hello, secret: bytes) -> Session | None:
    """Run the connecting side, on a non-blocking socket. Returns None where the security is none.

    Raises GroupNotFoundError, WrongSecretError, RefusedError; EOFError or OSError if the peer goes away.
    """
    loop = asyncio.get_running_loop()
    receive = partial(loop.sock_recv, stream)
    request = _HELLO.pack(_MAGIC, *hello, secrets.token_bytes(_NONCE_BYTES))
    await loop.sock_sendall(stream, request)
    if await _exactly(receive, 1) != _YES:
        raise GroupNotFoundError
    nonce = await _exactly(receive, _NONCE_BYTES)
    if not hmac.compare_digest(await _exactly(receive, _PROOF_BYTES), _proof(secret, b"accept", request, nonce)):
        raise WrongSecretError
    await loop.sock_sendall(stream, _proof(secret, b"initiate", request, nonce))
    if await _exactly(receive, 1) != _YES:
        raise RefusedError
    return _session(secret, request, nonce, hello.security, own=b"initiate", peer=b"accept")


async def accept(
    stream: socket.socket, secret_of: Callable[[Hello], bytes | None], admits: Callable[[Hello], bool]
) -> tuple[Hello, Session | None] | None:
    """Run the accepting side, on a non-blocking socket. Returns None for an unauthenticated or refused peer.

    secret_of: the secret of the group that a hello names; None where there is no such group.
    admits: whether a peer that has proved that it is in the group may connect.
    """
    loop = asyncio.get_running_loop()
    receive = partial(loop.sock_recv, stream)
    request = await _exactly(receive, _HELLO.size)
    magic, *fields, _ = _HELLO.unpack(request)
    if magic != _MAGIC:
        return None
    hello = Hello(*fields)
    secret = secret_of(hello)
    if secret is None:
        await loop.sock_sendall(stream, _NO)
        return None
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(stream, _YES + nonce + _proof(secret, b"accept", request, nonce))
    proof = await _exactly(receive, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"initiate", request, nonce)):
        return None
    if not admits(hello):
        await loop.sock_sendall(stream, _NO)
        return None
    await loop.sock_sendall(stream, _YES)
    return hello, _session(secret, request, nonce, hello.security, own=b"accept", peer=b"initiate")


async def _exactly(receive: Callable[[int], Awaitable[bytes]], count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = await receive(count - len(parts))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return parts


def _session(secret: bytes, request: bytes, nonce: bytes, security: int, *, own: bytes, peer: bytes) -> Session | None:
    """A secret for each direction, for Python (control) and for the native layer (mesh), which use it in turn."""
    if security == 0:
        return None
    # Imported here, since only connections with security need it.
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    salt = hashlib.sha256(request + nonce).digest()  # covers both nonces, both ranks and the purpose
    name = SECURITIES[security]

    def derive(layer: bytes, side: bytes) -> bytes:
        info = b" ".join((b"netfold stream 1", name.encode(), layer, side))
        return HKDF(algorithm=SHA256(), length=auth.SECRET_BYTES, salt=salt, info=info).derive(secret)

    def secrets_of(layer: bytes) -> Secrets:
        return name, derive(layer, own), derive(layer, peer)

    return Session(control=secrets_of(b"control"), mesh=secrets_of(b"mesh"))


def _proof(secret: bytes, side: bytes, request: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + request + nonce, "sha256")
