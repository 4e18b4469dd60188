"""A TLS stream to a switch that is authenticated by the fingerprint of its certificate.

It has the methods of a socket that `control_messages` uses. One thread may receive while others send. `ssl.SSLSocket`
is not safe for two threads, so the session works on memory buffers, under a lock that no thread holds while it waits
for the network.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import threading
from typing import Any

from netfold.switch_protocol.control_messages import ProtectedSocket

_RECEIVE_BYTES = 1 << 16


class FingerprintError(ValueError):
    """The switch's certificate is not the pinned one."""


def client_context() -> ssl.SSLContext:
    """A TLS context for a switch: no authority and no name, since trust rests on the fingerprint alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_fingerprint(certificate: bytes | None, fingerprint: str) -> None:
    """Raise FingerprintError where the switch's certificate (DER) has another fingerprint."""
    found = hashlib.sha256(certificate or b"").hexdigest()
    if not hmac.compare_digest(found, fingerprint.lower()):
        raise FingerprintError(f"its certificate's fingerprint is {found}, not {fingerprint.lower()}")


class PinnedStream(ProtectedSocket):
    """TLS over `stream`, which it takes over. fingerprint: hexadecimal SHA-256 of the whole certificate."""

    def __init__(self, stream: socket.socket, fingerprint: str) -> None:
        """Do the handshake and compare fingerprints before any data is sent.

        Raises FingerprintError, ssl.SSLError, EOFError, OSError; the stream is then closed.
        """
        super().__init__(stream)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = client_context().wrap_bio(self._incoming, self._outgoing)
        self._session_lock = threading.Lock()  # guards the session and its memory buffers
        self._send_lock = threading.Lock()  # keeps the order of the session's output
        try:
            self._shake_hands()
            check_fingerprint(self._session.getpeercert(binary_form=True), fingerprint)
        except BaseException:
            self.close()
            raise

    def sendall(self, data: Any, flags: int = 0) -> None:
        with self._send_lock:
            with self._session_lock:
                self._session.write(data)
                encrypted = self._outgoing.read()
            super().sendall(encrypted, flags)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receive at least one byte, or b"" at the end."""
        while True:
            try:
                with self._session_lock:
                    return self._session.read(bufsize)
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            if self._outgoing.pending:  # a message of TLS itself
                self._flush()
            try:
                self._receive()
            except EOFError:
                return b""

    def _shake_hands(self) -> None:
        while True:
            try:
                self._session.do_handshake()
                return self._flush()
            except ssl.SSLWantReadError:
                self._flush()
                self._receive()

    def _receive(self) -> None:
        data = super().recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError("the connection was closed")
        with self._session_lock:
            self._incoming.write(data)

    def _flush(self) -> None:
        with self._send_lock:
            with self._session_lock:
                encrypted = self._outgoing.read()
            if encrypted:
                super().sendall(encrypted)
