"""Messages between two ranks: matching, flow control, failures, and collectives beside them.

With torch: core/tests/torch/test_point_to_point_torch.py.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from fabrics import need_libfabric
from load import seconds
from ranks import run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.communicator import CollectiveTimeout, GroupAborted, Mismatch, PeerLost
from netfold.communicator.connection_manager import GroupMonitor
from netfold.communicator.group import ANY_SOURCE, region

native = pytest.mark.native

# netfold/collective/point_to_point.hpp
EAGER_BYTES = 128 << 10
CREDIT_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
SOON_S = 3.0


@pytest.fixture(autouse=True, params=["auto", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All tests run over shared memory and over connections."""
    monkeypatch.setenv("NETFOLD_TRANSPORT", request.param)
    return str(request.param)


def join(rank: int, size: int, folder: str, timeout_s: float | None = None) -> Communicator:
    return Communicator(FileStore(folder), rank, size, timeout_s=timeout_s or seconds(20), join_timeout_s=seconds(20))


def message(count: int, sender: int, tag: int, dtype: str = "float32") -> Any:
    """Distinct in every element, and different for every sender and tag."""
    return ((np.arange(count, dtype=np.int64) * 7 + 1000 * sender + 13 * tag) % 65521).astype(dtype)


def start_send(group: Communicator, buffer: Any, to: int, tag: int = 0) -> Any:
    return group.group.submit(
        "send", dtype="f32", root=to, tag=tag, inputs=[region(buffer)], wait_here=False, timeout_s=seconds(20)
    )


def start_receive(group: Communicator, buffer: Any, source: int = ANY_SOURCE, tag: int = 0) -> Any:
    return group.group.submit(
        "receive", dtype="f32", root=source, tag=tag, outputs=[region(buffer)], wait_here=False, timeout_s=20
    )


SIZES = [0, 1, 1000, EAGER_BYTES // 4, EAGER_BYTES // 4 + 1, PIECE_BYTES // 4, 2 * PIECE_BYTES // 4 + 3, 3_000_000]


def sends_every_size(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        for count in SIZES:
            for late in (False, True):
                if rank == 0:
                    group.send(message(count, 0, 3), 1, tag=3)
                else:
                    if late:
                        time.sleep(0.01)
                    into = np.full(count, -1, np.float32)
                    assert group.receive(into, 0, tag=3) == 0
                    np.testing.assert_array_equal(into, message(count, 0, 3))


@native
def test_messages_of_every_size_arrive_whole() -> None:
    values(run_threads(sends_every_size, 2))


def exchanges(rank: int, size: int, folder: str, count: int) -> None:
    with join(rank, size, folder) as group:
        peers = [peer for peer in range(size) if peer != rank]
        sent = {peer: message(count, rank, peer) for peer in peers}
        got = {peer: np.full(count, -1, np.float32) for peer in peers}
        work = [start_send(group, sent[peer], peer, tag=peer) for peer in peers]
        work += [start_receive(group, got[peer], peer, tag=rank) for peer in peers]
        for operation in reversed(work):
            group.group.wait(operation)
        for peer in peers:
            np.testing.assert_array_equal(got[peer], message(count, peer, rank))


@native
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_all_ranks_may_send_to_each_other_at_once(count: int) -> None:
    values(run_threads(exchanges, 4, count))


def out_of_order(rank: int, size: int, folder: str, counts: list[int]) -> None:
    with join(rank, size, folder) as group:
        if rank == 0:
            kept = [message(count, 0, tag) for tag, count in enumerate(counts)]
            work = [start_send(group, buffer, 1, tag) for tag, buffer in enumerate(kept)]
            for operation in work:
                group.group.wait(operation)
        else:
            for tag, count in reversed(list(enumerate(counts))):
                into = np.full(count, -1, np.float32)
                group.receive(into, 0, tag)
                np.testing.assert_array_equal(into, message(count, 0, tag))


@native
@pytest.mark.parametrize("counts", [[5] * 20, [100_000] * 5, [10, 100_000, 0, 20, 200_000, 7]])
def test_tags_may_be_received_in_any_order(counts: list[int]) -> None:
    values(run_threads(out_of_order, 2, counts))


def one_tag(rank: int, size: int, folder: str) -> None:
    sizes = [3, 100_000, 5, 0, 300_000, 1]
    with join(rank, size, folder) as group:
        if rank == 0:
            kept = [message(count, 0, place) for place, count in enumerate(sizes)]
            for operation in [start_send(group, buffer, 1) for buffer in kept]:
                group.group.wait(operation)
        else:
            into = [np.full(count, -1, np.float32) for count in sizes]
            work = [start_receive(group, buffer, 0) for buffer in into]
            for operation in work:
                group.group.wait(operation)
            for place, buffer in enumerate(into):
                np.testing.assert_array_equal(buffer, message(len(buffer), 0, place))


@native
def test_messages_of_one_tag_keep_their_order_whether_large_or_small() -> None:
    values(run_threads(one_tag, 2))


def gathers_from_any(rank: int, size: int, folder: str, count: int) -> None:
    with join(rank, size, folder) as group:
        if rank != 0:
            group.send(message(count, rank, 5), 0, tag=5)
            return
        found = set()
        for _ in range(size - 1):
            into = np.full(count, -1, np.float32)
            source = group.receive(into, tag=5)
            np.testing.assert_array_equal(into, message(count, source, 5))
            found.add(source)
        assert found == set(range(1, size))


@native
@pytest.mark.parametrize("count", [10, 500_000])
def test_a_receive_from_any_source_returns_the_sender(count: int) -> None:
    values(run_threads(gathers_from_any, 4, count))


def any_and_named(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        if rank == 0:
            into = [np.zeros(4, np.float32) for _ in range(4)]
            work = [
                start_receive(group, into[0], ANY_SOURCE),
                start_receive(group, into[1], 1),
                start_receive(group, into[2], 2),
                start_receive(group, into[3], ANY_SOURCE),
            ]
            group.barrier()
            for place, operation in enumerate(work):
                if place == 2:
                    group.send(np.zeros(1), 2, tag=1)
                group.group.wait(operation)
            # Rank 1's first message matches the receive that was posted first, though it names no source.
            assert [operation.peer for operation in work] == [1, 1, 2, 2]
            assert [buffer[0] for buffer in into] == [10.0, 11.0, 20.0, 21.0]
            return
        group.barrier()
        if rank == 2:
            group.receive(np.zeros(1), 0, tag=1)  # rank 1's messages have arrived
        for place in range(2):
            group.send(np.full(4, 10.0 * rank + place, np.float32), 0)


@native
def test_receives_match_in_the_order_of_posting_with_or_without_a_source() -> None:
    values(run_threads(any_and_named, 3))


def floods(rank: int, size: int, folder: str, count: int) -> int:
    with join(rank, size, folder) as group:
        if rank == 0:
            kept = [np.full(1, number, np.float32) for number in range(count)]
            work = [start_send(group, buffer, 1, tag=number) for number, buffer in enumerate(kept)]
            at_once = sum(operation.done for operation in work)
            group.barrier()
            for operation in work:
                group.group.wait(operation)
            return at_once
        group.barrier()
        into = np.zeros(1, np.float32)
        for number in reversed(range(count)):
            assert group.receive(into, 0, tag=number) == 0
            assert into[0] == number
        return 0


@native
def test_ten_thousand_unreceived_messages_stay_within_the_credit() -> None:
    at_once, _ = values(run_threads(floods, 2, 10_000))
    # The bytes that a sender may leave at the receiver. Beyond them, announcements wait in the sender's memory.
    assert 0 < at_once <= CREDIT_BYTES // 256


def streams_small(rank: int, size: int, folder: str) -> None:
    """Much more than the credit, which returns as messages are received."""
    with join(rank, size, folder) as group:
        for number in range(2000):
            if rank == 0:
                group.send(np.full(1000, number, np.float32), 1)
            else:
                into = np.zeros(1000, np.float32)
                group.receive(into)
                assert into[0] == into[-1] == number


@native
def test_credit_returns_as_messages_are_received() -> None:
    values(run_threads(streams_small, 2))


def never_received(rank: int, size: int, folder: str) -> float:
    with join(rank, size, folder) as group:
        large, small = np.ones(4_000_000, np.float32), np.ones(3, np.float32)
        work = []
        if rank == 0:
            work = [start_send(group, large, 1, tag=1)] + [start_send(group, small, 1, tag=2) for _ in range(5000)]
        for count in (10, 1_000_000):
            for _ in range(3):
                buffer = np.full(count, rank + 1.0, np.float32)
                group.all_reduce(buffer)
                assert buffer[0] == buffer[-1] == 3.0
        if rank == 0:
            assert not work[0].done
        group.barrier()
        return time.monotonic()


@native
def test_unreceived_sends_do_not_delay_collectives() -> None:
    values(run_threads(never_received, 2))


def overtakes_a_collective(rank: int, size: int, folder: str, count: int) -> None:
    with join(rank, size, folder) as group:
        buffer = np.full(1_000_000, rank + 1.0, np.float32)
        word = message(count, 0, 0)
        if rank == 0:
            work = group.group.submit("all_reduce", dtype="f32", outputs=[region(buffer)], wait_here=False)
            group.send(word, 1)  # rank 1 receives this before it makes the call that the sum waits for
            group.group.wait(work)
        else:
            into = np.zeros(count, np.float32)
            group.receive(into, 0)
            np.testing.assert_array_equal(into, word)
            group.all_reduce(buffer)
        assert buffer[0] == buffer[-1] == 3.0


@native
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_a_message_does_not_wait_for_a_collective_before_it(count: int) -> None:
    values(run_threads(overtakes_a_collective, 2, count))


def unwatched(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        buffer = message(1_000_000, 0, 0) if rank == 0 else np.zeros(1_000_000, np.float32)
        operation = start_send(group, buffer, 1) if rank == 0 else start_receive(group, buffer, 0)
        deadline = time.monotonic() + seconds(SOON_S)
        while not operation.done and time.monotonic() < deadline:
            time.sleep(0.005)
        assert operation.done, "the engine thread drives an operation without a waiting thread"
        np.testing.assert_array_equal(buffer, message(1_000_000, 0, 0))


@native
def test_a_message_arrives_without_a_wait() -> None:
    values(run_threads(unwatched, 2))


def on_threads(rank: int, size: int, folder: str, threads: int) -> None:
    errors: list[BaseException] = []
    with join(rank, size, folder) as group:

        def play(tag: int) -> None:
            try:
                for turn in range(20):
                    count = 50_000 if turn % 10 == 0 else tag + turn
                    mine, theirs = message(count, rank, tag), np.full(count, -1, np.float32)
                    if (tag + rank) % 2:
                        group.send(mine, 1 - rank, tag)
                        group.receive(theirs, 1 - rank, tag)
                    else:
                        group.receive(theirs, None, tag)
                        group.send(mine, 1 - rank, tag)
                    np.testing.assert_array_equal(theirs, message(count, 1 - rank, tag))
            except BaseException as error:
                errors.append(error)

        players = [threading.Thread(target=play, args=(tag,)) for tag in range(threads)]
        for player in players:
            player.start()
        buffer = np.full(1000, rank + 1.0)
        for _ in range(10):
            group.all_reduce(buffer, op="max")
        for player in players:
            player.join(seconds(20))
        assert not errors, errors
        assert buffer[0] == 2.0
        group.barrier()


@native
def test_many_threads_may_send_and_receive_beside_collectives() -> None:
    values(run_threads(on_threads, 2, 8))


def random_traffic(rank: int, size: int, folder: str, seed: int) -> None:
    """Every rank knows all messages. It receives its own in a random order, some without naming the source."""
    random_for_all = random.Random(seed)
    messages = []
    for number in range(150):
        source, to = random_for_all.sample(range(size), 2)
        count = random_for_all.choice([0, 1, 40, 5000, 40_000, 300_000] if number % 10 == 0 else [0, 1, 40, 5000])
        messages.append((source, to, number if random_for_all.random() < 0.7 else 1000 + source, count, number))
    with join(rank, size, folder) as group:
        mine = random.Random(seed + rank)
        work, kept = [], []
        expected: list[tuple[Any, Any, int, int]] = []
        for source, to, tag, count, number in messages:
            if source == rank:
                kept.append(message(count, number, tag))
                work.append(start_send(group, kept[-1], to, tag))
        # Messages of one tag keep the sender's order; tags are received in any order.
        tags: dict[int, list[Any]] = {}
        for source, to, tag, count, number in messages:
            if to == rank:
                tags.setdefault(tag, []).append((source, tag, count, number))
        turns = list(tags)
        mine.shuffle(turns)
        for turn in turns:
            for source, tag, count, number in tags[turn]:
                into = np.full(count, -1, np.float32)
                named = source if mine.random() < 0.5 else ANY_SOURCE
                expected.append((start_receive(group, into, named, tag), into, source, number))
        mine.shuffle(expected)
        for operation, into, source, number in expected:
            group.group.wait(operation)
            assert operation.peer == source
            np.testing.assert_array_equal(into, message(len(into), number, messages[number][2]))
        for operation in work:
            group.group.wait(operation)
        group.barrier()


@native
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_arrives_at_its_destination(seed: int) -> None:
    values(run_threads(random_traffic, 4, seed))


def mismatches(rank: int, size: int, folder: str, sent: Any, into: Any) -> tuple[str, int | None, str]:
    group = join(rank, size, folder)
    try:
        if rank == 0:
            group.send(sent, 1, tag=4)
            group.receive(np.zeros(1), 1, tag=9)  # never sent
        else:
            group.receive(into, None, tag=4)
    except (Mismatch, PeerLost) as error:
        return type(error).__name__, error.rank, str(error)
    finally:
        group.close()
    return "", None, ""


@native
@pytest.mark.parametrize(
    ("sent", "into"),
    [
        pytest.param(np.zeros(10, np.float32), np.zeros(9, np.float32), id="shorter"),
        pytest.param(np.zeros(10, np.float32), np.zeros(11, np.float32), id="longer"),
        pytest.param(np.zeros(10, np.float32), np.zeros(10, np.int32), id="dtype"),
        pytest.param(np.zeros(0, np.float32), np.zeros(10, np.float32), id="nothing"),
        pytest.param(np.zeros(500_000, np.float32), np.zeros(500_001, np.float32), id="large"),
    ],
)
def test_another_size_or_dtype_is_an_error_on_both_sides(sent: Any, into: Any) -> None:
    sender, receiver = values(run_threads(mismatches, 2, sent, into))
    assert receiver[:2] == ("Mismatch", 0)
    short = {"float32": "f32", "int32": "i32"}
    both = (
        f"rank 0 sent {sent.nbytes} bytes of f32 with tag 4, "
        f"rank 1 receives {into.nbytes} bytes of {short[into.dtype.name]} with tag 4"
    )
    assert both in receiver[2]
    # The sender may be done with a small message; its next wait raises the error.
    assert sender[0] in ("Mismatch", "PeerLost")
    assert sender[1] == 1 or sender[0] == "Mismatch"
    assert both in sender[2]


def waits_too_long(rank: int, size: int, folder: str, call: str) -> tuple[str, int | None, str, float]:
    released = f"{folder}/released"
    group = join(rank, size, folder)
    began = time.monotonic()
    try:
        if rank == 0:
            if call == "receive":
                group.receive(np.zeros(10, np.float32), 1, tag=7, timeout_s=0.5)
            elif call == "receive from any":
                group.receive(np.zeros(10, np.float32), tag=7, timeout_s=0.5)
            else:
                group.send(np.zeros(1_000_000, np.float32), 1, tag=7, timeout_s=0.5)
        else:
            group.send(np.zeros(1, np.float32), 0, tag=8)
            while not os.path.exists(released):
                time.sleep(0.02)
    except CollectiveTimeout as error:
        return type(error).__name__, error.rank, str(error), time.monotonic() - began
    finally:
        open(released, "w").close()
        group.close()
    return "", None, "", 0.0


@native
@pytest.mark.parametrize(
    ("call", "named", "words"),
    [
        ("receive", 1, "waiting for rank 1 to send with tag 7; what came is from rank 1 with tag 8"),
        (
            "receive from any",
            None,
            "waiting for any rank to send with tag 7; what came is from rank 1 with tag 8",
        ),
        ("send", 1, "still waiting for rank 1 to receive with tag 7"),
    ],
)
def test_a_timeout_names_the_rank_and_the_tag(call: str, named: int | None, words: str) -> None:
    error, rank, text, took = values(run_threads(waits_too_long, 2, call))[0]
    assert error == "CollectiveTimeout"
    assert rank == named
    assert words in text
    assert f"rank 0: {call.split()[0]} #1 of " in text
    assert ", timed out after 0." in text and "(its timeout is 0.5 s); " in text
    assert 0.4 < took < 0.5 + seconds(SOON_S)


def dies(rank: int, size: int, folder: str, call: str) -> tuple[str, int | None, str, float]:
    group = join(rank, size, folder)
    group.barrier()
    began = time.monotonic()
    if rank == 2:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if call == "receive":
            group.receive(np.zeros(10), 2)
        elif call == "receive from any":
            group.receive(np.zeros(10))
        else:
            group.send(np.zeros(1_000_000), 2)
    except PeerLost as error:
        return type(error).__name__, error.rank, str(error), time.monotonic() - began
    finally:
        group.close()
    return "", None, "", 0.0


@pytest.mark.parametrize("call", ["receive", "receive from any", "send"])
def test_a_dead_rank_is_named_by_the_receivers_of_its_messages(call: str, transport: str) -> None:
    outcomes = run_ranks(dies, 3, call, dies=[2], env={"NETFOLD_TRANSPORT": transport})
    for rank in (0, 1):
        assert not outcomes[rank].error, outcomes[rank].text
        error, named, text, took = outcomes[rank].value
        assert error == "PeerLost"
        assert named == 2, text
        assert f"rank {rank}: {call.split()[0]} #1 of " in text
        assert took < seconds(SOON_S)


def leaves_early(rank: int, size: int, folder: str) -> str:
    with join(rank, size, folder) as group:
        if rank == 1:
            for number in range(3):
                group.send(np.full(10_000, number, np.float32), 0)
            return ""
        if rank == 2:
            group.receive(np.zeros(1), 0)  # until rank 0 has seen rank 1 leave
            group.send(np.full(10_000, 3, np.float32), 0)
            return ""
        time.sleep(0.2)
        into = np.zeros(10_000, np.float32)
        for number in range(3):
            assert group.receive(into, 1 if number else None) == 1
            assert into[0] == into[-1] == number
        group.send(np.zeros(1), 2)
        assert group.receive(into) == 2, "that rank 1 left is no reason to give up on the others"
        assert into[-1] == 3
        with pytest.raises(PeerLost, match="rank 1 left: rank 1 closed the group") as caught:
            group.receive(into, 1)
        assert caught.value.rank == 1
    return "through"


@native
def test_messages_of_a_rank_that_left_are_still_received() -> None:
    assert values(run_threads(leaves_early, 3))[0] == "through"


def leaves_unseen(rank: int, size: int, folder: str) -> int:
    with join(rank, size, folder) as group:
        if rank == 0:
            time.sleep(0.3)
            into = np.zeros(10, np.float32)
            sender = group.receive(into)
            assert into[-1] == 9
            return int(sender)
        if rank == 2:
            time.sleep(0.6)
            group.send(np.arange(10, dtype=np.float32), 0)
    return -1


@native
def test_a_receive_from_any_rank_outlasts_a_rank_that_left_before_the_two_had_connected() -> None:
    assert values(run_threads(leaves_unseen, 3))[0] == 2


def large_then_leave(rank: int, size: int, folder: str) -> None:
    """More than the receiver's host buffers before a read; the sender is gone by then."""
    with join(rank, size, folder) as group:
        if rank == 0:
            for number in range(8):
                group.send(np.full(EAGER_BYTES // 4 - 100, number, np.float32), 1)
        else:
            time.sleep(0.3)
            into = np.zeros(EAGER_BYTES // 4 - 100, np.float32)
            for number in range(8):
                group.receive(into, 0)
                assert into[0] == into[-1] == number


@native
def test_messages_in_flight_survive_their_sender() -> None:
    values(run_threads(large_then_leave, 2))


def aborted_while_waiting(rank: int, size: int, folder: str) -> str:
    group = join(rank, size, folder)
    try:
        if rank == 0:
            threading.Timer(0.1, group.group.abort, ("the user pressed Ctrl-C",)).start()
        group.receive(np.zeros(1), 1 - rank)
    except (GroupAborted, PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group.close()
    return ""


@native
def test_an_abort_ends_waiting_receives_on_both_ranks() -> None:
    here, there = values(run_threads(aborted_while_waiting, 2))
    assert here.startswith("GroupAborted: rank 0: receive #1 of 1 f64")
    assert there.startswith("PeerLost: rank 1: receive #1 of 1 f64")
    assert "the user pressed Ctrl-C" in here
    assert "the user pressed Ctrl-C" in there


def waits_twice(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        if rank == 1:
            group.receive(np.zeros(1), 0, tag=1)
            group.send(np.full(3, 5, np.float32), 0)
            return
        into = np.zeros(3, np.float32)
        operation = start_receive(group, into, 1)
        with pytest.raises(TimeoutError, match=r"the wait timed out: the operation is not done after 0\.05 s"):
            group.group.wait(operation, 0.05)
        group.send(np.zeros(1), 1, tag=1)
        group.group.wait(operation)
        assert into.tolist() == [5, 5, 5]


@native
def test_a_receive_goes_on_after_a_wait_times_out() -> None:
    values(run_threads(waits_twice, 2))


def misuses(rank: int, size: int, folder: str) -> None:
    with join(rank, size, folder) as group:
        buffer = np.ones(4, np.float32)
        for call, words in (
            (lambda: group.send(buffer, rank), f"send: rank {rank} is this rank itself; copy the tensor instead"),
            (lambda: group.receive(buffer, rank), f"receive: rank {rank} is this rank itself"),
            (lambda: group.send(buffer, 5), "send: rank 5 is not a rank of this group of 2"),
            (lambda: group.receive(buffer, -2), "receive: rank -2 is not a rank of this group of 2"),
            (lambda: group.send(buffer, -1), "send: rank -1 is not a rank of this group of 2"),
            (lambda: group.send(buffer, 1 - rank, tag=-1), "send: tag -1 is negative"),
            (lambda: group.send(np.ones((4, 4))[:, 1], 1 - rank), "must be C-contiguous"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        group.barrier()  # a refusal changes nothing


@native
def test_misuse_is_refused_in_a_sentence() -> None:
    values(run_threads(misuses, 2))


def records(rank: int, size: int, folder: str) -> None:
    from netfold._native import engine

    with join(rank, size, folder) as group:
        for count in (10, 600_000):
            if rank == 0:
                group.send(np.ones(count, np.float32), 1, tag=2)
            else:
                group.receive(np.ones(count, np.float32), tag=2)
        events = group.group.events()
        assert events["operation"].tolist() == [engine.KINDS["receive" if rank else "send"]] * 2
        assert events["algorithm"].tolist() == [engine.ALGORITHMS["point_to_point"]] * 2
        assert events["bytes"].tolist() == [40, 2_400_000]
        assert events["sequence"].tolist() == [1, 2]
        assert events["slowest_rank"].tolist() == ([0, 0] if rank else [-1, -1])
        # header and values at once; announcement, three chunks with a header each
        assert events["wire_bytes"].tolist() == ([0, 32] if rank else [72, 2_400_000 + 4 * 32])
        assert (events["finished_ns"] >= events["started_ns"]).all()
        group.barrier()
        assert group.group.events()["sequence"][-1] == 1, "messages are counted apart from collectives"


@native
def test_messages_have_records() -> None:
    values(run_threads(records, 2))


def receives_ahead(rank: int, size: int, folder: str) -> None:
    with Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20) as group:
        other = 1 - rank
        into = [np.zeros(count, np.int32) for count in (3, 50_000, 1_000_000)]
        works = [group.receive(buffer, None, tag=tag, asynchronous=True) for tag, buffer in enumerate(into)]
        assert not any(work.done for work in works)
        group.barrier()
        sent = [
            group.send(np.full(into[tag].size, 10 * rank + tag, np.int32), other, tag, asynchronous=True)
            for tag in reversed(range(3))
        ]
        assert [work.wait() for work in works] == [other] * 3
        for work in sent:
            work.wait()
        assert all(work.done and work.result == other for work in works)
        assert all((buffer == 10 * other + tag).all() for tag, buffer in enumerate(into))


@pytest.mark.native
def test_receives_may_be_posted_before_the_sends() -> None:
    values(run_threads(receives_ahead, 2))


def keeps_one_receive_pending(rank: int, size: int, folder: str) -> int:
    """Count the buffers of later works that are still held after their wait."""
    with join(rank, size, folder) as group:
        pending = np.zeros(4, np.float32)
        first = group.receive(pending, 1 - rank, tag=7, asynchronous=True)
        held = []
        for number in range(100):
            buffer = np.full(1000, number, np.float32)
            held.append(weakref.ref(buffer))
            group.all_reduce(buffer, asynchronous=True).wait()
        del buffer
        gc.collect()
        group.send(np.ones(4, np.float32), 1 - rank, tag=7)
        first.wait()
        return sum(each() is not None for each in held)


@native
def test_a_pending_receive_does_not_keep_the_buffers_of_later_works() -> None:
    assert values(run_threads(keeps_one_receive_pending, 2)) == [0, 0]


# --- connections that were closed since descriptors are short --------------------------------------------------------


def dies_without_a_connection(
    rank: int, size: int, folder: str, when: str, first: int, transport: str
) -> tuple[int | None, float]:
    """Rank 0's connection to rank 2, which dies, is closed before its receive from any rank, or in it, by `first`."""
    files = FileStore(f"{folder}/files")
    options = Options(probe="off", transport=transport, interface="127.0.0.1")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=seconds(40)) as group:
        monitor = group.group._monitor
        if rank != 0:
            if first == 0:
                registered = monitor.registered_group
                handle = registered.handler

                def close_later(peer: int, request: Any) -> Any:
                    monitor.native = SlowToDisconnect(monitor.native)
                    return handle(peer, request)

                registered.handler = close_later
            group.send(np.full(10, rank, np.float32), 0, tag=1)
            if rank == 2:
                files.get("asked", 80)
                os.kill(os.getpid(), signal.SIGKILL)
            files.get("done", 80)
            return None, 0.0
        for source in range(1, size):  # makes the connections
            group.receive(np.zeros(10, np.float32), source, tag=1)
        asked = threading.Event()

        def query(ranks: list[int], sequence: int = 0) -> Any:
            try:
                return GroupMonitor.query_status(monitor, ranks, sequence)
            finally:
                asked.set()

        monitor.query_status = query
        if first == 2:
            monitor.native = SlowToDisconnect(monitor.native)
        if when == "before it":
            monitor.release(1, 2, 0)
        receive = start_receive(group, np.zeros(10, np.float32))
        if when == "in it":
            time.sleep(0.3)  # it sleeps
            monitor.release(1, 2, 0)
        assert asked.wait(seconds(10)), "a receive that waits asks the ranks that it has no connection to"
        closed = monitor.native.broken(1, 2, 0)
        assert closed is not None and closed[1] == 0, "a closed connection stays closed, and was not made again"
        began = time.monotonic()
        files.set("asked", b"")
        with pytest.raises(PeerLost) as lost:
            group.group.wait(receive)
        files.set("done", b"")
        return lost.value.rank, time.monotonic() - began


class SlowToDisconnect:
    """A native group that disconnects later than the other end."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def disconnect(self, *arguments: Any) -> Any:
        time.sleep(0.15)
        return self._native.disconnect(*arguments)


@pytest.mark.parametrize("transport", ["tcp", "fabric:tcp"])
@pytest.mark.parametrize(("when", "first"), [("before it", 0), ("in it", 0), ("in it", 2)])
def test_a_receive_from_any_rank_notices_the_death_of_a_rank_whose_idle_connection_was_closed(
    when: str, first: int, transport: str
) -> None:
    if transport != "tcp":
        need_libfabric()
    at_fault, waited_s = values(
        run_ranks(dies_without_a_connection, 3, when, first, transport, timeout_s=90, dies=[2])[:1]
    )[0]
    assert at_fault == 2
    assert waited_s < seconds(5)


def _refused_numbers(rank: int, size: int, folder: str) -> None:
    """Ranks, tags and rows that are no numbers, or numbers out of range, are refused in a sentence."""
    one, four = np.ones(2), np.ones(4)
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "tag 2147483655 is out of range", lambda group: group.send(one, 1 - rank, tag=2**31 + 7)),
        (ValueError, "tag 2147483655 is out of range", lambda group: group.receive(one, 1 - rank, tag=2**31 + 7)),
        (ValueError, f"tag {2**90} is out of range", lambda group: group.send(one, 1 - rank, tag=2**90)),
        (ValueError, "tag -1 is negative", lambda group: group.send(one, 1 - rank, tag=-1)),
        (TypeError, "a tag is an integer, not 1.5", lambda group: group.send(one, 1 - rank, tag=1.5)),
        (ValueError, f"rank {2**40} is out of range", lambda group: group.send(one, 2**40)),
        (ValueError, f"rank {-(2**33)} is out of range", lambda group: group.broadcast(one, -(2**33))),
        (ValueError, "root 2 is not a rank of this group of 2", lambda group: group.reduce(one, np.int64(2))),
        (TypeError, "a rank is an integer, not zero", lambda group: group.scatter(None, one, "zero")),
        (TypeError, "must be integers", lambda group: group.all_to_all(four, four, send_rows=[1.5, 2.5])),
        (ValueError, "must be 2 numbers", lambda group: group.all_to_all(four, four, send_rows=[2**70, 4 - 2**70])),
    ]
    with Communicator(FileStore(folder), rank, size, options=Options(probe="off"), timeout_s=20) as group:
        for kind, text, call in refused:
            with pytest.raises(kind, match=re.escape(text)):
                call(group)
        group.barrier()


def test_ranks_tags_and_rows_out_of_range_are_refused_in_a_sentence() -> None:
    values(run_threads(_refused_numbers, 2))
