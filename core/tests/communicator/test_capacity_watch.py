"""CapacityWatch logs, keeps and reports a path's rate, with a simulated clock."""

from __future__ import annotations

import logging

import pytest

from netfold._native import shares
from netfold.bootstrap import capacity
from netfold.communicator.capacity_watch import CapacityWatch, drifted

ENDS = frozenset({"a", "b"})
SWITCH = "s:1#" + "0" * 64 + ",s:2"
LINK = 25_000_000


class Turns:
    """A watch, its clock, and the Shares that it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, measured: bool = True, rank: int = 0) -> None:
        monkeypatch.setattr(capacity, "_cache", {})
        self.now = 100.0
        self.shares = shares.Shares([4_000_000, 6_000_000], 14_000_000, LINK)
        clock = lambda: self.now
        self.watch = CapacityWatch(lambda: self.shares, rank=rank, hosts=ENDS, switch=SWITCH, clock=clock)
        self.watch.begin(measured=measured)

    def operation(self, first: int, second: int = 6_000_000, host: int = 14_000_000) -> None:
        """An operation in which each path also ran alone."""
        self.shares.learn([(0, first), (0, second), (0, host)])
        self.now += 1

    def look(self) -> list[float | None]:
        return [self.watch.look(0), self.watch.look(1)]


def test_the_next_group_begins_with_a_rate_that_drifted_by_a_fifth(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns = Turns(monkeypatch)
    with caplog.at_level(logging.INFO, "netfold"):
        assert turns.look() == [4e6, 6e6]
        turns.operation(4_700_000)
        assert turns.look() == [4.7e6, 6e6]
        assert capacity.cached_rates(ENDS, SWITCH) == () and not caplog.records
        turns.operation(1_000_000)
        assert turns.look() == [4.7e6, 6e6], "one operation may have paused"
        turns.operation(1_000_000)
        assert turns.look() == [1e6, 6e6]
    assert capacity.cached_rates(ENDS, SWITCH) == (1e6, 6e6)
    (record,) = caplog.records
    assert "the switch at s:1 4 MB/s then, 1 now (3 s ago, when the group was made)" in record.getMessage()
    assert "s:2" not in record.getMessage() and "0000" not in record.getMessage()


def test_one_log_line_a_minute_has_all_changes_since_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns = Turns(monkeypatch)
    with caplog.at_level(logging.INFO, "netfold"):
        for rate in (2_000_000, 1_000_000, 8_000_000, 2_000_000) * 15:
            turns.operation(rate)
            turns.look()
        assert len(caplog.records) == 1
        turns.now += 1
        turns.operation(8_000_000, host=30_000_000)  # more than twice the known rate counts at once
        turns.look()
    assert len(caplog.records) == 2
    said = caplog.records[1].getMessage()
    assert "the switch at s:1 2 MB/s then" in said and "the host algorithm 14 MB/s then, 30 now" in said
    assert "in the last such line" in said
    assert capacity.cached_rates(ENDS, SWITCH)[0] == turns.look()[0], "the first rate does not wait for the log"


def test_other_ranks_keep_rates_and_log_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns = Turns(monkeypatch, rank=1)
    with caplog.at_level(logging.INFO, "netfold"):
        turns.operation(1_000_000)
        turns.look()
    assert capacity.cached_rates(ENDS, SWITCH) == (1e6, 6e6) and not caplog.records


def test_an_unmeasured_rate_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, measured=False)
    assert turns.look() == [None, None]
    turns.operation(1_000_000)
    assert turns.look() == [1e6, 6e6]
    before = CapacityWatch(lambda: None, rank=0, hosts=ENDS, switch=SWITCH)
    assert before.look(0) is None, "the group has no shares yet"


def test_the_threshold_of_a_fifth_is_relative_to_the_older_rate() -> None:
    assert drifted([100.0, 100.0, 100.0, 0.0], [120.0, 121.0, 79.0, 0.0]) == [1, 2]
