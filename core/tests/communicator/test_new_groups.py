"""Groups of ranks that are in a group already: they form by its messages, over no store and with no handshake."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, values
from test_reconfigure import check_sum, exchange

from netfold import Communicator, FileStore, Options
from netfold.bootstrap import handshake
from netfold.communicator import NetfoldError, RendezvousError
from netfold.communicator.message_links import ParentLost

OVER_TCP = Options(probe="off", transport="tcp")
IN_MEMORY = Options(probe="off")


def joined(folder: str, rank: int, size: int, options: Options = IN_MEMORY, join_timeout_s: float = 20) -> Communicator:
    return Communicator(
        FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=seconds(join_timeout_s)
    )


def group_of(parent: Communicator, ranks: list[int], name: str = "", join_timeout_s: float = 20) -> Communicator:
    """As torch makes groups: only the members call, and in any thread."""
    meeting = parent.group.meeting(ranks, name)
    options = parent.group.options
    return Communicator(
        meeting, meeting.rank, meeting.size, options=options, timeout_s=20, join_timeout_s=join_timeout_s
    )


def events_of(group: Communicator) -> int:
    return len(group.group.events())


def without_handshakes(rank: int, size: int, folder: str, options: Options) -> list[Any]:
    with joined(folder, rank, size, options) as world:
        check_sum(world)
        if options.transport == "tcp" and rank != 1:  # the first message of two ranks makes their connection
            group_of(world, [2, 0, 3]).close()
        exchange(folder, "ready", rank, size)
        before = events_of(world)
        proofs = mock.patch("netfold.bootstrap.handshake._proof", wraps=handshake._proof)
        with proofs as proof, group_of(world, [2, 0, 3]) if rank != 1 else joined(f"{folder}/alone", 0, 1) as part:
            assert events_of(world) == before  # no operation of the program
            handshakes = proof.call_count
            exchange(folder, "made", rank, size)
            check_sum(part)
            if rank != 1:
                half = part.split(part.rank == 1)  # a group of a group of a group
                assert half is not None
                with half:
                    check_sum(half)
                    exchange(folder, "half", rank, size)
                    found = [part.rank, part.size, half.rank, half.size, handshakes]
            else:
                exchange(folder, "half", rank, size)
                found = [handshakes]
            check_sum(world)
            exchange(folder, "done", rank, size)
            return found


@pytest.mark.parametrize("options", [IN_MEMORY, OVER_TCP])
def test_some_ranks_form_a_group_without_a_handshake_and_without_the_other_ranks(options: Options) -> None:
    found = values(run_ranks(without_handshakes, 4, options))
    assert found == [[1, 3, 0, 1, 0], [0], [0, 3, 0, 2, 0], [2, 3, 1, 2, 0]]


def in_opposite_orders(rank: int, size: int, folder: str) -> list[int]:
    """Each rank has a thread for each group. Odd ranks start them in the opposite order, a moment apart."""
    names = [f"group {number}" for number in range(6)]
    with joined(folder, rank, size) as world:
        made: dict[str, Communicator] = {}

        def make(name: str) -> None:
            made[name] = group_of(world, list(range(size)), name)

        threads = [threading.Thread(target=make, args=(name,)) for name in (names[::-1] if rank % 2 else names)]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for _ in range(20):
            check_sum(world)  # collectives of the parent do not wait for the groups
        for thread in threads:
            thread.join()
        sums = []
        for number, name in enumerate(names):
            total = np.array([float(number)])
            made[name].all_reduce(total)
            sums.append(int(total[0]))
        exchange(folder, "done", rank, size)
        for group in made.values():
            group.close()
        return sums


def test_threads_make_groups_of_the_same_ranks_in_any_order() -> None:
    assert values(run_ranks(in_opposite_orders, 3)) == [[0, 3, 6, 9, 12, 15]] * 3


def one_stays_away(rank: int, size: int, folder: str, options: Options) -> str:
    with joined(folder, rank, size, options) as world:
        why = ""
        if rank < 2:
            with pytest.raises(RendezvousError) as failed:
                group_of(world, [0, 1, 2], join_timeout_s=0.5)
            why = str(failed.value)
        exchange(folder, "gave up", rank, size)
        if rank == 2:
            with pytest.raises(RendezvousError) as failed:
                group_of(world, [0, 1, 2])
            why = str(failed.value)
        check_sum(world)
        with group_of(world, [0, 1, 2, 3]) as second:
            check_sum(second)
            exchange(folder, "done", rank, size)
        return why


@pytest.mark.parametrize("options", [IN_MEMORY, OVER_TCP])
def test_a_member_that_stays_away_is_named_and_the_parent_goes_on(options: Options) -> None:
    whys = values(run_ranks(one_stays_away, 4, options))
    assert all("rank 2 did not answer in time" in why for why in whys[:3])


def fails(*_: Any) -> Any:
    raise RendezvousError("a test has no port")


def one_fails(rank: int, size: int, folder: str) -> tuple[str, float]:
    with joined(folder, rank, size) as world:
        began = time.monotonic()
        replaced = mock.patch("netfold.communicator.meeting.acquire_listener", fails)
        with replaced if rank == 1 else nullcontext(), pytest.raises(RendezvousError) as failed:
            group_of(world, list(range(size)))
        took_s = time.monotonic() - began
        exchange(folder, "failed", rank, size)
        check_sum(world)
        with group_of(world, list(range(size))) as second:
            check_sum(second)
            exchange(folder, "done", rank, size)
        return str(failed.value), took_s


def test_a_member_that_fails_tells_all_others_why() -> None:
    found = values(run_ranks(one_fails, 4))
    assert {why for why, _ in found} == {"a test has no port"}
    assert max(took_s for _, took_s in found) < seconds(3)


def memory_gets_lost(rank: int, size: int, folder: str) -> str:
    with joined(folder, rank, size) as world:
        if rank == 1:
            lost = mock.patch("netfold.communicator.parent_meeting.take_memory", return_value=None)
            with lost, pytest.raises(RendezvousError, match="rank 1 did not get the memory"):
                group_of(world, list(range(size)))
        else:
            with group_of(world, list(range(size))) as group, pytest.raises(NetfoldError) as failed:
                group.barrier()
        exchange(folder, "failed", rank, size)
        check_sum(world)
        exchange(folder, "done", rank, size)
        return "" if rank == 1 else str(failed.value)


def test_a_member_that_fails_at_the_last_step_ends_the_first_operation() -> None:
    first, _, last = values(run_ranks(memory_gets_lost, 3))
    assert "it could not join" in first and "it could not join" in last


def one_dies(rank: int, size: int, folder: str, options: Options, member: bool) -> tuple[str, str, float]:
    world = joined(folder, rank, size, options)
    check_sum(world)
    exchange(folder, "ready", rank, size)
    members = [0, 1, 2, 3] if member else [0, 1, 2]
    if rank == 3:
        time.sleep(0.2)
        Path(folder, "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2 and not member:
        time.sleep(1.0)  # the others wait for this rank, not for the one that dies
    try:
        group = group_of(world, members)
    except RendezvousError as error:
        return type(error).__name__, str(error), time.monotonic() - float(Path(folder, "died").read_text())
    check_sum(group)
    exchange(folder, "done", rank, 3)
    return "", "", 0.0


@pytest.mark.parametrize("options", [IN_MEMORY, OVER_TCP])
def test_a_member_that_is_killed_is_noticed(options: Options) -> None:
    for kind, why, took_s in values(run_ranks(one_dies, 4, options, True, dies=[3])[:3]):
        assert kind == "ParentLost" and re.search(r"rank 3\b", why), why
        assert took_s < seconds(4)


def test_the_death_of_a_rank_that_is_no_member_ends_nothing() -> None:
    assert values(run_ranks(one_dies, 4, IN_MEMORY, False, dies=[3])[:3]) == [("", "", 0.0)] * 3


def parent_ends(rank: int, size: int, folder: str, how: str) -> str:
    with joined(folder, rank, size) as world:
        check_sum(world)
        exchange(folder, "ready", rank, size)
        if rank == 0:
            time.sleep(0.2)
            if how == "closed":
                world.close()
            else:
                world.group.abort("a test")
        with pytest.raises(ParentLost) as failed:
            group_of(world, list(range(size)))
        exchange(folder, "done", rank, size)
        return str(failed.value)


@pytest.mark.parametrize("how", ["closed", "aborted"])
def test_a_parent_that_ends_meanwhile_ends_the_attempt(how: str) -> None:
    whys = values(run_ranks(parent_ends, 3, how))
    assert whys[0] == "the group whose ranks form a new one has failed, or was closed"
    for why in whys[1:]:
        assert "rank 0" in why


def outlives_its_parent(rank: int, size: int, folder: str) -> bool:
    world = joined(folder, rank, size)
    part = world.split(0)
    assert part is not None
    with part:
        world.close()
        exchange(folder, "closed", rank, size)
        check_sum(part)
        big = np.full(1 << 20, float(rank))
        part.broadcast(big, 1)  # from memory to memory, where the kernel allows it
        assert (big == 1).all()
        exchange(folder, "done", rank, size)
        return part.group.peer_memory is not None


def test_a_group_outlives_its_parent() -> None:
    values(run_ranks(outlives_its_parent, 3))


def unlike_options(rank: int, size: int, folder: str) -> str:
    with joined(folder, rank, size) as world:
        with pytest.raises(RendezvousError) as failed:
            world.split(0, options=Options(probe="off", algorithm="ring" if rank == 1 else None))
        exchange(folder, "done", rank, size)
        return str(failed.value)


def test_options_that_only_one_member_has_are_an_error() -> None:
    assert set(values(run_ranks(unlike_options, 3))) == {
        "rank 0 makes a new group with the options of the group that its ranks are in, and rank 1 with other ones: "
        "every rank needs the same"
    }


def other_transport(rank: int, size: int, folder: str) -> list[str]:
    """A parent over TCP has a group in shared memory, and that one a group over TCP, which measures its links."""
    with joined(folder, rank, size, OVER_TCP) as world:
        inside = world.split(0, options=IN_MEMORY)
        assert inside is not None
        with inside:
            check_sum(inside)
            over_tcp = inside.split(0, options=Options(probe="on", transport="tcp"))
            assert over_tcp is not None
            with over_tcp:
                check_sum(over_tcp)
                again = over_tcp.split(0)
                assert again is not None
                with again:
                    check_sum(again)
                    assert again.group.links == over_tcp.group.links and again.group.links.measured
                    exchange(folder, "done", rank, size)
                return [group.group.why("all_reduce", 64).split(" ")[0] for group in (inside, over_tcp)]


def test_a_group_with_other_options_finds_out_for_itself() -> None:
    for inside, over_tcp in values(run_ranks(other_transport, 3)):
        assert inside == "shared_memory" and over_tcp != "shared_memory"
