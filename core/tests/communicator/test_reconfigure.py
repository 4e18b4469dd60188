"""`Communicator.reconfigure` and `shrink`: the next group over handles, and every way in which it does not form."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.bootstrap import endpoint, handle, regroup, rendezvous, tree
from netfold.communicator import GroupAborted, RendezvousError

QUIET = Options(probe="off")
OVER_TCP = Options(probe="off", transport="tcp")
# The longest time to the error for what is known at once: a member that died, gave up, or forms another group.
SOON_S = 3.0


def joined(folder: str, rank: int, size: int, options: Options = QUIET) -> Communicator:
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20)


def outside(options: Options = QUIET) -> Communicator:
    return Communicator.outside(options=options, timeout_s=20, join_timeout_s=20)


def check_sum(group: Communicator) -> None:
    """Every element, and every rank's part, counts."""
    own = np.arange(5000, dtype=np.float64) * (group.rank + 1)
    group.all_reduce(own)
    expected = np.arange(5000, dtype=np.float64) * sum(range(1, group.size + 1))
    assert np.array_equal(own, expected)


def exchange(folder: str, name: str, rank: int, size: int, value: str = "") -> list[str]:
    """Leave a value in the folder; returns those of all ranks, by rank. Also a barrier."""
    store = FileStore(folder)
    store.set(f"{name}/{rank}", value.encode())
    return [store.get(f"{name}/{peer}", 20).decode() for peer in range(size)]


# --- who is in the group, and in which order -------------------------------------------------------------------------


def shrink_after_a_death(rank: int, size: int, folder: str, transport: str) -> tuple[int, int, float]:
    options = Options(probe="off", transport=transport)
    with joined(folder, rank, size, options) as group:
        check_sum(group)
        exchange(folder, "ready", rank, size)
        if rank == 1:
            Path(folder, "died").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Exception, match=r"rank 1|gave up"):
            while True:
                group.all_reduce(np.ones(1000))
        group.shrink([1])
        check_sum(group)
        took_s = time.monotonic() - float(Path(folder, "died").read_text())
        exchange(folder, "done", [0, 2, 3].index(rank), 3)
        return group.rank, group.size, took_s


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_survivors_of_a_death_go_on_within_a_second(transport: str) -> None:
    outcomes = run_ranks(shrink_after_a_death, 4, transport, dies=[1])
    left = values([outcomes[0], outcomes[2], outcomes[3]])
    assert [(rank, size) for rank, size, _ in left] == [(0, 3), (1, 3), (2, 3)]
    assert max(took_s for *_, took_s in left) < seconds(1.0)


def newcomer_joins(rank: int, size: int, folder: str) -> tuple[int, int]:
    """Ranks 0 and 1 have a group; rank 2 never had one, and comes first in the next."""
    with joined(folder, rank, 2) if rank < 2 else outside() as group:
        if rank == 2:
            with pytest.raises(GroupAborted, match="in no group"):
                group.barrier()
        handles = exchange(folder, "handle", rank, size, group.handle)
        group.reconfigure(1, [handles[2], handles[1], handles[0]])
        check_sum(group)
        assert group.handles == tuple(reversed(handles))
        exchange(folder, "done", rank, size)
        return group.rank, group.size


def test_a_new_process_joins_and_the_list_orders_the_ranks() -> None:
    assert values(run_ranks(newcomer_joins, 3)) == [(2, 3), (1, 3), (0, 3)]


def from_a_set(rank: int, size: int, folder: str) -> tuple[int, list[str]]:
    with outside() as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        group.reconfigure("set", frozenset(handles))
        check_sum(group)
        exchange(folder, "done", rank, size)
        return group.rank, handles


def test_a_set_is_sorted() -> None:
    found = values(run_threads(from_a_set, 3))
    handles = found[0][1]
    assert [rank for rank, _ in found] == [sorted(handles).index(each) for each in handles]


def many_generations(rank: int, size: int, folder: str, options: Options) -> None:
    """Ten times: one leaves, the others go on, it comes back at another place."""
    with joined(folder, rank, size, options) as group:
        for turn in range(10):
            handles = exchange(folder, f"handles {turn}", rank, size, group.handle)
            dropped = turn % size
            left = handles[:dropped] + handles[dropped + 1 :]
            if rank != dropped:
                group.reconfigure(f"without {turn}", left)
                check_sum(group)
                assert group.rank == left.index(group.handle)
            exchange(folder, f"all {turn}", rank, size)
            group.reconfigure(f"all {turn}", [*left, handles[dropped]])
            check_sum(group)
        exchange(folder, "done", rank, size)


@pytest.mark.parametrize("options", [QUIET, OVER_TCP], ids=["memory", "tcp"])
def test_ranks_leave_and_come_back_ten_times(options: Options) -> None:
    values(run_threads(many_generations, 3, options, timeout_s=60))


def halves_and_split(rank: int, size: int, folder: str) -> list[int]:
    """Two groups at once from one; then all again; then `split` where there is no store."""
    with joined(folder, rank, size) as group:
        handles = list(group.handles)
        half = handles[:2] if rank < 2 else handles[2:]
        group.reconfigure(f"half {rank // 2}", half)
        check_sum(group)
        exchange(folder, "halves", rank, size)
        group.reconfigure("whole", handles)
        check_sum(group)
        part = group.split(rank % 2, key=-rank)
        assert part is not None
        with part:
            check_sum(part)
            check_sum(group)  # the parent goes on
            assert len(part.handles) == 2 and part.handle in part.handles and part.handle not in handles
            exchange(folder, "done", rank, size)
            return [group.rank, part.rank, part.size]


def test_groups_divide_and_meet_again_and_split_needs_no_store() -> None:
    assert values(run_threads(halves_and_split, 4)) == [[0, 1, 2], [1, 1, 2], [2, 0, 2], [3, 0, 2]]


def late(rank: int, size: int, folder: str) -> None:
    with outside() as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        time.sleep(0.8 * rank)
        group.reconfigure("late", handles)
        check_sum(group)
        exchange(folder, "done", rank, size)


def test_a_late_member_meets_the_others() -> None:
    values(run_threads(late, 3))


SECRET = "0123456789abcdef" * 4


def encrypted(rank: int, size: int, folder: str) -> None:
    secret = Path(folder) / f"secret {rank}"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    options = Options(probe="off", transport="tcp", security="encrypt", secret_file=str(secret))
    with joined(folder, rank, 2, options) if rank < 2 else outside(options) as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        group.reconfigure(7, handles)
        check_sum(group)
        exchange(folder, "done", rank, size)


def test_an_encrypted_group_takes_a_newcomer_with_the_same_secret_file() -> None:
    values(run_threads(encrypted, 3))


def test_ranks_derive_the_handles_of_all_and_a_secret_file_changes_the_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    handles = ["a", "b"]
    plain = handle.generation_secret("1", handles, None)
    others = [
        handle.generation_secret("2", handles, None),
        handle.generation_secret("1", handles[::-1], None),
        handle.generation_secret("1", [*handles, "c"], None),
        handle.generation_secret("1", handles, str(tmp_path / "secret")),
    ]
    assert plain == handle.generation_secret("1", ["a", "b"], None) and len({plain, *others}) == 5


# --- the group that was ----------------------------------------------------------------------------------------------


def leave_while_others_wait(rank: int, size: int, folder: str, options: Options) -> str:
    with joined(folder, rank, size, options) as group:
        group.barrier()
        if rank == 0:
            time.sleep(0.2)
            group.reconfigure("alone", [group.handle])
            check_sum(group)
            exchange(folder, "done", rank, size)
            return ""
        with pytest.raises(Exception) as found:
            group.all_reduce(np.ones(100))
        exchange(folder, "done", rank, size)
        return str(found.value)


@pytest.mark.parametrize("options", [QUIET, OVER_TCP], ids=["memory", "tcp"])
def test_operations_of_the_former_group_fail_with_the_reason(options: Options) -> None:
    _, *others = values(run_threads(leave_while_others_wait, 3, options))
    for text in others:
        assert "rank 0 left the group: it is reconfigured, as alone of 1 members" in text, text


def own_operation_under_way(rank: int, size: int, folder: str) -> str:
    with joined(folder, rank, size) as group:
        group.barrier()
        if rank == 0:
            work = group.all_reduce(np.ones(100), asynchronous=True)  # rank 1 never calls
            group.reconfigure("alone", [group.handle])
            with pytest.raises(Exception) as found:
                work.wait()
            return str(found.value)
        exchange(folder, "never", 0, 1)
        time.sleep(0.5)
        return ""


def test_an_own_operation_under_way_fails_with_the_reason() -> None:
    assert "it is reconfigured, as alone of 1 members" in values(run_threads(own_operation_under_way, 2))[0]


# --- calls that can form no group: the former group goes on ----------------------------------------------------------


def test_calls_that_can_be_no_group_are_refused_and_leave_the_group_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    with joined(str(tmp_path), 0, 1) as group, outside() as other:
        same, fine = group.handle, other.handle
        with outside(Options(secret_file=str(tmp_path / "secret"))) as third, outside(Options(security="encrypt")) as e:
            refused = {
                "handles 0 and 2 are the same one .*every member needs one place": [same, fine, same],
                "this rank's own handle .* is not one of the 1 handles": [fine],
                "at least one handle": [],
                "'gloo:0:1:2' is no handle of netfold": [same, "gloo:0:1:2"],
                "is no whole handle of netfold": [same, fine[:-8]],
                "handle 1 .* has another secret than this rank": [same, third.handle],
                "handle 1 .* has another NETFOLD_SECURITY than this rank: encrypt, not none": [same, e.handle],
            }
            for text, handles in refused.items():
                with pytest.raises(ValueError, match=text):
                    group.reconfigure("refused", handles)
        check_sum(group)
        group.reconfigure("refused", [same])  # the uuid is free
        with pytest.raises(RendezvousError, match="the uuid refused was already used on this communicator"):
            group.reconfigure("refused", [same])
        check_sum(group)
        with pytest.raises(ValueError, match="shrink: rank 0 is this rank"):
            group.shrink([0])
        with pytest.raises(ValueError, match=r"shrink: \[4\] of a group of 1"):
            group.shrink([4])


def test_a_handle_of_another_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with outside() as group:
        monkeypatch.setattr("netfold.__version__", "0.0.1")
        with outside() as older:
            text = older.handle
        monkeypatch.undo()
        with pytest.raises(ValueError, match=r"was made by netfold 0\.0\.1, and this rank runs netfold"):
            group.reconfigure(1, [group.handle, text])


def with_other_options(rank: int, size: int, folder: str) -> list[str]:
    """The next group has its own options, and the one after it the communicator's again."""
    with joined(folder, rank, size, OVER_TCP) as group:
        handles, found = list(group.handles), []
        for turn, options in enumerate((Options(probe="off", transport="tcp", algorithm="all_reduce=tree"), None)):
            group.reconfigure(turn, handles, options=options)
            check_sum(group)
            found.append(group.group.why("all_reduce", 40_000))
        exchange(folder, "done", rank, size)
        return found


def test_a_group_may_have_options_of_its_own() -> None:
    for first, second in values(run_threads(with_other_options, 3)):
        assert first.startswith("tree (NETFOLD_ALGORITHM=all_reduce=tree)"), first
        assert "all_reduce=tree" not in second, second


@pytest.mark.parametrize("name", ["transport", "security", "secret_file", "interface", "ports"])
def test_options_of_the_listener_and_the_handle_stay(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    other = {"security": "encrypt", "secret_file": str(secret), "interface": "127.0.0.1", "ports": "29987"}
    with outside() as group:
        options = Options(probe="off", **{name: other.get(name, "tcp")})
        with pytest.raises(ValueError, match=rf"^{name}=.* whose handle was made with {name}=.*a new communicator"):
            group.reconfigure(1, [group.handle], options=options)
        group.reconfigure(1, [group.handle])  # the uuid is free


def test_a_closed_communicator_is_not_reconfigured() -> None:
    group = outside()
    own = group.handle
    group.close()
    with pytest.raises(ValueError, match="closed"):
        group.reconfigure(1, [own])
    with pytest.raises(ValueError, match="closed"):
        group.barrier()


# --- groups that do not form -----------------------------------------------------------------------------------------


def refusal(group: Communicator, uuid: str, handles: list[str], timeout_s: float = 15.0) -> tuple[str, int | None]:
    """The error's text and rank; it came soon. Then this rank is in no group."""
    began = time.monotonic()
    with pytest.raises(RendezvousError) as found:
        group.reconfigure(uuid, handles, timeout_s=timeout_s)
    assert time.monotonic() - began < seconds(SOON_S)
    with pytest.raises(GroupAborted, match="in no group"):
        group.barrier()
    return str(found.value), found.value.rank


def name_a_dead_member(rank: int, size: int, folder: str, dead: int) -> tuple[str, int | None]:
    with outside() as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        exchange(folder, "ready", rank, size)
        if rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        found = refusal(group, "with the dead", handles)
        left = handles[:dead] + handles[dead + 1 :]
        group.reconfigure("without", left)
        check_sum(group)
        exchange(folder, "done", left.index(group.handle), size - 1)
        return found


@pytest.mark.parametrize("dead", [0, 2])
def test_a_dead_member_ends_it_at_once_on_all_others_and_the_next_group_forms(dead: int) -> None:
    outcomes = run_ranks(name_a_dead_member, 4, dead, dies=[dead])
    for text, at_fault in values([outcomes[rank] for rank in range(4) if rank != dead]):
        assert re.search(rf"did not form: rank {dead} \(127\.0\.0\.1:\d+\) is gone", text), text
        assert at_fault == dead


def die_in_the_middle(rank: int, size: int, folder: str, dead: int) -> tuple[str, int | None]:
    with outside() as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        if rank == dead:  # connected to its neighbours, and before it has the job
            tree.StartTree.broadcast = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        return refusal(group, "middle", handles)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_death_in_the_middle_ends_it_on_all_others(dead: int) -> None:
    outcomes = run_ranks(die_in_the_middle, 3, dead, dies=[dead])
    for text, at_fault in values([outcomes[rank] for rank in range(3) if rank != dead]):
        assert f"rank {dead}" in text
        assert at_fault == dead


def fails_as_the_last_neighbour_comes(rank: int, size: int, folder: str) -> tuple[str, int | None]:
    def give_up(proposal: Any, group: Any, *_: Any) -> None:
        with group.changed:
            assert group.changed.wait_for(lambda: {(1, 0, 0), (2, 0, 0)} <= group.accepted.keys(), seconds(20))
        raise RendezvousError("rank 2 gave up", rank=2)

    with outside() as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        if rank == 0:
            regroup._await_neighbours = give_up
        return refusal(group, "as the last comes", handles)


def test_neighbours_whose_connections_were_not_used_yet_get_the_reason_of_a_failure() -> None:
    found = values(run_ranks(fails_as_the_last_neighbour_comes, 3))
    assert [text.count("rank 2 gave up") for text, _ in found] == [1, 1, 1], found
    assert [at_fault for _, at_fault in found] == [2, 2, 2]


def gives_up_while_it_connects(rank: int, size: int, folder: str) -> tuple[str, int | None]:
    began, gave_up = threading.Event(), threading.Event()
    join, fail = rendezvous.join, tree.StartTree.fail

    def give_up(*_: Any) -> None:
        assert began.wait(seconds(20))
        raise RendezvousError("rank 1 gave up", rank=1)

    def join_late(*about: Any) -> None:
        began.set()
        assert gave_up.wait(seconds(20))
        join(*about)

    def fail_first(*about: Any) -> None:
        fail(*about)
        gave_up.set()

    with outside() as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        if rank == 0:
            regroup._CHILD_PAUSE_S = 60.0  # it does not ask
        if rank == 1:
            regroup._await_neighbours = give_up
            rendezvous.join, tree.StartTree.fail = join_late, fail_first  # type: ignore[method-assign]
        found = refusal(group, "late", handles)
        exchange(folder, "done", rank, size)
        return found


def test_a_connection_that_comes_after_its_rank_gave_up_brings_the_reason() -> None:
    found = values(run_ranks(gives_up_while_it_connects, 3))
    assert [text.count("rank 1 gave up") for text, _ in found] == [1, 1, 1], found
    assert [at_fault for _, at_fault in found] == [1, 1, 1]


def absent_member(rank: int, size: int, folder: str, absent: int) -> tuple[str, int | None]:
    with outside() as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        found = ("", None) if rank == absent else refusal(group, "absent", handles, 1.0)
        exchange(folder, "done", rank, size)
        return found


@pytest.mark.parametrize("absent", [0, 1])
def test_a_member_that_does_not_call_is_named_at_the_deadline(absent: int) -> None:
    found = values(run_threads(absent_member, 3, absent))
    for text, at_fault in found[:absent] + found[absent + 1 :]:
        assert re.search(rf"in time\. Missing: rank {absent} \(\S+\): it has not been called with these", text), text
        assert at_fault == absent


def closed_member(rank: int, size: int, folder: str) -> tuple[str, int | None]:
    with outside() as group, outside() as keeps_the_listener:
        handles = exchange(folder, "handle", rank, size, group.handle)
        if rank == 1:
            group.close()
        exchange(folder, "closed", rank, size)
        found = refusal(group, "closed", handles) if rank == 0 else ("", None)
        exchange(folder, "done", rank, size)
        assert keeps_the_listener.handle
        return found


def test_a_member_that_closed_its_communicator_is_gone_even_where_its_process_lives() -> None:
    text, at_fault = values(run_ranks(closed_member, 2))[0]
    assert "rank 1" in text and "is gone: its communicator was closed" in text and at_fault == 1


def other_process_at_the_port(rank: int, size: int, folder: str) -> tuple[str, int | None]:
    with outside() as group, outside() as other:
        made = other.handle
        other.close()
        stale = handle.make(
            b"12345678",
            b"1" * 32,
            handle.parse(made).addresses,
            rails=1,
            fabric=None,
            host="",
            security_level="none",
            secret_file=None,
        )
        return refusal(group, "stale", [group.handle, stale.text])


def test_a_stale_handle_whose_port_another_communicator_has_is_gone() -> None:
    text, at_fault = values(run_threads(other_process_at_the_port, 1))[0]
    assert "rank 1" in text and "is gone: nobody answers for it" in text and at_fault == 1


def disagree(rank: int, size: int, folder: str, calls: list[tuple[str, list[int]]]) -> str:
    with outside() as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        uuid, members = calls[rank]
        text, _ = refusal(group, uuid, [handles[each] for each in members])
        exchange(folder, "done", rank, size)
        return text


@pytest.mark.parametrize(
    "calls",
    [
        [("1", [0, 1]), ("1", [1, 0])],
        [("1", [0, 1]), ("2", [0, 1])],
        [("1", [0, 1, 2]), ("1", [0, 1, 2]), ("1", [0, 2])],
        [("1", [0, 1, 2]), ("1", [0, 1, 2]), ("2", [2, 1])],
        [("1", [0, 1, 2]), ("2", [1, 2, 0]), ("3", [2, 0, 1])],
    ],
)
def test_different_proposals_do_not_mix_and_each_ends_with_a_sentence(calls: list[tuple[str, list[int]]]) -> None:
    for text in values(run_threads(disagree, len(calls), calls)):
        assert "takes part in something else: it " in text and "All members need the same call" in text, text


def other_options(rank: int, size: int, folder: str) -> tuple[str, int | None]:
    with outside(Options(probe="off", switch="127.0.0.1:9" if rank == 2 else "")) as group:
        handles = exchange(folder, "handle", rank, size, group.handle)
        found = refusal(group, "options", handles)
        exchange(folder, "done", rank, size)
        return found


def test_options_that_do_not_fit_are_an_error_on_every_member() -> None:
    for text, at_fault in values(run_threads(other_options, 3)):
        assert "rank 2 has NETFOLD_SWITCH=127.0.0.1:9, rank 0 has None: all ranks need as many" in text, text
        assert at_fault == 2


def test_a_uuid_that_was_forgotten_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_REMEMBERED", 2)
    with outside() as group:
        for uuid in (1, 2, 3, 1):
            group.reconfigure(uuid, [group.handle])
        with pytest.raises(RendezvousError, match="already used"):
            group.reconfigure(3, [group.handle])


def test_nothing_is_left_behind_by_a_group_that_did_not_form() -> None:
    with outside() as group, outside() as idle:
        before = {thread.name for thread in threading.enumerate()}, len(os.listdir("/proc/self/fd"))
        for turn in range(5):
            with pytest.raises(RendezvousError, match="in time"):
                group.reconfigure(turn, [group.handle, idle.handle], timeout_s=0.1)
        deadline = time.monotonic() + seconds(5.0)
        while True:
            now = {thread.name for thread in threading.enumerate()}, len(os.listdir("/proc/self/fd"))
            extra = {name for name in now[0] - before[0] if "regroup" in name}
            if not extra and now[1] <= before[1]:
                break
            assert time.monotonic() < deadline, (extra, before[1], now[1])
            time.sleep(0.05)
