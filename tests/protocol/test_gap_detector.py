"""What of a sender's packets did not come: named once, not too early, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import FLAGS, make_switch, make_worker, receive

from netfold._native import protocol

pytestmark = pytest.mark.native

THRESHOLD = protocol.REORDER_THRESHOLD


def named_by(counters):
    """(packet, first, count) of every NACK."""
    gap_detector = protocol.GapDetector()
    nacks = [(packet_number, *gap_detector.observe(packet_number)) for packet_number in counters]
    return [one for one in nacks if one[2] > 0]


def test_a_packet_is_missed_when_one_sent_eight_later_is_here():
    assert named_by([1, 2, 3, *range(5, 12)]) == []
    assert named_by([1, 2, 3, *range(5, 20)]) == [(12, 4, 1)]


def test_the_first_packets_are_missed_too():
    assert named_by([3, *range(4, 30)]) == [(9, 1, 1), (10, 2, 1)]


@pytest.mark.parametrize("jump", [1, 7, 8, 9, 63, 64, 65, 1000])
def test_a_burst_is_missed_to_its_last_packet(jump):
    counters = [*range(1, 101), *range(101 + jump, 200 + jump)]
    missed = [packet_number for _, first, count in named_by(counters) for packet_number in range(first, first + count)]
    assert missed == list(range(101, 101 + jump))


def test_packets_that_overtake_each_other_by_less_than_eight_are_not_missed():
    counters = list(range(1, 200))
    for start in range(0, len(counters) - THRESHOLD, THRESHOLD):
        counters[start : start + THRESHOLD] = counters[start : start + THRESHOLD][::-1]
    assert named_by(counters) == []


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_every_lost_packet_is_named_once_and_in_time(came):
    counters = [packet_number for packet_number, here in enumerate(came, start=1) if here]
    named = []
    for packet_number, first, count in named_by(counters):
        last = first + count - 1
        assert last + THRESHOLD <= packet_number
        # Between the first and the last that are lost there may be a few that came.
        assert not came[first - 1]
        assert not came[last - 1]
        named += range(first, first + count)
    assert len(named) == len(set(named))
    newest = max(counters, default=0)
    lost = {
        packet_number
        for packet_number, here in enumerate(came, start=1)
        if not here and packet_number + THRESHOLD <= newest
    }
    assert lost <= set(named)
    assert sum(came[packet_number - 1] for packet_number in named) <= THRESHOLD * len(named_by(counters))


@given(st.lists(st.integers(1, 120), max_size=120))
def test_any_order_and_any_copies_name_a_packet_at_most_once(counters):
    named = [packet_number for _, first, count in named_by(counters) for packet_number in range(first, first + count)]
    assert len(named) == len(set(named))


def test_a_nack_is_as_long_as_any_packet_and_carries_no_values():
    packet = make_switch(payload_bytes=16).nack_packet(1, 7, 3)
    header = protocol.Header.parse(packet)
    assert len(packet) == protocol.HEADER_BYTES + 16
    assert header.flags == FLAGS["from_switch"] | FLAGS["nack"]
    assert (header.worker, header.chunk, header.elements, header.count) == (1, 7, 3, 0)


def test_a_nack_sent_to_the_switch_changes_nothing():
    switch = make_switch()
    before = switch.copy()
    assert switch.handle_packet(switch.nack_packet(0, 1, 1))[:2] == ("dropped", "direction")
    assert switch == before


def test_a_worker_understands_what_the_switch_writes():
    worker = make_worker(worker=1, window=4)
    worker.start(0, 8, 6)
    while worker.poll_send(0) is not None:
        pass
    assert receive(worker, make_switch().nack_packet(1, 2, 1)).outcome == "nack"
    assert worker.poll_send(0).header.chunk == 1
