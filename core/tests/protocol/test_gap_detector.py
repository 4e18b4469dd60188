"""The gap detector names each lost packet once, not too early, and no other packet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import FLAGS, make_switch, make_worker, receive

from netfold._native import protocol

pytestmark = pytest.mark.native

THRESHOLD = protocol.REORDER_THRESHOLD


def gaps_of(packet_numbers):
    """Return (packet number, first, count) for every gap that a packet reveals."""
    gap_detector = protocol.GapDetector()
    gaps = [(packet_number, *gap_detector.observe(packet_number)) for packet_number in packet_numbers]
    return [gap for gap in gaps if gap[2] > 0]


def test_a_packet_counts_as_lost_once_a_packet_sent_eight_later_has_come():
    assert gaps_of([1, 2, 3, *range(5, 12)]) == []
    assert gaps_of([1, 2, 3, *range(5, 20)]) == [(12, 4, 1)]


def test_lost_first_packets_are_named_too():
    assert gaps_of([3, *range(4, 30)]) == [(9, 1, 1), (10, 2, 1)]


@pytest.mark.parametrize("jump", [1, 7, 8, 9, 63, 64, 65, 1000])
def test_a_burst_is_named_to_its_last_packet(jump):
    packet_numbers = [*range(1, 101), *range(101 + jump, 200 + jump)]
    missed = [
        packet_number for _, first, count in gaps_of(packet_numbers) for packet_number in range(first, first + count)
    ]
    assert missed == list(range(101, 101 + jump))


def test_packets_that_overtake_each_other_by_less_than_eight_are_not_named():
    packet_numbers = list(range(1, 200))
    for start in range(0, len(packet_numbers) - THRESHOLD, THRESHOLD):
        packet_numbers[start : start + THRESHOLD] = packet_numbers[start : start + THRESHOLD][::-1]
    assert gaps_of(packet_numbers) == []


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_every_lost_packet_is_named_once_and_in_time(received):
    packet_numbers = [packet_number for packet_number, is_received in enumerate(received, start=1) if is_received]
    named = []
    for packet_number, first, count in gaps_of(packet_numbers):
        last = first + count - 1
        assert last + THRESHOLD <= packet_number
        # Between the first and the last lost packet a few may have come.
        assert not received[first - 1]
        assert not received[last - 1]
        named += range(first, first + count)
    assert len(named) == len(set(named))
    newest = max(packet_numbers, default=0)
    lost = {
        packet_number
        for packet_number, is_received in enumerate(received, start=1)
        if not is_received and packet_number + THRESHOLD <= newest
    }
    assert lost <= set(named)
    assert sum(received[packet_number - 1] for packet_number in named) <= THRESHOLD * len(gaps_of(packet_numbers))


@given(st.lists(st.integers(1, 120), max_size=120))
def test_any_order_and_any_copies_name_a_packet_at_most_once(packet_numbers):
    named = [
        packet_number for _, first, count in gaps_of(packet_numbers) for packet_number in range(first, first + count)
    ]
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
