"""Flows that share links: equal parts, taken up anew whenever one comes or goes."""

import heapq
import random

import pytest

from netfold.plan.events.links import SharedLinks


def ends(capacity, flows):
    """When each of `flows` (start, work, uses) ends, in order of start."""
    due = []
    links = SharedLinks(capacity, lambda when_s, flow, version: heapq.heappush(due, (when_s, 1, flow, version)))
    for number, (start_s, _, _) in enumerate(flows):
        heapq.heappush(due, (start_s, 0, number, 0))
    ended = {}
    while due:
        now_s, is_end, number, version = heapq.heappop(due)
        if not is_end:
            assert links.start(now_s, flows[number][1], flows[number][2]) == number
        elif links.ended(now_s, number, version):
            ended[number] = now_s
    return [ended[number] for number in range(len(flows))]


def test_a_flow_alone_takes_what_its_work_is():
    assert ends([1.0], [(2.0, 3.0, ((0, 1.0),)), (9.0, 1.0, ())]) == [5.0, 10.0]


def test_two_on_a_link_go_half_as_fast_until_one_has_ended():
    # Together from 1 to 3, when the second has had its one second of work.
    assert ends([1.0], [(0.0, 3.0, ((0, 1.0),)), (1.0, 1.0, ((0, 1.0),))]) == [4.0, 3.0]


def test_a_wide_link_slows_nobody_and_the_narrowest_one_counts():
    assert ends([2.0], [(0.0, 1.0, ((0, 1.0),)), (0.0, 1.0, ((0, 1.0),))]) == [1.0, 1.0]
    assert ends([1.0, 0.25], [(0.0, 1.0, ((0, 1.0), (1, 1.0)))]) == [4.0]


def test_a_flow_that_is_held_elsewhere_stays_so_when_another_ends():
    # The first is held to a quarter by link 1 all along; the second has half of link 0 as long as both are there.
    first, second = ends([1.0, 0.25], [(0.0, 1.0, ((0, 1.0), (1, 1.0))), (0.0, 1.0, ((0, 1.0),))])
    assert (first, second) == (4.0, 2.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_link_carries_more_than_it_can_and_all_work_is_done(seed):
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
