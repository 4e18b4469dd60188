"""Flows that share links: equal parts, divided anew whenever a flow begins or ends."""

import random
from functools import partial

import pytest

from netfold_plan.events.resources import EventQueue, SharedLinks


def ends(capacity, flows):
    """Return when each of `flows` (start, work, uses) ends, in order of start."""
    events, ended = EventQueue(), {}
    links = SharedLinks(events, capacity)
    for number, (start_s, work_s, uses) in enumerate(flows):
        events.at(start_s, links.start, work_s, uses, partial(lambda flow: ended.update({flow: events.now_s}), number))
    events.run()
    return [ended[number] for number in range(len(flows))]


def test_a_flow_alone_takes_its_bytes_over_the_rate():
    assert ends([1.0], [(2.0, 3.0, ((0, 1.0),)), (9.0, 1.0, ())]) == [5.0, 10.0]


def test_two_flows_on_a_link_have_half_their_rate_until_one_has_ended():
    # Together from 1 to 3, when the second has had its one second of work.
    assert ends([1.0], [(0.0, 3.0, ((0, 1.0),)), (1.0, 1.0, ((0, 1.0),))]) == [4.0, 3.0]


def test_the_narrowest_link_limits_a_flow():
    assert ends([2.0], [(0.0, 1.0, ((0, 1.0),)), (0.0, 1.0, ((0, 1.0),))]) == [1.0, 1.0]
    assert ends([1.0, 0.25], [(0.0, 1.0, ((0, 1.0), (1, 1.0)))]) == [4.0]


def test_a_flow_that_another_link_limits_stays_limited_when_a_flow_ends():
    # The first is held to a quarter by link 1 all along; the second has half of link 0 as long as both are there.
    first, second = ends([1.0, 0.25], [(0.0, 1.0, ((0, 1.0), (1, 1.0))), (0.0, 1.0, ((0, 1.0),))])
    assert (first, second) == (4.0, 2.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_link_exceeds_its_rate_and_every_flow_ends(seed):
    chance = random.Random(seed)
    capacity = [chance.choice([0.5, 1.0, 3.0]) for _ in range(4)]
    flows = sorted(
        (chance.uniform(0, 5), chance.uniform(0.1, 2), tuple((link, 1.0) for link in chance.sample(range(4), 2)))
        for _ in range(12)
    )
    ended = ends(capacity, flows)
    assert all(end_s >= start_s + work_s - 1e-9 for end_s, (start_s, work_s, _) in zip(ended, flows, strict=True))
    for link, most in enumerate(capacity):
        mine = [
            (start_s, end_s, work_s)
            for end_s, (start_s, work_s, uses) in zip(ended, flows, strict=True)
            if (link, 1.0) in uses
        ]
        if mine:
            span_s = max(end_s for _, end_s, _ in mine) - min(start_s for start_s, _, _ in mine)
            assert sum(work_s for _, _, work_s in mine) <= most * span_s + 1e-9
