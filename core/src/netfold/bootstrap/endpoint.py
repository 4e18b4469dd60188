"""The end of a communicator that outlives its groups: it tells other members how far this rank is with a new group.

An endpoint is registered at the process's listener under its handle's secret, from the making of the handle until the
communicator is closed. A member asks its neighbours in the new group's start-up tree (regroup.py):

    request  reconfigure   uuid, digest (of the members, in order), identity (of the member that asks)
    reply    idle          this rank has not begun
             forming       it waits for these members
             formed        it was in that group already
             failed        text: why it gave up; rank: the rank at fault, or -1
             other         text: what it does instead; includes: whether its other group waits for the asking member

Requests of other types go to the handlers that are registered for them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from netfold.bootstrap import handshake, rendezvous
from netfold.bootstrap.addresses import Interfaces
from netfold.bootstrap.handle import Handle
from netfold.bootstrap.handshake import CALL, Hello
from netfold.bootstrap.listener import Listener, RegisteredGroup, release_listener
from netfold.bootstrap.rendezvous import PeerAddresses
from netfold.errors import RendezvousError
from netfold.options import SECURITIES
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_messages import Message

# The groups that an endpoint remembers. A uuid that was forgotten is taken once more.
MAX_REMEMBERED = 4096
_MAX_TEXT = 2000


@dataclass
class _Attempt:
    digest: str
    identities: frozenset[bytes]
    state: str = "forming"
    why: str = ""
    at_fault: int = -1


class Endpoint:
    """One communicator's end. Owns a reference to the listener until its last owner releases it."""

    def __init__(self, handle: Handle, listener: Listener, interfaces: Interfaces) -> None:
        """listener: acquired by the caller, whose reference this takes over."""
        self.handle, self.listener, self.interfaces = handle, listener, interfaces
        # Of further requests, by type. They run on threads of the listener, a few at once, and must not wait.
        self.handlers: dict[str, Callable[[Message], Message]] = {}
        self._attempts: OrderedDict[str, _Attempt] = OrderedDict()
        self._lock = threading.Lock()
        self._owners = 1
        # Two "ranks": this one is 0, and a rank that asks is 1.
        self._registered = RegisteredGroup(handle.secret, 0, 2, 0, 1, SECURITIES.index(handle.security), self._answer)
        listener.register(self._registered)

    def check_unused(self, uuid: str) -> None:
        """RendezvousError where this rank has begun a group of this uuid before."""
        with self._lock:
            if uuid in self._attempts:
                raise RendezvousError(
                    f"the uuid {uuid} was already used on this communicator: every group needs another one"
                )

    def begin(self, uuid: str, digest: str, members: Sequence[Handle]) -> None:
        """From here on others may connect: the group is registered at the listener."""
        self.check_unused(uuid)
        with self._lock:
            self._attempts[uuid] = _Attempt(digest, frozenset(each.identity for each in members))
            while len(self._attempts) > MAX_REMEMBERED:
                self._attempts.popitem(last=False)

    def end(self, uuid: str, error: BaseException | None) -> None:
        """The group has formed, or has not, with this error. The first error counts."""
        with self._lock:
            attempt = self._attempts.setdefault(uuid, _Attempt("", frozenset()))
            if attempt.state != "forming":
                return
            attempt.state = "formed" if error is None else "failed"
            if error is not None:
                attempt.why = (str(error) or type(error).__name__)[:_MAX_TEXT]
                rank = getattr(error, "rank", None)
                attempt.at_fault = -1 if rank is None else rank

    def give_up(self, error: RendezvousError) -> None:
        """Let the group that this rank is forming, if any, fail with this error here and on its other members."""
        with self._lock:
            forming = [uuid for uuid, attempt in self._attempts.items() if attempt.state == "forming"]
        for uuid in forming:
            self.end(uuid, error)

    def check_forming(self, uuid: str) -> None:
        """Raise the error of `give_up` where another thread has called it."""
        with self._lock:
            attempt = self._attempts[uuid]
            if attempt.state == "failed":
                raise RendezvousError(attempt.why, rank=None if attempt.at_fault < 0 else attempt.at_fault)

    def conflicts(self, own_uuid: str, reply: Message) -> bool:
        """Whether a member that replied `other`, and this one, wait for each other in two groups. Neither can form.

        The other member is told so when it asks.
        """
        with self._lock:
            uuid = reply["uuid"]
            if uuid == own_uuid:
                return True
            # A group that this rank has been in may still be ending, or starting, at the other member.
            if not reply["includes"] or uuid in self._attempts:
                return False
            text = f"it was forming the group {own_uuid}"
            self._attempts[uuid] = _Attempt("", frozenset(), "refused", text)
            return True

    def retain(self) -> Endpoint:
        """One more owner, who calls `release`: a communicator keeps its endpoint when its group ends."""
        with self._lock:
            self._owners += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._owners -= 1
            if self._owners > 0:
                return
        self.listener.deregister(self._registered, None)
        release_listener(self.listener)

    def _answer(self, _: int, request: Message) -> tuple[Message, Any]:
        if request["type"] in self.handlers:
            return self.handlers[request["type"]](request), None
        uuid, digest, identity = request["uuid"], request["digest"], request["identity"]
        with self._lock:
            attempt = self._attempts.get(uuid)
            forming = next((each for each in self._attempts.items() if each[1].state == "forming"), None)
        if attempt is not None and attempt.digest == digest:
            return {"type": attempt.state, "text": attempt.why, "rank": attempt.at_fault}, None
        if attempt is not None and attempt.state == "refused":
            return {"type": "other", "text": attempt.why, "uuid": uuid, "includes": True}, None
        if attempt is not None:
            text = f"it was called with the uuid {uuid} and other handles, or another order of them"
            return {"type": "other", "text": text, "uuid": uuid, "includes": True}, None
        if forming is not None:
            other, others = forming[0], forming[1].identities
            text = f"it is forming the group {other} of {len(others)} members"
            return {"type": "other", "text": text, "uuid": other, "includes": identity in others}, None
        return {"type": "idle"}, None


class Caller:
    """Sends requests to one other member's endpoint. For one thread at a time."""

    def __init__(self, member: Handle, own: Endpoint) -> None:
        """own: of the member that sends, at whose listener the requests are sent."""
        self._secret, self._security = member.secret, SECURITIES.index(member.security)
        self._listener, self._peer_addresses = own.listener, PeerAddresses(own.interfaces, [member.endpoints()])

    def host_answers(self, timeout_s: float) -> bool:
        """Whether the member's host, if not its process, answers: it accepts or refuses a connection in time."""
        addresses, own = self._peer_addresses, self._peer_addresses.interfaces.hosts
        # Every host may have a bridge of one address: this host itself would answer there.
        endpoints = [each for each in addresses.candidates(0, 0) if (0, 0) in addresses.used or each[0] not in own]
        until = time.monotonic() + timeout_s
        for endpoint in endpoints[:1] if (0, 0) in addresses.used else endpoints:
            try:
                left_s = max(0.05, until - time.monotonic())
                socket.create_connection(endpoint, left_s, addresses.source(0)).close()
                return True
            except ConnectionRefusedError:
                return True
            except OSError:
                continue
        return False

    def call(self, request: Message, timeout_s: float) -> Message:
        """Send a request and return the reply. The reply `ended` comes from a member that was closed.

        Raises RendezvousError where the member is gone; OSError or EOFError where it did not answer.
        """
        hello = Hello(CALL, handshake.token_of(self._secret), 1, 0, 2, security=self._security)
        connect = rendezvous.connect(self._peer_addresses, hello, self._secret, time.monotonic() + timeout_s)
        with self._listener.run(connect) as stream:
            stream.settimeout(timeout_s)
            control_messages.send(stream, request)
            return control_messages.receive(stream)
