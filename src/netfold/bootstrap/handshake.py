"""Who is at the other end of a connection: proved, by HMAC over fresh nonces, before it is used for anything.

    knocks  magic, purpose, group's token, from, to, size, lane, rail, security, nonce
    opens   + nonce, proof        or -: nobody of that group and rank is at home here
    knocks  proof
    opens   +

The token says which group is meant and is no secret; the proofs show that each end knows the group's. They cover
everything that was said and which end says it, so neither can be replayed or reflected. Where the security is more
than none, both derive the keys of this connection from the group's secret and both nonces (HKDF, RFC 5869).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from netfold._native import auth
from netfold.bootstrap.secure_stream import Secrets, Session
from netfold.options import SECURITIES
from netfold.switch_protocol.control_messages import receive_exactly

JOIN, CALL = 1, 2  # what a connection is for: a place in the mesh; a question to a group that stands

_MAGIC = b"netfold4"
_HELLO = struct.Struct(">8sB16sIIIBBB32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_YES, _NO = b"+", b"-"


@dataclass(frozen=True)
class Hello:
    """Who knocks, at whose listener, and what for."""

    purpose: int
    token: bytes  # 16 bytes
    initiator: int
    target: int
    size: int
    lane: int = 0
    rail: int = 0
    security: int = 0  # of SECURITIES, of all that is said after the handshake


class GroupNotFoundError(Exception):
    """Somebody answered, and knows no such group or rank."""


class WrongSecretError(Exception):
    """Who answered does not know the group's secret."""


def token_of(secret: bytes) -> bytes:
    return hashlib.sha256(b"netfold listener" + secret).digest()[:16]


def initiate(stream: socket.socket, hello: Hello, secret: bytes) -> Session | None:
    """The connecting side, blocking under the socket's timeout; None where the security is none.

    EOFError or OSError when the other goes away.
    """
    said = _HELLO.pack(
        _MAGIC,
        hello.purpose,
        hello.token,
        hello.initiator,
        hello.target,
        hello.size,
        hello.lane,
        hello.rail,
        hello.security,
        secrets.token_bytes(_NONCE_BYTES),
    )
    stream.sendall(said)
    if receive_exactly(stream, 1) != _YES:
        raise GroupNotFoundError
    nonce = receive_exactly(stream, _NONCE_BYTES)
    if not hmac.compare_digest(receive_exactly(stream, _PROOF_BYTES), _proof(secret, b"accept", said, nonce)):
        raise WrongSecretError
    stream.sendall(_proof(secret, b"initiate", said, nonce))
    if receive_exactly(stream, 1) != _YES:  # else we would count a connection that the other has given up
        raise GroupNotFoundError
    return _session(secret, said, nonce, hello.security, ours=b"initiate", theirs=b"accept")


async def accept(
    stream: socket.socket, secret_of: Callable[[Hello], bytes | None]
) -> tuple[Hello, Session | None] | None:
    """The accepting side, of a non-blocking socket; None for a stranger. `secret_of` says whether somebody is in."""
    loop = asyncio.get_running_loop()
    said = await _exactly(lambda count: loop.sock_recv(stream, count), _HELLO.size)
    magic, *fields, _ = _HELLO.unpack(said)
    if magic != _MAGIC:
        return None
    hello = Hello(*fields)
    secret = secret_of(hello)
    if secret is None:
        await loop.sock_sendall(stream, _NO)
        return None
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(stream, _YES + nonce + _proof(secret, b"accept", said, nonce))
    proof = await _exactly(lambda count: loop.sock_recv(stream, count), _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"initiate", said, nonce)):
        return None
    await loop.sock_sendall(stream, _YES)
    return hello, _session(secret, said, nonce, hello.security, ours=b"accept", theirs=b"initiate")


async def _exactly(receive: Callable[[int], Awaitable[bytes]], count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = await receive(count - len(parts))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return parts


def _session(secret: bytes, said: bytes, nonce: bytes, security: int, *, ours: bytes, theirs: bytes) -> Session | None:
    """One secret a direction, for each of the two that speak over the connection in turn."""
    if security == 0:
        return None
    # Here: only who wants security pays for the import.
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    salt = hashlib.sha256(said + nonce).digest()  # both nonces are in it, and who speaks with whom for what
    name = SECURITIES[security]

    def secret_of(speaker: bytes, side: bytes) -> bytes:
        info = b" ".join((b"netfold stream 1", name.encode(), speaker, side))
        return HKDF(algorithm=SHA256(), length=auth.SECRET_BYTES, salt=salt, info=info).derive(secret)

    def secrets_of(speaker: bytes) -> Secrets:
        return name, secret_of(speaker, ours), secret_of(speaker, theirs)

    return Session(control=secrets_of(b"control"), mesh=secrets_of(b"mesh"))


def _proof(secret: bytes, side: bytes, said: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, side + said + nonce, hashlib.sha256).digest()
