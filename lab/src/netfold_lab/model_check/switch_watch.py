"""Exhaustive search of the watch on a switch: production's `SwitchWatch`, with replies and results in every order.

A state is the watch at one of its ticks. Before the next tick the open query may be answered, whichever chunk it
names: the switch waits for no rank, for this rank, for another rank, or for both, or it does not know. The awaited
chunk may get its result, with or without a next chunk behind it, or the first chunk may be called. The next tick comes
after TICK_S, or after PAUSE_S, as when this process was stopped. A loss that this watch reports is one of those that
recovery.py searches: it lets a rank lose its switch at any time, rightly or not.

Safety. The watch reports a loss in two cases. A query was open for ANSWER_S. Or two replies in succession said that the
chunk waits for this rank or for no rank, and the chunk has had no result for PATH_S since the wait for it began, or
since it last waited for another rank. A tick counts as TICK_S at most. At most one query is open. A reply about a
chunk that has its result changes nothing.
Bounds. Without any reply the watch reports the loss SILENT_S after the last one. While replies that know come within a
tick and packets do not pass, it reports the loss CUT_S after the wait for the chunk began.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

from netfold.communicator.switch_watch import ALIVE_S, ANSWER_S, PATH_S, TICK_S, Lost, Query, SwitchWatch
from netfold_lab.model_check.breadth_first import BrokenError, Report, Search

RANK, OTHER = 0, 1
PAUSE_S = 60.0
# From the last reply, or the start, to a loss: the interval of queries, their timeout, and a tick to notice each.
SILENT_S = ALIVE_S + ANSWER_S + 2 * TICK_S
# The timeout of the path, and, for the reply that shows it, an interval of queries and a tick.
CUT_S = PATH_S + ALIVE_S + TICK_S
# A longer wait for a chunk differs in nothing: replies that do not know never end it.
_LONG_S = PATH_S + TICK_S
REPLIES = ((), (RANK,), (OTHER,), (RANK, OTHER))

# The reply, or "none"; the next chunk: same, next or idle; seconds until the tick; whether a rank has left.
Event = tuple[Any, ...]


class _Past(NamedTuple):
    """The past, as far as the promises need it. Times are sums of ticks, each at most TICK_S."""

    open_s: float = -1.0  # since the open query was sent; -1: none is open
    about: str = ""  # of the open query: alive, chunk, or former: a chunk that has its result by now
    silent_s: float = 0.0  # since the last reply
    waited_s: float = -1.0  # since the wait for the chunk began, or it last waited for another rank; -1: no chunk
    cut_s: float = 0.0  # the same, while every query about the chunk was answered by the next tick
    bad: int = 0  # replies in succession that the chunk waits for this rank or for no rank, up to 2


@dataclass
class WatchReport(Report):
    losses: int = 0  # transitions that end with a loss


class _State(NamedTuple):
    watch: Any
    past: _Past
    chunks: int  # how many there were


def search_switch_watch(new: Callable[[int, float], Any] = SwitchWatch) -> WatchReport:
    """Search all states.

    new: makes a watch, of a rank, at a time in seconds.
    """
    report = WatchReport()
    search = _Search(_State(new(RANK, 0.0), _Past(), 0))
    search.run(report)
    report.losses = search.losses
    report.transitions += search.losses
    return report


class _Search(Search[_State, Event]):
    def __init__(self, first: _State) -> None:
        super().__init__(first)
        self.losses = 0

    def key(self, state: _State) -> Hashable:
        return _key(state.watch, state.past)

    def events(self, state: _State) -> Iterator[Event]:
        past = state.past
        replies: list[Any] = ["none"]
        if past.about == "alive":
            replies.append(None)
        elif past.about:
            replies += [*REPLIES, None]
        chunks = ("same", "next", "idle") if past.waited_s >= 0 else ("same", "next")
        for reply in replies:
            for chunk in chunks:
                for seconds, urgent in ((TICK_S, False), (TICK_S, True), (PAUSE_S, False)):
                    yield reply, chunk, seconds, urgent

    def after(self, state: _State, event: Event) -> _State | None:
        """Return the next state; None where the watch reports a loss."""
        watch, (reply, becomes, seconds, urgent) = copy(state.watch), event
        past = _replied(watch, state.past, reply)
        chunk = watch._chunk if becomes == "same" else state.chunks if becomes == "next" else None
        past = _waited(past, becomes)
        action = watch.poll(watch._last_tick + seconds, chunk, urgent=urgent)
        if isinstance(action, Lost):
            self.losses += 1
        past = _checked(past, action)
        return None if isinstance(action, Lost) else _State(watch, past, state.chunks + 1)

    def text(self, event: Event) -> str:
        reply, chunk, seconds, urgent = event
        replied = {"none": "no answer", None: "it is there and knows no rank", (): "waits for nobody"}.get(
            reply, f"waits for {reply}"
        )
        return f"{replied}, {chunk} chunk, {seconds} s{', a rank left' if urgent else ''}"


def _replied(watch: Any, past: _Past, reply: Any) -> _Past:
    """Give the watch a reply, or none, before the tick."""
    if reply == "none":
        return past
    missing = watch.stragglers
    watch.answer(reply)
    if past.about == "former" and watch.stragglers != missing:
        raise BrokenError("a reply about an earlier chunk is taken for the current chunk's")
    if past.about == "chunk":
        if reply is None:
            past = past._replace(cut_s=0.0)  # the bound CUT_S rests on replies that know
        elif not reply or RANK in reply:
            past = past._replace(bad=min(2, past.bad + 1))
        else:
            past = past._replace(bad=0, waited_s=0.0, cut_s=0.0)
    return past._replace(open_s=-1.0, about="", silent_s=0.0)


def _waited(past: _Past, becomes: str) -> _Past:
    """Let a tick pass, at whose end the chunk is the same, the next or none."""
    past = past._replace(silent_s=past.silent_s + TICK_S)
    if past.open_s >= 0:
        past = past._replace(open_s=past.open_s + TICK_S)
    if becomes != "same":
        about = "former" if past.about == "chunk" else past.about
        return past._replace(waited_s=0.0 if becomes == "next" else -1.0, cut_s=0.0, bad=0, about=about)
    if past.waited_s < 0:
        return past
    # A query that is open at a second tick: replies are slow, so the bound CUT_S, which rests on them, does not hold.
    slow = past.about and past.open_s > TICK_S
    waited_s = min(past.waited_s + TICK_S, _LONG_S)
    return past._replace(waited_s=waited_s, cut_s=0.0 if slow else past.cut_s + TICK_S)


def _checked(past: _Past, action: Query | Lost | None) -> _Past:
    """Hold what the watch does at the tick against the promises."""
    if isinstance(action, Lost):
        if past.open_s < ANSWER_S and not (past.bad >= 2 and past.waited_s >= PATH_S):
            raise BrokenError("a switch that answers counts as lost")
        return past
    if isinstance(action, Query):
        if past.open_s >= 0:
            raise BrokenError("a query is sent while another is open")
        past = past._replace(open_s=0.0, about="alive" if action.chunk is None else "chunk")
    if past.silent_s >= SILENT_S:
        raise BrokenError("a switch that does not answer does not count as lost")
    if past.cut_s >= CUT_S:
        raise BrokenError("a path that lets no packets through is not detected")
    return past


def _key(watch: Any, past: _Past) -> tuple[Any, ...]:
    """Return a value that is equal for watches that differ only in their start time and in chunk numbers."""
    now, query = watch._time, watch._asked
    about = None if query is None else "alive" if query.chunk is None else query.chunk == watch._chunk
    is_awaited = watch._chunk is not None
    return (
        is_awaited,
        min(now - watch._since, _LONG_S) if is_awaited else 0.0,
        about,
        now - watch._asked_at if query is not None else 0.0,
        max(0.0, watch._next_ask - now),
        watch._asked_of_chunk,
        min(2, watch._bad_answers),
        watch.stragglers,
        past,
    )


def sentence(report: WatchReport) -> str:
    """Return a report in one line."""
    return (
        f"the watch of a rank: {report.outcome}; {report.states:,} states, {report.transitions:,} transitions "
        f"({report.losses:,} end with a loss), depth {report.depth}, {report.seconds:.2f} s"
    )
