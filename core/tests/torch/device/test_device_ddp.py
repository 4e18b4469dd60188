"""torch's own C++ over Works and Futures of device memory: DDP and functional collectives on fake devices."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks, values

pytestmark = pytest.mark.torch


def train(rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from fake_device_api import FakeLayer

    import netfold
    import netfold.torch
    from netfold.torch import factory

    torch.set_num_threads(1)
    device_api = FakeLayer("early", rank)
    device_api.takes_everything = True
    factory.cuda_api = lambda: device_api  # type: ignore[attr-defined]
    options = netfold.Options(intra_host="off", pinned_bytes=300 << 10)
    dist.init_process_group(
        "netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size, pg_options=options
    )
    torch.manual_seed(7 + rank)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3)
    first = model[0].weight.detach().clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, model[0].weight), "the model is rank 0's everywhere"
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.full((3, 300), float(rank + step))).square().mean().backward()
        gradients = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        model.zero_grad()
        alone = []
        for each in range(size):
            model(torch.full((3, 300), float(each + step))).square().mean().backward()
            alone.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
            model.zero_grad()
        assert torch.allclose(gradients, sum(alone) / size, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
    summed = functional.all_reduce(torch.ones(1000), "sum", dist.group.WORLD)
    assert summed.eq(size).all()
    whole = functional.all_gather_tensor(torch.full((5,), float(rank)), 0, dist.group.WORLD)
    assert whole.tolist() == [float(each) for each in range(size) for _ in range(5)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(size)]
    assert "staged through 3 x" in netfold.torch.device_paths()
    assert len(netfold.torch.events()) > 10
    dist.destroy_process_group()


def test_ddp_and_functional_collectives_use_the_device_path() -> None:
    values(run_ranks(train, 2, timeout_s=100))
