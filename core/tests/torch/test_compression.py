"""DDP with gradients as i8: the residual adds the rounding error of one step to the next."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks, values

pytestmark = [pytest.mark.torch]

SIZE = 3
STEPS = 300


def network() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(20, 50, bias=False), torch.nn.Tanh(), torch.nn.Linear(50, 9))


def gradients(model: Any) -> list[Any]:
    return [parameter.grad.detach().clone() for parameter in model.parameters()]


def run(rank: int, size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import netfold.torch

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found: dict[str, Any] = {}
    # Small buckets, so that there are several and DDP lays them out anew after the first step.
    model = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    kept = netfold.torch.compress_gradients(model)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(16, 20, generator=generator)
    own = network()
    own(inputs).square().mean().backward()
    true = [gradient.double() for gradient in gradients(own)]
    applied = [torch.zeros_like(gradient) for gradient in true]
    once: list[Any] = []
    for step in range(STEPS):
        model.zero_grad()
        model(inputs).square().mean().backward()
        for total, got in zip(applied, gradients(model), strict=True):
            total += got.double()
        if step == 1:
            once = [got.double() for got in gradients(model)]
    lost = [kept.residual(parameter).double() for parameter in model.parameters()]
    largest = [gradient.abs().max() for gradient in true]
    for tensor in (*true, *lost):
        dist.all_reduce(tensor)
    for number in largest:
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
    for index in range(len(true)):
        unit = largest[index] / (127 // size - 1)
        exact, noise = true[index] / size, (once[index] - true[index] / size).abs().max()
        balance = applied[index] + lost[index] / size - STEPS * exact
        found[f"noise {index}"] = float(noise / unit)
        found[f"mean error {index}"] = float((applied[index] / STEPS - exact).abs().max() / unit)
        found[f"balance {index}"] = float(balance.abs().max() / largest[index])
    found["wires"] = {int(code) for code in netfold.torch.events()["wire"]}
    found["compressed wires"] = {int(code) for code in kept._compressed.netfold.events()["wire"]}
    bits = torch.cat([gradient.flatten() for gradient in gradients(model)]).view(torch.int32)
    gathered = [torch.empty_like(bits) for _ in range(size)]
    dist.all_gather(gathered, bits)
    found["same bits"] = all(torch.equal(each, bits) for each in gathered)
    found["other dtypes"] = other_dtypes(rank, size)
    found["channels last"] = channels_last(rank, size)
    found["infinite"] = infinite(rank)
    dist.destroy_process_group()
    return found


def other_dtypes(rank: int, size: int) -> bool:
    """f64 gradients are averaged as they are."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import netfold.torch

    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False).double())
    netfold.torch.compress_gradients(model)
    model(torch.full((1, 3), float(rank), dtype=torch.float64)).sum().backward()
    (gradient,) = gradients(model)
    return bool((gradient == sum(range(size)) / size).all())


def channels_last(rank: int, size: int) -> bool:
    """A gradient that does not lie in memory in the order of its indices, and what it lost."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import netfold.torch

    torch.manual_seed(2)
    model = torch.nn.Conv2d(3, 8, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(rank))
    model(inputs).square().sum().backward()
    true = model.weight.grad.clone()
    model.weight.grad = None
    replica = DistributedDataParallel(model)
    kept = netfold.torch.compress_gradients(replica)
    replica(inputs).square().sum().backward()
    lost = kept.residual(model.weight)
    missing = true - lost
    dist.all_reduce(missing)
    same = torch.allclose(missing / size, model.weight.grad, rtol=0, atol=float(true.abs().max()) * 2.0**-18)
    return bool(same and lost.abs().max() > 0 and not lost.is_contiguous())


def infinite(rank: int) -> list[float]:
    """A step that overflows, as loss scaling brings about, and the one after it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import netfold.torch

    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    kept = netfold.torch.compress_gradients(model)
    found = []
    for factor in (float("inf") if rank == 1 else 1.0, 1.0):
        model.zero_grad()
        model(torch.full((1, 3), factor)).sum().backward()
        found += [float(gradients(model)[0][0, 0]), float(kept.residual(model.module.weight).abs().max())]
    return found


def test_gradients_are_sent_as_i8_and_their_mean_error_vanishes_over_many_steps() -> None:
    from netfold._native import engine

    for found in values(run_ranks(run, SIZE, timeout_s=120)):
        for index in range(3):
            # One step is noisy; the mean of many is not: what is missing is one unit at most, however many steps. Had
            # the residual no effect, the mean error would be noise / sqrt(STEPS), ten times the bound.
            assert found[f"noise {index}"] > 0.05, found
            assert found[f"mean error {index}"] <= 1.01 / STEPS, found
            # f32 roundings of STEPS sums.
            assert found[f"balance {index}"] <= STEPS * 2.0**-21, found
        assert found["compressed wires"] == {engine.DTYPES["i8"]}
        assert engine.DTYPES["i8"] not in found["wires"], "everything else travels as before"
        assert found["same bits"]
        assert found["other dtypes"]
        assert found["channels last"]
        assert found["infinite"] == [float("inf"), 0.0, 1.0, 0.0]


def alone(rank: int, size: int, folder: str) -> list[str]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import netfold.torch

    said = []
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    netfold.torch.compress_gradients(model)
    model(torch.full((1, 3), 0.1)).sum().backward()
    said.append(str(gradients(model)[0].eq(torch.tensor(0.1)).all().item()))
    try:
        netfold.torch.compress_gradients(model)
    except RuntimeError as error:
        said.append(str(error))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/other", rank=rank, world_size=size)
    try:
        netfold.torch.compress_gradients(DistributedDataParallel(torch.nn.Linear(3, 1)))
    except ValueError as error:
        said.append(str(error))
    dist.destroy_process_group()
    return said


def test_one_rank_compresses_nothing_and_other_groups_are_refused() -> None:
    (said,) = values(run_ranks(alone, 1, timeout_s=60))
    assert said[0] == "True"
    assert "register_comm_hook" in said[1]
    assert "not a netfold group" in said[2]
