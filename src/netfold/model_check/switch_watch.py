"""Exhaustive search of the watch on a switch: production's `SwitchWatch`, with answers and results in every order.

A state is the watch at one of its ticks. Until the next tick the open question may be answered, about whichever chunk
it was asked: the switch waits for nobody, for this rank, for another, or for both; and the chunk that is waited for may
get its result, with or without another one behind it, or the first may be called. The next tick comes after TICK_S, or
after so long that this rank must have been stopped. What recovery makes of a loss, at any time and rightly or not, is
searched in recovery.py: a loss that this machine says is one of those.

Safety. A switch is lost only when a question was open for ANSWER_S, or when two answers in succession said that the
chunk waits for this rank or for nobody, and it has had no result for PATH_S since it was waited for or since it last
waited for another rank. A tick counts as TICK_S at most. One question at a time is open. An answer about a chunk that
has its result changes nothing.
Bounds. Without any answer the switch is lost `SILENT_S` after the last. While answers come within a tick, and
packets do not pass, it is lost `CUT_S` after the chunk was first waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from netfold.communicator.switch_watch import ALIVE_S, ANSWER_S, PATH_S, TICK_S, Lost, Query, SwitchWatch

RANK, OTHER = 0, 1
PAUSE_S = 60.0
# Since an answer came, or since the start: the next question, its time, and a tick more to notice either.
SILENT_S = ALIVE_S + ANSWER_S + 2 * TICK_S
# The path's time, and, for the answer that shows it, an interval of questions and a tick.
CUT_S = PATH_S + ALIVE_S + TICK_S
ANSWERS = ((), (RANK,), (OTHER,), (RANK, OTHER))

# The answer, or "none"; what becomes of the chunk; how long until the tick; whether a rank has left.
Event = tuple[Any, ...]


class _Past(NamedTuple):
    """What has happened, as far as promises ask. Times in seconds of ticks, each at most TICK_S."""

    open_s: float = -1.0  # since the open question was asked; -1: none is open
    about: str = ""  # the open question: alive, chunk, or former, where the chunk has its result since
    silent_s: float = 0.0  # since the last answer
    waited_s: float = -1.0  # since the chunk was waited for, or last waited for another rank; -1: none is
    cut_s: float = 0.0  # the same, while every question about it was answered by the next tick
    bad: int = 0  # answers in succession of this chunk, up to 2


@dataclass
class WatchReport:
    """trace: the events that break the promise."""

    states: int = 0
    transitions: int = 0
    losses: int = 0  # transitions that end with one
    depth: int = 0
    broken: str = ""
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0


def search_switch_watch(new: Callable[[int, float], Any] = SwitchWatch) -> WatchReport:
    """Search to the end; `new` makes a watch of a rank at a time."""
    began = time.perf_counter()
    report = WatchReport()
    states: list[tuple[Any, _Past, int]] = [(new(RANK, 0.0), _Past(), 0)]  # and how many chunks there were
    came: list[tuple[int, Event]] = [(-1, ())]
    known = {_key(*states[0][:2])}
    at = 0
    while at < len(states) and not report.broken:
        watch, past, chunks = states[at]
        for event in _events(past):
            machine = copy(watch)
            action, now, broken = _happen(machine, past, event, chunks)
            report.transitions += 1
            report.losses += isinstance(action, Lost)
            if broken:
                report.broken, report.trace = broken, [*_trace(came, at), _words(event)]
                break
            if not isinstance(action, Lost) and _key(machine, now) not in known:
                known.add(_key(machine, now))
                states.append((machine, now, chunks + 1))
                came.append((at, event))
        at += 1
    report.states, report.depth = len(states), len(_trace(came, len(states) - 1))
    report.seconds = time.perf_counter() - began
    return report


def _events(past: _Past) -> Iterator[Event]:
    answers: list[Any] = ["none"]
    if past.about == "alive":
        answers.append(None)
    elif past.about:
        answers += ANSWERS
    chunks = ("same", "next", "idle") if past.waited_s >= 0 else ("same", "next")
    for answer in answers:
        for chunk in chunks:
            for seconds, urgent in ((TICK_S, False), (TICK_S, True), (PAUSE_S, False)):
                yield answer, chunk, seconds, urgent


def _happen(watch: Any, past: _Past, event: Event, new_chunk: int) -> tuple[Query | Lost | None, _Past, str]:
    """What the watch makes of the event; what has happened then; the promise that breaks."""
    answer, becomes, seconds, urgent = event
    broken = ""
    if answer != "none":
        missing = watch.stragglers
        watch.answer(answer)
        past = _answered(past, answer)
        if past.about == "former" and watch.stragglers != missing:
            broken = "an answer about a chunk that has its result is taken for this one's"
        past = past._replace(open_s=-1.0, about="", silent_s=0.0)
    chunk = watch._chunk if becomes == "same" else new_chunk if becomes == "next" else None
    past = past._replace(silent_s=past.silent_s + TICK_S)
    if past.open_s >= 0:
        past = past._replace(open_s=past.open_s + TICK_S)
    if becomes != "same":
        about = "former" if past.about == "chunk" else past.about
        past = past._replace(waited_s=0.0 if becomes == "next" else -1.0, cut_s=0.0, bad=0, about=about)
    elif past.waited_s >= 0:
        # A question that is open at a second tick: the answers are slow, and so may be what is found out by them.
        slow = past.about and past.open_s > TICK_S
        past = past._replace(waited_s=past.waited_s + TICK_S, cut_s=0.0 if slow else past.cut_s + TICK_S)
    action = watch.poll(watch._last_tick + seconds, chunk, urgent=urgent)
    if isinstance(action, Lost):
        silent, cut = past.open_s >= ANSWER_S, past.bad >= 2 and past.waited_s >= PATH_S
        return action, past, broken or ("" if silent or cut else "a switch is lost that answers")
    if isinstance(action, Query):
        if past.open_s >= 0:
            broken = broken or "a question is asked while another is open"
        past = past._replace(open_s=0.0, about="alive" if action.chunk is None else "chunk")
    if past.silent_s >= SILENT_S:
        broken = broken or "a switch that does not answer is not lost"
    if past.cut_s >= CUT_S:
        broken = broken or "a path that lets no packets through is not noticed"
    return action, past, broken


def _answered(past: _Past, missing: Any) -> _Past:
    if past.about != "chunk":
        return past
    if not missing or RANK in missing:
        return past._replace(bad=min(2, past.bad + 1))
    return past._replace(bad=0, waited_s=0.0, cut_s=0.0)


def _key(watch: Any, past: _Past) -> tuple[Any, ...]:
    """Equal for watches that differ in when they were made, and in chunks' numbers, alone."""
    now, asked = watch._time, watch._asked
    about = None if asked is None else "alive" if asked.chunk is None else asked.chunk == watch._chunk
    is_awaited = watch._chunk is not None
    return (
        is_awaited,
        now - watch._since if is_awaited else 0.0,
        about,
        now - watch._asked_at if asked is not None else 0.0,
        max(0.0, watch._next_ask - now),
        watch._asked_of_chunk,
        min(2, watch._bad_answers),
        watch.stragglers,
        past,
    )


def _trace(came: list[tuple[int, Event]], at: int) -> list[str]:
    trace = []
    while at > 0:
        at, event = came[at]
        trace.append(_words(event))
    return trace[::-1]


def _words(event: Event) -> str:
    answer, chunk, seconds, urgent = event
    said = {"none": "no answer", None: "it is there", (): "waits for nobody"}.get(answer, f"waits for {answer}")
    return f"{said}, {chunk} chunk, {seconds} s{', a rank left' if urgent else ''}"


def sentence(report: WatchReport) -> str:
    """A report in one line."""
    found = f"BROKEN: {report.broken}: {'; '.join(report.trace)}" if report.broken else "exhausted"
    return (
        f"the watch of a rank: {found}; {report.states:,} states, {report.transitions:,} transitions "
        f"({report.losses:,} end with a loss), depth {report.depth}, {report.seconds:.2f} s"
    )
