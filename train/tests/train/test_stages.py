"""The cut of a chain into stages, against every possible cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netfold_train.parallel.stages import Cut, cut


def every_cut(costs: list[int], stages: int) -> list[tuple[int, ...]]:
    """The costs of the stages for every cut."""
    inner = itertools.combinations(range(1, len(costs)), stages - 1)
    return [
        tuple(sum(costs[first:end]) for first, end in itertools.pairwise((0, *between, len(costs))))
        for between in inner
    ]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_smaller_largest_stage_or_is_more_even_with_the_same_one(costs: list[int], data: st.DataObject):
    stages = data.draw(st.integers(1, len(costs)))
    found = cut(costs, stages)
    assert found.bounds[0] == 0 and found.bounds[-1] == len(costs)
    assert all(found.layers(stage) for stage in range(stages)) and len(found) == stages
    assert found.costs == tuple(sum(costs[layer] for layer in found.layers(stage)) for stage in range(stages))

    def badness(stage_costs: tuple[int, ...]) -> tuple[int, int]:
        return max(stage_costs), sum(cost**2 for cost in stage_costs)

    assert badness(found.costs) == min(badness(one) for one in every_cut(costs, stages))


def test_a_heavy_last_layer_gets_a_stage_of_its_own() -> None:
    assert cut([1, 1, 1, 1, 4], 2) == Cut((0, 4, 5), (4, 4))


def test_the_text_of_a_cut_has_the_stages_and_their_balance() -> None:
    assert cut([1, 2, 1, 4], 2).described(["embedding", "block0", "block1", "head"]) == (
        "4 layers in 2 stages: embedding to block1 (50%), head (50%); in brackets each stage's share of a pass. "
        "No other cut has a smaller largest stage; it is 0% above an even share"
    )


def test_fewer_layers_than_stages_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="3 stages cannot be cut from 2 layers"):
        cut([1, 1], 3)
