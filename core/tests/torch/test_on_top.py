"""torch's features above process groups, over netfold: hooks, ZeRO, FSDP2, tensor parallelism, checkpoints.

DistributedDataParallel itself is in test_ddp.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from load import seconds
from worlds import Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_on_top")]

MODES = ("auto",)
CASES: dict[str, Case] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


def network() -> Any:
    import torch

    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def batch(rank: int) -> Any:
    import torch

    return torch.randn(4, 12, generator=torch.Generator().manual_seed(rank))


def trained_alone(size: int, steps: int) -> list[Any]:
    """The parameters after `steps` of SGD on the samples of all ranks."""
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([model(batch(rank)).square().mean() for rank in range(size)]).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def close(got: Any, expected: Any) -> None:
    import torch

    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-5, atol=1e-6)


@case
def hooks_that_compress_gradients(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def bf16(state: Any, bucket: Any) -> Any:
        # DDP refuses the hook of this name without a GPU, whatever the backend; the hook itself needs none.
        return default_hooks.bf16_compress_hook(state, bucket)

    bf16.__annotations__ = {}
    for hook in (bf16, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)):
        ddp = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
        ddp.register_comm_hook(None, hook)
        single = network()
        torch.stack([single(batch(other)).square().mean() for other in range(size)]).mean().backward()
        for _ in range(2):
            ddp.zero_grad()
            ddp(batch(rank)).square().mean().backward()
        for got, expected in zip(ddp.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=0.03, atol=0.002)


@case
def sparse_gradients_of_an_embedding(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    torch.manual_seed(1)
    single = torch.nn.Embedding(20, 3, sparse=True)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(20, 3, sparse=True))
    ddp.module.load_state_dict(single.state_dict())
    rows = [torch.tensor([other, 2 * other, 7]) for other in range(size)]
    ddp(rows[rank]).square().sum().backward()
    torch.stack([single(each).square().sum() for each in rows]).mean().backward()
    assert ddp.module.weight.grad.is_sparse
    torch.testing.assert_close(ddp.module.weight.grad.to_dense(), single.weight.grad.to_dense())


@case
def fsdp2_trains_as_one_process_does(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for mesh in (
        init_device_mesh("cpu", (size,)),
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")),
    ):
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch(rank)).square().mean().backward()
            optimizer.step()
        close([parameter.full_tensor() for parameter in model.parameters()], trained_alone(size, 3))


@case
def tensor_parallel_layers_of_dtensor(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = batch(0)  # the same on every rank
    model(inputs).square().mean().backward()
    single = network()
    single(inputs).square().mean().backward()
    close([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in single.parameters()])

    whole = torch.arange(64.0).view(8, 8)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])  # all_to_all
    assert torch.equal(columns.to_local(), whole[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    uneven = distribute_tensor(torch.arange(float(2 * size + 1)), mesh, [Shard(0)])
    assert isinstance(uneven, DTensor) and torch.equal(uneven.full_tensor(), torch.arange(float(2 * size + 1)))


@case
def checkpoints_are_saved_and_loaded(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    model = fully_shard(network(), mesh=mesh)
    expected = [parameter.full_tensor() for parameter in model.parameters()]
    for how in ("save", "async_save"):
        # Training goes on meanwhile: the saving thread has a group of its own, as torch's documentation asks.
        options = {"process_group": dist.new_group()} if how == "async_save" else {}
        saved = getattr(dcp, how)({"model": model.state_dict()}, checkpoint_id=f"{folder}/{how}", **options)
        for _ in range(20):
            dist.all_reduce(torch.ones(100))
        if how == "async_save":
            saved.result(seconds(60))
        dist.barrier()
        other = fully_shard(
            torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)), mesh=mesh
        )
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{how}")
        other.load_state_dict(state["model"])
        close([parameter.full_tensor() for parameter in other.parameters()], expected)


@pytest.mark.parametrize("name", CASES)
def test_each_case_passes_on_every_rank(name: str) -> None:
    check(__name__, MODES, "auto", name)
