"""A socket whose bytes are authenticated or encrypted: what ranks speak over, from the handshake on.

Two sets of keys come from one handshake. `control` is for what Python says over the connection; `mesh` is for the
native layer, which takes the socket over later, so that no state of a cipher is handed on. The records are those of
native/auth/records.hpp, and docs/explanation/security.md says what they are for.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from netfold._native import auth

# What the native layer takes: the security, the secret of what is sent and that of what is received.
Secrets = tuple[str, bytes, bytes]


class ForgedRecordError(ConnectionError):
    """Somebody changed, repeated or left out bytes of a connection between ranks."""

    def __init__(self) -> None:
        super().__init__("a record came with a wrong tag: somebody changed, repeated or left out bytes on the way")


@dataclass(frozen=True)
class Session:
    """What a handshake brought, at one of its ends."""

    control: Secrets
    mesh: Secrets


class SecureStream(socket.socket):
    """`stream`, which it takes over, in records. For one thread at a time."""

    def __init__(self, stream: socket.socket, session: Session) -> None:
        timeout_s = stream.gettimeout()
        super().__init__(stream.family, stream.type, stream.proto, fileno=stream.detach())
        self.settimeout(timeout_s)
        self.session = session
        security, send, receive = session.control
        self._protector = auth.RecordProtector(security, send)
        self._unprotector = auth.RecordUnprotector(security, receive)
        self._payload = b""
        self._record = b""  # what came of the next one

    def sendall(self, data: Any, flags: int = 0) -> None:
        whole = bytes(data)
        for at in range(0, len(whole), auth.MAX_RECORD_PAYLOAD):
            super().sendall(self._protector.protect(whole[at : at + auth.MAX_RECORD_PAYLOAD]), flags)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """At least a byte, b"" at the end. ForgedRecordError."""
        while not self._payload:
            if not self._read_record():
                return b""
        payload, self._payload = self._payload[:bufsize], self._payload[bufsize:]
        return payload

    def _read_record(self) -> bool:
        # Never further than this record: what comes behind it may be for the native layer.
        while len(self._record) < (needed := self._needed()):
            part = super().recv(needed - len(self._record))
            if not part:
                return False
            self._record += part
        payload = self._unprotector.unprotect(self._record)
        self._record = b""
        if payload is None:
            raise ForgedRecordError
        self._payload = payload
        return True

    def _needed(self) -> int:
        if len(self._record) < auth.RECORD_HEADER_BYTES:
            return int(auth.RECORD_HEADER_BYTES)
        payload = int.from_bytes(self._record[: auth.RECORD_HEADER_BYTES], "big")
        if payload > auth.MAX_RECORD_PAYLOAD:
            raise ForgedRecordError
        return int(payload + auth.RECORD_OVERHEAD)

    def detach(self) -> int:
        """The descriptor, for the native layer. ForgedRecordError where somebody said more than was to be said."""
        if self._payload or self._record:
            raise ForgedRecordError
        return super().detach()

    def send(self, *_: Any) -> int:
        raise NotImplementedError("a sealed stream is written by sendall")

    def recv_into(self, *_: Any) -> int:
        raise NotImplementedError("a sealed stream is read by recv")


def secure_stream(stream: socket.socket, session: Session | None) -> socket.socket:
    """The stream as the handshake says that it is to be used; None: plain bytes."""
    return stream if session is None else SecureStream(stream, session)


def mesh_secrets(stream: socket.socket) -> Secrets | None:
    """What the native layer is to use for this connection; None for plain bytes."""
    return stream.session.mesh if isinstance(stream, SecureStream) else None


__all__ = ["ForgedRecordError", "Secrets", "SecureStream", "Session", "mesh_secrets", "secure_stream"]
