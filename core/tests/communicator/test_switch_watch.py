"""A rank counts its switch as lost: a pure machine, driven by a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from netfold.communicator.switch_watch import ALIVE_S, ANSWER_S, PATH_S, QUIET_S, Lost, Query, SwitchWatch

RANK = 1
TICK_S = 0.2
# One tick late in each of its steps.
LATE_S = 3 * TICK_S

# What the switch answers `delay_s` after a question about a chunk: the ranks that it waits for; None: nothing comes.
Answers = Callable[[float], Sequence[int] | None]


def run(
    seconds: float,
    chunk_at: Callable[[float], int | None],
    answers: Answers,
    *,
    delay_s: float = 0.01,
    urgent: bool = False,
) -> tuple[float, Lost] | None:
    """Tick for that long; return when the switch counted as lost, and why."""
    watch = SwitchWatch(RANK, 0.0)
    asked: tuple[float, Query] | None = None
    now = 0.0
    while now < seconds:
        now += TICK_S
        if asked is not None and now >= asked[0] + delay_s and (missing := answers(asked[0])) is not None:
            watch.answer(missing if asked[1].chunk is not None else None)
            asked = None
        action = watch.poll(now, chunk_at(now), urgent=urgent)
        if isinstance(action, Lost):
            return now, action
        if action is not None:
            assert asked is None, "a second question while one is open"
            asked = now, action
    return None


def stuck(_: float) -> int | None:
    return 7


def idle(_: float) -> int | None:
    return None


def flowing(now: float) -> int | None:
    return int(now * 1000)


def waits_for(*ranks: int) -> Answers:
    return lambda _: ranks


def silent(_: float) -> Sequence[int] | None:
    return None


def test_a_switch_that_replies_is_never_lost_while_results_arrive_or_none_is_awaited() -> None:
    for chunk_at in (flowing, idle):
        assert run(100, chunk_at, waits_for()) is None


def test_a_wait_for_another_rank_is_never_a_loss() -> None:
    assert run(2000, stuck, waits_for(0, 2)) is None
    assert run(2000, stuck, waits_for(0, 2), urgent=True) is None


def test_a_switch_without_replies_is_lost_within_five_seconds() -> None:
    for chunk_at in (stuck, idle, flowing):
        lost = run(100, chunk_at, silent)
        assert lost is not None
        assert ANSWER_S <= lost[0] <= max(QUIET_S, ALIVE_S) + ANSWER_S + LATE_S <= 5.0
        assert "has not answered" in lost[1].why


def test_a_switch_that_does_not_know_whom_it_waits_for_is_not_lost() -> None:
    """In a tree: another switch did not answer, whose ranks may be late."""
    watch = SwitchWatch(RANK, 0.0)
    for tick in range(1, 1000):
        action = watch.poll(tick * TICK_S, 7)
        assert not isinstance(action, Lost)
        if action is not None:
            watch.answer(None)


def test_a_switch_that_replies_is_lost_if_packets_do_not_pass() -> None:
    # If packets to the switch are cut, it waits for this rank; if packets from it are cut, it waits for no rank.
    for answers in (waits_for(RANK), waits_for(0, RANK), waits_for()):
        lost = run(100, stuck, answers)
        assert lost is not None
        assert PATH_S <= lost[0] <= PATH_S + LATE_S
        assert "packets have not passed between it and rank 1" in lost[1].why


def test_one_late_contribution_is_not_a_loss() -> None:
    """The switch waits for this rank at the first answer, and has its packet at the next."""
    assert run(100, stuck, lambda now: (RANK,) if now < QUIET_S + TICK_S else (0,)) is None


def test_a_rank_that_was_stopped_does_not_blame_the_switch() -> None:
    watch = SwitchWatch(RANK, 0.0)
    now = 0.0
    while (action := watch.poll(now, 7)) is None:
        now += TICK_S
    assert action == Query(7)
    # Stopped for a minute during an open query; the reply waits in the socket, and is read one tick later.
    assert watch.poll(now + 60, 7) is None
    watch.answer([0])
    assert not isinstance(watch.poll(now + 60 + TICK_S, 7), Lost)


def test_a_reply_about_an_earlier_chunk_does_not_count() -> None:
    watch = SwitchWatch(RANK, 0.0)
    now = 0.0
    while watch.poll(now, 7) is None:
        now += TICK_S
    watch.poll(now, 8)
    watch.answer([2])
    assert watch.stragglers == ()


def test_the_switch_is_queried_every_tick_after_a_rank_left() -> None:
    watch = SwitchWatch(RANK, 0.0)
    for tick in range(1, 20):
        assert watch.poll(tick * TICK_S, 7, urgent=True) == Query(7)
        watch.answer([0])
        assert watch.stragglers == (0,)


@given(
    st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans(), st.booleans(), st.sets(st.integers(0, 3))), max_size=60)
)
def test_a_switch_is_lost_only_after_bad_replies_or_none(ticks: list[tuple[float, bool, bool, set[int]]]) -> None:
    """With any ticks and any answers, the stated reason of a loss is true."""
    watch = SwitchWatch(RANK, 0.0)
    now, chunk, bad, ticks_open = 0.0, 0, 0, 0
    asked: Query | None = None
    for gap_s, moves, answers, missing in ticks:
        now += gap_s
        if moves:
            chunk, bad = chunk + 1, 0
        if asked is not None and answers:
            if asked.chunk == chunk and not moves:
                bad = bad + 1 if not missing or RANK in missing else 0
            # As Membership does: pass the reply before polling the chunk.
            watch.answer(sorted(missing) if asked.chunk is not None else None)
            asked, ticks_open = None, 0
        action = watch.poll(now, chunk)
        if isinstance(action, Query):
            assert asked is None
            asked = action
        elif isinstance(action, Lost):
            if "packets" in action.why:
                assert bad >= 2
            else:
                assert ticks_open >= ANSWER_S / 0.5 - 1  # no tick counts for more than half a second
            return
        ticks_open += asked is not None
