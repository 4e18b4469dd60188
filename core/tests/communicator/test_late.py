"""Ranks of different hosts that wait query each other's status: hopeless waits end, and errors have the status.

The awaited rank need not be the rank at fault, so the fault may reach the waiting rank by no message.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import Outcome, run_ranks, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold.communicator import NetfoldError, connection_manager

pytestmark = pytest.mark.native

# Without shared memory, ranks treat each other as ranks of other hosts.
APART = Options(transport="tcp")
TIMEOUT_S = 30.0
HERE = re.escape(__file__)


def join(rank: int, size: int, folder: str, timeout_s: float = TIMEOUT_S, options: Options = APART) -> Communicator:
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=timeout_s)


def _own_roots(rank: int, size: int, folder: str, algorithm: str, late: int | None) -> None:
    with join(rank, size, folder, options=Options(transport="tcp", algorithm=f"broadcast={algorithm}")) as group:
        group.barrier()
        began = time.monotonic()
        if rank == late:
            time.sleep(0.3)  # the others are in their barriers when they learn of it
        try:
            group.broadcast(np.zeros(10_000), root=rank)
            group.barrier()
        finally:
            assert time.monotonic() - began < TIMEOUT_S / 3
            time.sleep(0.5)  # no rank leaves while another queries it


@pytest.mark.parametrize("late", [None, 0, 2])
@pytest.mark.parametrize("algorithm", ["direct", "tree", "chain"])
def test_ranks_with_different_roots_get_both_long_before_the_timeout(algorithm: str, late: int | None) -> None:
    """As the root, each rank sends without waiting; its data meets the next call."""
    outcomes = run_threads(_own_roots, 3, algorithm, late)
    for outcome in outcomes:
        assert outcome.error in ("Mismatch", "PeerLost"), outcome
    mismatch = next(outcome for outcome in outcomes if outcome.error == "Mismatch")
    assert len(set(re.findall(r"root (\d)", mismatch.text))) > 1, mismatch.text


def _one_gives_up(rank: int, size: int, folder: str) -> float:
    """Rank 0 waits for rank 2, which never calls; rank 1 has sent its part and gives up."""
    with join(rank, size, folder, options=Options(transport="tcp", algorithm="all_gather=direct")) as group:
        group.barrier()
        began = time.monotonic()
        if rank == 2:
            while not Path(folder, "learned").exists():
                time.sleep(0.05)
                assert time.monotonic() - began < TIMEOUT_S
            return 0.0
        outs = [np.zeros(4) for _ in range(size)]
        try:
            group.all_gather(np.full(4, float(rank)), outs, timeout_s=1.0 if rank == 1 else None)
        finally:
            if rank == 0:
                Path(folder, "learned").touch()
                Path(folder, "after").write_text(str(time.monotonic() - began))
        return 0.0


def test_a_failed_ranks_reason_reaches_ranks_that_wait_for_another() -> None:
    outcomes = run_threads(_one_gives_up, 3)
    assert outcomes[1].error == "CollectiveTimeout"
    assert outcomes[0].error == "PeerLost"
    assert re.search("rank 1 gave up on the group during all_gather #2 [^:]*: rank 1: all_gather #2", outcomes[0].text)
    assert "still waiting for rank 2" in outcomes[0].text


def _waits_for_silence(rank: int, size: int, folder: str, fate: str, options: Options) -> None:
    pid = Path(folder, "pid")
    with join(rank, size, folder, timeout_s=2.5, options=options) as group:
        group.all_reduce(np.ones(3))
        if rank == 1:
            pid.write_text(str(os.getpid()))
            if fate == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            while not Path(folder, "over").exists():
                time.sleep(0.05)
            return
        while not pid.exists() or not pid.read_text():
            time.sleep(0.02)
        try:
            group.all_reduce(np.ones(1000))
        finally:
            Path(folder, "over").touch()
            if fate == "stops":
                os.kill(int(pid.read_text()), signal.SIGCONT)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(
    ("fate", "seen"),
    [
        (
            "never calls",
            r"Just now rank 1 is in no collective for [\d.]+ s, its last having been all_reduce #\d+, called",
        ),
        ("stops", r"Just now rank 1 is not answering \(stopped, or its host cannot be reached\)"),
    ],
)
def test_a_timeout_says_where_it_was_called_and_what_the_awaited_rank_was_last_seen_doing(
    transport: str, fate: str, seen: str
) -> None:
    options = Options(transport=transport, reconnect_s=0)
    outcome: Outcome = run_ranks(_waits_for_silence, 2, fate, options)[0]
    assert outcome.error == "CollectiveTimeout"
    first_line = outcome.text.splitlines()[0]
    assert re.match(
        rf"rank 0: all_reduce #\d+ of 1000 f64 \(8000 bytes\) by \w+, called at {HERE}:\d+, "
        r"timed out after 2\.\d s \(its timeout is 2\.5 s\); still waiting for rank 1\. ",
        first_line,
    ), first_line
    assert re.search(seen, first_line), first_line


def _one_sleeps(
    rank: int, size: int, folder: str, options: Options, over: list[threading.Event]
) -> tuple[str, int | None, str]:
    with join(rank, size, folder, timeout_s=2.5, options=options) as group:
        group.barrier()
        if rank == 2:
            for each in over:
                each.wait(TIMEOUT_S)
            return "", None, ""
        try:
            group.all_reduce(np.ones(1000))
        except NetfoldError as error:
            return type(error).__name__, error.rank, str(error)
        finally:
            over[rank].set()
            for each in over:  # no rank leaves while another queries it
                each.wait(TIMEOUT_S)
    return "nothing was raised", None, ""


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving_doubling", "shared_memory", "in_network"])
def test_all_ranks_report_a_timeout_alike_with_the_awaited_rank_first(algorithm: str) -> None:
    options = Options(transport="auto" if algorithm == "shared_memory" else "tcp", algorithm=f"all_reduce={algorithm}")
    if algorithm != "in_network":
        return _check_names(options, [threading.Event() for _ in range(4)])
    with running_switch() as switch:
        _check_names(Options(switch=switch.endpoint), [threading.Event() for _ in range(4)])


def _check_names(options: Options, over: list[threading.Event]) -> None:
    over[2].set()
    found = values(run_threads(_one_sleeps, 4, options, over))
    for rank in (0, 1, 3):
        error, named, text = found[rank]
        assert error == "CollectiveTimeout", text
        assert named == 2, text
        assert re.match(rf"rank {rank}: all_reduce #2 .* timed out after [\d.]+ s \(its timeout is 2\.5 s\)", text), (
            text
        )
        seen = text.partition("Just now ")[2]
        assert re.match(r"rank 2 is in no collective for [\d.]+ s, its last having been barrier #1", seen), text
        assert not re.search(r"rank [013] is|gave up", text), text


def _short_waits(rank: int, size: int, folder: str) -> list[float]:
    """A rank is late by twice the time until the first query, and nothing fails."""
    with join(rank, size, folder) as group:
        if rank == 1:
            time.sleep(2.2)
        array = np.full(5, rank + 1.0)
        group.all_reduce(array)
        group.barrier()
        return list(array)


def test_a_slow_rank_is_awaited() -> None:
    assert values(run_threads(_short_waits, 2)) == [[3.0] * 5] * 2


_BACKLOG, _PACE_S = 40, 0.06


def _submits_all_at_once(rank: int, size: int, folder: str, transport: str, questions: list[int]) -> list[float]:
    """Rank 0 queues its calls, and rank 1 makes one each 0.06 s: the last ones are in rank 0's queue for 2.4 s."""
    with join(rank, size, folder, options=Options(transport=transport)) as group:
        group.barrier()
        monitor = group.group._monitor
        check = monitor.check_overdue
        monitor.check_overdue = lambda *event: (questions.append(rank), check(*event))[1]  # type: ignore[method-assign, func-returns-value]
        arrays = [np.full(1, 10.0 * number + rank) for number in range(_BACKLOG)]
        works = []
        for array in arrays:
            if rank == 1:
                time.sleep(_PACE_S)
            works.append(group.all_reduce(array, asynchronous=True))
        for work in works:
            work.wait()
        return [float(array[0]) for array in arrays]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_operations_that_wait_in_a_queue_which_moves_are_not_overdue(transport: str) -> None:
    questions: list[int] = []
    sums = values(run_threads(_submits_all_at_once, 2, transport, questions))
    assert sums == [[20.0 * number + 1 for number in range(_BACKLOG)]] * 2
    assert questions == []


def _asks_twice(rank: int, size: int, folder: str, asked: list[float]) -> None:
    with join(rank, size, folder) as group:
        group.barrier()
        monitor, may_end = group.group._monitor, threading.Event()
        query = monitor.query_status
        monitor.query_status = lambda *of: (asked.append(rank), may_end.wait(TIMEOUT_S), query(*of))[2]  # type: ignore[method-assign, func-returns-value]
        if rank == 0:
            event = ("overdue", group.group._id, [1], 0, 0, 1, 1.0)
            for _ in range(20):
                connection_manager.manager._handle(*event)
            may_end.set()
            until = time.monotonic() + TIMEOUT_S
            while monitor.is_asking and time.monotonic() < until:
                time.sleep(0.01)
            connection_manager.manager._handle(*event)
        group.barrier()


def test_one_question_of_a_group_is_under_way_at_a_time() -> None:
    asked: list[float] = []
    values(run_threads(_asks_twice, 2, asked))
    assert asked == [0, 0]


def _expires_in_the_queue(rank: int, size: int, folder: str, over: threading.Event) -> None:
    with join(rank, size, folder) as group:
        group.barrier()
        if rank == 1:
            over.wait(TIMEOUT_S)
            return
        calls = [group.all_reduce(np.ones(1), timeout_s=each, asynchronous=True) for each in (25.0, 28.0, 1.0, 26.0)]
        try:
            calls[-1].wait()
        finally:
            over.set()


def test_an_operation_in_the_queue_expires_at_its_own_deadline() -> None:
    outcome = run_threads(_expires_in_the_queue, 2, threading.Event())[0]
    assert outcome.error == "CollectiveTimeout"
    assert re.search(
        r"all_reduce #4 .* timed out after 1\.\d s \(its timeout is 1\.0 s\); it did not start", outcome.text
    ), outcome.text


def _answers_after(rank: int, size: int, folder: str, aborts: bool) -> object:
    with join(rank, size, folder) as group:
        group.barrier()
        monitor = group.group._monitor
        if aborts:
            group.group.abort("enough")
    # A query that came before the group was closed, and gets its reply afterwards.
    return monitor.handle_request(1 - rank, {"type": "query", "sequence": 1})[0]["failure"]


def test_a_rank_that_has_closed_its_group_counts_as_no_failure() -> None:
    """Another rank may still wait for results of the last call: at a switch, or further along a ring."""
    assert values(run_threads(_answers_after, 2, False)) == [None, None]
    for failure in values(run_threads(_answers_after, 2, True)):
        assert failure is not None and "enough" in str(failure)
