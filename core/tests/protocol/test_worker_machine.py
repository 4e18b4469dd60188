"""The worker's machine, step by step: window, repair of losses, timers, dropped packets, and value semantics."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import (
    EPOCH,
    F16,
    F32,
    FLAGS,
    I32,
    INCARNATION,
    JOB,
    MAX,
    MIN_LOC,
    MS,
    answer_to,
    assert_same,
    i32,
    make_packet,
    make_worker,
    receive,
    send_all,
)

from netfold._native import protocol

pytestmark = pytest.mark.native

PROBE_GROWTH = 2
PROBE_WAIT_NS = 2 * MS
REORDER_THRESHOLD = 8
WINDOW_GROWTH = 8
LEAST_WINDOW = 32
ROUNDS_BETWEEN_TRIALS = 8
BURST_NS = 2 * MS


def started(elements, window=1, **shape):
    worker = make_worker(window=window, **shape)
    worker.start(0, elements, I32)
    return worker


def chunks(sends):
    return [send.header.chunk for send in sends]


def numbered(send, number):
    """Return the answer to `send` with the switch's packet number `number`."""
    return answer_to(send, packet_number=number)


def nack(first, packets, **changes):
    """Return a NACK of `packets` packets of worker 0 from number `first` on."""
    fields = {
        "flags": FLAGS["from_switch"] | FLAGS["nack"],
        "chunk": first,
        "elements": packets,
        "count": 0,
        "wire": F32,
    }
    return make_packet(**{**fields, **changes})


def test_a_worker_sends_its_window_and_waits():
    worker = started(20, window=4)
    sends = send_all(worker)
    assert chunks(sends) == [0, 1, 2, 3]
    assert (worker.in_flight, worker.sendable()) == (4, 0)
    assert [(send.first, send.count) for send in sends] == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_a_contribution_carries_every_field_on_which_workers_must_agree():
    worker = make_worker(worker=1, payload_bytes=16)
    worker.start(operation=5, elements=3, wire=F32, reduce=3, table=77)
    header = send_all(worker)[0].header
    assert (header.job, header.epoch, header.incarnation) == (JOB, EPOCH, INCARNATION)
    assert (header.operation, header.elements, header.count, header.worker) == (5, 3, 3, 1)
    assert (header.wire, header.reduce, header.table, header.flags) == (F32, 3, 77, 0)


@pytest.mark.parametrize(("elements", "counts"), [(1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])])
def test_the_last_chunk_has_the_remaining_elements(elements, counts):
    worker = started(elements, window=6, payload_bytes=16)
    assert [send.count for send in send_all(worker)] == counts


def test_operations_stream_through_the_window_without_a_barrier():
    worker = make_worker(window=3)
    worker.start(10, 3, I32)
    worker.start(11, 9, F16)
    sends = send_all(worker)
    assert [(send.header.operation, send.first, send.count) for send in sends] == [(10, 0, 2), (10, 2, 1), (11, 0, 4)]
    got = receive(worker, answer_to(sends[0]))
    assert (got.outcome, got.first, got.finished) == ("received", 0, False)
    assert [(send.header.operation, send.first) for send in send_all(worker)] == [(11, 4)]
    assert receive(worker, answer_to(sends[1])).finished


def test_the_window_moves_only_past_the_oldest_answer():
    worker = started(20, window=4)
    sends = send_all(worker)
    for chunk in (3, 2, 1):
        assert receive(worker, answer_to(sends[chunk], i32(chunk, 0))).values == i32(chunk, 0)
        assert worker.sendable() == 0
    receive(worker, answer_to(sends[0]))
    assert worker.oldest_outstanding == 4
    assert chunks(send_all(worker)) == [4, 5, 6, 7]


def test_answers_in_any_order_finish_an_operation_once():
    worker = started(6, window=3)
    sends = send_all(worker)
    finished = [receive(worker, answer_to(sends[chunk])).finished for chunk in (2, 0, 1)]
    assert finished == [False, False, True]
    assert worker.idle
    assert worker.poll_timeout() == -1


def test_a_worker_has_at_most_16_operations_in_progress():
    worker = make_worker(window=2)
    for number in range(protocol.MAX_OPERATIONS):
        assert worker.can_start()
        worker.start(number, 1, I32)
    assert not worker.can_start()
    before = worker.copy()
    with pytest.raises(ValueError, match="too many"):
        worker.start(16, 1, I32)
    assert_same(worker, before)
    receive(worker, answer_to(send_all(worker)[0]))
    assert worker.can_start()


def test_an_operation_without_elements_is_refused():
    with pytest.raises(ValueError, match="none of its elements"):
        make_worker().start(0, 0, I32)


# Repair.


def test_a_gap_in_the_answers_causes_a_retransmission_without_a_timeout():
    worker = started(100, window=16)
    sends = send_all(worker, now_ns=0)
    for chunk in range(1, REORDER_THRESHOLD):
        receive(worker, answer_to(sends[chunk]), now_ns=100)
        assert worker.sendable() == 0, "reordering by less than the threshold is no loss"
    receive(worker, answer_to(sends[REORDER_THRESHOLD]), now_ns=100)
    (again,) = send_all(worker, now_ns=100)
    assert worker.poll_timeout() > 100
    assert (again.header.chunk, again.again, worker.retransmissions) == (0, True, 1)
    assert (again.first, again.count) == (sends[0].first, sends[0].count)
    assert again.header.packet_number > sends[-1].header.packet_number


def test_an_answer_to_a_retransmission_reveals_no_gap():
    # It may answer the first send, so it shows nothing about packets that were sent before the second (Karn).
    worker = started(100, window=16)
    sends = send_all(worker, now_ns=0)
    for chunk in range(1, REORDER_THRESHOLD + 1):
        receive(worker, answer_to(sends[chunk]), now_ns=100)
    (again,) = send_all(worker, now_ns=100)
    receive(worker, answer_to(again), now_ns=200)
    following = list(range(16, 16 + REORDER_THRESHOLD + 1))
    assert chunks(send_all(worker, now_ns=200)) == following, "the window moved, and no other chunk counts as lost"


def test_a_timeout_probes_with_the_oldest_chunk_alone():
    # All of them may be waiting for a straggler.
    worker = started(100, window=30)
    send_all(worker)
    due_ns = worker.poll_timeout()
    assert due_ns == 50 * MS
    before = worker.copy()
    worker.handle_timeout(due_ns - 1)
    assert_same(worker, before)
    worker.handle_timeout(due_ns)
    (again,) = send_all(worker, now_ns=due_ns)
    assert (again.header.chunk, again.again, worker.retransmissions) == (0, True, 1)


def test_after_an_answered_probe_twice_as_many_overdue_chunks_go_each_round_trip():
    worker = started(62, window=31)
    assert len(send_all(worker)) == 31
    now_ns = worker.poll_timeout()
    worker.handle_timeout(now_ns)
    rounds = []
    while flight := send_all(worker, now_ns):
        rounds.append(len(flight))
        now_ns += MS
        for send in flight:
            receive(worker, answer_to(send), now_ns)
        assert send_all(worker, now_ns) == [], "the other answers may follow at once"
        if not worker.idle:
            assert worker.poll_timeout() == now_ns + PROBE_WAIT_NS
            now_ns = worker.poll_timeout()
            worker.handle_timeout(now_ns)
    assert rounds == [PROBE_GROWTH**number for number in range(5)], "a whole lost window of 31 in five round trips"
    assert worker.idle


def test_a_pause_of_the_path_costs_one_probe():
    # The answers were only late: they follow the probe's answer, and no further chunk is sent again.
    worker = started(100, window=30)
    sends = send_all(worker)
    worker.handle_timeout(50 * MS)
    send_all(worker, 50 * MS)
    for send in sends[:10]:
        receive(worker, answer_to(send), 51 * MS)
    worker.handle_timeout(51 * MS + PROBE_WAIT_NS)
    assert not any(send.again for send in send_all(worker, 51 * MS + PROBE_WAIT_NS))
    assert worker.retransmissions == 1


def test_an_answered_probe_resends_no_chunk_that_is_not_overdue():
    worker = started(100, window=4)
    sends = send_all(worker)
    worker.handle_timeout(50 * MS)
    (probe,) = send_all(worker, 50 * MS)
    for send in sends[1:]:
        receive(worker, answer_to(send), 50 * MS)
    fresh = send_all(worker, 51 * MS)
    assert fresh == [], "the window waits for the probe"
    receive(worker, answer_to(probe), 52 * MS)
    assert not any(send.again for send in send_all(worker, 52 * MS))
    assert worker.retransmissions == 1


def test_an_answer_to_a_chunk_resent_for_a_gap_is_no_answered_probe():
    # The path works: overdue answers may still come, and the timer covers them.
    worker = started(100, window=16)
    sends = send_all(worker, now_ns=0)
    for chunk in range(1, REORDER_THRESHOLD + 1):
        receive(worker, answer_to(sends[chunk]), now_ns=40 * MS)
    (again,) = send_all(worker, now_ns=40 * MS)
    now_ns = 80 * MS
    assert 90 * MS < worker.poll_timeout() < 100 * MS, "the packets sent at 0 are overdue, and no timeout came"
    receive(worker, answer_to(again), now_ns)
    assert not any(send.again for send in send_all(worker, now_ns))


def test_a_chunk_that_is_passed_over_waits_for_another_workers_repair_while_no_answer_is_missing():
    worker = make_worker(window=128)
    worker.start(0, 64, I32)
    sends = send_all(worker)
    for number, send in enumerate(sends[1:], start=1):
        receive(worker, numbered(send, number), 2 * MS)
    assert send_all(worker, 2 * MS) == [], "the switch answered all complete chunks, in this order"
    worker.start(1, 60, I32)
    later = send_all(worker, 9 * MS)
    # A repair may take a timeout, here its least value, and a round trip.
    receive(worker, numbered(later[0], 32), 11 * MS)
    assert send_all(worker, 11 * MS) == []
    receive(worker, numbered(later[1], 33), 13 * MS)
    assert chunks(send_all(worker, 13 * MS)) == [0]


def test_a_skipped_number_resends_only_the_chunk_that_was_sent_at_its_place():
    worker = started(200, window=64)
    sends = send_all(worker)
    # Chunk 0 waits for another worker; the answer to chunk 3, the third, was lost.
    for number, chunk in [(1, 1), (2, 2), *((chunk, chunk) for chunk in range(4, 12))]:
        receive(worker, numbered(sends[chunk], number), 100)
    assert [send.header.chunk for send in send_all(worker, 100) if send.again] == [3]


def test_a_skipped_number_without_a_chunk_between_resends_one_that_had_been_passed_over():
    worker = started(200, window=64)
    sends = send_all(worker)
    for number, chunk in enumerate(range(1, 20), start=1):
        receive(worker, numbered(sends[chunk], number), 100)
    # Chunk 0 completed late, and its answer, number 20, was lost.
    receive(worker, numbered(sends[20], 21), 100)
    assert [send.header.chunk for send in send_all(worker, 100) if send.again] == [0]


def test_an_answer_that_is_lost_twice_is_requested_twice_without_a_timeout():
    worker = started(40, window=64)
    sends = send_all(worker)
    for chunk in range(1, 10):
        receive(worker, numbered(sends[chunk], chunk + 1), 100)
    assert chunks(send_all(worker, 100)) == [0]
    worker.start(1, 40, I32)
    later = send_all(worker, 200)
    for place, send in enumerate(sends[10:] + later[:7], start=11):
        receive(worker, numbered(send, place), 300)
    assert send_all(worker, 300) == []
    receive(worker, numbered(later[7], 28), 300)
    assert chunks(send_all(worker, 300)) == [0], "the switch answers a duplicate at once"


def test_a_nack_resends_the_named_packets_and_no_others():
    worker = started(100, window=16)
    sends = send_all(worker)
    got = receive(worker, nack(3, 2))
    assert got.outcome == "nack"
    again = send_all(worker)
    assert chunks(again) == [2, 3], "packet numbers begin at 1"
    assert all(send.again for send in again)
    assert [send.header.packet_number for send in again] == [17, 18]
    before = worker.copy()
    assert receive(worker, nack(3, 2)).drop == "stale", "they are in flight again"
    assert_same(worker, before)
    receive(worker, nack(18, 1))
    assert chunks(send_all(worker)) == [3], "a second loss is found like the first"
    receive(worker, answer_to(sends[0]))
    assert receive(worker, nack(1, 1)).drop == "stale"


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("worker", {"worker": 1}),
        ("worker", {"worker": 2}),
        ("epoch", {"epoch": EPOCH - 1}),
        ("direction", {"flags": FLAGS["nack"]}),
        ("malformed", {"count": 1}),
        ("malformed", {"elements": 0}),
        ("stale", {"chunk": 17}),
        ("stale", {"chunk": 0, "elements": 1}),
    ],
)
def test_a_worker_drops_an_invalid_nack(reason, changes):
    worker = started(100, window=16)
    send_all(worker)
    before = worker.copy()
    got = receive(worker, nack(1, 3, **changes))
    assert (got.outcome, got.drop) == ("dropped", reason)
    assert_same(worker, before)


# The congestion window.


class Path:
    """A streaming worker; a test sets each round trip's time, and all packets are answered in order."""

    def __init__(self, window=320):
        self.worker, self.now_ns, self.numbers = started(10_000_000, window=window), 0, 0

    def after_slow_start(self, rtt_ns=MS):
        for _ in range(8):
            self.round_trip(rtt_ns)
        assert self.worker.congestion_window == 320
        return self

    def round_trip(self, rtt_ns, lost=0):
        """Return the window before and after. lost: so many of the first packets are lost, and named by a NACK."""
        sends = self.send_all()
        before = self.worker.congestion_window
        self.now_ns += rtt_ns
        if lost:
            receive(self.worker, nack(sends[0].header.packet_number, lost), self.now_ns)
        for send in sends[lost:]:
            self.numbers += 1
            receive(self.worker, numbered(send, self.numbers), self.now_ns)
        again = [send for send in self.send_all() if send.again][:lost] if lost else []
        for send in again:
            self.numbers += 1
            receive(self.worker, numbered(send, self.numbers), self.now_ns)
        return before, self.worker.congestion_window

    def send_all(self):
        """Send all that the window allows, at its pace; round trips are counted from the end of sending."""
        sends, now_ns = [], self.now_ns
        while (more := send_all(self.worker, now_ns)) or self.worker.next_send_ns() >= 0:
            sends += more
            now_ns = max(now_ns, self.worker.next_send_ns())
        self.now_ns = now_ns
        return sends

    def shared(self, others, per_chunk_ns=MS // 8):
        """Make a round trip through a queue with `others` packets of other flows; return the control after it."""
        self.round_trip((self.worker.congestion_window + others) * per_chunk_ns)
        return self.worker.control


def test_the_congestion_window_starts_small_and_doubles_each_round_trip():
    worker = started(10_000, window=320)
    assert worker.congestion_window == LEAST_WINDOW
    assert len(send_all(worker)) == LEAST_WINDOW
    path = Path()
    sizes = [path.round_trip(MS)[1] for _ in range(4)]
    assert sizes == [64, 128, 256, 320]


def test_a_window_below_the_least_is_sent_at_once():
    assert len(send_all(started(100, window=30))) == 30


def test_an_operation_begins_with_the_window_that_the_last_one_ended_with():
    worker = started(2_000, window=320)
    now_ns = 0
    while not worker.idle:
        sends = send_all(worker, now_ns)
        now_ns += MS
        for send in sends:
            receive(worker, answer_to(send), now_ns)
    window = worker.congestion_window
    assert window > 4 * LEAST_WINDOW
    worker.start(1, 2_000, I32)
    assert len(send_all(worker, now_ns + 60_000 * MS)) == window


def test_slow_start_ends_with_half_the_window_that_found_a_queue():
    path = Path()
    for _ in range(2):
        path.round_trip(MS)
    path.round_trip(20 * MS)  # its first answer ends the previous round trip
    assert path.round_trip(20 * MS) == (256, 128)
    assert path.worker.control == "delay"


def test_a_queue_on_the_path_shrinks_the_window_to_what_the_target_allows():
    path = Path().after_slow_start()
    sizes = [path.round_trip(path.worker.congestion_window * MS // 20)[1] for _ in range(20)]  # 16 ms at 320
    # 1 + 3.5 ms at 20 packets a millisecond, and the growth of two round trips.
    assert all(76 <= size <= 90 + 2 * WINDOW_GROWTH for size in sizes[3:]), sizes
    assert path.worker.control == "delay"
    assert path.worker.in_flight <= path.worker.congestion_window


def test_the_congestion_window_grows_back_to_the_granted_window_and_no_further():
    path = Path().after_slow_start()
    for _ in range(3):
        path.round_trip(60 * MS)
    for _ in range(ROUNDS_BETWEEN_TRIALS + 4):  # until a trial finds that the queue is gone
        path.round_trip(1 * MS)
    assert path.worker.control == "delay"
    for _ in range(60):
        before, after = path.round_trip(1 * MS)
        assert after in (320, before + WINDOW_GROWTH)
    assert after == 320


def test_a_long_path_is_no_queue():
    path = Path()
    sizes = [path.round_trip(80 * MS)[1] for _ in range(5)]
    assert sizes == [64, 128, 256, 320, 320]


def test_a_path_that_became_longer_is_recognised_in_a_few_trials():
    path = Path().after_slow_start()
    for _ in range(3):
        path.round_trip(60 * MS)
    controls = set()
    for _ in range(5 * (ROUNDS_BETWEEN_TRIALS + 3)):
        path.round_trip(60 * MS)
        controls.add(path.worker.control)
    assert controls == {"share", "delay"}
    assert path.worker.control == "delay"
    assert all(path.round_trip(60 * MS)[1] == 320 for _ in range(20)), "there are no further trials"


@pytest.mark.parametrize("others", [100, 160, 220])
def test_the_window_approaches_that_of_other_flows_that_keep_the_queue_full(others):
    path = Path().after_slow_start()
    controls = [path.shared(others) for _ in range(20 * (ROUNDS_BETWEEN_TRIALS + 3))]
    assert controls[40:] == ["share"] * len(controls[40:])
    windows = [path.round_trip((path.worker.congestion_window + others) * MS // 8)[0] for _ in range(60)]
    assert 0.5 * others < sum(windows) / 60 < 1.3 * others


def test_a_flow_that_fills_the_queue_to_just_below_the_target_does_not_take_the_link():
    path = Path().after_slow_start()
    controls, windows = set(), []
    for number in range(400):  # above 1 ms + the target of 3.5 ms, and below in one of four, whatever the worker sends
        windows.append(path.round_trip(5 * MS if number % 4 else 4 * MS)[1])
        controls.add(path.worker.control)
    assert "share" in controls
    assert min(windows[200:]) > 4 * LEAST_WINDOW


def test_after_the_other_flows_have_left_the_control_is_delay_again():
    path = Path().after_slow_start()
    for _ in range(60):
        path.shared(160)
    assert path.worker.control == "share"
    for _ in range(2 * (ROUNDS_BETWEEN_TRIALS + 3)):
        path.shared(0)
    assert path.worker.control == "delay"
    assert path.worker.congestion_window <= 96, "a queue of 11 ms"


# Pacing.


def test_a_free_window_after_a_pause_is_spread_over_a_round_trip():
    path = Path().after_slow_start(rtt_ns=20 * MS)
    worker, begin_ns = path.worker, path.now_ns + 1000 * MS
    sent = [(begin_ns, len(send_all(worker, begin_ns)))]
    while worker.next_send_ns() >= 0:
        now_ns = worker.next_send_ns()
        sent.append((now_ns, len(send_all(worker, now_ns))))
    assert sum(count for _, count in sent) == worker.congestion_window == 320
    rtt_ns = worker.smoothed_rtt_ns
    assert sent[0][1] <= 320 // 2 + 1, "a quarter of a round trip at twice the window per round trip"
    assert sent[-1][0] - begin_ns > rtt_ns // 5
    for (earlier_ns, _), (later_ns, count) in pairwise(sent):
        assert later_ns - earlier_ns >= BURST_NS // 2, "no timer for a few packets"
        assert count <= 2 * 320 * (later_ns - earlier_ns) / rtt_ns + 1


def test_a_path_that_answers_within_a_burst_is_not_paced():
    path = Path().after_slow_start(rtt_ns=MS)
    sends = send_all(path.worker, path.now_ns + 50 * MS)
    assert len(sends) == 320
    assert path.worker.next_send_ns() == -1


def test_a_window_of_the_least_size_is_not_paced():
    worker = started(10_000, window=320)
    sends = send_all(worker)
    assert len(sends) == LEAST_WINDOW
    assert worker.next_send_ns() == -1


# Losses and stragglers.


def test_few_losses_are_no_congestion_and_many_are():
    path = Path().after_slow_start()
    for _ in range(4):
        assert path.round_trip(1 * MS, lost=15)[1] == 320
    assert path.round_trip(1 * MS, lost=120)[1] <= 320
    assert path.round_trip(1 * MS)[1] < 320


def test_a_straggler_is_no_queue():
    worker = Path().after_slow_start().worker
    now_ns = 100 * MS
    sends = send_all(worker, now_ns)
    receive(worker, answer_to(sends[0]), now_ns + MS)
    for _ in range(10):
        now_ns = worker.poll_timeout()
        worker.handle_timeout(now_ns)
        send_all(worker, now_ns)
    for send in sends[1:]:
        receive(worker, answer_to(send), now_ns + MS)
    fresh = send_all(worker, now_ns + MS)
    receive(worker, answer_to(fresh[-1]), now_ns + 2 * MS)
    assert worker.congestion_window == 320


def test_a_probe_is_sent_although_the_congestion_window_is_full():
    path = Path().after_slow_start()
    path.round_trip(60 * MS)
    sends = path.send_all()
    path.now_ns += 60 * MS
    for send in sends[:9]:
        path.numbers += 1
        receive(path.worker, numbered(send, path.numbers), path.now_ns)
    assert path.worker.in_flight > path.worker.congestion_window
    assert send_all(path.worker, path.now_ns) == []
    path.now_ns = path.worker.poll_timeout()
    path.worker.handle_timeout(path.now_ns)
    assert path.worker.sendable() == 1
    (probe,) = send_all(path.worker, path.now_ns)
    assert probe.again


# Timers.


def test_timeouts_back_off_to_a_bound_until_an_answer_comes():
    worker = started(100, window=4)
    sends = send_all(worker)
    now_ns, waits_ms = 0, []
    for _ in range(20):
        due_ns = worker.poll_timeout()
        waits_ms.append((due_ns - now_ns) / MS)
        now_ns = due_ns
        worker.handle_timeout(now_ns)
        send_all(worker, now_ns)
    assert waits_ms == [50, 100] + [200] * 18
    assert worker.retransmissions == 20
    receive(worker, answer_to(sends[2]), now_ns)
    assert worker.poll_timeout() == now_ns + PROBE_WAIT_NS
    now_ns += PROBE_WAIT_NS
    worker.handle_timeout(now_ns)
    assert worker.poll_timeout() == now_ns + 50 * MS


def test_the_timeout_follows_the_round_trip_between_two_bounds():
    for rtt_ns, timeout_ns in [(1000, 10 * MS), (20 * MS, 60 * MS), (150 * MS, 200 * MS)]:
        worker = started(100, window=2)
        sends = send_all(worker)
        receive(worker, answer_to(sends[0]), rtt_ns)
        assert worker.smoothed_rtt_ns == rtt_ns
        assert worker.poll_timeout() == rtt_ns + timeout_ns  # RFC 6298: srtt + 4 * (rtt / 2) at first


def test_a_chunk_that_was_sent_twice_measures_no_round_trip():
    worker = started(100, window=1)
    send_all(worker)
    worker.handle_timeout(50 * MS)
    (again,) = send_all(worker, 50 * MS)
    receive(worker, answer_to(again), 51 * MS)
    assert worker.smoothed_rtt_ns == 0


def test_an_answer_to_a_chunk_that_counts_as_lost_is_accepted_and_nothing_is_resent():
    worker = started(100, window=3)
    sends = send_all(worker)
    worker.handle_timeout(50 * MS)
    assert worker.sendable() == 1
    assert receive(worker, answer_to(sends[0]), 50 * MS).outcome == "received"
    assert chunks(send_all(worker, 50 * MS)) == [3], "the window allows one more"
    assert worker.retransmissions == 0


def test_refused_chunks_are_offered_again_in_order_and_count_as_no_retransmission():
    worker = started(100, window=4)
    sends = send_all(worker)
    for send in sends[1:]:
        worker.not_sent(send.header.chunk)
    assert (worker.in_flight, worker.sendable()) == (1, 3)
    again = send_all(worker)
    assert chunks(again) == [1, 2, 3]
    assert not any(send.again for send in again)
    assert worker.retransmissions == 0
    assert [send.header.packet_number for send in again] == [5, 6, 7], "a packet number never repeats"


def test_a_refused_chunk_stops_the_timer_when_nothing_else_is_in_flight():
    worker = started(2)
    (send,) = send_all(worker)
    worker.not_sent(send.header.chunk)
    assert worker.poll_timeout() == -1
    assert chunks(send_all(worker, 70 * MS)) == [0]
    assert worker.poll_timeout() == 120 * MS


def test_a_refused_retransmission_is_not_counted_until_it_is_sent():
    worker = started(100, window=1)
    send_all(worker)
    worker.handle_timeout(50 * MS)
    (again,) = send_all(worker, 50 * MS)
    assert worker.retransmissions == 1
    worker.not_sent(again.header.chunk)
    assert worker.retransmissions == 0
    assert send_all(worker, 51 * MS)[0].again
    assert worker.retransmissions == 1


def test_not_sent_of_a_chunk_that_is_not_in_flight_changes_nothing():
    worker = started(6, window=3)
    sends = send_all(worker)
    receive(worker, answer_to(sends[0]))
    receive(worker, answer_to(sends[2]))
    before = worker.copy()
    for chunk in (0, 2, 3, 2**63):
        worker.not_sent(chunk)
        assert_same(worker, before)


# Dropped packets.

DROPS = {
    "another_job": ("foreign", {"job": JOB + 1}),
    "a_former_epoch": ("epoch", {"epoch": EPOCH - 1}),
    "another_incarnation_of_the_switch": ("incarnation", {"incarnation": INCARNATION ^ 1}),
    "a_worker_the_job_does_not_have": ("worker", {"worker": 2}),
    "a_contribution": ("direction", {"flags": 0}),
    "a_hello": ("direction", {"flags": FLAGS["from_switch"] | FLAGS["hello"]}),
    "a_chunk_not_yet_sent": ("window", {"chunk": 5}),
    "the_largest_chunk": ("window", {"chunk": 2**64 - 1}),
    "a_chunk_before_its_window": ("stale", {"chunk": 0}),
    "a_chunk_it_has": ("duplicate", {"chunk": 3}),
    "another_operation": ("malformed", {"operation": 1}),
    "another_count": ("malformed", {"count": 1}),
    "another_wire_format": ("malformed", {"wire": F16}),
    "another_operator": ("malformed", {"reduce": MAX}),
    "an_operator_that_its_wire_format_does_not_know": ("malformed", {"reduce": MIN_LOC}),
    "a_mismatch_about_a_chunk_before_its_window": (
        "stale",
        {"chunk": 0, "flags": FLAGS["from_switch"] | FLAGS["mismatch"]},
    ),
}


@pytest.mark.parametrize("what", DROPS)
def test_a_worker_drops(what):
    reason, changes = DROPS[what]
    worker = started(100, window=4)
    sends = send_all(worker)
    receive(worker, answer_to(sends[0]), 10)
    receive(worker, answer_to(sends[3]), 10)
    sends += send_all(worker)  # base 1, in flight 1 2 4, answered 3
    before = worker.copy()
    got = receive(worker, answer_to(sends[2], **changes), 20)
    assert (got.outcome, got.drop) == ("dropped", reason)
    assert_same(worker, before)


@pytest.mark.parametrize("bytes_more", [-56, -9, -8, -1, 1, 8])
def test_a_worker_drops_a_packet_of_another_length(bytes_more):
    worker = started(2)
    (send,) = send_all(worker)
    before = worker.copy()
    got = receive(worker, (answer_to(send) + bytes(8))[: 56 + bytes_more], 20)
    assert (got.outcome, got.drop) == ("dropped", "length" if bytes_more >= -8 else "malformed")
    assert_same(worker, before)


def test_an_answer_from_before_the_first_operation_is_dropped():
    worker = make_worker()
    before = worker.copy()
    got = receive(worker, make_packet(flags=FLAGS["from_switch"]))
    assert (got.outcome, got.drop) == ("dropped", "window")
    assert_same(worker, before)


def test_a_mismatch_names_the_other_worker_and_changes_nothing():
    worker = started(100, window=2)
    sends = send_all(worker)
    before = worker.copy()
    other = {"worker": 1, "operation": 8, "elements": 5, "flags": FLAGS["from_switch"] | FLAGS["mismatch"]}
    got = receive(worker, answer_to(sends[0], **other), 20)
    assert got.outcome == "mismatch"
    assert (got.header.worker, got.header.operation, got.header.elements) == (1, 8, 5)
    assert_same(worker, before)


@pytest.mark.parametrize(
    "shape",
    [{"workers": 0}, {"worker": 2}, {"window": 0}, {"payload_bytes": 0}, {"payload_bytes": 12}],
    ids=str,
)
def test_a_worker_of_an_impossible_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"worker|window|payload"):
        make_worker(**shape)


# Value semantics.

ACTION = st.one_of(
    st.tuples(st.just("start"), st.integers(1, 7)),
    st.tuples(st.just("send"), st.integers(1, 4)),
    st.tuples(st.just("answer"), st.integers(0, 3)),
    st.tuples(st.just("not_sent"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([1, 100, 60 * MS])),
)


class Player:
    """Plays actions on a worker, and keeps its sends for the answers."""

    def __init__(self):
        self.worker, self.now_ns, self.operations, self.sent = make_worker(window=3), 0, 0, {}

    def play(self, actions):
        for kind, number in actions:
            if kind == "start" and self.worker.can_start():
                self.worker.start(self.operations, number, I32)
                self.operations += 1
            elif kind == "send":
                for _ in range(number):
                    if (send := self.worker.poll_send(self.now_ns)) is not None:
                        self.sent[send.header.chunk] = answer_to(send)
            elif kind == "answer":
                chunk = self.worker.oldest_outstanding + number
                if chunk in self.sent:
                    self.worker.handle_packet(self.sent[chunk], self.now_ns)
            elif kind == "not_sent":
                self.worker.not_sent(self.worker.oldest_outstanding + number)
            elif kind == "wait":
                self.now_ns += number
                self.worker.handle_timeout(self.now_ns)
        return self.worker


@given(st.lists(ACTION, max_size=25), st.lists(ACTION, min_size=1, max_size=6))
def test_a_copy_of_a_worker_is_independent_of_the_original(past, future):
    player = Player()
    worker = player.play(past)
    copy = worker.copy()
    assert_same(copy, worker)
    player.play(future)
    assert_same(copy, Player().play(past))
    assert_same(worker, Player().play(past + future))


@given(st.lists(ACTION, max_size=8), st.lists(ACTION, max_size=8))
def test_canonical_bytes_of_a_worker_are_equal_exactly_when_the_machines_are(one, two):
    first, second = Player().play(one), Player().play(two)
    assert (first == second) == (first.canonical() == second.canonical())


@pytest.mark.parametrize("field", ["job", "epoch", "incarnation", "worker"])
def test_workers_of_other_generations_have_other_canonical_bytes(field):
    one, two = make_worker(workers=3), make_worker(**{"workers": 3, field: 2})
    assert one != two
    assert one.canonical() != two.canonical()


def test_workers_with_the_same_chunks_in_other_operations_are_equal_exactly_when_their_bytes_are():
    one, two = make_worker(window=2), make_worker(window=2)
    one.start(0, 4, I32)
    two.start(0, 2, I32)
    two.start(0, 2, I32)
    for worker in (one, two):
        for send in send_all(worker):
            receive(worker, answer_to(send))
        assert worker.idle
    assert (one == two) == (one.canonical() == two.canonical())
