"""A user's loop whose ranks die, leave and join: its weights are those of one process with the same batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from loops import SAMPLES, die, join, loss_of, made, mark, marked, serial, train, until, weights, whole_steps
from ranks import run_ranks, values

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CLOSE = {"rel": 1e-9, "abs": 1e-12}  # f64, summed in another order


def check(found: dict[str, Any], steps: int) -> None:
    expected, losses = serial(whole_steps(steps))
    assert found["weights"] == pytest.approx(expected, **CLOSE)
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


def check_gradient(world: Any) -> None:
    """DDP's gradient is the mean over exactly this attempt's ranks, each of its own samples."""
    import torch

    net = world.state.modules[0]
    alone, _, _ = made()
    alone.load_state_dict(net.state_dict())
    parts = world._divided()
    for rank, part in enumerate(parts.ranges):
        own = range(world.samples + part.start, world.samples + part.stop)
        (loss_of(alone, own) * parts.weight(rank) / world.size).backward()
    for parameter, expected in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-9, atol=1e-12)


def loses_three_and_gets_two_back(rank: int, size: int, folder: str, first: int) -> Any:
    import torch

    deaths = {2: (4, "backward"), 0: (8, "vote"), 5: (12, "forward")}
    joins = {8: 16, 9: 20}
    took_part: dict[int, int] = {}

    def hook(world: Any, now: str) -> None:
        if now == "vote":
            check_gradient(world)
            # A bit for each process: the sum names the processes that it is of.
            members = torch.tensor(2.0**rank, dtype=torch.float64)
            torch.distributed.all_reduce(members)
            took_part[world.step] = int(members)
        if deaths.get(rank) == (world.step, now):
            die()
        for newcomer, step in joins.items():
            # A newcomer asks rank 0 first.
            if (world.rank, world.step, now) == (0, step, "forward"):
                mark(folder, f"join {newcomer}")
                until(lambda: world.members._standing._waiting, f"{newcomer} has asked")

    if rank >= first:
        until(marked(folder, f"join {rank}"), "it is its time")
    return train(join(folder, rank, first), 30, hook), took_part


@pytest.mark.jobs
def test_a_job_of_eight_loses_three_ranks_and_gets_two_back() -> None:
    outcomes = run_ranks(loses_three_and_gets_two_back, 10, 8, dies=[0, 2, 5], timeout_s=150)
    found = values([each for rank, each in enumerate(outcomes) if rank not in (0, 2, 5)])
    # The processes that take part, from this step on: of a step that was repeated, those of the last attempt.
    groups = {0: range(8), 4: {0, 1, *range(3, 8)}, 8: {1, *range(3, 8)}, 12: {1, 3, 4, 6, 7}}
    groups |= {17: {1, 3, 4, 6, 7, 8}, 21: {1, 3, 4, 6, 7, 8, 9}}
    members = {step: groups[max(each for each in groups if each <= step)] for step in range(30)}
    for each, took_part in found:
        check(each, 30)
        assert each["weights"] == found[0][0]["weights"] and each["rate"] == pytest.approx(0.02 * 0.97**30)
        assert each["sizes"] == {step: len(members[step]) for step in each["losses"]}
        assert took_part == {step: sum(1 << process for process in members[step]) for step in each["losses"]}
    assert [min(each["losses"]) for each, _ in found] == [0, 0, 0, 0, 0, 17, 21]


def dies_while_it_receives_the_state(rank: int, size: int, folder: str, first: int) -> Any:
    from netfold.elastic.torch import transfer

    members: Any = None
    send = transfer.send

    def to_the_dead(parts: Any, peer: Any) -> int:
        if isinstance(peer, transfer.SendTo):
            until(lambda: members.failed, "the new rank's end shows")
        return send(parts, peer)

    transfer.send = to_the_dead

    def hook(world: Any, now: str) -> None:
        if (world.rank, world.step, now) == (0, 4, "forward"):
            mark(folder, "join")
            until(lambda: world.members._standing._waiting, "the new rank has asked")

    if rank >= first:
        until(marked(folder, "join"), "it is its time")
        transfer.receive = lambda *of: die()  # type: ignore[assignment, return-value]
    members = join(folder, rank, first)
    return train(members, 10, hook)


def test_ranks_go_on_where_a_new_one_dies_while_it_receives_the_state() -> None:
    """The ranks leave torch's groups twice before DDP is made anew."""
    for found in values(run_ranks(dies_while_it_receives_the_state, 3, 2, dies=[2])[:2]):
        check(found, 10)
        assert found["generation"] == 3


def skips(rank: int, size: int, folder: str) -> Any:
    """Rank 1 is lost in step 3, and its samples of that step with it."""
    from netfold.elastic import Policy

    def hook(world: Any, now: str) -> None:
        if (rank, world.step, now) == (1, 3, "vote"):
            die()

    return train(join(folder, rank, size), 6, hook, Policy(SAMPLES, lost_samples="skip"))


def test_the_lost_part_of_a_step_can_be_left_out() -> None:
    outcomes = run_ranks(skips, 3, dies=[1])
    steps = whole_steps(6)
    steps[3] = (range(72, 80), range(88, 96))
    expected, losses = serial(steps)
    for found in values([outcomes[0], outcomes[2]]):
        assert found["weights"] == pytest.approx(expected, **CLOSE)
        assert found["losses"] == pytest.approx(dict(enumerate(losses)), **CLOSE)
        assert found["samples"] == 6 * SAMPLES


def keeps_its_part(rank: int, size: int, folder: str) -> Any:
    from netfold.elastic import Policy

    def hook(world: Any, now: str) -> None:
        if (rank, world.step, now) == (2, 3, "forward"):
            die()
        factors.append(world.lr_factor)

    factors: list[float] = []
    found = train(join(folder, rank, size), 6, hook, Policy(SAMPLES, batch="per_rank", learning_rate="linear"))
    return found, factors[-1]


def test_the_batch_and_the_learning_rate_can_follow_the_ranks() -> None:
    outcomes = run_ranks(keeps_its_part, 3, dies=[2])
    first = whole_steps(3)
    smaller = [(range(72 + 16 * step, 88 + 16 * step),) for step in range(3)]
    net, optimizer, scheduler = made()
    for number, (numbers,) in enumerate([*first, *smaller]):
        optimizer.zero_grad()
        loss_of(net, numbers).backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * (1 if number < 3 else 2 / 3)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        scheduler.step()
    for found, factor in values(outcomes[:2]):
        assert found["weights"] == pytest.approx(weights(net), **CLOSE)
        assert found["samples"] == 72 + 48 and factor == pytest.approx(2 / 3)
        assert found["rate"] == pytest.approx(0.02 * 0.97**6)


def leaves(rank: int, size: int, folder: str) -> Any:
    def hook(world: Any, now: str) -> None:
        if (rank, world.step, now) == (0, 3, "forward"):
            world.leave()

    return train(join(folder, rank, size), 8, hook)


def test_a_rank_that_leaves_costs_no_step() -> None:
    gone, *others = values(run_ranks(leaves, 3))
    assert gone["left"] and sorted(gone["losses"]) == [0, 1, 2, 3]
    for found in others:
        check(found, 8)
        assert found["sizes"] == {step: 3 if step < 4 else 2 for step in range(8)}


def stands_in_the_vote(rank: int, size: int, folder: str) -> Any:
    """Rank 0 has passed the vote of step 3, rank 1 is lost, and rank 2 does not learn how its vote has ended."""
    members = join(folder, rank, size)
    vote, change = members.vote, members.change
    applies: list[bool] = []

    def voting() -> Any:
        if members.done != 3 or members.generation > 1 or rank == 0:
            return vote()
        wish = members.begin_vote()
        members.communicator.all_reduce(np.array([wish, 3, -3], np.int64), op="max")
        until(marked(folder, "passed"), "rank 0 has passed the vote")
        if rank == 1:
            die()
        members.communicator.group.abort("the connection of rank 2 is broken")
        return vote()

    def changing(error: BaseException | None = None) -> Any:
        found = change(error)
        applies.append(found.apply)
        return found

    def hook(world: Any, now: str) -> None:
        if (rank, world.step, now) == (0, 3, "voted"):
            mark(folder, "passed")

    members.vote, members.change = voting, changing
    found = train(members, 8, hook)
    return found, applies


def test_a_rank_that_does_not_know_how_its_vote_ended_is_told() -> None:
    outcomes = run_ranks(stands_in_the_vote, 3, dies=[1])
    (passed, at_once), (told, applies) = values([outcomes[0], outcomes[2]])
    assert (at_once, applies) == ([False], [True])
    for found in (passed, told):
        check(found, 8)
    assert passed["weights"] == told["weights"]


def breaks_rules(rank: int, size: int, folder: str) -> None:
    import torch.distributed as dist

    import netfold.elastic as elastic

    net, optimizer, _ = made()
    state = elastic.State(model=net, optimizer=optimizer)
    with elastic.World(state, members=join(folder, rank, size)) as world:
        assert dist.get_world_size() == size and world.generation == 1

        def body(*, after: bool) -> None:
            loss_of(net, range(4)).backward()
            optimizer.step()
            if after:
                dist.barrier()

        with pytest.raises(RuntimeError, match="1 collective of the default group after the vote"), world.attempt():
            body(after=True)
        assert world.members.done == 1
        outside = pytest.raises(RuntimeError, match="between two attempts: a lost member would end this process")
        with outside, world.attempt():
            body(after=False)
        with pytest.raises(RuntimeError, match=r"outside of World\.attempt"):
            optimizer.step()

        class OwnError(Exception): ...

        world._collectives = world._submitted()
        with pytest.raises(OwnError), world.attempt():
            raise OwnError
        step = world.step
        with world.attempt():
            pass  # the end votes
        assert world.step == step + 1
        with pytest.raises(ValueError, match="World was given no policy"):
            _ = world.part


def test_collectives_in_the_wrong_place_are_refused() -> None:
    values(run_ranks(breaks_rules, 2))


def scaled(rank: int, size: int, folder: str) -> Any:
    """A GradScaler leaves step 2 out, and a rank is lost in it: the scale falls once."""
    import torch

    import netfold.elastic as elastic

    net, optimizer, _ = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = elastic.State(model=net, optimizer=optimizer, scaler=scaler)
    with elastic.World(state, members=join(folder, rank, size), policy=elastic.Policy(SAMPLES)) as world:
        ddp: list[Any] = []

        def wrap(world: Any) -> None:
            ddp[:] = [torch.nn.parallel.DistributedDataParallel(net, init_sync=False)]

        world.on_change(wrap)
        while world.step < 5:
            with world.attempt():
                optimizer.zero_grad()
                factor = float("inf") if world.step == 2 else 1.0
                loss = loss_of(ddp[0], world.part) * world.weight * factor
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if (rank, world.step) == (1, 2):
                    die()
                scaler.step(optimizer)
                scaler.update()
        return weights(net), scaler.get_scale()


def test_a_step_that_a_loss_scaler_leaves_out_is_left_out_once() -> None:
    outcomes = run_ranks(scaled, 3, dies=[1])
    net, optimizer, _ = made()
    for step in (0, 1, 3, 4):
        optimizer.zero_grad()
        loss_of(net, range(step * SAMPLES, (step + 1) * SAMPLES)).backward()
        optimizer.step()
    for found, scale in values([outcomes[0], outcomes[2]]):
        assert found == pytest.approx(weights(net), **CLOSE) and scale == 4.0


def adds_numbers(rank: int, size: int, folder: str) -> Any:
    """As `stands_in_the_vote`, with a vote that adds numbers up: rank 2 gets the sums from rank 0."""
    import torch

    import netfold.elastic as elastic

    net = torch.nn.Linear(1, 1)
    members = join(folder, rank, size)
    group = members.communicator
    all_reduce = group.all_reduce

    def reducing(array: Any, **options: Any) -> None:
        all_reduce(array, **options)
        if members.done == 2 and members.generation == 1 and rank != 0:
            until(marked(folder, "passed"), "rank 0 has passed the vote")
            if rank == 1:
                die()
            array[:] = -1.0  # not what the ranks added up
            group.group.abort("the connection of rank 2 is broken")
            all_reduce(array, **options)

    group.all_reduce = reducing
    found = []
    with elastic.World(elastic.State(model=net), numbers=2, members=members) as world:
        while world.step < 4:
            with world.attempt():
                sums = world.vote([world.step + 1.0, 10.0**members.rank])
                found.append(sums)
                if (rank, world.step) == (0, 2):
                    mark(folder, "passed")
    return found


def test_a_rank_that_is_told_gets_the_sums_of_the_vote() -> None:
    outcomes = run_ranks(adds_numbers, 3, dies=[1])
    expected = [[3.0, 111.0], [6.0, 111.0], [9.0, 111.0], [8.0, 11.0]]
    assert values([outcomes[0], outcomes[2]]) == [expected, expected]
