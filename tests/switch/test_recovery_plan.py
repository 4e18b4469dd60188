"""The plan of recovery: who gives which kept result to whom, for anything that ranks can have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netfold.communicator.recovery_plan import Plan, ReceiveState, chunks_of, make_plan, pack, unpack

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
    said = {}
    for rank in ranks:
        results = draw(st.integers(0, (1 << reach) - 1))
        base = 0
        while results >> base & 1:
            base += 1
        said[rank] = ReceiveState(lowest + base, end + draw(st.integers(0, 5)), results >> base)
    return window, said


def has(words: ReceiveState, chunk: int) -> bool:
    return chunk < words.base or bool(words.held >> (chunk - words.base) & 1)


@given(jobs())
def test_everybody_ends_with_what_anybody_had(job: Job) -> None:
    window, said = job
    plan = make_plan(said, window)
    assert plan.base == min(words.base for words in said.values())
    for chunk in range(plan.base, plan.base + 2 * window):
        anybody = any(has(words, chunk) for words in said.values())
        assert bool(plan.held >> (chunk - plan.base) & 1) == anybody
        for rank, words in said.items():
            gets = [giver for giver, bits in plan.fetches.get(rank, {}).items() if bits >> (chunk - plan.base) & 1]
            # Once, from one who has it, and only what was lacking.
            assert len(gets) == int(anybody and not has(words, chunk))
            assert all(giver != rank and has(said[giver], chunk) for giver in gets)


@given(jobs())
def test_what_is_passed_on_is_still_kept(job: Job) -> None:
    """Each keeps the results of its last W chunks: a chunk and one W above it are never both asked for or had."""
    window, said = job
    plan = make_plan(said, window)
    for shares in plan.fetches.values():
        for giver, bits in shares.items():
            newest = max(chunk for chunk in range(said[giver].base + window) if has(said[giver], chunk))
            assert all(chunk > newest - window for chunk in chunks_of(bits, plan.base))


@given(jobs())
def test_nothing_has_a_result_that_some_rank_never_began(job: Job) -> None:
    window, said = job
    plan = make_plan(said, window)
    assert plan.end == min(words.end for words in said.values())
    assert plan.base + plan.held.bit_length() <= plan.end


@given(jobs())
def test_the_plan_depends_on_the_words_and_not_on_who_spoke_first(job: Job) -> None:
    window, said = job
    assert make_plan(dict(reversed(said.items())), window) == make_plan(said, window)


@given(st.integers(0, 1 << 300))
def test_a_map_survives_its_way(bits: int) -> None:
    assert unpack(pack(bits)) == bits
    assert sum(1 << chunk for chunk in chunks_of(bits, 0)) == bits


def test_those_who_have_a_chunk_take_turns() -> None:
    plan = make_plan({0: ReceiveState(0, 8, 0), 1: ReceiveState(8, 8, 0), 2: ReceiveState(8, 8, 0)}, 8)
    assert plan == Plan(base=0, end=8, held=0xFF, fetches={0: {1: 0b01010101, 2: 0b10101010}})


@pytest.mark.parametrize(
    ("said", "why"),
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
def test_words_that_cannot_be_true_make_no_plan(said: dict[int, ReceiveState], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_plan(said, 8)
