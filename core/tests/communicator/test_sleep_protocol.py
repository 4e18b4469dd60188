"""The engine's sleep protocol as a state machine, searched in full: no sleeping engine misses a request.

The model follows core/native/engine a step at a time: a step is what happens under one lock or in one system call.
Three threads make a request each: one waits for its request, one waits later, one never waits. A request's data arrive
at any moment. Where all sleep, and the data of a request that is not done have arrived, a wake-up was lost: that
request waits until something else happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

REQUESTS = (0, 1, 2)
WAITS, WAITS_LATER, NEVER_WAITS = REQUESTS


@dataclass(frozen=True)
class State:
    submitted: frozenset[int] = frozenset()
    inbox: frozenset[int] = frozenset()
    posted: frozenset[int] = frozenset()  # taken up by a driver, and not done
    arrived: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    driver: str = "none"  # none, engine, or the number of a thread
    wake: bool = False  # the group's doorbell
    doorbell: bool = False  # the engine thread's own
    sleeps: bool = False  # Inbox::State::engine_sleeps
    engine: str = "top"
    watched: frozenset[int] = frozenset()  # by the engine's sleep
    threads: tuple[str, ...] = ("start", "start", "start")
    watching: frozenset[int] = frozenset()  # by the sleep of the thread that drives

    @property
    def has_work(self) -> bool:
        return bool(self.inbox or self.posted)

    def thread(self, number: int, at: str) -> State:
        return replace(self, threads=tuple(at if i == number else old for i, old in enumerate(self.threads)))

    def turn(self) -> tuple[State, bool]:
        """One turn of a driver, and whether it made progress. As in the engine, taking up a request is no progress."""
        posted = self.posted | self.inbox
        ended = posted & self.arrived
        return replace(self, inbox=frozenset(), posted=posted - ended, done=self.done | ended), bool(ended)


def arrivals(state: State) -> Iterator[State]:
    for request in REQUESTS:
        if request not in state.arrived:
            yield replace(state, arrived=state.arrived | {request})


def steps(state: State, fault: str) -> Iterator[State]:
    for number in REQUESTS:
        yield from _thread(state, number, fault)
    yield from _engine(state, fault)


def _take_over(state: State, number: int) -> State:
    return replace(state, driver=str(number), sleeps=False).thread(number, "turn")


def _thread(state: State, number: int, fault: str) -> Iterator[State]:
    at = state.threads[number]
    free = state.driver == "none" or (state.driver == "engine" and state.sleeps)
    if at == "start":
        new = replace(state, submitted=state.submitted | {number}, inbox=state.inbox | {number})
        after = "wait" if number == WAITS else "away" if number == WAITS_LATER else "end"
        if free and number != NEVER_WAITS and len(new.inbox) == 1:
            yield _take_over(new, number)
        elif state.driver == "none":
            yield replace(new, doorbell=fault != "no doorbell").thread(number, after)
        else:
            yield replace(new, wake=True).thread(number, after)
    elif at == "away":
        yield state.thread(number, "wait")
    elif at == "wait":
        if number in state.done:
            yield state.thread(number, "end")
        elif free and state.has_work:
            yield _take_over(state, number)
        else:
            yield state.thread(number, "blocked")
    elif at == "blocked" and number in state.done:
        yield state.thread(number, "end")
    elif at == "turn":
        # A thread that does not wait yet drives for one turn.
        new, moved = state.turn()
        leaves = number in new.done or number == WAITS_LATER
        yield new.thread(number, "leave" if leaves else "turn" if moved else "list")
    elif at == "list":
        yield replace(state, watching=state.posted).thread(number, "look")
    elif at == "look":
        new, moved = state.turn()
        yield new.thread(number, "clear" if moved else "sleep")
    elif at == "sleep" and (state.wake or state.watching & state.arrived):
        yield state.thread(number, "clear")
    elif at == "clear":
        yield replace(state, wake=False, watching=frozenset()).thread(
            number, "leave" if number in state.done else "turn"
        )
    elif at == "leave":
        rings = state.has_work and fault != "leaves in silence"
        left = replace(state, driver="none", doorbell=state.doorbell or rings)
        yield left.thread(number, "end" if number in state.done else "away")


def _engine(state: State, fault: str) -> Iterator[State]:
    mine = state.driver == "engine"
    if state.engine == "top":
        new = replace(state, doorbell=False)
        if mine or (state.driver == "none" and state.has_work):
            yield replace(new, driver="engine", wake=False, engine="turn")
        else:
            yield replace(new, engine="asleep", watched=frozenset())
    elif state.engine in ("turn", "look"):
        if not mine:
            yield replace(state, engine="top")
            return
        before = replace(state, wake=False) if fault == "clears again" and state.engine == "look" else state
        new, moved = before.turn()
        if not new.has_work:
            yield replace(new, driver="none", engine="top")
        elif moved:
            yield replace(new, engine="top")
        else:
            yield replace(new, engine="list" if state.engine == "turn" else "park")
    elif state.engine == "list":
        yield replace(state, watched=state.posted, engine="look")
    elif state.engine == "park":
        yield replace(state, sleeps=mine, engine="asleep")
    elif state.engine == "asleep" and (
        state.doorbell or (state.wake and mine) or (mine and state.watched & state.arrived & state.posted)
    ):
        yield replace(state, engine="awake")
    elif state.engine == "asleep" and not mine and state.watched:
        # A caller took over; the stale list may end this sleep at any moment, or never: neither may matter.
        yield replace(state, engine="awake")
    elif state.engine == "awake":
        yield replace(state, sleeps=False if mine else state.sleeps, engine="top", watched=frozenset())


def search(fault: str = "") -> tuple[int, list[State]]:
    """The number of states, and those in which all sleep although a request could end."""
    first = State()
    seen, queue, lost = {first}, [first], []
    while queue:
        state = queue.pop()
        after = [each for each in steps(state, fault) if each != state]
        if not after and (state.submitted & state.arrived) - state.done:
            lost.append(state)
        for each in (*after, *arrivals(state)):
            if each not in seen:
                seen.add(each)
                queue.append(each)
    return len(seen), lost


def test_no_request_is_ever_missed_by_a_sleeping_engine() -> None:
    states, lost = search()
    assert states > 1000, "the model does nothing"
    assert not lost, lost[0]


@pytest.mark.parametrize("fault", ["clears again", "no doorbell", "leaves in silence"])
def test_the_search_finds_each_fault(fault: str) -> None:
    """`clears again`: the engine clears the doorbell before its last look, as it did once."""
    assert search(fault)[1]
