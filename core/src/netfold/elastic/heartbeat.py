"""Heartbeats: every member watches the next one, so a member that goes silent ends the generation.

The kernel shows the end of a process on a host that works. A host without power or network, or a process that was
stopped, sends nothing, and every other member would wait for it until its operation's timeout. So a thread asks the
next member of the generation each BEAT_S over a connection of its own; any reply is a heartbeat. The generation ends
after

    HOST_SILENT_S     in which the member's host accepted no connection either
    PROCESS_SILENT_S  in which the host did: a process that holds its interpreter's lock for seconds is no lost member

and the members agree on the next generation (negotiation.py). A wrong suspicion costs a step: the suspected member
takes part in that agreement. Where several members are silent, the agreement finds them all. Cost: a request each
BEAT_S for each member, of about 1 ms.
"""

from __future__ import annotations

import threading
import time

from netfold.bootstrap import handle
from netfold.bootstrap.endpoint import Caller
from netfold.elastic.negotiation import REQUEST_S
from netfold.elastic.standing import Standing
from netfold.errors import RendezvousError
from netfold.switch_protocol.control_messages import ProtocolError

BEAT_S = 1.0
HOST_SILENT_S, PROCESS_SILENT_S = 3.0, 10.0
# The fewest requests without a reply. A member that was stopped itself finds that much time has passed.
_LEAST_UNANSWERED = 3


class Heartbeats:
    """Watches the next member in each generation, from the first one until `standing` is closed."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        threading.Thread(target=self._run, name="netfold heartbeats", daemon=True).start()

    def _run(self) -> None:
        standing = self._standing
        watched, caller, since, unanswered = "", None, 0.0, 0
        while True:
            with standing.changed:
                standing.changed.wait_for(lambda: standing.closed, BEAT_S)
                if standing.closed:
                    return
                generation, member = standing.generation, self._next()
            if member != watched:
                watched, caller, unanswered = member, self._caller(member), 0
            if caller is None:
                continue
            began = time.monotonic()
            why = _ask(caller)
            if not why:
                unanswered = 0
                continue
            since = began if unanswered == 0 else since
            unanswered += 1
            limit_s = PROCESS_SILENT_S if caller.host_answers(REQUEST_S) else HOST_SILENT_S
            silent_s = time.monotonic() - since
            if unanswered >= _LEAST_UNANSWERED and silent_s >= limit_s:
                where = handle.parse(member).where
                standing.lose(generation, member, f"{where} has not answered for {silent_s:.1f} s: {why}", since)
                unanswered = 0

    def _next(self) -> str:
        """The handle of the member to watch; "" for none. Under the lock."""
        standing = self._standing
        if standing.negotiation is None or standing.has_reported or standing.size < 2:
            return ""
        return standing.handles[(standing.rank + 1) % standing.size]

    def _caller(self, member: str) -> Caller | None:
        return Caller(handle.parse(member), self._standing.communicator.endpoint) if member else None


def _ask(caller: Caller) -> str:
    """ "" where the member replied, else what happened."""
    try:
        caller.call({"type": "alive"}, REQUEST_S)
    except (RendezvousError, OSError, EOFError, ProtocolError) as error:
        return str(error) or type(error).__name__
    return ""
