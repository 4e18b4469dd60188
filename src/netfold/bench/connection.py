"""Lines of JSON between a runner and one of its ranks."""

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]


class Connection:
    """The runner's end."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._received = b""

    def send(self, message: Message) -> None:
        # A rank that is gone shows as an ended process, with its reason.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def poll(self) -> Message | None:
        """A message, if a whole one has come; never waits."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while b"\n" not in self._received:
                piece = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
                if not piece:
                    return None
                self._received += piece
        line, found, rest = self._received.partition(b"\n")
        if not found:
            return None
        self._received = rest
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        self.socket.close()
