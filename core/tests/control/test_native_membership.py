"""A rank that joins a switch by the native client, without Python's: the same jobs and the same sums."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds, settles
from native_rank import TABLE, add, join, part, total
from ranks import RunningSwitch, private, run_ranks, run_threads, running_switch, values

from netfold._native import engine
from netfold._native_dev import control
from netfold.communicator.group import region
from netfold.communicator.membership import Membership
from netfold.switch_protocol.control_client import SwitchAccess

pytestmark = pytest.mark.native

TOKEN = secrets.token_hex(32)
COUNTS = (1, 7, 352, 5000, 300_001)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[RunningSwitch, str]]:
    """A switch that wants a token, and the file with one that it knows."""
    with running_switch("--token-file", private(tmp_path / "tokens", f"vision {TOKEN}\n")) as switch:
        yield switch, private(tmp_path / "token", TOKEN + "\n")
        assert TOKEN not in switch.log()


def new_job() -> str:
    return secrets.token_hex(16)


def _adds(
    rank: int, size: int, folder: str, endpoint: str, job: str, token_file: str, security: str
) -> tuple[bool, bool]:
    member = join(rank, size, endpoint, job=job, token_file=token_file, security=security)
    for dtype in ("float32", "int32"):
        for turn, count in enumerate(COUNTS, 1 if dtype == "float32" else 1 + len(COUNTS)):
            array = part(rank, count, turn, dtype)
            add(member, array, turn)
            np.testing.assert_array_equal(array, total(size, count, turn, dtype))
    member.leave("it is done")
    return member.authenticated, member.encrypts


def test_native_ranks_add_through_an_open_switch() -> None:
    with running_switch() as switch:
        assert values(run_threads(_adds, 3, switch.endpoint, new_job(), "", "none")) == [(False, False)] * 3
        switch.wait_for("rank 1 left: it is done")


@pytest.mark.parametrize(("security", "encrypts"), [("none", False), ("authenticate", False), ("encrypt", True)])
def test_native_ranks_add_through_a_switch_with_tokens(
    guarded: tuple[RunningSwitch, str], security: str, encrypts: bool
) -> None:
    switch, token_file = guarded
    both = values(run_threads(_adds, 2, switch.endpoint, new_job(), token_file, security))
    assert both == [(True, encrypts)] * 2
    switch.wait_for(f"event=started .*authenticated=yes encrypted={'yes' if encrypts else 'no'}")


def test_native_ranks_in_processes_add(guarded: tuple[RunningSwitch, str]) -> None:
    switch, token_file = guarded
    assert all(values(run_ranks(_adds, 4, switch.endpoint, new_job(), token_file, "encrypt")))


def test_a_switch_of_ipv6_is_joined() -> None:
    with running_switch("--listen", "[::1]:0") as switch:
        assert values(run_threads(_adds, 2, switch.endpoint, new_job(), "", "none")) == [(False, False)] * 2


def python_rank(rank: int, size: int, endpoint: str, job: str, token_file: str | None, security: str) -> None:
    """Join by Python's client, and add through a native group, as a rank of a Communicator does."""
    access = SwitchAccess(endpoint, token_file, rank, tuple(range(size)), security)
    membership = Membership.join(access, job=job, timeout_s=20.0)
    in_network = (engine.KINDS["all_reduce"], 0, engine.ALGORITHMS["in_network"], -1, engine.ALGORITHMS["local"])
    group = engine.add_group(
        rank=rank, nodes=list(range(size)), lanes=3, rails=1, connections=[], resumable=False, id=1, job="", spin_us=0,
        spins_for_sockets=False, yields=True, table=[in_network], table_hash=TABLE, fabric=None, rma_min_bytes=0,
        security="none",
    )  # fmt: skip
    try:
        membership.attach(group, [], TABLE)
        for count in COUNTS:
            turn = COUNTS.index(count) + 1
            array = part(rank, count, turn)
            limit_ns = int(seconds(30) * 1e9)
            operation = group.submit(
                engine.KINDS["all_reduce"],
                engine.DTYPES["f32"],
                0,
                False,
                0,
                [],
                [region(array)],
                array,
                limit_ns,
                False,
            )
            assert group.wait(operation, limit_ns) and operation.failure is None, operation.failure
            np.testing.assert_array_equal(array, total(size, count, turn))
    finally:
        membership.leave("it is done")
        engine.remove_group(group)


def _adds_by_either(rank: int, size: int, folder: str, endpoint: str, job: str, token_file: str, security: str) -> None:
    if rank == 1:
        return python_rank(rank, size, endpoint, job, token_file or None, security)
    member = join(rank, size, endpoint, job=job, token_file=token_file, security=security)
    for turn, count in enumerate(COUNTS, 1):
        array = part(rank, count, turn)
        add(member, array, turn)
        np.testing.assert_array_equal(array, total(size, count, turn))
    member.leave("it is done")


@pytest.mark.parametrize("security", ["open", "authenticate", "encrypt"])
def test_a_job_with_ranks_of_both_clients_has_the_same_sums(guarded: tuple[RunningSwitch, str], security: str) -> None:
    if security == "open":
        with running_switch() as switch:
            values(run_threads(_adds_by_either, 3, switch.endpoint, new_job(), "", "none"))
    else:
        switch, token_file = guarded
        values(run_threads(_adds_by_either, 3, switch.endpoint, new_job(), token_file, security))


def both_joined(switch: RunningSwitch, **options: Any) -> list[Any]:
    job = new_job()
    return values(run_threads(lambda rank, size, _: join(rank, size, switch.endpoint, job=job, **options), 2))


def test_a_window_and_a_payload_are_the_switchs() -> None:
    with running_switch("--window", "100K") as switch:
        first, second = both_joined(switch)
        assert first.payload_bytes == second.payload_bytes == 8880
        assert first.window == second.window == (100 << 10) // (8880 + 48)
        assert not first.hardware
        first.leave("done")
        second.leave("done")


def test_a_rank_that_left_when_nobody_needed_it_ends_nothing() -> None:
    with running_switch() as switch:
        first, second = both_joined(switch)
        values(run_threads(lambda rank, *_: add((first, second)[rank], np.ones(10, np.float32), 1), 2))
        second.leave("it is done")
        switch.wait_for("rank 1 left: it is done")
        assert first.watch(int(2.5e9)) == ""
        first.leave("it is done")
        assert first.watch(int(1e8)) == ""


def test_a_rank_that_left_while_it_was_needed_is_named_with_its_reason() -> None:
    with running_switch() as switch:
        first, second = both_joined(switch)
        second.leave("out of memory", 1)
        with pytest.raises(RuntimeError) as raised:
            add(first, np.ones(10, np.float32), 1)
        reason = "rank 1 left while its contribution was needed: out of memory; see its own output"
        assert str(raised.value) == f"{reason} [rank 1]"
        # It stays so, whoever asks.
        assert first.watch(int(1e9)) == reason
        first.leave("a rank left", 1)


def test_a_rank_at_fault_is_another_than_the_one_that_left() -> None:
    with running_switch() as switch:
        job = new_job()
        ranks = values(run_threads(lambda rank, size, _: join(rank, size, switch.endpoint, job=job), 3))
        ranks[1].leave("rank 2 hangs", 2)
        with pytest.raises(RuntimeError, match=r"rank 1 left .* rank 2 hangs; .* \[rank 2\]"):
            add(ranks[0], np.ones(10, np.float32), 1)
        for rank in ranks:
            rank.leave("done")


def test_a_killed_switch_is_lost_at_once() -> None:
    with running_switch() as switch:
        first, second = both_joined(switch)
        switch.process.kill()
        for member in (first, second):
            reason = member.watch(int(seconds(20) * 1e9))
            assert reason == f"the switch at {switch.endpoint} is gone (it closed the connection)"


def test_a_stopped_switch_is_lost_after_its_replies_are_overdue() -> None:
    with running_switch() as switch:
        first, _ = both_joined(switch)
        os.kill(switch.process.pid, signal.SIGSTOP)
        try:
            reason = first.watch(int(seconds(20) * 1e9))
            assert reason.startswith(f"the switch at {switch.endpoint} is gone (it has not answered for 3."), reason
        finally:
            os.kill(switch.process.pid, signal.SIGCONT)


def test_a_switch_that_is_stopped_in_order_gives_its_reason() -> None:
    with running_switch() as switch:
        first, _ = both_joined(switch)
        switch.process.send_signal(signal.SIGTERM)
        reason = first.watch(int(seconds(20) * 1e9))
        assert reason.startswith(f"the switch at {switch.endpoint} is gone ("), reason
        assert "it closed the connection" not in reason


def test_a_thread_may_leave_while_another_polls(guarded: tuple[RunningSwitch, str]) -> None:
    switch, token_file = guarded
    first, second = both_joined(switch, token_file=token_file)
    reasons: list[str] = []
    poller = threading.Thread(target=lambda: reasons.append(first.watch(int(3e9))))
    poller.start()
    first.leave("another thread said so")
    poller.join(seconds(10))
    assert reasons == [""]
    switch.wait_for("rank 0 left: another thread said so")
    second.leave("done")


def test_a_membership_that_is_dropped_ends_at_the_switch() -> None:
    with running_switch() as switch:
        members = both_joined(switch)
        del members[0]
        switch.wait_for("rank 0 left")
        members[0].leave("done")


def test_no_descriptor_is_left() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with running_switch() as switch:
        for member in both_joined(switch):
            member.leave("warm")
        del member
        before = descriptors()
        for _ in range(3):
            for member in both_joined(switch):
                member.leave("done")
            with pytest.raises(RuntimeError):
                join(0, 1, "127.0.0.1:9", job=new_job())
        del member
        assert settles(lambda: descriptors() <= before), (before, descriptors())


def test_both_clients_speak_one_version() -> None:
    from netfold.switch_protocol import control_messages

    assert control.VERSION == control_messages.VERSION
