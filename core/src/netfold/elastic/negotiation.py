"""A member's agreement over the network: requests to the other members' endpoints, answers, silence, and deadlines.

A thread runs from the first request or failure to the decision. Requests have a timeout and threads of their own, so
a member that does not answer delays no other. A member is suspected

    at once          where nobody listens at its address any more. On another host a firewall may say so, too
    after SUSPECT_S  without an answer

and is asked again all the same. Everything is under one lock, the `changed` of members.py.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from netfold.bootstrap import handle
from netfold.bootstrap.endpoint import Caller, Endpoint
from netfold.elastic import messages
from netfold.elastic.agreement import NO_BALLOT, Agreement, Ask, Ballot, Decide, Request, decide_from
from netfold.elastic.newest import NewestGeneration
from netfold.errors import RendezvousError
from netfold.switch_protocol.control_messages import Message, ProtocolError

# Silence from which a member is suspected. A process whose threads all wait for one another's Python may take a second.
SUSPECT_S = 3.0
REQUEST_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
# Of many members that notice a failure at the same time, some ask their leader first, and so many a second in all.
_ASKS_PER_S = 1000
# Two members that outbid each other try again at different times.
_OUTBID_S = (0.05, 0.3)
_MAX_REQUESTS = 32
# How often too few members look for newcomers.
_SHORT_PAUSE_S = 0.1

# The rank at fault, or -1, and why the generation ends.
Loss = tuple[int, str]


@dataclass
class _Peer:
    handle: handle.Handle
    caller: Caller
    request: Request | None = None
    is_asked: bool = False
    pause_s: float = _FIRST_PAUSE_S
    next_at: float = 0.0
    silent_since: float | None = None
    state: str = "the other members decided without it"


class Negotiation:
    """Runs the agreement that ends a generation."""

    def __init__(
        self,
        generation: int,
        handles: Sequence[str],
        own: str,
        endpoint: Endpoint,
        changed: threading.Condition,
        *,
        min_size: int,
        max_size: int | None,
        waiting: Callable[[], Sequence[str]],
        newest: NewestGeneration,
    ) -> None:
        """handles: of the members. changed: the lock of everything here, notified when something has come.

        waiting: the handles of newcomers that asked this member lately.
        """
        read = [handle.parse(text) for text in handles]
        rank = list(handles).index(own)
        hosts = {each.host for each in read}
        self.generation, self.handles = generation, tuple(handles)
        self.agreement = Agreement(rank, len(handles), one_host=len(hosts) == 1 and "" not in hosts)
        self.loss: Loss | None = None
        self.over = False  # another member said that the generation ended long ago
        self.told = threading.Event()
        """Set when the decision was sent to all that this member tells."""
        self._own, self._endpoint, self._changed = own, endpoint, changed
        self._min_size, self._max_size, self._waiting, self._newest = min_size, max_size, waiting, newest
        # The ballot for which the store was asked, and whether it names no later generation. None: not known yet.
        self._store_asked: Ballot = NO_BALLOT
        self._is_newest: bool | None = None
        self._peers = {
            each: _Peer(member, Caller(member, endpoint)) for each, member in enumerate(read) if each != rank
        }
        self._until = 0.0
        self._runs = self._closed = self._led = False
        self._lead_at = 0.0
        self._alive: dict[str, bool | None] = {}  # newcomers; None: not known yet
        self._missing = 0  # how many are missing to min_size

    def start(self, loss: Loss | None, timeout_s: float) -> None:
        """Run until there is a decision, `timeout_s` at least. The member has begun. Under the lock.

        loss: why the generation ends; None at a boundary.
        """
        self.loss = self.loss or loss
        self._until = max(self._until, time.monotonic() + timeout_s)
        if not self._runs and not self._closed:
            self._runs = True
            threading.Thread(target=self._run, name="netfold agreement", daemon=True).start()
        self._changed.notify_all()

    def note_silence(self, rank: int, since: float) -> None:
        """A member has not answered since a time of time.monotonic(). Under the lock."""
        self._peers[rank].silent_since = since

    def close(self) -> None:
        """End the thread. Under the lock."""
        self._closed = True
        self._changed.notify_all()

    def states(self) -> dict[int, str]:
        """In words, what is known about each member that has not agreed. Under the lock."""
        return {rank: peer.state for rank, peer in self._peers.items() if peer.state}

    def shortage(self, waited_s: float) -> str:
        """Explain in sentences that there is no decision. Under the lock."""
        began = f"generation {self.generation} of {len(self.handles)} members has ended, and"
        if self._missing > 0:
            return (
                f"{began} {self._missing} more members are needed within {waited_s:.0f} s: min_size is "
                f"{self._min_size}. Start more ranks, or set a lower min_size"
            )
        missing = [f"rank {rank} ({self._peers[rank].handle.where}): {state}" for rank, state in self.states().items()]
        if self.agreement.may_propose:
            missing.append("the store, which would name a generation that went on without this member")
        listed = "; ".join(missing or [f"the decision of rank {self.agreement.leader}"])
        return (
            f"{began} its members did not agree within {waited_s:.0f} s. More than half of them are needed, or half "
            f"with rank 0, so that two parts of a cut network never both go on. Missing: {listed}. Check these hosts "
            "and the network between them, or start the job again from a checkpoint"
        )

    def _run(self) -> None:
        pool = ThreadPoolExecutor(min(_MAX_REQUESTS, max(1, len(self._peers))), "netfold agreement")
        try:
            with self._changed:
                while self.agreement.decision is None and not self._closed and not self.over:
                    now = time.monotonic()
                    if now > self._until:
                        break
                    self._advance(pool)
                    next_at = self._send(pool, now)
                    if self.agreement.decision is None:
                        self._changed.wait(max(0.001, min(next_at, self._until) - now))
                self._runs = False
                tell = self.agreement.decision is not None and self.agreement.ballot != NO_BALLOT
                self._changed.notify_all()
            if tell:
                self._tell(pool)
        finally:
            self.told.set()
            pool.shutdown(wait=False)

    def _advance(self, pool: ThreadPoolExecutor) -> None:
        agreement, now = self.agreement, time.monotonic()
        if agreement.ballot == NO_BALLOT:
            if self._led:
                self._led, self._lead_at = False, now + random.uniform(*_OUTBID_S)
            if agreement.leader == agreement.rank and now >= self._lead_at:
                agreement.lead()
                self._led = True
        elif agreement.is_stuck:
            agreement.lead()
        if not agreement.may_propose or (agreement.rests_on_ends and not self._is_latest(pool)):
            return
        if agreement.inherited is not None:
            return agreement.propose()
        newcomers = self._newcomers(pool)
        if newcomers is None:
            return  # their answers are under way
        draft = decide_from(agreement.reports, agreement.ended, newcomers, self._max_size)
        # Nobody is waited for if all members leave.
        self._missing = self._min_size - len(draft.members) - len(draft.newcomers) if draft.members else 0
        if self._missing <= 0:
            agreement.propose(newcomers, self._max_size)

    def _is_latest(self, pool: ThreadPoolExecutor) -> bool:
        """Whether the store names no later generation, where one is kept. Asked anew for each ballot.

        A later generation, without this member, may consist of newcomers by now, whom this member does not know.
        """
        if not self._newest.is_kept:
            return True
        if self._store_asked != self.agreement.ballot:
            self._store_asked, self._is_newest = self.agreement.ballot, None
            pool.submit(self._ask_store, self.agreement.ballot)
        return bool(self._is_newest)

    def _ask_store(self, ballot: Ballot) -> None:
        while (newest := self._newest.read()) is None:
            with self._changed:
                if self._closed or self._store_asked != ballot or time.monotonic() > self._until:
                    return
            time.sleep(_LONGEST_PAUSE_S)
        with self._changed:
            if self._store_asked == ballot:
                self._is_newest = newest.generation <= self.generation
                self.over |= not self._is_newest
            self._changed.notify_all()

    def _newcomers(self, pool: ThreadPoolExecutor) -> list[str] | None:
        """Those that live, of the newcomers that asked any member; None while that is being found out."""
        reported = [each for report in self.agreement.reports.values() for each in report.waiting]
        asked = [each for each in dict.fromkeys([*reported, *self._waiting()]) if each not in self.handles]
        for each in asked:
            if each not in self._alive:
                self._alive[each] = None
                pool.submit(self._check, each)
        if any(self._alive[each] is None for each in asked):
            return None
        return [each for each in asked if self._alive[each]]

    def _check(self, newcomer: str) -> None:
        try:
            lives = self._call(newcomer, {"type": "alive"})["type"] == "alive"
        except (RendezvousError, OSError, EOFError, ValueError):
            lives = False
        with self._changed:
            self._alive[newcomer] = lives
            self._changed.notify_all()

    def _call(self, text: str, request: Message) -> Message:
        return Caller(handle.parse(text), self._endpoint).call(request, REQUEST_S)

    def _send(self, pool: ThreadPoolExecutor, now: float) -> float:
        """Send what is due; returns the time at which something is due next."""
        next_at = now + (_SHORT_PAUSE_S if self._missing > 0 else _LONGEST_PAUSE_S)
        if self.agreement.ballot == NO_BALLOT and now < self._lead_at:
            next_at = min(next_at, self._lead_at)
        for rank, request in self.agreement.wanted().items():
            peer = self._peers[rank]
            if peer.request != request:
                peer.request, peer.pause_s, peer.next_at = request, _FIRST_PAUSE_S, 0.0
                if isinstance(request, Ask):
                    peer.next_at = now + random.uniform(0.0, len(self.handles) / _ASKS_PER_S)
            if peer.is_asked:
                continue
            if now >= peer.next_at:
                peer.is_asked = True
                pool.submit(self._ask, rank, request)
            else:
                next_at = min(next_at, peer.next_at)
        return next_at

    def message(self, request: Request) -> Message:
        """A request of this member's, for the endpoint of another one. It has begun."""
        agreement = self.agreement
        assert agreement.report is not None
        return {
            "type": messages.TYPE,
            "generation": self.generation,
            "sender": agreement.rank,
            "done": agreement.report.done,
            "lost": None if self.loss is None else list(self.loss),
            "message": messages.pack(request),
        }

    def _ask(self, rank: int, request: Request) -> None:
        peer, began, reply, error = self._peers[rank], time.monotonic(), None, None
        try:
            reply = peer.caller.call(self.message(request), REQUEST_S)
        except (RendezvousError, OSError, EOFError, ProtocolError) as failed:
            error = failed
        with self._changed:
            peer.is_asked = False
            pause_s = peer.pause_s
            peer.pause_s = min(2 * peer.pause_s, _LONGEST_PAUSE_S)
            if self.agreement.promised != NO_BALLOT and isinstance(request, Ask):
                # A ballot is under way, and its leader will tell.
                pause_s = max(_LONGEST_PAUSE_S, len(self.handles) / _ASKS_PER_S)
            peer.next_at = time.monotonic() + pause_s
            if reply is None:
                self._unanswered(rank, peer, began, error)
            else:
                self._answered(rank, peer, reply)
            self._changed.notify_all()

    def _answered(self, rank: int, peer: _Peer, reply: Message) -> None:
        kind = reply["type"]
        if kind == "ended":
            peer.state = "it has left the job"
            return self.agreement.suspect(rank, certain=True)
        peer.silent_since = None
        if kind == messages.TYPE:
            peer.state = ""
            try:
                return self.agreement.take(rank, messages.unpack(reply["message"]))
            except ProtocolError as error:
                peer.state = f"it sent {error}"
                return
        self.agreement.suspects -= {rank}
        if kind == "over":
            self.over = True
        peer.state = "it has not passed the vote yet" if kind == "later" else "it is not in this generation"
        peer.pause_s = _FIRST_PAUSE_S if kind == "later" else peer.pause_s

    def _unanswered(self, rank: int, peer: _Peer, began: float, error: Any) -> None:
        if isinstance(error, RendezvousError):
            peer.state = "nobody answers for it at its address any more"
            return self.agreement.suspect(rank, certain=True)
        peer.silent_since = began if peer.silent_since is None else peer.silent_since
        silent_s = time.monotonic() - peer.silent_since
        peer.state = f"it has not answered for {silent_s:.1f} s"
        if silent_s > SUSPECT_S:
            self.agreement.suspect(rank)

    def _tell(self, pool: ThreadPoolExecutor) -> None:
        """Tell the other members and the newcomers. A message that is lost costs time: they ask."""
        with self._changed:
            decision = self.agreement.decision
            assert decision is not None
            decide = self.message(Decide(decision))
            peers = [peer.handle.text for rank, peer in self._peers.items() if rank not in self.agreement.ended]

        def tell(text: str, request: Message) -> None:
            with contextlib.suppress(RendezvousError, OSError, EOFError, ValueError):
                self._call(text, request)

        sent: list[Future[None]] = [pool.submit(tell, each, decide) for each in peers]
        taken = {"type": "taken", "handle": self._own}
        sent += [pool.submit(tell, each, taken) for each in decision.newcomers]
        wait(sent, 2 * REQUEST_S)
