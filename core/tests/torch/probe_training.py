"""Features of `probe.py`: what torch builds on process groups, each against the same computation on one process."""

from __future__ import annotations

from typing import Any

from probe import World, feature

DDP = ("torch.nn.parallel.distributed",)
FSDP = ("torch.distributed.fsdp", "torch.distributed.device_mesh")
TENSOR = ("torch.distributed.tensor.parallel",)
CHECKPOINT = ("torch.distributed.checkpoint", "torch.distributed.fsdp")


def network() -> Any:
    import torch

    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def batch(rank: int) -> Any:
    import torch

    return torch.randn(4, 12, generator=torch.Generator().manual_seed(rank))


def gradients_alone(size: int, model: Any = None) -> list[Any]:
    """Of the mean loss over all ranks' samples."""
    import torch

    model = model or network()
    torch.stack([model(batch(rank)).square().mean() for rank in range(size)]).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def trained_alone(size: int, steps: int) -> list[Any]:
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        gradients_alone(size, model)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def close(got: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    import torch

    got, expected = list(got), list(expected)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=rtol, atol=atol)


def gradients_of(ddp: Any, world: World, steps: int = 2, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """After each of `steps` the gradients are those of one process."""
    for _ in range(steps):
        ddp.zero_grad()
        ddp(batch(world.rank)).square().mean().backward()
        close([parameter.grad for parameter in ddp.parameters()], gradients_alone(world.size), rtol, atol)


def replicated(**options: Any) -> Any:
    import torch

    return torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.0005, **options)


@feature(imports=DDP)
def ddp(world: World) -> None:
    gradients_of(replicated(), world, steps=3)
    gradients_of(replicated(gradient_as_bucket_view=True), world, steps=3)


@feature(imports=DDP)
def ddp_static_graph(world: World) -> None:
    gradients_of(replicated(static_graph=True), world, steps=3)


@feature(imports=DDP)
def ddp_find_unused_parameters(world: World) -> None:
    import torch

    class Partly(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, inputs: Any, spare: bool) -> Any:
            return self.spare(inputs) if spare else self.used(inputs)

    model = torch.nn.parallel.DistributedDataParallel(Partly(), find_unused_parameters=True)
    model(torch.ones(2, 3), world.rank == 1).sum().backward()
    for layer in (model.module.used, model.module.spare):
        assert layer.weight.grad.eq(1).all()


@feature(imports=DDP)
def ddp_no_sync(world: World) -> None:
    ddp = replicated()
    with ddp.no_sync():
        ddp(batch(world.rank)).square().mean().backward()
    ddp(batch(world.rank)).square().mean().backward()
    close([parameter.grad for parameter in ddp.parameters()], [2 * each for each in gradients_alone(world.size)])


@feature(imports=DDP)
def ddp_buffers(world: World) -> None:
    """All ranks have rank 0's buffers before each forward pass."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        ddp(batch(world.rank)).sum().backward()
    alone = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8))
    alone.load_state_dict(model.state_dict())
    ddp(batch(world.rank))
    assert torch.isfinite(model[1].running_mean).all()


@feature(imports=DDP)
def ddp_hook_all_reduce_of_cpp(world: World) -> None:
    import torch.distributed as dist

    ddp = replicated()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    gradients_of(ddp, world)


@feature(imports=DDP)
def ddp_hook_fp16_of_cpp(world: World) -> None:
    import torch.distributed as dist

    ddp = replicated()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    gradients_of(ddp, world, rtol=0.01, atol=0.001)


@feature(imports=("torch.distributed.algorithms.ddp_comm_hooks.default_hooks",))
def ddp_hook_fp16(world: World) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ddp = replicated()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    gradients_of(ddp, world, rtol=0.01, atol=0.001)


@feature(imports=("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",))
def ddp_hook_power_sgd(world: World) -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    ddp = torch.nn.parallel.DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        ddp.zero_grad()
        ddp(batch(world.rank)).square().mean().backward()
    # A matrix of rank 8 at most is approximated by one of rank 8.
    close([parameter.grad for parameter in ddp.parameters()], gradients_alone(world.size), 0.05, 0.02)


@feature(imports=DDP)
def ddp_join(world: World) -> None:
    """Ranks with different numbers of batches."""
    ddp = replicated()
    with ddp.join():
        for _ in range(1 + world.rank):
            ddp(batch(world.rank)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in ddp.parameters())


@feature(imports=("torch.distributed.optim",))
def zero_redundancy_optimizer(world: World) -> None:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = replicated()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(batch(world.rank)).square().mean().backward()
        optimizer.step()
    close(ddp.parameters(), trained_alone(world.size, 3))


def fsdp_trains(world: World, mesh: Any) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch(world.rank)).square().mean().backward()
        optimizer.step()
    close([parameter.full_tensor() for parameter in model.parameters()], trained_alone(world.size, 3))


@feature(imports=FSDP)
def fsdp2(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    fsdp_trains(world, init_device_mesh("cpu", (2,)))


@feature(imports=FSDP)
def fsdp2_on_two_dimensions(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    fsdp_trains(world, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    fsdp_trains(world, init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))


@feature(imports=FSDP)
def fsdp1(world: World) -> None:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch(world.rank)).square().mean().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        close(model.parameters(), trained_alone(world.size, 3))


@feature(imports=TENSOR)
def dtensor(world: World) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(64.0).view(8, 8)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), whole.chunk(2, 1)[world.rank])
    assert torch.equal((columns @ rows).redistribute(mesh, [Replicate()]).to_local(), whole @ whole)
    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    assert torch.equal(uneven.full_tensor(), torch.arange(5.0))
    assert rows.sum().full_tensor().item() == whole.sum().item()


@feature(imports=TENSOR)
def tensor_parallel(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = parallelize_module(
        network(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    model(batch(0)).square().mean().backward()
    single = network()
    single(batch(0)).square().mean().backward()
    close([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in single.parameters()])


@feature(imports=("torch.distributed.pipelining",))
def pipelining(world: World) -> None:
    import torch
    from torch.distributed import pipelining

    layers = [network()[0], network()[2]]
    whole = torch.nn.Sequential(*[torch.nn.Linear(12, 12) for _ in range(2)])
    torch.manual_seed(1)
    for parameter in whole.parameters():
        torch.nn.init.uniform_(parameter)
    layers = list(whole)
    inputs, target = torch.cat([batch(0), batch(1)]), torch.zeros(8, 12)

    def loss_of(output: Any, target: Any) -> Any:
        return (output - target).square().sum()

    loss_of(whole(inputs), target).backward()
    expected = [[parameter.grad.clone() for parameter in layer.parameters()] for layer in layers]
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        mine = layers[world.rank]
        mine.zero_grad()
        stage = pipelining.PipelineStage(mine, world.rank, 2, torch.device("cpu"))
        schedule = getattr(pipelining, name)(stage, 4, loss_fn=loss_of, scale_grads=False)
        schedule.step(*((inputs,) if world.rank == 0 else ()), **({"target": target} if world.rank == 1 else {}))
        close([parameter.grad for parameter in mine.parameters()], expected[world.rank], 1e-4, 1e-4)


def checkpointed(world: World, save: Any) -> None:
    """A checkpoint of `save(state, folder)` is loaded into another model."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(network(), mesh=mesh)
    expected = [parameter.full_tensor() for parameter in model.parameters()]
    save({"model": model.state_dict()}, f"{world.folder}/saved")
    dist.barrier()
    blank = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    other = fully_shard(blank, mesh=mesh)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=f"{world.folder}/saved")
    other.load_state_dict(state["model"])
    close([parameter.full_tensor() for parameter in other.parameters()], expected)


@feature(imports=CHECKPOINT)
def checkpoint(world: World) -> None:
    import torch.distributed.checkpoint as dcp

    checkpointed(world, lambda state, folder: dcp.save(state, checkpoint_id=folder))


@feature(imports=CHECKPOINT)
def checkpoint_asynchronous(world: World) -> None:
    """Saved by a thread of its own, while collectives go on."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    group = dist.new_group()

    def save(state: Any, folder: str) -> None:
        saved = dcp.async_save(state, checkpoint_id=folder, process_group=group)
        for _ in range(20):
            dist.all_reduce(torch.ones(100))
        saved.result(15)

    checkpointed(world, save)


@feature(imports=("torch.distributed.algorithms.model_averaging.averagers",))
def model_averaging(world: World) -> None:
    import torch
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.data.fill_(world.rank)
        parameter.grad = torch.zeros_like(parameter)  # only what is trained is averaged
    PeriodicModelAverager(period=1, warmup_steps=0).average_parameters(model.parameters())
    for parameter in model.parameters():
        assert parameter.eq(0.5).all()
