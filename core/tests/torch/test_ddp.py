"""DistributedDataParallel over netfold: against training on one process, and with failures.

A world of processes a mode runs all cases in order and says what it found; a test is a case.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from load import seconds
from worlds import MODES, Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_ddp")]  # the worlds are made once

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def network(dtype: Any, *, seed: int = 0) -> Any:
    """A few layers whose weights are multiples of 1/8, so that f64 holds every product and sum exactly."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.ReLU(), torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 7)
    )
    for parameter in model.parameters():
        eighths = torch.randint(-16, 17, parameter.shape, generator=generator)
        parameter.data = (eighths / 8).to(dtype)
    return model.to(dtype)


def samples(count: int, dtype: Any) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(7)
    inputs = torch.randint(-8, 9, (count, 12), generator=generator).to(dtype)
    return inputs, torch.randint(-4, 5, (count, 7), generator=generator).to(dtype)


def gradients(model: Any) -> list[Any]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def wrapped(model: Any, **options: Any) -> Any:
    import torch

    return torch.nn.parallel.DistributedDataParallel(model, **options)


def everybody_has(dist: Any, tensors: list[Any]) -> None:
    """The same bits on every rank; by a gather of bytes, which reduces nothing."""
    import torch

    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, flat)
        assert all(torch.equal(other, gathered[0]) for other in gathered)


@case
def every_rank_starts_from_rank_0s_parameters_and_buffers(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.BatchNorm1d(9))
    model[1].running_mean += rank
    model[1].num_batches_tracked += rank  # an integer among floats
    ddp = wrapped(model)
    torch.manual_seed(0)
    expected = torch.nn.Linear(5, 9)
    assert torch.equal(ddp.module[0].weight, expected.weight)
    assert ddp.module[1].num_batches_tracked == 0
    assert ddp.module[1].running_mean.eq(0).all()


@case
def the_first_step_in_f64_is_that_of_one_process_exactly(dist: Any, rank: int, size: int, folder: str) -> None:
    """Weights are multiples of 2^-3 up to 2, inputs integers up to 8, the batch 2^5 and the ranks 2^2: every
    activation, product, sum and mean is a multiple of a power of two far above 2^-52 of its size, so no addition
    rounds and no order of summation shows. The loss is linear in the outputs, which keeps it so.

    A narrower wire applies to f32 alone.
    """
    import torch

    inputs, target = samples(32, torch.float64)
    single = network(torch.float64)
    (single(inputs) * target).sum(1).mean().backward()
    ddp = wrapped(network(torch.float64, seed=rank))
    share = slice(rank * 8, rank * 8 + 8)
    (ddp(inputs[share]) * target[share]).sum(1).mean().backward()
    for got, expected in zip(gradients(ddp), gradients(single), strict=True):
        assert torch.equal(got, expected)


@case
def the_first_step_in_f32_is_that_of_one_process_within_the_bound(dist: Any, rank: int, size: int, folder: str) -> None:
    """One linear layer, loss = mean over the batch of sum_i y_i t_i; so the gradient of W_ij is the sum over B samples
    of t_si x_sj / B, with B and the number of ranks P powers of two: dividing rounds nothing.

    A sum of m products, in whatever order and with or without fused multiply-add, is off by at most
    gamma(m) sum |terms|, gamma(m) = m v / (1 - m v), v = 2^-24 (Higham, Accuracy and Stability, section 3.1): each
    term goes through one rounding as a product and at most m - 1 as part of a sum. On one process m = B. With P ranks,
    B/P terms are added at each rank and P sums in the network or round the ring: B/P + P - 1 <= B roundings a term at
    most. Both are compared with each other, so the bound is twice gamma(B) sum |terms|.

    With a bf16 wire (unit roundoff u = 2^-8) a rank's gradient g_r is rounded once before and the result once after
    the reduction, in f32: ((1 + u)^2 (1 + v)^(P-1) - 1) sum |g_r| / P more, where |g_r| / P is at most the sum of the
    magnitudes of that rank's terms, times 1 + gamma(B).
    """
    import torch

    batch = 64
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(batch, 17, generator=generator)
    target = torch.randn(batch, 5, generator=generator)
    single = torch.nn.Linear(17, 5, bias=False)
    (single(inputs) * target).sum(1).mean().backward()
    ddp = wrapped(torch.nn.Linear(17, 5, bias=False))
    share = slice(rank * batch // size, (rank + 1) * batch // size)
    (ddp(inputs[share]) * target[share]).sum(1).mean().backward()

    magnitude = target.double().abs().t() @ inputs.double().abs() / batch
    v, u = 2.0**-24, 2.0**-8
    gamma = batch * v / (1 - batch * v)
    bound = 2 * gamma * magnitude
    if os.environ.get("NETFOLD_WIRE_DTYPE") == "bf16":
        bound += ((1 + u) ** 2 * (1 + v) ** (size - 1) - 1) * magnitude * (1 + gamma)
    (got,), (expected,) = gradients(ddp), gradients(single)
    assert ((got.double() - expected.double()).abs() <= bound).all()
    everybody_has(dist, [got])


@case
def every_dtype_trains_to_the_same_bits_on_every_rank(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        ddp = wrapped(network(dtype, seed=rank), bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-10)
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        for step in range(4):
            optimizer.zero_grad()
            inputs, target = samples(8 * size * 4, dtype)
            share = slice((step * size + rank) * 8, (step * size + rank + 1) * 8)
            (ddp(inputs[share]) * target[share]).sum(1).mean().mul(2.0**-6).backward()
            optimizer.step()
        everybody_has(dist, list(ddp.parameters()))
        assert any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))


@case
def training_goes_the_way_of_one_process_over_many_steps(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    def train(model: Any, share: slice) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.5)
        inputs, target = samples(32, torch.float64)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs[share]) / 64, target[share])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    single = network(torch.float64)
    alone = train(single, slice(None))
    ddp = wrapped(network(torch.float64), gradient_as_bucket_view=True)
    together = torch.tensor(train(ddp, slice(rank * 8, rank * 8 + 8)), dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.AVG)
    torch.testing.assert_close(together, torch.tensor(alone, dtype=torch.float64), rtol=1e-9, atol=0)
    assert together[-1] < together[0]


@case
def nan_in_one_ranks_gradient_reaches_every_rank(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    ddp = wrapped(torch.nn.Linear(3, 2))
    inputs = torch.ones(4, 3)
    if rank == 2:
        inputs[0, 1] = float("nan")
        inputs[0, 2] = float("inf")
    ddp(inputs).sum().backward()
    assert ddp.module.weight.grad.isnan()[:, 1].all()
    assert ddp.module.weight.grad[:, 2].isinf().all()
    assert ddp.module.weight.grad[:, 0].isfinite().all()


@case
def buckets_are_reduced_while_backward_goes_on(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    import netfold.torch

    ended = []

    class Slow(torch.autograd.Function):
        """Backward gets here after the gradients of all later layers, and stays for a while."""

        @staticmethod
        def forward(context: Any, value: Any) -> Any:
            return value

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            time.sleep(0.3)
            ended.append(time.perf_counter_ns())
            return gradient

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(100, 200), torch.nn.Linear(200, 300)

        def forward(self, value: Any) -> Any:
            return self.last(Slow.apply(self.first(value)))

    ddp = wrapped(Model(), bucket_cap_mb=0.01)
    for _ in range(2):  # buckets are rebuilt after the first step
        ended.clear()
        before = len(netfold.torch.events())
        ddp(torch.ones(4, 100)).sum().backward()
    events = netfold.torch.events()[before:]
    assert len(events) >= 2, "several buckets"
    assert (events["finished_ns"] < ended[0]).any(), "the last layer's bucket was reduced before the first's was there"
    assert (events["queued_ns"] > ended[0]).any()


@case
def gradients_accumulate_without_communication_under_no_sync(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    import netfold.torch

    inputs, target = samples(32, torch.float64)
    single = network(torch.float64)
    (single(inputs) * target).sum(1).mean().backward()
    ddp = wrapped(network(torch.float64))
    before = len(netfold.torch.events())
    with ddp.no_sync():
        first = slice(rank * 8, rank * 8 + 4)
        ((ddp(inputs[first]) * target[first]).sum(1).mean() / 2).backward()
    assert len(netfold.torch.events()) == before
    second = slice(rank * 8 + 4, rank * 8 + 8)
    ((ddp(inputs[second]) * target[second]).sum(1).mean() / 2).backward()
    for got, expected in zip(gradients(ddp), gradients(single), strict=True):
        assert torch.equal(got, expected)


@case
def unused_parameters_and_static_graphs(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, value: Any, both: bool) -> Any:
            value = self.used(value)
            return self.unused(value) if both else value

    ddp = wrapped(Model(), find_unused_parameters=True)
    ddp(torch.full((2, 4), rank + 1.0), rank == 0).sum().backward()  # one rank uses what others do not
    everybody_has(dist, [ddp.module.used.weight.grad, ddp.module.unused.weight.grad])
    static = wrapped(Model(), static_graph=True)
    for _ in range(3):
        static.zero_grad()
        static(torch.full((2, 4), rank + 1.0), True).sum().backward()
    everybody_has(dist, gradients(static))


@case
def communication_hooks_run(dist: Any, rank: int, size: int, folder: str) -> None:
    """PowerSGD's callback blocks on a later Future: TORCH_NOTES, trap 3. It also calls collectives from callbacks: with
    several buckets the ranks' order of calls would depend on their threads, whatever the backend; so it gets one."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    for state, hook in (
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    ):
        ddp = wrapped(network(torch.float32), bucket_cap_mb=25 if state is not None else 0.005)
        ddp.register_comm_hook(state, hook)
        inputs, target = samples(32, torch.float32)
        for _ in range(5):
            ddp.zero_grad()
            share = slice(rank * 8, rank * 8 + 8)
            (ddp(inputs[share]) * target[share]).sum(1).mean().mul(2.0**-8).backward()
        everybody_has(dist, gradients(ddp))


@case
def ranks_with_fewer_batches_join_the_others(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch

    ddp = wrapped(network(torch.float64))
    steps = 0
    with ddp.join():
        for _ in range(2 + rank):
            ddp(torch.ones(2, 12, dtype=torch.float64)).sum().backward()
            steps += 1
    assert steps == 2 + rank
    everybody_has(dist, list(ddp.parameters()))


@case
def an_optimizer_may_be_sharded(dist: Any, rank: int, size: int, folder: str) -> None:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = wrapped(network(torch.float32))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(2, 12) * (rank + 1)).sum().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    everybody_has(dist, list(ddp.parameters()))


@case
def an_error_in_the_reducer_is_raised_and_a_new_group_can_be_made(dist: Any, rank: int, size: int, folder: str) -> None:
    """TORCH_NOTES, trap 2: a Future with an exception set takes the process down instead."""
    import torch

    ddp = wrapped(network(torch.float32))
    ddp(torch.ones(2, 12)).sum().backward()
    if rank == 3:
        dist.destroy_process_group()
    else:
        began = time.monotonic()
        try:
            for _ in range(3):
                ddp(torch.ones(2, 12)).sum().backward()
        except RuntimeError as error:
            assert "rank 3" in str(error), str(error)
        else:
            raise AssertionError("nothing was raised")
        assert time.monotonic() - began < seconds(10)
        dist.destroy_process_group()
    for again in range(2):
        dist.init_process_group("netfold", init_method=f"file://{folder}/again-{again}", rank=rank, world_size=size)
        ddp = wrapped(network(torch.float32, seed=rank))
        ddp(torch.ones(2, 12)).sum().backward()
        everybody_has(dist, gradients(ddp))
        if again == 0:
            dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_each_case_passes_on_every_rank(mode: str, name: str) -> None:
    check(__name__, tuple(MODES), mode, name)
