"""A leaf's packets to its parent: which sums it sends, under which numbers, and which it sends again."""

import pytest

from netfold._native import protocol

pytestmark = pytest.mark.native

FAR = protocol.REORDER_THRESHOLD


def send_all(sender):
    sends = []
    while (send := sender.poll_send()) is not None:
        sends.append(send)
        assert len(sends) <= 1000, "a slot is due once at most"
    return sends


def sender_of(slots):
    sender = protocol.ParentSender(64)
    for slot in range(slots):
        sender.offer(slot)
    assert send_all(sender) == [(slot, slot + 1) for slot in range(slots)]
    return sender


def test_sums_go_in_the_order_in_which_they_were_offered_each_once():
    sender = protocol.ParentSender(8)
    for slot in (3, 1, 3):
        sender.offer(slot)
    assert send_all(sender) == [(3, 1), (1, 2)]
    assert (sender.in_flight, sender.packets_sent, sender.sent_again) == (2, 2, 0)


def test_a_sum_that_is_offered_again_has_a_new_number():
    sender = sender_of(2)
    sender.offer(0)
    assert send_all(sender) == [(0, 3)]
    assert (sender.packets_sent, sender.sent_again) == (3, 1)


def test_a_packet_that_the_socket_refused_goes_under_another_number_and_counts_once():
    sender = protocol.ParentSender(8)
    sender.offer(5)
    assert sender.poll_send() == (5, 1)
    sender.not_sent(5)
    assert (sender.packets_sent, sender.sent_again) == (0, 0)
    assert send_all(sender) == [(5, 2)]
    assert (sender.packets_sent, sender.sent_again) == (1, 0)


def test_a_nack_resends_the_sums_that_it_names_and_no_others():
    sender = sender_of(6)
    sender.handle_result(2, 1)
    assert sender.handle_nack(2, 3) == 2  # slots 1 and 3: slot 2 has its result
    assert send_all(sender) == [(1, 7), (3, 8)]
    assert sender.handle_nack(2, 3) == 0
    assert sender.handle_nack(1 << 60, 1 << 31) == 0
    assert send_all(sender) == []


def test_the_sum_of_a_skipped_result_goes_again_once_eight_later_results_came():
    sender = sender_of(20)
    sender.handle_result(0, 1)
    for slot in range(2, 2 + FAR):
        assert send_all(sender) == []
        sender.handle_result(slot, slot + 1)  # number 2 was slot 1's
    assert send_all(sender) == [(1, 21)]
    sender.handle_result(1, 2)
    assert sender.in_flight == 20 - FAR - 2


def test_as_many_sums_go_again_as_numbers_are_missing_the_oldest_first():
    sender = sender_of(30)
    # Slots 0 to 3 wait for another leaf, and two results were lost.
    for number, slot in enumerate(range(4, 16), start=3):
        sender.handle_result(slot, number)
    assert [slot for slot, _ in send_all(sender)] == [0, 1]


def test_sums_that_wait_for_another_leaf_do_not_go_again():
    sender = sender_of(40)
    for number, slot in enumerate(range(10, 40), 1):
        sender.handle_result(slot, number)
    assert send_all(sender) == []
    assert sender.in_flight == 10


def test_a_result_that_comes_while_its_sum_is_due_again_cancels_the_sum():
    sender = sender_of(1)
    sender.offer(0)
    sender.handle_result(0, 1)
    assert send_all(sender) == []
    assert sender.in_flight == 0
    sender.offer(0)  # the slot's next chunk
    assert send_all(sender) == [(0, 2)]
    assert sender.sent_again == 0
