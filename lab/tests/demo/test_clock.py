"""Time in collectives: buckets that are in flight together count once."""

import pytest

from netfold_lab.demo.clock import union_ns

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(10, 30)], 20),
        ([(10, 30), (40, 45)], 25),
        ([(10, 30), (20, 50)], 40),
        ([(10, 50), (20, 30)], 40),
        ([(40, 45), (10, 30), (25, 42)], 35),
    ],
)
def test_the_union_of_intervals_counts_every_moment_once(intervals: list[tuple[int, int]], length: int) -> None:
    assert union_ns(intervals) == length
