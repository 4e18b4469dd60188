"""A socket between ranks whose bytes are authenticated or encrypted from the handshake on.

A handshake gives two sets of keys. `control` is for Python's messages over the connection. `mesh` is for the native
layer, which takes over the socket later, so that no cipher state is handed on. The records are those of
netfold/auth/records.hpp; docs/explanation/security.md says what they protect from.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from netfold._native import auth
from netfold.switch_protocol.control_messages import ProtectedSocket

# For the native layer: the security, the secret of sent bytes and that of received bytes.
Secrets = tuple[str, bytes, bytes]


class ForgedRecordError(ConnectionError):
    """Bytes of a connection between ranks were changed, repeated or left out."""

    def __init__(self) -> None:
        super().__init__("a record came with a wrong tag: somebody changed, repeated or left out bytes on the way")


@dataclass(frozen=True)
class Session:
    """The keys that a handshake gave one of its ends."""

    control: Secrets
    mesh: Secrets


class SecureStream(ProtectedSocket):
    """Takes over `stream` and sends records over it. For one thread at a time."""

    def __init__(self, stream: socket.socket, session: Session) -> None:
        super().__init__(stream)
        self.session = session
        security, send, receive = session.control
        self._protector = auth.RecordProtector(security, send)
        self._unprotector = auth.RecordUnprotector(security, receive)
        self._payload = b""
        self._record = b""  # the received part of the next record

    def sendall(self, data: Any, flags: int = 0) -> None:
        data = bytes(data)
        for at in range(0, len(data), auth.MAX_RECORD_PAYLOAD):
            super().sendall(self._protector.protect(data[at : at + auth.MAX_RECORD_PAYLOAD]), flags)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receive at least one byte, or b"" at the end. Raises ForgedRecordError."""
        while not self._payload:
            if not self._read_record():
                return b""
        payload, self._payload = self._payload[:bufsize], self._payload[bufsize:]
        return payload

    def _read_record(self) -> bool:
        # Never read beyond this record: the following bytes may be for the native layer.
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
        """The descriptor, for the native layer. ForgedRecordError where unexpected bytes were received."""
        if self._payload or self._record:
            raise ForgedRecordError
        return super().detach()


def secure_stream(stream: socket.socket, session: Session | None) -> socket.socket:
    """Protect the stream with the keys of its handshake. session: None for plain bytes."""
    return stream if session is None else SecureStream(stream, session)


def mesh_secrets(stream: socket.socket) -> Secrets | None:
    """The secrets that the native layer uses for this connection; None for plain bytes."""
    return stream.session.mesh if isinstance(stream, SecureStream) else None
