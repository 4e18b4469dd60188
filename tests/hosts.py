"""Simulate several hosts on one machine: ranks that do not find each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netfold.bootstrap import shm_discovery

_exchange = shm_discovery._exchange


def apart(layout: tuple[int, ...]) -> tuple[Any, str, Callable[..., None]]:
    """The arguments of `setattr` that let a rank share memory only within its host. layout: the host of each rank."""

    def exchange_apart(rank: int, size: int, sockets: Any, *rest: Any) -> None:
        streams = [stream and _Hidden(stream, layout[peer] != layout[rank]) for peer, stream in enumerate(sockets)]
        _exchange(rank, size, streams, *rest)

    return shm_discovery, "_exchange", exchange_apart


class _Hidden:
    """A connection on which a rank sends a wrong path to ranks of other hosts."""

    def __init__(self, stream: Any, hidden: bool) -> None:
        self._stream = stream
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def sendall(self, data: bytes) -> None:
        if self._hidden and b"netfold-" in data:
            data = data.replace(b"netfold-", b"nothing-")
        self._stream.sendall(data)
