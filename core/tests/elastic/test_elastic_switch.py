"""A job with a switch whose members change: each generation reduces in the network, and has the memory of the last."""

from __future__ import annotations

import os
import signal

from load import seconds
from members_job import Job, die, first_members, mark, newcomer, size_is, sum_of, wait_for
from ranks import run_ranks, running_switch, values

from netfold import Options


def in_network(rank: int, size: int, folder: str, endpoint: str) -> tuple[float, int, dict[int, int]]:
    """Rank 1 is killed in step 3, and rank 4 comes in its place. Returns the packets that each generation sent."""
    options = Options(probe="off", transport="tcp", switch=endpoint, algorithm="in_network")
    if rank == 4:
        wait_for(folder, "lost")
    with newcomer(folder, options=options) if rank == 4 else first_members(folder, rank, 4, options) as members:
        job = Job(members, size_is(4, generation=3))
        packets: dict[int, int] = {}

        def before_vote() -> None:
            traffic = members.communicator.group.traffic()
            assert traffic is not None
            packets[members.generation] = traffic["packets_sent"]
            if rank == 1 and members.done == 3:
                die()
            if members.size == 3:
                mark(folder, "lost")

        job.before_vote = before_vote
        job.run()
        return float(job.state[0]) - sum_of(members.done), members.size, packets


def test_each_generation_reduces_in_the_network_with_the_memory_of_the_one_before() -> None:
    # A second job, or a second one's memory, has no place there.
    with running_switch("--max-jobs", "1", "--memory", "12M") as switch:
        outcomes = run_ranks(in_network, 5, switch.endpoint, dies=[1], timeout_s=90)
        left = values([each for rank, each in enumerate(outcomes) if rank != 1])
        assert [each[:2] for each in left] == [(0.0, 4)] * 4
        assert [sorted(packets) for _, _, packets in left] == [[1, 2, 3]] * 3 + [[3]]
        assert all(min(packets.values()) > 0 for _, _, packets in left)
        starts = switch.wait_for(r"epoch=(\d+) workers=(\d) window=(\d+)", count=3)
    epochs, workers, windows = zip(*(map(int, each) for each in starts), strict=True)
    assert list(epochs) == sorted(set(epochs)) and workers == (4, 3, 4)
    assert windows[0] == windows[2] > 0


def without_its_switch(rank: int, size: int, folder: str, endpoint: str, switch_pid: int) -> tuple[float, int]:
    """The switch is killed in step 2, and rank 1 in step 4."""
    options = Options(probe="off", transport="tcp", switch=endpoint, algorithm="in_network")
    with first_members(folder, rank, size, options) as members:
        job = Job(members, lambda of: of.done >= 8)

        def before_vote() -> None:
            if rank == 0 and members.done == 2:
                os.kill(switch_pid, signal.SIGKILL)
            if rank == 1 and members.done == 4:
                die()

        job.before_vote = before_vote
        job.run()
        return float(job.state[0]) - sum_of(members.done), members.size


def test_a_lost_rank_of_a_job_whose_switch_is_lost_too_ends_no_other_rank() -> None:
    with running_switch() as switch:
        outcomes = run_ranks(without_its_switch, 3, switch.endpoint, switch.process.pid, dies=[1], timeout_s=90)
        assert values([outcomes[0], outcomes[2]]) == [(0.0, 2)] * 2
        assert switch.process.wait(seconds(10)) == -signal.SIGKILL
