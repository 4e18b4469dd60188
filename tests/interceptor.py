"""A man in the middle between ranks, who reads, changes, repeats and drops bytes, and cuts connections."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from load import seconds

from netfold import FileStore

# An attack waits for this many bytes at once: they belong to a tensor, and not to the handshake.
_LONG = 16 << 10


class Interceptor:
    """A man in the middle between rank 0 and the ranks that connect to it: records all bytes, attacks on request."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.captured: list[bytes] = []
        self.connections = 0
        self.attack = ""  # flip, repeat, leave out, cut or hold: done once, then reset to empty
        self.attack_after = 0  # bytes of a direction
        self.done = threading.Event()
        self.released = threading.Event()  # set by the test: what was held goes on
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            here, _ = self._listener.accept()
            self.connections += 1
            there = socket.create_connection(self._to)
            for source, to in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=(source, to), daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            passed = 0
            while data := source.recv(1 << 20):
                self.captured.append(data)
                passed += len(data)
                to.sendall(self._attacked(data, to) if passed >= self.attack_after else data)
        for stream in (source, to):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def _attacked(self, data: bytes, to: socket.socket) -> bytes:
        with self._lock:
            if not self.attack or len(data) < _LONG:
                return data
            attack, self.attack = self.attack, ""
        middle = len(data) // 2 & ~7
        self.done.set()
        if attack == "flip":
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if attack == "repeat":
            return data + data
        if attack == "hold":
            to.sendall(data[:middle])
            assert self.released.wait(seconds(60))
            return data[middle:]
        if attack == "leave out":
            return data[:middle] + data[middle + 8 :]
        assert attack == "cut", attack
        raise ConnectionAbortedError


class ThroughInterceptor(FileStore):
    """A store in which rank 0's address is that of an interceptor before it."""

    interceptor: Interceptor

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("address/0"):
            said: dict[str, Any] = json.loads(value)
            host, _, port = said["at"][0].rpartition(":")
            self.interceptor = Interceptor(host, int(port))
            said["at"] = [f"127.0.0.1:{self.interceptor.port}"]
            value = json.dumps(said).encode()
        super().set(key, value)
