"""The state of a rank: what a repeated step restores, what is refused, and how it is sent."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, values

torch = pytest.importorskip("torch")

from netfold.elastic.torch.state import State  # noqa: E402
from netfold.elastic.torch.transfer import Unpacking, pack  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_repeated_step_begins_with_the_same_numbers() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = State(model=net, optimizer=optimizer, scheduler=scheduler)
    results = []
    for attempt in range(3):
        if attempt:
            state.restore()
        state.begin()
        output = net(torch.arange(12.0).reshape(4, 3))
        output.sum().backward()
        scheduler.last_epoch += 7
        numbers = (random.random(), np.random.rand(), torch.rand(1).item())
        results.append((output.tolist(), net[1].running_mean.tolist(), net[1].num_batches_tracked.item(), numbers))
    assert results[0] == results[1] == results[2]
    state.restore()
    assert scheduler.last_epoch == 0 and net[1].num_batches_tracked.item() == 0
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_loss_scaler_can_unscale_again() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = State(model=net, optimizer=optimizer, scaler=scaler)
    votes: list[int] = []
    end = state.on_step(lambda: votes.append(1), lambda: 1.0)
    for attempt in range(2):
        if attempt:
            state.restore()
        state.begin()
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        assert net.bias.grad.item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert votes == [1, 1]  # of the scaler's step, and of the optimizer's
    # A step that is left out votes as well: every rank must know that every other rank leaves it out.
    optimizer.zero_grad()
    before = net.bias.item()
    scaler.scale(net(torch.full((1, 2), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert votes == [1, 1, 1] and net.bias.item() == before and scaler.get_scale() == 4.0
    end()
    optimizer.step()
    assert votes == [1, 1, 1] and "step" not in vars(scaler)


def test_a_learning_rate_is_multiplied_within_the_step_alone() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    State(optimizer=optimizer).on_step(lambda: None, lambda: 4.0)
    for expected in (-2.0, -3.0):
        weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert weight.item() == expected
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_closure_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    State(optimizer=optimizer).on_step(lambda: None, lambda: 1.0)
    with pytest.raises(ValueError, match="a closure computes gradients after the vote"):
        optimizer.step(lambda: weight.sum())


def divided(rank: int, size: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    net = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="model is a DistributedDataParallel, which belongs to one generation"):
        State(model=torch.nn.parallel.DistributedDataParallel(net))
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="optimizer is a ZeroRedundancyOptimizer, which divides its state: every rank"):
        State(optimizer=zero)
    whole = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="_flat_param of model is divided among the ranks"):
        State(model=whole)
    fully_shard(net)
    with pytest.raises(ValueError, match="weight of model is divided among the ranks"):
        State(model=net)
    with pytest.raises(ValueError, match="a parameter of group 0 of optimizer is divided"):
        State(optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="sampler is a list, which has no state_dict"):
        State(sampler=[])
    dist.destroy_process_group()


def test_divided_state_is_refused() -> None:
    values(run_ranks(divided, 2, timeout_s=60))


def test_a_state_is_divided_into_structure_and_tensors() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {
        "a": weight,
        "tied": weight.detach(),
        "t": weight.t(),
        "list": [torch.tensor(3, dtype=torch.int16), {"b": (torch.ones(2, dtype=torch.bfloat16), None, "text", 1.5)}],
        "flag": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(2).to_sparse(),
        3: slice(1, 2),
    }
    structure, tensors = pack(state)
    assert len(tensors) == 9  # the tied one once, the sparse one as two
    unpacking = Unpacking(structure)
    for ours, theirs in zip(unpacking.tensors, tensors, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.data_ptr() != 1
        ours.copy_(theirs)
    loaded: Any = unpacking.state()
    assert loaded.keys() == state.keys() and loaded[3] == slice(1, 2)
    for key in ("a", "tied", "t", "flag", "complex", "empty"):
        assert torch.equal(loaded[key], state[key])
    assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()
    assert torch.equal(loaded["list"][1]["b"][0], torch.ones(2, dtype=torch.bfloat16))
    assert loaded["list"][1]["b"][1:] == (None, "text", 1.5)
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(2))


def made(seed: int) -> dict[str, Any]:
    """A model and an optimizer that has state, other for each seed."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 1).bfloat16())
    optimizer = torch.optim.Adam([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.5}], lr=0.1)
    for _ in range(seed):
        for parameter in net.parameters():
            parameter.grad = torch.rand_like(parameter)
        net[1](torch.rand(4, 200))
        optimizer.step()
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1),
    }


def check_equal(parts: dict[str, Any], others: dict[str, Any]) -> None:
    for name, part in parts.items():
        ours, theirs = pack(part.state_dict()), pack(others[name].state_dict())
        assert ours[0] == theirs[0], name
        assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True)), name


def sent(rank: int, size: int, folder: str) -> None:
    import torch.distributed as dist

    from netfold.elastic.torch import transfer

    torch.set_num_threads(1)
    transfer.WINDOW_BYTES = 100_000  # several windows
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    parts = made(rank + 1)
    if rank == 2:
        assert transfer.send(parts, transfer.SendTo(0)) > 500_000
    if rank == 0:
        transfer.receive(parts, transfer.ReceiveFrom(2))
        check_equal(parts, made(3))
    # The optimizer goes on with this state.
    (transfer.send if rank == 0 else transfer.receive)(parts, transfer.Broadcast())
    check_equal(parts, made(3))
    for parameter in parts["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    parts["optimizer"].step()
    if rank == 1:
        parts["model"][2] = torch.nn.Linear(200, 2).bfloat16()
        with pytest.raises(ValueError, match="the state of model that another rank sent does not fit the one here"):
            transfer.receive({"model": parts["model"]}, transfer.ReceiveFrom(0))
    if rank == 0:
        transfer.send({"model": parts["model"]}, transfer.SendTo(1))
    dist.barrier()
    dist.destroy_process_group()


def test_a_state_is_sent_to_other_ranks() -> None:
    values(run_ranks(sent, 3, timeout_s=60))
