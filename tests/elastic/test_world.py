"""A user's loop whose ranks die, leave and join: its weights are those of one process with the same batches."""

from __future__ import annotations

from typing import Any

import pytest
from loops import SAMPLES, die, join, mark, marked, serial, train, until, whole_steps
from ranks import run_ranks, values

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CLOSE = {"rel": 1e-9, "abs": 1e-12}  # f64, summed in another order


def check(found: dict[str, Any], steps: int) -> None:
    weights, losses = serial(whole_steps(steps))
    assert found["weights"] == pytest.approx(weights, **CLOSE)
    assert found["losses"] == pytest.approx({step: losses[step] for step in found["losses"]}, **CLOSE)
    assert found["samples"] == steps * SAMPLES


def dies_at(rank: int, size: int, folder: str, victim: int, moment: str, steps: int) -> Any:
    def hook(world: Any, now: str) -> None:
        if rank == victim and (world.step, now) == (3, moment):
            die()

    return train(join(folder, rank, size), steps, hook)


@pytest.mark.parametrize("moment", ["forward", "backward", "vote", "voted", "end"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_lost_rank_costs_no_step(victim: int, moment: str) -> None:
    outcomes = run_ranks(dies_at, 3, victim, moment, 8, dies=[victim])
    left = values([each for rank, each in enumerate(outcomes) if rank != victim])
    for found in left:
        check(found, 8)
        assert found["generation"] == 2
    assert left[0]["weights"] == left[1]["weights"]  # to the bit


def loses_three_and_gets_two_back(rank: int, size: int, folder: str, first: int) -> Any:
    deaths = {2: (4, "backward"), 0: (8, "vote"), 5: (12, "forward")}
    joins = {8: 16, 9: 20}

    def hook(world: Any, now: str) -> None:
        if deaths.get(rank) == (world.step, now):
            die()
        for newcomer, step in joins.items():
            # A newcomer asks rank 0 first.
            if (world.rank, world.step, now) == (0, step, "forward"):
                mark(folder, f"join {newcomer}")
                until(lambda: world.members._waiting, f"{newcomer} has asked")

    if rank >= first:
        until(marked(folder, f"join {rank}"), "it is its time")
        return train(join(folder, rank, first), 30, hook)
    return train(join(folder, rank, first), 30, hook)


def test_a_job_of_eight_loses_three_ranks_and_gets_two_back() -> None:
    outcomes = run_ranks(loses_three_and_gets_two_back, 10, 8, dies=[0, 2, 5], timeout_s=150)
    found = values([each for rank, each in enumerate(outcomes) if rank not in (0, 2, 5)])
    for each in found:
        check(each, 30)
        assert each["weights"] == found[0]["weights"] and each["rate"] == pytest.approx(0.02 * 0.97**30)
    sizes = found[0]["sizes"]
    assert [sizes[step] for step in (3, 5, 9, 13, 29)] == [8, 7, 6, 5, 7]
    assert [min(each["losses"]) for each in found] == [0, 0, 0, 0, 0, 17, 21]
