"""Failures between ranks without a switch: each is an error, in time, with rank, operation and what to try.

With a switch: core/tests/switch/test_failures_in_network.py.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import Outcome, run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.communicator import Mismatch, PeerLost

# The longest time from a failure without a timeout to its error.
SOON_S = 3.0
TIMEOUT_S = 1.0

ALGORITHMS = pytest.mark.parametrize("algorithm", ["direct", "ring", "halving_doubling", "tree", "shared_memory"])
SIZES = pytest.mark.parametrize("count", [100, 1_000_000])

Call = Callable[[Communicator], None]

# Beside all_reduce: every other state machine.
OTHERS = (
    "broadcast=chain",
    "broadcast=tree",
    "all_gather=ring",
    "all_gather=bruck",
    "reduce_scatter=ring",
    "reduce=tree",
    "all_to_all=pairwise",
    "all_to_all=bruck",
)
OTHER = pytest.mark.parametrize("algorithm", OTHERS)


def make_call(group: Communicator, operation: str, count: int) -> None:
    """Call an operation, with blocks of so many elements where it has blocks."""
    one = np.ones(count, np.float32)
    blocks = [np.ones(count, np.float32) for _ in range(group.size)]
    if operation == "broadcast":
        group.broadcast(one)
    elif operation == "reduce":
        group.reduce(one)
    elif operation == "all_gather":
        group.all_gather(one, blocks)
    elif operation == "reduce_scatter":
        group.reduce_scatter(blocks, one)
    else:
        group.all_to_all(blocks, [block.copy() for block in blocks])


def all_reduce(count: int, dtype: str = "float32", op: str = "sum") -> Call:
    return lambda group: group.all_reduce(np.ones(count, dtype), op=op)


def broadcast(count: int, root: int) -> Call:
    return lambda group: group.broadcast(np.ones(count, np.float32), root)


def barrier(group: Communicator) -> None:
    group.barrier()


def calls_in_turn(
    rank: int,
    size: int,
    folder: str,
    algorithm: str,
    calls: list[list[Call]],
    timeout_s: float,
    transport: str = "auto",
) -> tuple[str, int | None, str, float]:
    """The error's type, rank and text, and the seconds it took; then a call that must fail for the same reason."""
    options = Options(algorithm=algorithm, transport=transport, probe="off")
    group = Communicator(FileStore(folder), rank, size, options=options, timeout_s=timeout_s, join_timeout_s=60)
    began = time.monotonic()
    try:
        for call in calls[rank]:
            call(group)
    except Exception as error:
        took = time.monotonic() - began
        with pytest.raises(type(error), match="this group failed before"):
            group.barrier()
        return type(error).__name__, getattr(error, "rank", None), str(error), took
    finally:
        group.close()
    return "", None, "", 0.0


def disagree(algorithm: str, calls: list[list[Call]]) -> list[tuple[str, int | None, str, float]]:
    found = values(run_threads(calls_in_turn, len(calls), algorithm, calls, 20.0))
    for rank, (error, _, text, took) in enumerate(found):
        assert error in ("Mismatch", "PeerLost"), (rank, error, text)
        assert took < seconds(SOON_S)
        assert re.match(rf"rank {rank}: \w+ #[12] ", text), text
    assert "Mismatch" in [error for error, *_ in found]
    for error, _, text, _ in found:
        if error == "Mismatch":
            assert "is in" in text and "every rank must make the same calls in the same order" in text
    return found


@ALGORITHMS
@pytest.mark.native
@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("usual", "other"),
    [
        pytest.param(all_reduce(100), all_reduce(101), id="sizes"),
        pytest.param(all_reduce(1_000_000), all_reduce(1_000_001), id="large sizes"),
        pytest.param(all_reduce(100), all_reduce(100, "int32"), id="dtypes"),
        pytest.param(all_reduce(100), all_reduce(100, op="max"), id="operators"),
        pytest.param(all_reduce(100), all_reduce(100, op="avg"), id="average"),
        pytest.param(all_reduce(100), barrier, id="operations"),
        pytest.param(all_reduce(1_000_000), lambda group: group.reduce(np.ones(100, np.float32), 0), id="roots"),
    ],
)
def test_ranks_that_make_different_calls_all_get_the_mismatch(
    algorithm: str, odd: int, usual: Call, other: Call
) -> None:
    # A rank that only sends may finish before it learns of the mismatch; the next call raises it.
    disagree(algorithm, [[other if rank == odd else usual, barrier] for rank in range(3)])


@pytest.mark.native
def test_a_rank_that_sleeps_until_a_third_rank_calls_learns_of_the_mismatch_at_once() -> None:
    """Rank 0 sleeps until rank 2 posts its call. Rank 1 makes another call than rank 0, and reads no posts for it."""

    def another_call(group: Communicator) -> None:
        time.sleep(2.0)
        group.reduce(np.ones(100, np.float32), 0)

    absence_s = 2.0 + 2 * seconds(SOON_S)
    calls: list[list[Call]] = [[all_reduce(100)], [another_call], [lambda group: time.sleep(absence_s)]]
    error, _, text, took = values(run_threads(calls_in_turn, 3, "shared_memory", calls, absence_s + 20.0))[0]
    assert error == "Mismatch" and "rank 1" in text, text
    assert took < 2.0 + seconds(SOON_S)


@ALGORITHMS
@pytest.mark.native
def test_operations_in_a_circular_wait_end_at_the_timeout(algorithm: str) -> None:
    """Rank 2 waits for the root, which waits in an all_reduce for rank 2: no rank reads the other's header."""
    calls = [[all_reduce(1_000_000)], [all_reduce(1_000_000)], [broadcast(100, 0)]]
    for error, _, text, took in values(run_threads(calls_in_turn, 3, algorithm, calls, TIMEOUT_S)):
        assert error in ("CollectiveTimeout", "Mismatch", "PeerLost"), text
        assert took < TIMEOUT_S + seconds(SOON_S)


@pytest.mark.native
def test_ranks_with_different_roots_time_out_and_name_the_awaited_rank() -> None:
    calls = [[broadcast(100, 1)], [broadcast(100, 0)]]
    found = values(run_threads(calls_in_turn, 2, "direct", calls, TIMEOUT_S, "tcp"))
    assert any(error == "CollectiveTimeout" and "still waiting for rank" in text for error, _, text, _ in found)
    assert all(error in ("CollectiveTimeout", "PeerLost") for error, *_ in found)


@pytest.mark.parametrize("algorithm", ["direct", "shared_memory"])
@pytest.mark.native
def test_ranks_of_one_host_with_different_roots_get_the_mismatch(algorithm: str) -> None:
    disagree(algorithm, [[broadcast(100, 1), barrier], [broadcast(100, 0), barrier]])


@ALGORITHMS
@pytest.mark.native
def test_an_empty_tensor_against_a_full_one_is_a_mismatch(algorithm: str) -> None:
    calls = [[all_reduce(0), barrier], [all_reduce(100), barrier]]
    found = values(run_threads(calls_in_turn, 2, algorithm, calls, 20.0))
    assert {error for error, *_ in found} <= {"Mismatch", "PeerLost"}


@ALGORITHMS
@SIZES
@pytest.mark.native
def test_a_rank_that_never_calls_is_named_at_the_timeout(algorithm: str, count: int) -> None:
    released = threading.Event()

    def absent(group: Communicator) -> None:
        released.wait(seconds(30))

    def call(group: Communicator) -> None:
        try:
            group.all_reduce(np.ones(count, np.float32))
        finally:
            released.set()

    found = values(run_threads(calls_in_turn, 3, algorithm, [[call], [absent], [call]], TIMEOUT_S))
    for rank in (0, 2):
        error, named, text, took = found[rank]
        # The rank whose timeout comes second may learn of the first.
        assert error in ("CollectiveTimeout", "PeerLost"), text
        assert named == 1, text
        assert f"rank {rank}: all_reduce #1 of {count} f32" in text
        assert "rank 1" in text
        assert TIMEOUT_S * 0.9 < took < TIMEOUT_S + seconds(SOON_S)


def dies_in_operation(rank: int, size: int, folder: str, algorithm: str, count: int, victim: int) -> Any:
    with Communicator(
        FileStore(folder),
        rank,
        size,
        options=Options(algorithm=algorithm, probe="off"),
        timeout_s=30,
        join_timeout_s=60,
    ) as group:
        for _ in range(3):
            group.all_reduce(np.ones(count, np.float32))
        if rank == victim:
            # The others are in the next all_reduce, whose bytes this rank has begun to exchange.
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = time.monotonic()
        try:
            while True:
                group.all_reduce(np.ones(count, np.float32))
        except Exception as error:
            return type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic() - began


@ALGORITHMS
@SIZES
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_is_named_by_all_others_within_seconds(algorithm: str, count: int, victim: int) -> None:
    outcomes = run_ranks(dies_in_operation, 4, algorithm, count, victim, dies=[victim])
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert not outcome.error, outcome.text
        error, named, text, took = outcome.value
        assert error == "PeerLost", text
        assert named == victim, f"rank {rank}: {text}"
        assert f"rank {rank}: all_reduce #" in text
        assert took < seconds(SOON_S)


def fails_by_itself(rank: int, size: int, folder: str, algorithm: str) -> None:
    with Communicator(
        FileStore(folder),
        rank,
        size,
        options=Options(algorithm=algorithm, probe="off"),
        timeout_s=30,
        join_timeout_s=60,
    ) as group:
        group.all_reduce(np.ones(10, np.float32))
        if rank == 1:
            raise ZeroDivisionError("the learning rate fell to nothing")
        group.all_reduce(np.ones(10, np.float32))


@ALGORITHMS
@pytest.mark.native
def test_a_rank_that_fails_sends_the_others_its_error(algorithm: str) -> None:
    outcomes = run_threads(fails_by_itself, 3, algorithm)
    assert outcomes[1].error == "ZeroDivisionError"
    for rank in (0, 2):
        assert outcomes[rank].error == "PeerLost"
        assert "ZeroDivisionError: the learning rate fell to nothing" in outcomes[rank].text


def aborts(rank: int, size: int, folder: str) -> str:
    group = Communicator(FileStore(folder), rank, size, timeout_s=30, join_timeout_s=60)
    try:
        if rank == 0:
            group.group.abort("the user pressed Ctrl-C")
        group.barrier()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group.close()
    return ""


@pytest.mark.native
def test_an_abort_carries_its_reason_to_every_rank() -> None:
    own, *others = values(run_threads(aborts, 3))
    assert own.startswith("GroupAborted: ")
    for text in others:
        assert text.startswith("PeerLost: ")
        assert "the user pressed Ctrl-C" in text


def leaves_in_turn(rank: int, size: int, folder: str) -> None:
    with Communicator(FileStore(folder), rank, size, timeout_s=30, join_timeout_s=60) as group:
        group.barrier()
        time.sleep(0.05 * rank)
    group.close()
    with pytest.raises(ValueError, match="this group was closed"):
        group.barrier()


@pytest.mark.native
def test_ranks_that_leave_after_their_last_operation_fail_no_other() -> None:
    values(run_threads(leaves_in_turn, 4))


def two_groups(rank: int, size: int, folder: str) -> float:
    """The first group loses a rank. The second, of the same processes, goes on."""
    first = Communicator(FileStore(f"{folder}/1"), rank, size, timeout_s=30, join_timeout_s=60)
    with Communicator(FileStore(f"{folder}/2"), rank, size, timeout_s=30, join_timeout_s=60) as second:
        if rank == 0:
            first.close()
        else:
            with pytest.raises(Exception, match="rank 0"):
                first.barrier()
        first.close()
        buffer = np.full(100_000, rank + 1.0)
        second.all_reduce(buffer)
        return float(buffer[-1])


@pytest.mark.native
def test_the_failure_of_one_group_does_not_affect_another() -> None:
    assert values(run_threads(two_groups, 3)) == [6.0] * 3


def join_as(rank: int, size: int, folder: str, ranks: list[int]) -> None:
    Communicator(FileStore(folder), ranks[rank], 2, join_timeout_s=5.0).close()


def test_a_second_process_with_a_rank_is_refused_and_the_first_goes_on() -> None:
    outcomes = run_ranks(join_as, 3, [0, 1, 1])
    first, second = sorted(outcomes[1:], key=lambda outcome: outcome.error)
    assert not outcomes[0].error, outcomes[0].text
    assert not first.error
    assert second.error == "RendezvousError"
    assert "rank 1 of 2 was claimed 2 times: two processes were started with the same rank" in second.text


def forks(rank: int, size: int, folder: str) -> str:
    with Communicator(FileStore(folder), rank, size, timeout_s=30, join_timeout_s=60) as group:
        group.barrier()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                group.barrier()
                os.write(writer, b"no error")
            except Exception as error:
                os.write(writer, f"{type(error).__name__}: {error}".encode())
            finally:
                group.close()  # must not wait for a thread that only the parent has
                os._exit(0)
        os.close(writer)
        said = os.read(reader, 4096).decode()
        os.waitpid(child, 0)
        group.barrier()  # the child's end did not affect the parent's group
        return said


def test_a_group_is_refused_in_a_forked_child_and_goes_on_in_the_parent() -> None:
    outcomes: list[Outcome] = run_ranks(forks, 2)
    assert values(outcomes) == ["RuntimeError: this group was made before a fork; make a new one in the child"] * 2


def goes_on_in_a_child(rank: int, size: int, folder: str) -> bytes:
    with Communicator(FileStore(f"{folder}/parent"), rank, size, timeout_s=30, join_timeout_s=60) as group:
        group.barrier()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with Communicator(FileStore(f"{folder}/child"), rank, size, timeout_s=5, join_timeout_s=20) as own:
                    # The child's own engine thread does this.
                    work = own.all_reduce(np.full(1000, rank + 1.0), asynchronous=True)
                    time.sleep(0.05)
                    work.wait()
                os.write(writer, b"closed")
            finally:
                os._exit(0)
        os.close(writer)
        said = os.read(reader, 100)
        os.waitpid(child, 0)
        group.barrier()
        return said


def test_a_group_made_in_a_forked_child_works_and_closes() -> None:
    """Once, such a group waited forever for a thread that only the parent has."""
    assert values(run_ranks(goes_on_in_a_child, 2, timeout_s=30)) == [b"closed"] * 2


def is_outlived(rank: int, size: int, folder: str) -> tuple[float, str]:
    with Communicator(FileStore(f"{folder}/store"), rank, size, timeout_s=30, join_timeout_s=60) as group:
        group.barrier()
        told = Path(folder, "told")
        if rank == 1:
            if os.fork() == 0:  # as a data loader
                give_up = time.monotonic() + seconds(20)
                while not told.exists() and time.monotonic() < give_up:
                    time.sleep(0.01)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            group.all_reduce(np.ones(1000))
        except Exception as error:
            return time.monotonic() - began, f"{type(error).__name__} {getattr(error, 'rank', None)}"
        finally:
            told.touch()
        return 0.0, "nothing went wrong"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_dead_rank_is_noticed_at_once_although_its_child_lives_on(transport: str) -> None:
    """Once, the child kept the connections open until it ended."""
    took_s, said = run_ranks(is_outlived, 2, env={"NETFOLD_TRANSPORT": transport}, dies=[1])[0].value
    assert said == "PeerLost 1"
    assert took_s < seconds(5)


def waits_twice(rank: int, size: int, folder: str) -> float:
    with Communicator(FileStore(folder), rank, size, timeout_s=30, join_timeout_s=60) as group:
        buffer = np.full(1000, rank + 1.0)
        if rank == 1:
            time.sleep(0.3)
        began = time.monotonic()
        operation = group.group.submit(
            "all_reduce", dtype="f64", outputs=[(buffer.ctypes.data, buffer.nbytes)], wait_here=False
        )
        if rank == 0:
            with pytest.raises(TimeoutError, match=r"the wait timed out: the operation is not done after 0\.05 s"):
                group.group.wait(operation, 0.05)
        group.group.wait(operation)
        assert time.monotonic() - began < seconds(5)
        return float(buffer[999])


@pytest.mark.native
def test_an_operation_goes_on_after_a_wait_times_out() -> None:
    assert values(run_threads(waits_twice, 2)) == [3.0, 3.0]


@OTHER
@pytest.mark.native
@pytest.mark.parametrize("odd", [0, 2])
def test_different_sizes_are_a_mismatch_in_every_operation(algorithm: str, odd: int) -> None:
    operation = algorithm.partition("=")[0]

    def call(count: int) -> Call:
        return lambda group: make_call(group, operation, count)

    disagree(algorithm, [[call(101 if rank == odd else 100), barrier] for rank in range(3)])


@OTHER
@SIZES
@pytest.mark.native
def test_a_rank_absent_from_any_operation_is_named_by_the_waiting_ranks(algorithm: str, count: int) -> None:
    operation = algorithm.partition("=")[0]
    released = threading.Event()

    def absent(group: Communicator) -> None:
        released.wait(seconds(30))

    def call(group: Communicator) -> None:
        try:
            make_call(group, operation, count)
            group.barrier()  # a rank that only sends finishes before
        finally:
            released.set()

    timeout_s = 0.4
    found = values(run_threads(calls_in_turn, 3, algorithm, [[call], [absent], [call]], timeout_s))
    assert found[1][0] == ""
    for rank in (0, 2):
        error, named, text, took = found[rank]
        assert error in ("CollectiveTimeout", "PeerLost"), text
        assert took < timeout_s + seconds(SOON_S)
        # In the barrier, a root that finished before waits for rank 2 as well.
        assert named == 1 or re.search(r"still waiting for rank[ 2]* 1\b", text), f"rank {rank}: {text}"


def dies_in_all(rank: int, size: int, folder: str, victim: int) -> list[tuple[str, str, int | None, str, float]]:
    """One group a state machine, all busy when one rank is killed: (machine, error, rank named, text, seconds)."""
    found: list[tuple[str, str, int | None, str, float]] = []
    groups = [
        Communicator(
            FileStore(f"{folder}/{index}"),
            rank,
            size,
            options=Options(algorithm=algorithm, probe="off"),
            timeout_s=30,
            join_timeout_s=60,
        )
        for index, algorithm in enumerate(OTHERS)
    ]

    def busy(group: Communicator, algorithm: str) -> None:
        try:
            while True:
                began = time.monotonic()
                make_call(group, algorithm.partition("=")[0], 200_000)
                group.barrier()
        except Exception as error:
            took = time.monotonic() - began
            found.append((algorithm, type(error).__name__, getattr(error, "rank", None), str(error), took))

    for group in groups:
        group.barrier()
    threads = [threading.Thread(target=busy, args=pair) for pair in zip(groups, OTHERS, strict=True)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    return found


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_in_any_operation_is_named_by_all_others(victim: int) -> None:
    for rank, outcome in enumerate(run_ranks(dies_in_all, 4, victim, dies=[victim])):
        if rank == victim:
            continue
        assert not outcome.error, outcome.text
        assert {algorithm for algorithm, *_ in outcome.value} == set(OTHERS)
        for algorithm, error, named, text, took in outcome.value:
            assert error == "PeerLost" and named == victim, f"{algorithm}, rank {rank}: {text}"
            assert took < seconds(SOON_S), f"{algorithm}, rank {rank}: {text}"


def give_and_abort(rank: int, size: int, folder: str, algorithm: str, rank_1_failed: threading.Event) -> str:
    """Rank 0 posts its data and aborts. Rank 1 has the data and waits for rank 2, which calls after rank 1's error."""
    options = Options(algorithm=f"all_reduce={algorithm}")
    group = Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20)
    try:
        if rank == 0:
            group.all_reduce(np.ones(10, np.float32), asynchronous=True)
            time.sleep(0.3)
            group.group.abort("enough")
            return "enough"
        if rank == 2:
            assert rank_1_failed.wait(seconds(15)), "rank 1 waits for rank 2 and never gets the error of rank 0"
        with pytest.raises(PeerLost, match="enough") as raised:
            group.all_reduce(np.ones(10, np.float32))  # rank 2 has all data, so its call may succeed
            group.barrier()
        rank_1_failed.set()
        assert raised.value.rank == 0
        return str(raised.value)
    finally:
        group.close()


@pytest.mark.parametrize("algorithm", ["shared_memory", "direct"])
@pytest.mark.native
def test_ranks_of_one_host_get_an_abort_whichever_rank_they_wait_for(algorithm: str) -> None:
    for text in values(run_threads(give_and_abort, 3, algorithm, threading.Event())):
        assert "enough" in text


# Calls that one rank refuses, while the others wait in the right one.
REFUSED: dict[str, tuple[Call, Call]] = {
    "rows of all_to_all": (
        lambda group: group.all_to_all(np.ones(3), np.ones(3)),
        lambda group: group.all_to_all(np.ones(3), np.ones(3), send_rows=[1, 1, 2]),
    ),
    "parts of all_gather": (
        lambda group: group.all_gather(np.ones(2)),
        lambda group: group.all_gather(np.ones(2), [np.ones(2)] * 2),
    ),
    "an operator": (
        lambda group: group.reduce_scatter(np.ones(3)),
        lambda group: group.reduce_scatter(np.ones(3), op="xor"),
    ),
    "strides": (
        lambda group: group.all_reduce(np.ones(3)),
        lambda group: group.all_reduce(np.ones((3, 2))[:, 0]),
    ),
    "a root": (
        lambda group: group.broadcast(np.ones(3), 0),
        lambda group: group.broadcast(np.ones(3), 3),
    ),
}

informed = threading.Semaphore(0)  # a waiting rank has its error


def _refuses(rank: int, size: int, folder: str, transport: str, name: str) -> tuple[str, str]:
    right, wrong = REFUSED[name]
    options = Options(transport=transport, probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60) as group:
        # All refuse alike, and then one by one without a rank that waits: the group goes on.
        for refuses in (True, rank == 0, rank == 1):
            if refuses:
                with pytest.raises((ValueError, TypeError)):
                    wrong(group)
            right(group)
        if rank == 1:
            with pytest.raises((ValueError, TypeError)) as refused:
                wrong(group)
            for _ in range(size - 1):
                informed.acquire(timeout=seconds(30))
            with pytest.raises((Mismatch, PeerLost)):
                group.barrier()
            return "refused", str(refused.value)
        try:
            right(group)
            group.barrier()
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            informed.release()
        return "", ""


@pytest.mark.native
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_wait_for_a_rank_that_refused_the_call_learn_why(transport: str, name: str) -> None:
    began = time.monotonic()
    first, (_, reason), last = values(run_threads(_refuses, 3, transport, name))
    assert time.monotonic() - began < seconds(10)
    for error, text in (first, last):
        assert error in ("Mismatch", "PeerLost") and "rank 1 refused its call" in text, text
        assert reason[:100] in text, (reason, text)
    assert "Mismatch" in (first[0], last[0])
