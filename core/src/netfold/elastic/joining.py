"""A process that wants to be a member: it asks members, one after the other, until a generation has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from netfold.bootstrap import handle
from netfold.bootstrap.endpoint import Caller, Endpoint
from netfold.elastic import messages
from netfold.elastic.agreement import Decision
from netfold.elastic.negotiation import REQUEST_S
from netfold.elastic.newest import Newest, NewestGeneration
from netfold.errors import GroupAborted, RendezvousError
from netfold.options import timeout_seconds
from netfold.switch_protocol.control_messages import Message

POLL_S = 0.2
"""Between two questions. A member that has decided also tells at once."""


class Welcome(NamedTuple):
    generation: int
    handles: list[str]
    decision: Decision
    """It began the generation."""
    former: int
    """The size of the generation before."""


class AllEnded(RendezvousError):  # noqa: N818 - named after what is the case
    """Of the newest generation nobody listens any more, or is a member. Behind a firewall that refuses, one may be."""

    def __init__(self, generation: int) -> None:
        super().__init__(
            f"every member of generation {generation} has ended, and the job's state with them; start all ranks again, "
            "from a checkpoint"
        )
        self.generation = generation
        """The newest, in which they were."""


def all_have_ended(newest: Newest, ended: Collection[str], read: Callable[[], Newest | None]) -> bool:
    """Whether the job has no members any more, so that it may begin again.

    newest: as the store named it before its members were asked. ended: those that are no members any more.
    read: reads it again, afterwards. Rank 0 writes each generation before it forms: if it is the same, it was the last.
    """
    return newest.is_whole and set(newest.handles) <= set(ended) and read() == newest


class Joining:
    """Asks until a generation has this process."""

    def __init__(
        self, endpoint: Endpoint, newest: NewestGeneration, changed: threading.Condition, timeout_s: float
    ) -> None:
        """changed: the lock of `hint` and `closed`, notified when these change.

        timeout_s: the longest time without an answer of any member.
        """
        self._endpoint, self._newest, self._changed = endpoint, newest, changed
        self._timeout_s = timeout_seconds(timeout_s)
        self.hint = ""
        """The handle of a member that says that it has taken this process in."""
        self.closed = False

    def wait(self, after: int, known: Sequence[str]) -> Welcome:
        """Wait as long as members answer.

        after: the last generation that this process was in; 0: none. known: handles of members, beside the store's.
        Raises RendezvousError where no member answers in time, or one says why the job cannot take this process;
        AllEnded at once where a process that comes for the first time finds that all members have ended.
        """
        own = self._endpoint.handle.text
        request = {"type": "join", "handle": own, "after": after}
        answered_at, why = time.monotonic(), "the store does not answer"
        while True:
            newest = self._newest.read()
            if newest is not None and newest.is_over:
                raise RendezvousError(
                    f"the job has ended, after generation {newest.generation}: it takes no new rank. A new job needs a "
                    "store of its own"
                )
            if newest is not None and newest.generation == 0:
                why = "the store names none"
            ended: set[str] = set()  # or no members: new ranks that were taken in by members that have ended since
            # In the order of the ranks. A newcomer of that generation may be no member yet, and is counted as ended: by
            # then those that would send it the state have been asked, and have ended.
            candidates = [self._take_hint(), *(newest.handles if newest is not None else ()), *known]
            for text in dict.fromkeys(each for each in candidates if each not in ("", own)):
                caller = Caller(handle.parse(text), self._endpoint)
                try:
                    while (reply := caller.call(request, REQUEST_S))["type"] == "waiting":
                        answered_at = time.monotonic()
                        if self._wait_for_hint() not in ("", text):
                            break
                    if reply["type"] == "welcome":
                        return self._welcome(caller, reply)
                except RendezvousError as error:
                    ended.add(text)
                    why = str(error)
                    continue
                except (OSError, EOFError) as error:
                    why = str(error)
                    continue
                if reply["type"] == "refused":
                    raise RendezvousError(str(reply["text"]))
                if reply["type"] != "waiting":
                    ended.add(text)
                    why = f"{handle.parse(text).where} is no member now"
            if after == 0 and newest is not None and all_have_ended(newest, ended | {own}, self._newest.read):
                raise AllEnded(newest.generation)
            if time.monotonic() > answered_at + self._timeout_s:
                raise RendezvousError(
                    f"no member of the job has answered for {self._timeout_s:.0f} s ({why}). Does the store belong to "
                    "this job, and does its job still run?"
                )
            self._wait_for_hint()

    def _take_hint(self) -> str:
        with self._changed:
            hint, self.hint = self.hint, ""
            return hint

    def _wait_for_hint(self) -> str:
        with self._changed:
            if not self.hint and not self.closed:
                self._changed.wait(POLL_S)
            if self.closed:
                raise GroupAborted("this process stopped to wait for a place in the job: its members were closed")
            return self.hint

    def _welcome(self, caller: Caller, reply: Message) -> Welcome:
        """Raises EOFError where the generation ends meanwhile."""
        generation, size = int(reply["generation"]), int(reply["size"])
        handles: list[str] = []
        while len(handles) < size:
            page = caller.call({"type": "members", "generation": generation, "start": len(handles)}, REQUEST_S)
            if page["type"] != "members" or not page["handles"]:
                raise EOFError("its generation ended")
            handles += page["handles"]
        return Welcome(generation, handles, messages.unpack_decision(reply["decision"]), int(reply["former"]))
