"""A stream inside TLS, to a switch that is known by the fingerprint of its certificate.

As a socket to `control`, and for one thread that receives beside any that send. `ssl.SSLSocket` promises nothing to two
threads at once, so the session is driven through memory, under a lock that nobody holds while waiting for the network.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import threading

_RECEIVE_BYTES = 1 << 16


class FingerprintError(ValueError):
    """Another certificate than the pinned one."""


class PinnedStream:
    """Over `stream`, which it owns. `fingerprint`: hexadecimal SHA-256 of the certificate, whole."""

    def __init__(self, stream: socket.socket, fingerprint: str) -> None:
        """Shake hands and compare, before a byte is sent. FingerprintError, ssl.SSLError, EOFError, OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # No authority and no name: the fingerprint is the whole of the trust.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        self._stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing)
        self._session_lock = threading.Lock()  # the session and its two ends in memory
        self._send_lock = threading.Lock()  # what the session wrote leaves in that order
        while True:
            try:
                self._session.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._more()
        self._flush()
        certificate = self._session.getpeercert(binary_form=True)
        found = hashlib.sha256(certificate or b"").hexdigest()
        if not hmac.compare_digest(found, fingerprint.lower()):
            raise FingerprintError(f"its certificate's fingerprint is {found}, not {fingerprint.lower()}")

    def sendall(self, data: bytes) -> None:
        with self._send_lock:
            with self._session_lock:
                self._session.write(data)
                sealed = self._outgoing.read()
            self._stream.sendall(sealed)

    def recv(self, count: int) -> bytes:
        """At least a byte, or b"" at the end."""
        while True:
            try:
                with self._session_lock:
                    return self._session.read(count)
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            if self._outgoing.pending:  # an answer that TLS itself owes
                self._flush()
            try:
                self._more()
            except EOFError:
                return b""

    def settimeout(self, seconds: float | None) -> None:
        self._stream.settimeout(seconds)

    def getpeername(self) -> tuple[str, int]:
        name: tuple[str, int] = self._stream.getpeername()
        return name

    def getsockname(self) -> tuple[str, int]:
        name: tuple[str, int] = self._stream.getsockname()
        return name

    def shutdown(self, how: int) -> None:
        self._stream.shutdown(how)

    def close(self) -> None:
        self._stream.close()

    def _more(self) -> None:
        data = self._stream.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError("the connection was closed")
        with self._session_lock:
            self._incoming.write(data)

    def _flush(self) -> None:
        with self._send_lock:
            with self._session_lock:
                sealed = self._outgoing.read()
            if sealed:
                self._stream.sendall(sealed)
