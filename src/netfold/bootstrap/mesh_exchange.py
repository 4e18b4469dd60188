"""A collective of small Python values over the connections of the mesh, before the native group exists."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from netfold.errors import RendezvousError
from netfold.switch_protocol import control_messages


class MeshExchange:
    """Among `members`, ascending, with this rank. streams: a connection to each rank, by rank."""

    def __init__(
        self, rank: int, members: Sequence[int], streams: Sequence[socket.socket | None], deadline: float
    ) -> None:
        self._rank = rank
        self._members = members
        self._streams = streams
        self._deadline = deadline

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all members, in their order. RendezvousError that names a rank that left."""
        found = {self._rank: value}
        for peer, stream in self._others():
            with self._errors_named(peer):
                stream.settimeout(max(0.001, self._deadline - time.monotonic()))
                control_messages.send(stream, {"type": "value", "value": value})
        for peer, stream in self._others():
            with self._errors_named(peer):
                stream.settimeout(max(0.001, self._deadline - time.monotonic()))
                found[peer] = control_messages.receive(stream)["value"]
        return [found[peer] for peer in self._members]

    def _others(self) -> Iterator[tuple[int, socket.socket]]:
        for peer in self._members:
            stream = self._streams[peer]
            if stream is not None:
                yield peer, stream

    @contextlib.contextmanager
    def _errors_named(self, peer: int) -> Iterator[None]:
        """Raise errors of the connection to `peer` as a RendezvousError."""
        try:
            yield
        except (OSError, EOFError) as error:
            what = "did not answer in time" if isinstance(error, TimeoutError) else f"left ({error})"
            raise RendezvousError(
                f"rank {self._rank}: rank {peer} {what} while the ranks found out which of them share memory; see its "
                "own output",
                rank=peer,
            ) from error
