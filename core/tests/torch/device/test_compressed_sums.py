"""Sums by the i8 wire format that the device quantises before the copy to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_worlds import ORDERS, distinct, on_devices, reduce_options  # noqa: E402
from ranks import values  # noqa: E402

from netfold._native import kernels  # noqa: E402
from netfold.torch.device import compressed_sums, fixed_point  # noqa: E402

pytestmark = pytest.mark.torch

SIZE = 3
# A chunk in several slots, and a tensor of several chunks, the last of them short.
STAGED = {"pinned_bytes": 72 << 10, "intra_host": "off", "wire_dtype": "i8"}
CHUNK = 30_000 // 128 * 128
COUNT = 2 * CHUNK + 20_001


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_sums, "CHUNK_ELEMENTS", CHUNK)


def contribution(rank: int) -> Any:
    """Ordinary values, subnormal ones and zeros."""
    random = torch.Generator().manual_seed(rank)
    made = torch.randn(COUNT, generator=random)
    made[1000:3000] *= 1e-38
    made[5000:6000] = 0
    return made


def averages_on_a_host(contributions: list[Any], operations_before: int) -> tuple[Any, list[Any]]:
    """The average by the native kernels, chunk by chunk, and each rank's rounding errors."""
    total, lost = torch.empty(COUNT), [torch.empty(COUNT) for _ in contributions]
    for number, begin in enumerate(range(0, COUNT, CHUNK)):
        parts = [each[begin : begin + CHUNK].numpy().copy() for each in contributions]
        count, ranks = len(parts[0]), len(parts)
        found = np.empty((ranks, fixed_point.block_count(count)), np.int32)
        for part, magnitudes in zip(parts, found, strict=True):
            kernels.block_magnitudes(magnitudes, part)
        agreed, integers = found.max(0), np.zeros(count, np.int8)
        for rank, part in enumerate(parts):
            own, errors = np.empty(count, np.int8), np.empty(count, np.float32)
            kernels.quantise_bytes(own, part, agreed, ranks, operations_before + number + 1, rank, errors)
            integers += own
            lost[rank][begin : begin + CHUNK] = torch.from_numpy(errors)
        back = np.empty(count, np.float32)
        kernels.dequantise_bytes(back, integers, agreed, ranks, ranks=ranks)
        total[begin : begin + CHUNK] = torch.from_numpy(back)
    return total, lost


def bits(tensor: Any) -> Any:
    return tensor.view(torch.int32)


def sums(group: Any, device_api: Any) -> str:
    """Twice with a residual, from kernels of the caller, and both under way at once; then a mean without one."""
    rank, size = group.rank(), group.size()
    tensors = [device_api.tensor(torch.full((COUNT,), -1.0)) for _ in range(3)]
    residual = device_api.tensor(torch.zeros(COUNT))
    for tensor in tensors:
        device_api.compute(lambda tensor=tensor: tensor.copy_(contribution(rank)))  # type: ignore[misc]
    futures = [group.average(tensor, residual) for tensor in tensors[:2]]
    work = group.allreduce([tensors[2]], reduce_options(dist.ReduceOp.AVG))
    for future in futures:
        future.wait()
    work.wait()
    inputs = [contribution(each) for each in range(size)]
    chunks = -(-COUNT // CHUNK)
    first, lost = averages_on_a_host(inputs, 0)
    second, lost = averages_on_a_host([mine + error for mine, error in zip(inputs, lost, strict=True)], chunks)
    third, _ = averages_on_a_host(inputs, 2 * chunks)
    for tensor, due in zip(tensors, (first, second, third), strict=True):
        found = device_api.value(tensor)
        assert torch.equal(bits(found), bits(due))
    assert torch.equal(bits(device_api.value(residual)), bits(lost[rank]))
    return str(group.devices.why())


@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_has_the_bits_of_the_native_kernels_and_so_has_the_residual(order: Any) -> None:
    for said in values(on_devices(sums, SIZE, order, **STAGED)):
        assert said.endswith("; f32 sums by i8 from 65536 bytes are quantised on the device"), said


def with_non_finite_values(group: Any, device_api: Any) -> None:
    """One chunk holds Inf and NaN: it is summed by i32, and its residual becomes 0."""
    rank, mine = group.rank(), distinct(group.rank(), COUNT)
    mine[[5, 700]] = torch.tensor([torch.inf, torch.nan if rank == 1 else 1.0])
    mine[6] = -torch.inf if rank == 2 else torch.inf
    tensor, residual = device_api.tensor(mine), device_api.tensor(torch.zeros(COUNT))
    group.average(tensor, residual).wait()
    found, due = device_api.value(tensor), sum(distinct(each, COUNT) for each in range(SIZE)) / SIZE
    assert found[5] == torch.inf and found[6].isnan() and found[700].isnan()
    others = torch.ones(COUNT, dtype=torch.bool)
    others[: 128 * 6] = False  # whole blocks
    assert (found - due)[:CHUNK][others[:CHUNK]].abs().max() <= 0.01, "by i32"
    assert device_api.value(residual)[:CHUNK].eq(0).all()
    assert device_api.value(residual)[CHUNK:].ne(0).any()


@pytest.mark.parametrize("order", ORDERS)
def test_a_chunk_that_is_not_finite_goes_by_i32(order: Any) -> None:
    values(on_devices(with_non_finite_values, SIZE, order, **STAGED))


def crossing(group: Any, device_api: Any, count: int) -> float:
    """The bytes that one sum copies between device and host, for each byte of the tensor."""
    tensor, copied, original = device_api.tensor(torch.ones(count)), [0], device_api.copy
    group.allreduce([tensor], reduce_options()).wait()

    def copy(stream: Any, to: Any, source: Any) -> None:
        copied[0] += source.nbytes
        original(stream, to, source)

    device_api.copy = copy
    group.allreduce([tensor], reduce_options()).wait()
    return copied[0] / tensor.nbytes


def test_a_quarter_of_the_bytes_crosses_the_bus() -> None:
    both_ways = 2 * (1 / 4 + 1 / 128)
    for ratio in values(on_devices(lambda group, api: crossing(group, api, COUNT), 2, **STAGED)):
        assert both_ways <= ratio < both_ways + 0.001
    for ratio in values(on_devices(lambda group, api: crossing(group, api, 10_000), 2, **STAGED)):
        assert ratio == 2, "small sums are quantised on the host"


def after_another_path(group: Any, device_api: Any) -> None:
    """A sum by i8 with a residual is staged. The calls before it and after it go by IPC, on the same memory."""
    rank, size = group.rank(), group.size()
    tensor, residual = device_api.tensor(torch.zeros(COUNT)), device_api.tensor(torch.zeros(COUNT))
    device_api.compute(lambda: tensor.copy_(contribution(rank)))
    first = group.allreduce([tensor], reduce_options(dist.ReduceOp.MAX))
    second = group.average(tensor, residual)
    third = group.allreduce([tensor], reduce_options(dist.ReduceOp.MIN))
    fourth = group.average(tensor, residual)
    first.wait()
    second.wait()
    third.wait()
    fourth.wait()
    greatest = torch.stack([contribution(each) for each in range(size)]).amax(0)
    due, lost = averages_on_a_host([greatest] * size, 0)
    due, lost = averages_on_a_host([due + error for error in lost], -(-COUNT // CHUNK))
    assert torch.equal(bits(device_api.value(tensor)), bits(due))
    assert torch.equal(bits(device_api.value(residual)), bits(lost[rank]))


@pytest.mark.parametrize("order", ORDERS)
def test_sums_by_i8_and_other_paths_wait_for_each_other(order: Any) -> None:
    values(on_devices(after_another_path, SIZE, order, wire_dtype="i8"))
