"""The plan of recovery: which rank sends which kept result to which rank, for all states that ranks can have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netfold.communicator.recovery_plan import ReceiveState, ResendPlan, chunks_of, make_plan, pack, unpack

Job = tuple[int, dict[int, ReceiveState]]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A window, and what ranks may have: rank r has contributed up to its lowest unanswered chunk + W, and no result is
    there before all have."""
    window = draw(st.integers(1, 24))
    lowest = draw(st.integers(0, 1000))
    ranks = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True))
    end = lowest + draw(st.integers(0, 40))
    reach = min(end, lowest + window) - lowest
    states = {}
    for rank in ranks:
        results = draw(st.integers(0, (1 << reach) - 1))
        base = 0
        while results >> base & 1:
            base += 1
        states[rank] = ReceiveState(lowest + base, end + draw(st.integers(0, 5)), results >> base)
    return window, states


def has(words: ReceiveState, chunk: int) -> bool:
    return chunk < words.base or bool(words.held >> (chunk - words.base) & 1)


@given(jobs())
def test_all_ranks_end_with_every_result_that_any_rank_had(job: Job) -> None:
    window, states = job
    plan = make_plan(states, window)
    assert plan.base == min(words.base for words in states.values())
    for chunk in range(plan.base, plan.base + 2 * window):
        anybody = any(has(words, chunk) for words in states.values())
        assert bool(plan.held >> (chunk - plan.base) & 1) == anybody
        for rank, words in states.items():
            gets = [giver for giver, bits in plan.fetches.get(rank, {}).items() if bits >> (chunk - plan.base) & 1]
            # Each missing chunk once, from a rank that has it, and no other chunk.
            assert len(gets) == int(anybody and not has(words, chunk))
            assert all(giver != rank and has(states[giver], chunk) for giver in gets)


@given(jobs())
def test_a_forwarded_result_is_still_kept(job: Job) -> None:
    """Each rank keeps the results of its last W chunks, so no plan has both a chunk and the one W above it."""
    window, states = job
    plan = make_plan(states, window)
    for shares in plan.fetches.values():
        for giver, bits in shares.items():
            newest = max(chunk for chunk in range(states[giver].base + window) if has(states[giver], chunk))
            assert all(chunk > newest - window for chunk in chunks_of(bits, plan.base))


@given(jobs())
def test_no_operation_that_a_rank_has_not_begun_has_a_result(job: Job) -> None:
    window, states = job
    plan = make_plan(states, window)
    assert plan.end == min(words.end for words in states.values())
    assert plan.base + plan.held.bit_length() <= plan.end


@given(jobs())
def test_the_plan_does_not_depend_on_the_order_of_replies(job: Job) -> None:
    window, states = job
    assert make_plan(dict(reversed(states.items())), window) == make_plan(states, window)


@given(st.integers(0, 1 << 300))
def test_a_bitmap_survives_its_encoding(bits: int) -> None:
    assert unpack(pack(bits)) == bits
    assert sum(1 << chunk for chunk in chunks_of(bits, 0)) == bits


def test_ranks_that_have_a_chunk_take_turns() -> None:
    plan = make_plan({0: ReceiveState(0, 8, 0), 1: ReceiveState(8, 8, 0), 2: ReceiveState(8, 8, 0)}, 8)
    assert plan == ResendPlan(base=0, end=8, held=0xFF, fetches={0: {1: 0b01010101, 2: 0b10101010}})


@pytest.mark.parametrize(
    ("states", "why"),
    [
        pytest.param(
            {0: ReceiveState(0, 9, 0), 1: ReceiveState(9, 9, 0)}, "a window of 8", id="ahead by more than a window"
        ),
        pytest.param(
            {0: ReceiveState(0, 2, 0), 1: ReceiveState(0, 4, 0b1000)},
            "begun none from 2 on",
            id="ahead of a contribution",
        ),
    ],
)
def test_contradictory_states_make_no_plan(states: dict[int, ReceiveState], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_plan(states, 8)
