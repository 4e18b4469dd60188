"""Decide whether a switch is lost, from the results that arrive and from its replies over the control connection.

A pure state machine without clock, thread or socket. Its owner calls `poll` every tick and carries out what that
returns:

    query   while a chunk has no result for QUIET_S: which ranks' contributions has the switch not seen?
            else, every ALIVE_S: does the switch reply?
    lost    no reply for ANSWER_S: the control connection is cut, or the switch has stopped or is gone;
            or replies come, but for PATH_S no result of a chunk for which the switch waits for this rank, or for
            no rank: packets do not pass in one of the directions

One query is open at a time. A rank that was stopped, or had no processor, learned nothing meanwhile: a tick longer than
TICK_S counts as TICK_S.

core/native/control/switch_watch.cpp has the same rules for processes without Python.
core/tests/control/test_native_switch_watch.py compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Longer than several of the protocol's longest timeouts.
QUIET_S = 1.0
ALIVE_S = 1.0
ANSWER_S = 3.0
# From the first moment without a result. At least two replies have come by then.
PATH_S = 2.5
TICK_S = 0.5


@dataclass(frozen=True)
class Query:
    """A query to the switch. chunk: the one that this rank waits for; None: only whether the switch replies."""

    chunk: int | None


@dataclass(frozen=True)
class Lost:
    """The switch is lost; `why` is a clause after "the switch at ... is gone"."""

    why: str


class SwitchWatch:
    """Of one rank at one switch. Times are seconds of any monotonic clock."""

    def __init__(self, rank: int, now: float) -> None:
        self._rank = rank
        self._last_tick = now
        self._time = 0.0
        self._chunk: int | None = None
        self._since = 0.0  # when the wait for the chunk began
        self._asked: Query | None = None
        self._asked_at = 0.0
        self._next_ask = ALIVE_S
        self._asked_of_chunk = False  # whether the newest query was about the chunk
        self._bad_answers = 0
        self.stragglers: tuple[int, ...] = ()  # the switch's last reply about this chunk

    def poll(self, now: float, chunk: int | None, *, urgent: bool = False) -> Query | Lost | None:
        """The action that is due.

        chunk: the oldest one without a result; None where this rank waits for none.
        urgent: query without waiting for QUIET_S, since a rank has left.
        """
        self._time += min(now - self._last_tick, TICK_S)
        self._last_tick = now
        if chunk != self._chunk:
            self._chunk, self._since, self._bad_answers, self.stragglers = chunk, self._time, 0, ()
            self._asked_of_chunk = False
        if self._asked is not None:
            waited = self._time - self._asked_at
            return Lost(f"it has not answered for {waited:.1f} s") if waited >= ANSWER_S else None
        waited = self._time - self._since
        if self._chunk is not None and self._bad_answers >= 2 and waited >= PATH_S:
            return Lost(
                f"packets have not passed between it and rank {self._rank} for {waited:.1f} s, though it answers over "
                "its control connection: does a firewall drop them, or did the path's MTU shrink?"
            )
        is_quiet = self._chunk is not None and (urgent or waited >= QUIET_S)
        if self._time < self._next_ask and not (is_quiet and (urgent or not self._asked_of_chunk)):
            return None
        self._asked, self._asked_at = Query(self._chunk if is_quiet else None), self._time
        self._asked_of_chunk = is_quiet
        self._next_ask = self._time + ALIVE_S
        return self._asked

    def answer(self, missing: Sequence[int] | None) -> None:
        """The reply to the open query.

        missing: ranks that the switch waits for; None for `Query(None)`, and where the switch does not know.
        """
        asked, self._asked = self._asked, None
        if asked is None or missing is None or asked.chunk is None or asked.chunk != self._chunk:
            return
        self.stragglers = tuple(missing)
        self._bad_answers = self._bad_answers + 1 if not missing or self._rank in missing else 0
        if self._bad_answers == 0:
            self._since = self._time
