"""The links of a start-up tree whose ranks are in a group already: messages of that group, the parent.

The messages take the parent's point-to-point connections, and its memory inside a host. So they need no handshake of
their own, wait for no operation of the parent, and fail as soon as the parent does. A tag keeps the messages of each
new group apart from those of other ones and of the program.

A frame is two messages, its header and its body, since a message and its receive have one size. A receive is posted
only for an expected frame, so none is left where a group has formed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from netfold.bootstrap.tree import FRAME, LinkError, check_length
from netfold.errors import RendezvousError

# How soon a frame of one neighbour is noticed while this rank waits for another one's.
_CHECK_S = 0.02


class ParentLost(RendezvousError):  # noqa: N818 - named after the event, as PeerLost is
    """The parent failed, or was closed, before the new group had formed."""


class _Receive:
    """The next frame of a neighbour: its header, then its body."""

    def __init__(self, native: Any, ranks: Sequence[int], peer: int, tag: int) -> None:
        self._native, self._ranks, self._peer, self._tag = native, ranks, peer, tag
        self._kind: bytes | None = None
        self._post(FRAME.size)

    def _post(self, length: int) -> None:
        self.buffer = np.empty(length, np.uint8)
        region = self.buffer.ctypes.data, length
        self.operation = self._native.submit_message(
            self._ranks[self._peer], self._tag, region, self.buffer, sends=False
        )

    def take(self) -> tuple[bytes, bytes] | None:
        """Kind and body, once both have arrived. ConnectionError."""
        if self._kind is None and self._is_done():
            length, self._kind = FRAME.unpack(self.buffer.tobytes())
            check_length(length)
            if length == 0:
                return self._kind, b""
            self._post(length)
        if self._kind is None or not self._is_done():
            return None
        return self._kind, self.buffer.tobytes()

    def _is_done(self) -> bool:
        if not self.operation.done:
            return False
        if self.operation.failure is not None:
            raise _lost(self.operation, self._ranks)
        return True


class MessageLinks:
    """The neighbours are ranks of the parent. For one thread."""

    def __init__(self, native: Any, ranks: Sequence[int], tag: int) -> None:
        """native: the parent's native group.

        ranks: the parent's number of each rank of the new group.
        tag: negative, the same on all members, and of this group alone.
        """
        self._native, self._ranks, self._tag = native, ranks, tag
        self._expected: dict[int, _Receive] = {}

    def send(self, peer: int, kind: bytes, body: bytes, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for part in (FRAME.pack(len(body), kind), body):
            if part:
                self._send(peer, np.frombuffer(part, np.uint8), until)

    def _send(self, peer: int, buffer: np.ndarray[Any, Any], until: float) -> None:
        region = buffer.ctypes.data, buffer.nbytes
        operation = self._native.submit_message(self._ranks[peer], self._tag, region, buffer, sends=True)
        if not operation.done and not self._native.wait(operation, int(max(0.0, until - time.monotonic()) * 1e9)):
            raise TimeoutError("it did not receive in time")
        if operation.failure is not None:
            raise _lost(operation, self._ranks)

    def expect(self, peer: int) -> None:
        if peer not in self._expected:
            self._expected[peer] = _Receive(self._native, self._ranks, peer, self._tag)

    def receive(self, wait_s: float, timeout_s: float) -> Iterator[tuple[int, bytes, bytes]]:
        until = time.monotonic() + wait_s
        while self._expected:
            is_first = True
            for peer, receive in list(self._expected.items()):
                try:
                    frame = receive.take()
                except ConnectionError as error:
                    raise LinkError(peer, error) from None
                if frame is not None:
                    is_first = False
                    del self._expected[peer]
                    yield peer, *frame
            left_s = until - time.monotonic()
            if not is_first or left_s <= 0:
                return
            awaited = next(iter(self._expected.values()))
            pause_s = left_s if len(self._expected) == 1 else min(left_s, _CHECK_S)
            self._native.wait(awaited.operation, int(pause_s * 1e9))

    def close(self) -> None:
        for receive in self._expected.values():
            self._native.withdraw(receive.operation)
        self._expected.clear()


def _lost(operation: Any, ranks: Sequence[int]) -> ParentLost:
    _, at_fault, text = operation.failure
    rank = ranks.index(at_fault) if at_fault in ranks else None
    return ParentLost(f"the group whose ranks form a new one failed: {text}", rank=rank)
