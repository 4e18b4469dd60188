"""A group's connections that were not made at its start: each is made when it is first used, once.

All of it runs on the listener's thread (bootstrap/listener.py), so a connection that is being made needs no thread.
Both ranks of a pair may begin. The higher one decides which connection counts:

    it connects itself       it refuses the lower one's connection, which comes after its own has begun
    it does not              it admits the lower one's connection, and never begins its own

The lower rank waits for _LOWER_WAITS_S before it connects, since both often use the connection at about the same time.
At most a bounded number of a process's connections are being made at once (Listener.connecting). The time of a first
connection begins when it is among them.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from netfold.bootstrap import handshake, rendezvous
from netfold.bootstrap.handshake import FIRST, Hello
from netfold.bootstrap.listener import ConnectionKey, RegisteredGroup
from netfold.bootstrap.rendezvous import PeerAddresses
from netfold.bootstrap.secure_stream import mesh_secrets

_LOWER_WAITS_S = 0.01
# How long the lower rank waits for a connection for which its own was refused.
_REFUSED_WAITS_S = 2.0


class FirstConnections:
    """Of one rank and group (listener.Receiver)."""

    def __init__(
        self,
        native: Any,
        group: RegisteredGroup,
        peer_addresses: PeerAddresses,
        limit_s: float,
        *,
        on_made: Callable[[ConnectionKey, socket.socket], None],
        on_failure: Callable[[ConnectionKey, float, BaseException], None],
    ) -> None:
        """group: registered at its listener.

        limit_s: time to make a connection.
        on_made: for the log.
        on_failure: with the moment when the attempt began, and the reason. Must not block.
        """
        self._native, self._group, self._peer_addresses, self._limit_s = native, group, peer_addresses, limit_s
        self._on_made: Callable[..., None] = on_made
        self._on_failure: Callable[..., None] = on_failure
        self._made: set[ConnectionKey] = set()
        self._attempts: dict[ConnectionKey, asyncio.Task[None]] = {}
        self._connecting: set[ConnectionKey] = set()  # of the attempts, those whose handshake may have begun
        self._ended = False

    def begin(self) -> None:
        """The native group has the connections that were made before. Takes those that came in between."""
        group = self._group
        self._made.update(group.accepted)
        group.receiver = self
        # Under the lock: a start that fails closes them on its own thread.
        with group.changed:
            early = dict(group.early)
            group.early.clear()
        for key, stream in early.items():
            self._made.add(key)
            self.take(key, stream)

    def use(self, key: ConnectionKey) -> None:
        """Make the connection, unless it is made or under way."""
        if key not in self._made and key not in self._attempts and not self._ended:
            self._attempts[key] = asyncio.get_running_loop().create_task(self._attempt(key))

    def end(self) -> None:
        """No connection is made any more."""
        self._ended = True
        for attempt in self._attempts.values():
            attempt.cancel()
        # They refer to the native group, which is to end when its owner lets it go.
        self._native, self._on_made, self._on_failure = None, _nothing, _nothing

    def admit(self, key: ConnectionKey) -> bool:
        peer = key[0]
        if self._ended or key in self._made or (key in self._connecting and self._group.rank > peer):
            return False
        self._made.add(key)
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.cancel()
        return True

    def take(self, key: ConnectionKey, stream: socket.socket) -> None:
        if self._ended:
            return stream.close()
        self._on_made(key, stream)
        peer, lane, rail = key
        secrets = mesh_secrets(stream)
        self._native.connect(lane, peer, rail, stream.detach(), secrets)

    def miss(self, key: ConnectionKey) -> None:
        self._made.discard(key)
        self.use(key)  # its attempt was cancelled, if there was one

    async def _attempt(self, key: ConnectionKey) -> None:
        peer, lane, rail = key
        group = self._group
        began = time.monotonic()
        try:
            if group.rank < peer:
                await asyncio.sleep(_LOWER_WAITS_S)  # the peer's connection cancels this attempt
            assert group.listener is not None
            async with group.listener.connecting:
                began = time.monotonic()
                self._connecting.add(key)
                token = handshake.token_of(group.secret)
                hello = Hello(FIRST, token, group.rank, peer, group.size, lane, rail, group.security)
                deadline = began + self._limit_s
                stream = await rendezvous.connect(self._peer_addresses, hello, group.secret, deadline)
            self._made.add(key)
            self.take(key, stream)
        except handshake.RefusedError as error:
            self._connecting.discard(key)
            await asyncio.sleep(_REFUSED_WAITS_S)
            self._on_failure(key, began, error)
        except Exception as error:
            self._on_failure(key, began, error)
        finally:
            self._connecting.discard(key)
            self._attempts.pop(key, None)


def _nothing(*_: Any) -> None:
    pass
