"""Members of an elastic job as processes: lost ranks, newcomers, members that leave, and the sums of every step."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from load import seconds
from members_job import (
    APART,
    QUIET,
    Job,
    die,
    first_members,
    in_background,
    mark,
    newcomer,
    size_is,
    steps,
    sum_of,
    wait_for,
)
from ranks import Daemon, run_ranks, values

from netfold import Communicator, FileStore, Options
from netfold.communicator import GroupAborted, NetfoldError, RendezvousError
from netfold.elastic import Change, Members, TooFewLeft
from netfold.elastic.joining import Joining
from netfold.elastic.newest import Newest

# --- lost members ----------------------------------------------------------------------------------------------------


def one_is_killed(rank: int, size: int, folder: str, victim: int, options: Options) -> tuple[float, int, Change, float]:
    with first_members(folder, rank, size, options) as members:
        job = Job(members, steps(8))

        def kill() -> None:
            if (rank, members.done) == (victim, 3):
                mark(folder, "died", str(time.monotonic()))
                die()
            if members.generation == 2 and not took:
                took.append(time.monotonic() - float(wait_for(folder, "died")))

        took: list[float] = []
        job.before_vote = kill
        (change,) = job.run().changes
        return float(job.state[0]), members.generation, change, took[0]


@pytest.mark.parametrize("options", [QUIET, APART], ids=["memory", "tcp"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_two_of_three_go_on_within_a_second_when_one_is_killed(victim: int, options: Options) -> None:
    outcomes = run_ranks(one_is_killed, 3, victim, options, dies=[victim])
    left = [rank for rank in range(3) if rank != victim]
    for place, (state, generation, change, took_s) in enumerate(values([outcomes[rank] for rank in left])):
        assert (state, generation) == (sum_of(8), 2)
        assert (change.rank, change.size, change.former) == (place, 2, tuple(left))
        assert [lost.rank for lost in change.lost] == [victim] and not change.new and not change.lacking
        assert took_s < seconds(1.0)


def killed_at_random(rank: int, size: int, folder: str, victims: list[int], after_s: float) -> tuple[float, int, int]:
    with first_members(folder, rank, size) as members:
        if rank in victims:

            def kill() -> None:
                wait_for(folder, "began")
                time.sleep(after_s)
                die()

            in_background(kill)
        job = Job(members, size_is(size - len(victims), generation=2))
        mark(folder, "began")
        job.run()
        return float(job.state[0]), members.done, members.size


@pytest.mark.parametrize("seed", range(8))
def test_the_state_is_right_whoever_is_killed_at_any_moment(seed: int) -> None:
    drawn = random.Random(seed)
    victims = drawn.sample(range(5), 1 + seed % 2)
    outcomes = run_ranks(killed_at_random, 5, victims, drawn.uniform(0.0, 0.1), dies=victims)
    left = values([outcomes[rank] for rank in range(5) if rank not in victims])
    for state, done, size in left:
        assert (state, done, size) == (sum_of(done), left[0][1], 5 - len(victims)), f"seed {seed}"


def killed_one_after_the_other(rank: int, size: int, folder: str) -> tuple[float, int]:
    """Each victim dies in another generation; the last one is alone."""
    with first_members(folder, rank, size) as members:
        job = Job(members, steps(20))
        dies_at = 3 * rank + 2 if rank < size - 1 else -1
        job.before_vote = lambda: die() if (members.generation, members.done) == (rank + 1, dies_at) else None
        job.run()
        return float(job.state[0]), members.size


def test_on_one_host_the_last_member_goes_on_alone() -> None:
    outcomes = run_ranks(killed_one_after_the_other, 4, dies=[0, 1, 2])
    assert values(outcomes[3:]) == [(sum_of(20), 1)]


def too_few_are_left(rank: int, size: int, folder: str) -> tuple[str, float]:
    with first_members(folder, rank, size, APART, join_timeout_s=5) as members:
        job = Job(members, steps(8))
        job.before_vote = lambda: die() if rank > 0 and members.done == 2 else None
        began = time.monotonic()
        with pytest.raises(TooFewLeft) as found:
            job.run()
        return str(found.value), time.monotonic() - began


def test_a_minority_of_several_hosts_never_goes_on_and_says_why() -> None:
    (outcome,) = run_ranks(too_few_are_left, 3, dies=[1, 2])[:1]
    ((text, took_s),) = values([outcome])
    assert text.startswith(
        "generation 1 of 3 members has ended, and its members did not agree within 5 s. More than half"
    )
    for rank in (1, 2):
        assert f"rank {rank} (127.0.0.1:" in text
    assert "nobody answers for it at its address any more" in text
    assert took_s < seconds(10)


def fewer_than_the_least(rank: int, size: int, folder: str) -> str:
    with first_members(folder, rank, size, min_size=2, join_timeout_s=4) as members:
        job = Job(members, steps(8))
        job.before_vote = lambda: die() if rank == 1 and members.done == 2 else None
        with pytest.raises(TooFewLeft) as found:
            job.run()
        return str(found.value)


def test_fewer_than_the_least_size_wait_for_newcomers_and_then_give_up() -> None:
    (text,) = values(run_ranks(fewer_than_the_least, 2, dies=[1])[:1])
    assert "1 more members are needed within 4 s: min_size is 2" in text


def busy_while_another_dies(rank: int, size: int, folder: str) -> tuple[float, int]:
    """Rank 0 computes for 2 s, and rank 2 dies. The agreement does not wait for rank 0; the generation does."""
    with first_members(folder, rank, size) as members:
        job = Job(members, steps(6))

        def before_vote() -> None:
            if members.done == 2 and members.generation == 1:
                if rank == 2:
                    die()
                if rank == 0:
                    time.sleep(2.0)

        job.before_vote = before_vote
        job.run()
        return float(job.state[0]), members.size


def test_a_member_that_computes_for_long_is_not_lost() -> None:
    assert values(run_ranks(busy_while_another_dies, 3, dies=[2])[:2]) == [(sum_of(6), 2)] * 2


# --- members that come late, leave, and come back --------------------------------------------------------------------


def stopped_and_continued(rank: int, size: int, folder: str) -> tuple[float, int, list[tuple[int, ...]], int]:
    """Rank 2 is stopped while rank 3 dies, is decided out, goes on later, and is sent the state."""
    with first_members(folder, rank, size) as members:
        until = size_is(3, generation=3)
        job = Job(members, until)

        def before_vote() -> None:
            if members.generation == 1 and members.done == 4:
                if rank == 2:
                    mark(folder, "pid", str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif rank == 3:
                    wait_for(folder, "pid")
                    time.sleep(0.2)
                    die()
            if members.generation == 2 and rank == 0 and not continued:
                continued.append(1)
                os.kill(int(wait_for(folder, "pid")), signal.SIGCONT)

        continued: list[int] = []
        job.before_vote = before_vote
        job.run()
        return float(job.state[0]), members.done, [change.former for change in job.changes], members.rank


def test_a_stopped_member_that_was_decided_out_comes_back_as_a_newcomer() -> None:
    outcomes = values(run_ranks(stopped_and_continued, 4, dies=[3])[:3])
    assert [state for state, *_ in outcomes] == [sum_of(outcomes[0][1])] * 3
    assert [changes for _, _, changes, _ in outcomes[:2]] == [[(0, 1), (0, 1, -1)]] * 2
    assert outcomes[2][2] == [(0, 1, 2)] and outcomes[2][3] == 2


def silent_while_forming(rank: int, size: int, folder: str) -> tuple[float, int]:
    """Rank 3 dies, and rank 2 is stopped when the next generation begins to form."""
    with first_members(folder, rank, size, join_timeout_s=seconds(20)) as members:
        job = Job(members, steps(8))
        job.before_vote = lambda: die() if rank == 3 and members.done == 2 else None
        if rank == 2:
            reconfigure = members.communicator.reconfigure

            def stop(*arguments: Any, **options: Any) -> None:
                mark(folder, "pid", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
                reconfigure(*arguments, **options)

            members.communicator.reconfigure = stop  # type: ignore[method-assign]
        job.run()
        if rank == 0:
            os.kill(int(wait_for(folder, "pid")), signal.SIGKILL)
        return float(job.state[0]), members.size


def test_a_member_that_goes_silent_while_a_generation_forms_is_decided_out() -> None:
    assert values(run_ranks(silent_while_forming, 4, dies=[2, 3], timeout_s=120)[:2]) == [(sum_of(8), 2)] * 2


def all_but_newcomers_are_gone(rank: int, size: int, folder: str) -> tuple[float, int, int]:
    """Rank 2 is stopped and decided out, rank 3 joins, ranks 0 and 1 die: rank 2 must not go on alone."""
    if rank == 3:
        wait_for(folder, "pid")
        members = newcomer(folder)
    else:
        members = first_members(folder, rank, 3, timeout_s=seconds(2))
    with members:
        job = Job(members, size_is(2, generation=4))

        def before_vote() -> None:
            if rank == 2 and members.done == 4 and members.generation == 1:
                mark(folder, "pid", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            if members.size == 3 and members.generation in (2, 3) and rank < 2:
                die()
            if rank == 3 and members.size == 1:
                os.kill(int(wait_for(folder, "pid")), signal.SIGCONT)

        job.before_vote = before_vote
        job.run()
        return float(job.state[0]), members.done, members.rank


def test_a_late_member_does_not_go_on_alone_beside_newcomers_that_it_does_not_know() -> None:
    outcomes = values(run_ranks(all_but_newcomers_are_gone, 4, dies=[0, 1], timeout_s=120)[2:])
    assert [(state, rank) for state, _, rank in outcomes] == [(sum_of(outcomes[0][1]), place) for place in (1, 0)]


def one_leaves(rank: int, size: int, folder: str) -> tuple[float, list[tuple[bool, tuple[int, ...]]]]:
    with first_members(folder, rank, size) as members:
        job = Job(members, steps(8))
        job.before_vote = lambda: members.leave() if rank == 0 and members.done == 3 else None
        job.run()
        return float(job.state[0]), [(change.left, change.former) for change in job.changes]


def test_a_member_leaves_at_a_boundary_and_no_step_is_lost() -> None:
    first, *rest = values(run_ranks(one_leaves, 3))
    assert first == (sum_of(5) if first[0] == sum_of(5) else sum_of(4), [(True, ())])
    assert rest == [(sum_of(8), [(False, (1, 2))])] * 2


# --- newcomers -------------------------------------------------------------------------------------------------------


def newcomers_join(rank: int, size: int, folder: str, first: int) -> tuple[float, int, int, bool]:
    with first_members(folder, rank, first) if rank < first else newcomer(folder) as members:
        job = Job(members, size_is(size))
        job.run()
        return float(job.state[0]), members.done, members.rank, members.lacks


def test_newcomers_join_at_a_boundary_and_are_sent_the_state() -> None:
    outcomes = values(run_ranks(newcomers_join, 5, 2))
    assert {(state, done) for state, done, *_ in outcomes} == {(sum_of(outcomes[0][1]), outcomes[0][1])}
    assert [rank for *_, rank, _ in outcomes[:2]] == [0, 1]
    assert sorted(rank for *_, rank, _ in outcomes) == [0, 1, 2, 3, 4]
    assert not any(lacks for *_, lacks in outcomes)


def spare_takes_a_place(rank: int, size: int, folder: str) -> tuple[float, int, list[int]]:
    if rank == 2:
        wait_for(folder, "running")
        members = newcomer(folder, max_size=2)
    else:
        members = first_members(folder, rank, 2, max_size=2)
    with members:
        job = Job(members, steps(80))
        sizes: list[int] = []

        def before_vote() -> None:
            sizes.append(members.size)
            time.sleep(0.01)
            if members.done == 2:
                mark(folder, "running")
            if members.done == 60 and rank == 1:
                die()

        job.before_vote = before_vote
        job.run()
        return float(job.state[0]), members.rank, sizes


def test_a_spare_waits_until_a_member_is_lost() -> None:
    first, _, spare = run_ranks(spare_takes_a_place, 3, dies=[1])
    (state, rank, sizes), (its_state, its_rank, its_sizes) = values([first, spare])
    assert (state, rank, its_state, its_rank) == (sum_of(80), 0, sum_of(80), 1)
    assert set(sizes) == {2} and set(its_sizes) == {2} and len(its_sizes) == 20


def newcomer_dies(rank: int, size: int, folder: str, moment: str) -> tuple[float, int]:
    if rank == 2:
        wait_for(folder, "running")
        if moment == "forming":
            Communicator.reconfigure = lambda *_, **__: die()  # type: ignore[method-assign,assignment,return-value]
        if moment == "waiting":
            in_background(lambda: (time.sleep(0.3), die()))  # type: ignore[func-returns-value,arg-type,return-value]
            newcomer(folder, max_size=2)
        with newcomer(folder):
            die()
    with first_members(folder, rank, 2, max_size=2 if moment == "waiting" else None) as members:
        count = itertools.count()
        ended = [0.0]

        def until(_: Members) -> bool:
            time.sleep(0.01)
            if next(count) == 2:
                mark(folder, "running")
            dead = members.generation >= (1 if moment == "waiting" else 3)
            ended[0] = ended[0] or (time.monotonic() if dead else 0.0)
            return bool(ended[0]) and time.monotonic() > ended[0] + 1.0

        job = Job(members, until).run()
        return float(job.state[0]) - sum_of(members.done), members.size


@pytest.mark.parametrize("moment", ["waiting", "forming", "lacking"])
def test_a_newcomer_that_dies_while_it_joins_costs_no_step(moment: str) -> None:
    assert values(run_ranks(newcomer_dies, 3, moment, dies=[2])[:2]) == [(0.0, 2)] * 2


def loses_three_and_gets_two(rank: int, size: int, folder: str) -> tuple[float, int, int, int]:
    """Ranks 0 to 7 begin. 5, 0 and 2 die one after the other; then 8 and 9 come."""
    if rank >= 8:
        wait_for(folder, "three are lost")
        members = newcomer(folder)
    else:
        members = first_members(folder, rank, 8)
    with members:
        job = Job(members, size_is(7, generation=5))

        def before_vote() -> None:
            if (
                members.generation <= 3
                and rank == (5, 0, 2)[members.generation - 1]
                and members.done >= 4 * members.generation
            ):
                die()
            if members.size == 5:
                mark(folder, "three are lost")

        job.before_vote = before_vote
        job.run()
        return float(job.state[0]), members.done, members.size, members.rank


def test_a_job_of_eight_loses_three_one_after_the_other_and_gets_two_back() -> None:
    outcomes = run_ranks(loses_three_and_gets_two, 10, dies=[0, 2, 5], timeout_s=120)
    left = values([outcome for rank, outcome in enumerate(outcomes) if rank not in (0, 2, 5)])
    assert {(state, done, size) for state, done, size, _ in left} == {(sum_of(left[0][1]), left[0][1], 7)}
    assert [rank for *_, rank in left[:5]] == [0, 1, 2, 3, 4]


def refused(rank: int, size: int, folder: str) -> str:
    if rank == 1:
        wait_for(folder, "running")
        with pytest.raises(NetfoldError) as found:
            newcomer(folder, options=Options(probe="off", security="authenticate"))
        mark(folder, "refused")
        return str(found.value)
    with first_members(folder, rank, 1) as members:
        mark(folder, "running")
        wait_for(folder, "refused")
        return str(members.size)


def test_a_process_that_does_not_fit_is_told_why() -> None:
    size, text = values(run_ranks(refused, 2))
    assert size == "1" and "the job cannot take this process" in text and "NETFOLD_SECURITY" in text


def test_a_newcomer_without_members_says_so(tmp_path: Path) -> None:
    with pytest.raises(NetfoldError, match=r"no member of the job has answered for 1 s \(the store names none\)"):
        newcomer(str(tmp_path), join_timeout_s=1)


def left_alone(rank: int, size: int, folder: str, dead: str) -> tuple[int, bool, int]:
    """Two newcomers that a generation had taken in, whose member ended before it formed."""
    store = FileStore(folder)
    store.set("elastic/newest", json.dumps({"generation": 3, "size": 3, "handles": [dead], "over": False}).encode())
    wait = Joining.wait

    def knows_all(joining: Joining, *known: Any) -> Any:
        store.set(f"handle {rank}", joining._endpoint.handle.text.encode())
        handles = [dead, *(store.get(f"handle {each}", 30).decode() for each in range(size))]
        joining._newest.read = lambda: Newest(3, handles, True)  # type: ignore[method-assign]
        return wait(joining, *known)

    Joining.wait = knows_all  # type: ignore[method-assign]
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    with Members.from_environment(place, store=store, options=QUIET, join_timeout_s=60) as members:
        members.vote()
        return members.generation, members.first is None, members.size


def test_newcomers_whose_only_member_ended_before_they_came_in_begin_again() -> None:
    with Communicator.outside(options=QUIET) as ended:
        dead = ended.endpoint.handle.text
    assert values(run_ranks(left_alone, 2, dead)) == [(4, True, 2)] * 2


def finishes(rank: int, size: int, folder: str, store: str) -> None:
    with first_members(store, rank, size) as members:
        members.vote()
        members.finish()


def test_a_process_that_comes_after_the_end_of_the_job_is_told(tmp_path: Path) -> None:
    values(run_ranks(finishes, 2, str(tmp_path)))
    began = time.monotonic()
    with pytest.raises(NetfoldError, match="the job has ended, after generation 1: it takes no new rank"):
        newcomer(str(tmp_path), join_timeout_s=60)
    assert time.monotonic() - began < seconds(10)


# --- a store that outlives ranks -------------------------------------------------------------------------------------


def launched(rank: int, size: int, folder: str, endpoint: str) -> tuple[float, int, int]:
    """Ranks 0 and 1 of a launcher; rank 0 dies, and rank 2 is its replacement, with the same variables."""
    if rank == 2:
        wait_for(folder, "rank 0 is gone")
    # No MASTER_ADDR: ranks meet at the store.
    os.environ.update(RANK=str(rank % 2), WORLD_SIZE="2", NETFOLD_STORE=endpoint)
    with Members.from_environment(options=QUIET, timeout_s=60, join_timeout_s=60) as members:
        job = Job(members, size_is(2, generation=3))

        def before_vote() -> None:
            if rank == 0 and members.done == 3:
                die()
            if members.size == 1:
                mark(folder, "rank 0 is gone")

        job.before_vote = before_vote
        job.run()
        return float(job.state[0]) - sum_of(members.done), members.rank, members.size


def test_a_replacement_finds_the_members_in_the_store_of_the_command(tmp_path: Path) -> None:
    store = Daemon(["store", "--listen", "127.0.0.1:0"], tmp_path / "log")
    try:
        line = store.stdout.readline()
        assert line.startswith("netfold store listening on 127.0.0.1:"), line
        outcomes = run_ranks(launched, 3, line.split()[-1], dies=[0])
        assert values(outcomes[1:]) == [(0.0, 0, 2), (0.0, 1, 2)]
    finally:
        store.send_signal(signal.SIGTERM)
        assert store.wait(seconds(20)) == 0
        store.stdout.close()


def begins_again(rank: int, size: int, folder: str, endpoint: str) -> tuple[int, bool, int]:
    """Ranks 0 and 1 are killed at once; 2 and 3 are their replacements, the first of which has come before."""
    if rank == 2:
        wait_for(folder, "runs")
        mark(folder, "comes")
    if rank == 3:
        wait_for(folder, "died")
    os.environ.update(
        RANK=str(rank % 2), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", NETFOLD_STORE=endpoint
    )
    with Members.from_environment(options=QUIET, timeout_s=60, join_timeout_s=60) as members:
        job = Job(members, steps(6))

        def before_vote() -> None:
            if rank < 2 and members.done == 3:
                mark(folder, "runs")
                wait_for(folder, "comes")
                mark(folder, "died")
                die()

        job.before_vote = before_vote
        job.run()
        return members.generation, members.first is None, members.size


def test_a_job_whose_members_have_all_ended_begins_again_when_every_rank_has_come(tmp_path: Path) -> None:
    store = Daemon(["store", "--listen", "127.0.0.1:0"], tmp_path / "log")
    try:
        endpoint = store.stdout.readline().split()[-1]
        outcomes = run_ranks(begins_again, 4, endpoint, dies=[0, 1])
        assert values(outcomes[2:]) == [(2, True, 2)] * 2
    finally:
        store.send_signal(signal.SIGTERM)
        assert store.wait(seconds(20)) == 0
        store.stdout.close()


def test_a_member_that_nobody_took_in_again_gets_the_reason_and_no_other_error(tmp_path: Path) -> None:
    with first_members(str(tmp_path), 0, 1) as members:
        with members._changed:
            members._standing.step_out()
        with pytest.raises(RendezvousError, match="nobody answered"):
            members.change(RendezvousError("nobody answered"))
        with pytest.raises(GroupAborted, match="no member has taken it in again"):
            members.change()
