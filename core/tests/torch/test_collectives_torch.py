"""Every collective of torch.distributed over netfold, against torch's own arithmetic on one process.

A world of processes a mode (auto, ring, a switch) runs all cases in order and says what it found; a test is a case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worlds import BY_DISPATCHER, Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_collectives")]  # the worlds are made once

MODES = ("auto", "ring", "switch")
CASES: dict[str, Case] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = lambda dist, rank, size, folder: function(dist, rank, size)
    return function


# --- what a rank contributes -----------------------------------------------------------------------------------------


def contribution(rank: int, count: int, dtype: Any) -> Any:
    """Distinct in every element, and exact in sums of four ranks: multiples of 1/4 below 2^7, or small integers."""
    import torch

    if dtype is torch.bool:
        return torch.tensor([(index >> rank) & 1 == 1 for index in range(count)])
    index = torch.arange(count, dtype=torch.int64)
    if dtype.is_floating_point:
        return ((index * 7 + rank * 13) % 499).to(torch.float64).div(4).to(dtype)
    return ((index * 5 + rank * 3) % 31).to(dtype)


def all_of(size: int, count: int, dtype: Any) -> Any:
    import torch

    return torch.stack([contribution(rank, count, dtype) for rank in range(size)])


def same(got: Any, expected: Any) -> None:
    import torch

    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# --- reductions ------------------------------------------------------------------------------------------------------


@case
def all_reduce_sums_every_dtype_exactly(dist: Any, rank: int, size: int) -> None:
    import torch

    for dtype in (
        torch.float64, torch.float32, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    ):  # fmt: skip
        for count in (1, 352, 5000, 70_001):
            tensor = contribution(rank, count, dtype)
            dist.all_reduce(tensor)
            same(tensor, all_of(size, count, dtype).sum(0, dtype=torch.float64).to(dtype))
    for dtype in (torch.float16, torch.bfloat16):
        # Multiples of 1/2 below 16: eight significant bits hold every partial sum, so no order of rounding shows.
        for count in (1, 352, 5000, 70_001):
            parts = [((torch.arange(count) * 3 + other) % 32).to(dtype) / 2 for other in range(size)]
            tensor = parts[rank].clone()
            dist.all_reduce(tensor)
            same(tensor, torch.stack(parts).to(torch.float64).sum(0).to(dtype))


@case
def all_reduce_knows_every_operator(dist: Any, rank: int, size: int) -> None:
    import torch

    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
        parts = all_of(size, 1000, dtype).remainder(8)  # products of four stay exact in 24 bits
        for op, expected in (
            (dist.ReduceOp.MIN, parts.amin(0)),
            (dist.ReduceOp.MAX, parts.amax(0)),
            (dist.ReduceOp.PRODUCT, functools.reduce(torch.mul, parts)),
        ):
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op)
            same(tensor, expected)
    for op, name in ((dist.ReduceOp.BAND, "and"), (dist.ReduceOp.BOR, "or"), (dist.ReduceOp.BXOR, "xor")):
        parts = all_of(size, 1000, torch.int64)
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, op)
        same(tensor, functools.reduce(getattr(torch, f"bitwise_{name}"), parts))


@case
def avg_divides_floats_by_the_number_of_ranks(dist: Any, rank: int, size: int) -> None:
    import torch

    for dtype in (torch.float64, torch.float32):
        tensor = contribution(rank, 5000, dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, all_of(size, 5000, dtype).to(torch.float64).sum(0).to(dtype) / size)
    for dtype in (torch.bfloat16, torch.float16):
        tensor = torch.full((9,), rank + 1.0, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.full((9,), (size + 1) / 2, dtype=dtype))


@case
def bool_tensors_take_min_and_max(dist: Any, rank: int, size: int) -> None:
    import torch

    parts = all_of(size, 16, torch.bool)
    for op, expected in (
        (dist.ReduceOp.MAX, parts.any(0)), (dist.ReduceOp.MIN, parts.all(0)), (dist.ReduceOp.BOR, parts.any(0)),
        (dist.ReduceOp.BAND, parts.all(0)), (dist.ReduceOp.BXOR, parts.sum(0) % 2 == 1),
        (dist.ReduceOp.PRODUCT, parts.all(0)), (dist.ReduceOp.SUM, parts.any(0)),
    ):  # fmt: skip
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, op)
        same(tensor, expected)


@case
def premul_sum_scales_each_rank_by_its_own_factor(dist: Any, rank: int, size: int) -> None:
    """NCCL's, which gloo lacks: a number or a tensor, other ranks' may differ. Factors are powers of two: exact."""
    import torch

    factors = [2.0 ** (other - 1) for other in range(size)]
    own = factors[rank]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        parts = [((torch.arange(3000) * 3 + other) % 16).to(dtype) for other in range(size)]
        expected = sum(part.to(torch.float64) * factor for part, factor in zip(parts, factors, strict=True)).to(dtype)
        for factor in (own, torch.tensor([own], dtype=dtype)):
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
            same(tensor, expected)
    tensor = torch.full((6,), 1.0)
    dist.reduce(tensor, 1, dist._make_nccl_premul_sum(own))
    same(tensor, torch.full((6,), sum(factors) if rank == 1 else 1.0))
    whole, mine = torch.ones(size * 3), torch.empty(3)
    dist.reduce_scatter_tensor(mine, whole, dist._make_nccl_premul_sum(own))
    same(mine, torch.full((3,), sum(factors)))
    assert whole.eq(1).all(), "the input stays as it is"


@case
def sparse_tensors_are_added_element_by_element(dist: Any, rank: int, size: int) -> None:
    import torch

    def sparse(other: int, dense: tuple[int, ...]) -> Any:
        """`other` elements: none on rank 0, and places that several ranks have."""
        places = torch.stack([torch.arange(other), torch.arange(other) * 2])
        return torch.sparse_coo_tensor(places, torch.full((other, *dense), other + 0.5), (5, 9, *dense))

    for dense in ((), (3,)):
        expected = sum(sparse(other, dense).to_dense() for other in range(size))
        for asynchronous in (False, True):
            tensor = sparse(rank, dense)
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                same(work.get_future().wait()[0].to_dense(), expected)
            same(tensor.to_dense(), expected)
            assert tensor.is_sparse
        tensor = sparse(rank, dense)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor.to_dense(), expected / size)


@case
def averages_of_every_kind_follow_one_rule(dist: Any, rank: int, size: int) -> None:
    """No overflow where the average has none; integers toward zero: dense, sparse, coalesced, scattered, reduced."""
    import torch

    def every_average(mine: Any) -> Iterator[tuple[str, Any]]:
        dense, reduced, block = mine.clone(), mine.clone(), torch.empty_like(mine)
        dist.all_reduce(dense, dist.ReduceOp.AVG)
        yield "all_reduce", dense
        dist.reduce(reduced, 0, dist.ReduceOp.AVG)
        if rank == 0:
            yield "reduce", reduced
        dist.reduce_scatter(block, [mine] * size, dist.ReduceOp.AVG)
        yield "reduce_scatter", block
        several = [mine.clone(), mine[:3].clone()]
        dist.all_reduce_coalesced(several, dist.ReduceOp.AVG)
        yield "coalesced", several[0]
        yield "coalesced", several[1]
        if mine.is_cpu:
            sparse = mine.to_sparse()
            dist.all_reduce(sparse, dist.ReduceOp.AVG)
            yield "sparse", sparse.to_dense()

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        real = torch.float32 if dtype.is_complex else dtype
        mine = torch.full((1000,), 0.7 * torch.finfo(real).max, dtype=dtype)
        for what, found in every_average(mine):
            ratio = (found / mine[: len(found)]).abs()
            assert ((ratio - 1).abs() < 0.01).all(), (what, dtype, ratio)
    for dtype in (torch.int8, torch.int32, torch.int64):
        mine = torch.tensor([7, -7, rank, -rank - 1] * 100, dtype=dtype)
        whole = [7, -7, (size - 1) * size // 2 // size, -(size * (size + 1) // 2 // size)]
        for what, found in every_average(mine):
            assert found.tolist() == (whole * 100)[: len(found)], (what, dtype)


@case
def complex_tensors_add_by_their_parts(dist: Any, rank: int, size: int) -> None:
    import torch

    for dtype in (torch.complex64, torch.complex128):
        parts = [torch.complex(torch.arange(700.0) + r, torch.arange(700.0) * (r + 1)).to(dtype) for r in range(size)]
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        same(tensor, torch.stack(parts).sum(0))
        # torch may only remember that values are negated: what counts is what they read as. torch 2.14 and newer hand
        # the backend a copy of such a tensor, whose sum is lost, over gloo as well.
        if BY_DISPATCHER:
            continue
        negated = parts[rank].clone().conj().imag
        assert negated.is_neg()
        dist.all_reduce(negated)
        same(negated.resolve_neg(), -torch.stack(parts).sum(0).imag)


@case
def nan_and_infinity_are_kept(dist: Any, rank: int, size: int) -> None:
    import torch

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for count in (50, 30_000):
            tensor = torch.ones(count, dtype=dtype)
            tensor[rank] = float("nan")
            tensor[10] = float("inf")
            tensor[20] = float("inf") if rank == 0 else float("-inf")
            tensor[count - 1] = float("-inf") if rank == size - 1 else 1.0
            dist.all_reduce(tensor)
            expected = torch.full((count,), float(size), dtype=dtype)
            expected[:size] = float("nan")
            expected[10], expected[20], expected[count - 1] = float("inf"), float("nan"), float("-inf")
            same(tensor, expected)


@case
def tensors_of_any_layout_are_reduced_in_place(dist: Any, rank: int, size: int) -> None:
    import torch

    whole = torch.zeros(6, 8)
    whole[:, ::2] = contribution(rank, 24, torch.float32).view(6, 4)
    whole[:, 1::2] = -1
    dist.all_reduce(whole[:, ::2])
    same(whole[:, ::2], all_of(size, 24, torch.float32).sum(0).view(6, 4))
    assert (whole[:, 1::2] == -1).all(), "what lies between was left alone"
    transposed = contribution(rank, 12, torch.float32).view(3, 4).t()
    dist.all_reduce(transposed)
    same(transposed, all_of(size, 12, torch.float32).sum(0).view(3, 4).t())
    scalar = torch.tensor(rank + 1.0)
    dist.all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == size * (size + 1) / 2
    empty = torch.zeros(0, 3)
    dist.all_reduce(empty)
    assert empty.shape == (0, 3)


@case
def reduce_leaves_the_others_as_they_are(dist: Any, rank: int, size: int) -> None:
    import torch

    for root in range(size):
        tensor = contribution(rank, 999, torch.float64)
        dist.reduce(tensor, root)
        same(
            tensor, all_of(size, 999, torch.float64).sum(0) if rank == root else contribution(rank, 999, torch.float64)
        )


@case
def reduce_scatter_in_all_its_forms(dist: Any, rank: int, size: int) -> None:
    import torch

    for count in (0, 1, 353, 20_001):
        # Row r of rank a: what a gives to r.
        rows = [contribution(a, size * count, torch.float32).view(size, count) for a in range(size)]
        expected = torch.stack([part[rank] for part in rows]).sum(0)
        output = torch.empty(count)
        dist.reduce_scatter(output, list(rows[rank].unbind(0)))
        same(output, expected)
        output = torch.empty(count)
        dist.reduce_scatter_tensor(output, rows[rank].flatten().contiguous())
        same(output, expected)
    output = torch.empty(3, 5)
    dist.reduce_scatter_tensor(output, torch.full((3 * size, 5), rank + 1.0), op=dist.ReduceOp.AVG)
    same(output, torch.full((3, 5), (size + 1) / 2))


# --- copies ----------------------------------------------------------------------------------------------------------


@case
def broadcast_from_every_root(dist: Any, rank: int, size: int) -> None:
    import torch

    for root in range(size):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64):
            tensor = (torch.arange(4001) * (rank + 1) % 97).to(dtype)
            dist.broadcast(tensor, root)
            same(tensor, (torch.arange(4001) * (root + 1) % 97).to(dtype))
    strided = torch.full((4, 4), float(rank))
    dist.broadcast(strided[:, 1], 2)
    assert strided[:, 1].eq(2).all() and strided[:, 0].eq(rank).all()


@case
def all_gather_in_all_its_forms(dist: Any, rank: int, size: int) -> None:
    import torch

    for shape in ((), (0,), (1,), (3, 117), (20_001,)):
        count = int(torch.tensor(shape).prod().item()) if shape else 1
        mine = contribution(rank, count, torch.float64).view(shape)
        gathered = [torch.empty(shape, dtype=torch.float64) for _ in range(size)]
        dist.all_gather(gathered, mine)
        for other in range(size):
            same(gathered[other], contribution(other, count, torch.float64).view(shape))
        if shape:
            whole = torch.empty(size * shape[0], *shape[1:], dtype=torch.float64)
            dist.all_gather_into_tensor(whole, mine)
            same(whole, torch.cat(gathered))
    uneven = [torch.zeros(5 + 3 * other, dtype=torch.int32) for other in range(size)]
    dist.all_gather(uneven, contribution(rank, 5 + 3 * rank, torch.int32))
    for other in range(size):
        same(uneven[other], contribution(other, 5 + 3 * other, torch.int32))
    strided = torch.zeros(size, 7, 2)
    dist.all_gather([strided[other, :, 0] for other in range(size)], contribution(rank, 14, torch.float32)[::2])
    for other in range(size):
        same(strided[other, :, 0], contribution(other, 14, torch.float32)[::2])


@case
def gather_and_scatter(dist: Any, rank: int, size: int) -> None:
    import torch

    for root in range(size):
        mine = contribution(rank, 801, torch.float32)
        gathered = [torch.empty(801) for _ in range(size)] if rank == root else None
        dist.gather(mine, gathered, dst=root)
        if gathered is not None:
            same(torch.stack(gathered), all_of(size, 801, torch.float32))
        output = torch.empty(801)
        dist.scatter(
            output,
            [contribution(10 * root + other, 801, torch.float32) for other in range(size)] if rank == root else None,
            src=root,
        )
        same(output, contribution(10 * root + rank, 801, torch.float32))


@case
def all_to_all_in_all_its_forms(dist: Any, rank: int, size: int) -> None:
    import torch

    def part(source: int, to: int) -> Any:
        return contribution(source * size + to, 2 + source + 3 * to, torch.int64)

    received = [torch.empty_like(part(other, rank)) for other in range(size)]
    dist.all_to_all(received, [part(rank, other) for other in range(size)])
    for other in range(size):
        same(received[other], part(other, rank))
    output = torch.empty(sum(len(part(other, rank)) for other in range(size)), dtype=torch.int64)
    dist.all_to_all_single(
        output,
        torch.cat([part(rank, other) for other in range(size)]),
        [len(part(other, rank)) for other in range(size)],
        [len(part(rank, other)) for other in range(size)],
    )
    same(output, torch.cat([part(other, rank) for other in range(size)]))
    even = torch.empty(size * 3, 2)
    dist.all_to_all_single(even, contribution(rank, size * 6, torch.float32).view(size * 3, 2))
    same(even, torch.cat([contribution(o, size * 6, torch.float32).view(size, 3, 2)[rank] for o in range(size)]))
    nothing = torch.empty(0 if rank else size, 1)
    dist.all_to_all_single(nothing, torch.ones(1, 1), [0 if rank else 1] * size, [1] + [0] * (size - 1))
    assert nothing.eq(1).all()


@case
def objects_travel(dist: Any, rank: int, size: int) -> None:
    everything = [{"rank": other, "text": "x" * (1000 * other), "nested": [other, None, 1.5]} for other in range(size)]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, everything[rank])
    assert found == everything
    found = [None] * size if rank == 1 else None  # type: ignore[assignment]
    dist.gather_object(everything[rank], found, dst=1)
    assert found == (everything if rank == 1 else None)
    box = [everything[rank], rank]
    dist.broadcast_object_list(box, src=2)
    assert box == [everything[2], 2]
    got: list[Any] = [None]
    dist.scatter_object_list(got, everything if rank == 3 else None, src=3)
    assert got == [everything[rank]]


# --- asynchronous ----------------------------------------------------------------------------------------------------


@case
def asynchronous_operations_are_waited_for_in_any_order(dist: Any, rank: int, size: int) -> None:
    import torch

    sizes = [1, 5000, 70_001, 3, 0, 20_000] * 5
    tensors = [contribution(rank, count, torch.float32) for count in sizes]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in reversed(range(len(works))):
        assert works[index].wait() in (True, None)
        assert works[index].is_completed() and works[index].is_success()
        same(tensors[index], all_of(size, sizes[index], torch.float32).sum(0))


@case
def a_future_holds_the_result_when_it_is_resolved(dist: Any, rank: int, size: int) -> None:
    import torch

    for count in (4, 100_000):
        for _ in range(20):
            strided = torch.zeros(count, 2)
            strided[:, 0] = contribution(rank, count, torch.float32)
            expected = all_of(size, count, torch.float32).sum(0)
            future = dist.all_reduce(strided[:, 0], async_op=True).get_future()
            # Staged tensors are copied back before anyone sees the operation complete.
            chained = future.then(lambda f: f.value()[0].clone())
            same(chained.wait(), expected)
            same(strided[:, 0], expected)


@case
def works_that_nobody_keeps_are_done_all_the_same(dist: Any, rank: int, size: int) -> None:
    import gc

    import torch

    tensor = contribution(rank, 200_000, torch.float32)
    dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(torch.ones(100_000), async_op=True)  # nor the tensor
    gc.collect()
    dist.barrier()
    # On one device operations start in order, and each engine works through them: the barrier may pass those in the
    # network, so ask again on the same way.
    last = torch.ones(1)
    dist.all_reduce(last, async_op=True).wait()
    dist.all_reduce(last)
    same(tensor, all_of(size, 200_000, torch.float32).sum(0))


@case
def a_callback_may_block_on_a_later_future(dist: Any, rank: int, size: int) -> None:
    """TORCH_NOTES trap 3: PowerSGD does this; one thread that runs callbacks and completes others would deadlock."""
    import torch

    depth = 10
    futures: list[Any] = []

    def block(index: int) -> Callable[[Any], float]:
        def callback(future: Any) -> float:
            own = float(future.value()[0][0])
            return own + (chained[index + 1].wait() if index + 1 < depth else 0.0)

        return callback

    tensors = [torch.full((50_000,), rank + 1.0 + index) for index in range(depth)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    chained: list[Any] = [None] * depth
    for index in reversed(range(depth)):
        chained[index] = futures[index].then(block(index))
    assert chained[0].wait() == sum(size * (size + 1) / 2 + size * index for index in range(depth))


@case
def the_coalescing_manager_does_many_at_once(dist: Any, rank: int, size: int) -> None:
    import torch

    tensors = [contribution(rank, 100 + index, torch.float32) for index in range(5)]
    with dist._coalescing_manager(async_ops=False):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for index, tensor in enumerate(tensors):
        same(tensor, all_of(size, 100 + index, torch.float32).sum(0))
    outputs = [torch.empty(size * (50 + index)) for index in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for index, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, contribution(rank, 50 + index, torch.float32))
    manager.wait()
    for index, output in enumerate(outputs):
        same(output, all_of(size, 50 + index, torch.float32).flatten())
    outputs = [torch.empty(20 + index) for index in range(3)]
    inputs = [contribution(rank, size * (20 + index), torch.float32) for index in range(3)]
    with dist._coalescing_manager():
        for output, input in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, input)
    for index, output in enumerate(outputs):
        same(output, all_of(size, size * (20 + index), torch.float32).sum(0).view(size, -1)[rank])
    tensors = [contribution(rank, 60 + index, torch.float64) for index in range(3)]
    dist.all_reduce_coalesced(tensors)
    for index, tensor in enumerate(tensors):
        same(tensor, all_of(size, 60 + index, torch.float64).sum(0))


@case
def small_tensors_of_one_call_share_an_operation(dist: Any, rank: int, size: int) -> None:
    import torch

    from netfold.torch.operations import operations_of

    def operations() -> int:
        return operations_of(dist.group.WORLD).netfold.collectives_submitted

    counts = [3 * index % 50 for index in range(300)]
    tensors = [contribution(rank, count, torch.float32) for count in counts]
    tensors[7] = contribution(rank, 2 * counts[7], torch.float32)[::2]
    tensors[8] = torch.nn.Parameter(contribution(rank, 40_000, torch.float32))
    tensors[9] = contribution(rank, 24, torch.float32).view(4, 6).t()
    right = [tensor.detach().clone() for tensor in tensors]
    for tensor in right:
        dist.all_reduce(tensor)
    before = operations()
    dist.all_reduce_coalesced(tensors)
    assert operations() - before == 3, "a large tensor stands alone, and divides the small ones"
    for tensor, expected in zip(tensors, right, strict=True):
        same(tensor.detach(), expected)

    # Uneven blocks, which are gathered and scattered again.
    blocks = [[(index + 2 * other) % 7 for other in range(size)] for index in range(100)]
    outputs = [[torch.full((count,), -1.0) for count in each] for each in blocks]
    before = operations()
    group = dist.group.WORLD
    own = [torch.arange(float(each[rank])) + 100 * index + 1000 * rank for index, each in enumerate(blocks)]
    group.allgather(outputs, own).wait()
    for index, each in enumerate(outputs):
        for other, output in enumerate(each):
            same(output, torch.arange(float(blocks[index][other])) + 100 * index + 1000 * other)
    group.reduce_scatter(own, outputs).wait()
    assert operations() - before == 2
    for index, output in enumerate(own):
        same(output, size * (torch.arange(float(blocks[index][rank])) + 100 * index + 1000 * rank))


@case
def functional_collectives_give_the_same(dist: Any, rank: int, size: int) -> None:
    import torch
    import torch.distributed._functional_collectives as functional

    mine = contribution(rank, 360, torch.float32)
    world = dist.group.WORLD
    same(functional.all_reduce(mine, "sum", world) + 0, all_of(size, 360, torch.float32).sum(0))
    same(functional.all_gather_tensor(mine, 0, world) + 0, all_of(size, 360, torch.float32).flatten())
    same(
        functional.reduce_scatter_tensor(mine, "sum", 0, world) + 0,
        all_of(size, 360, torch.float32).sum(0).view(size, -1)[rank],
    )
    same(
        functional.all_to_all_single(mine, None, None, world) + 0,
        torch.cat([contribution(other, 360, torch.float32).view(size, -1)[rank] for other in range(size)]),
    )
    same(functional.broadcast(mine, 1, world) + 0, contribution(1, 360, torch.float32))


# --- groups ----------------------------------------------------------------------------------------------------------


@case
def subgroups_work_side_by_side(dist: Any, rank: int, size: int) -> None:
    import torch

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    members = [rank // 2 * 2, rank // 2 * 2 + 1]
    for count in (3, 60_000):
        tensor = contribution(rank, count, torch.float64)
        work = dist.all_reduce(tensor, group=mine, async_op=True)
        everyone = torch.ones(3)
        dist.all_reduce(everyone)  # the world's queue is another
        assert everyone.tolist() == [size] * 3
        work.wait()
        same(tensor, sum(contribution(member, count, torch.float64) for member in members))
    tensor = torch.full((5,), float(rank))
    dist.broadcast(tensor, src=members[1], group=mine)  # a global rank
    assert tensor.eq(members[1]).all()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, rank, group=mine)
    assert found == members
    with_a_gap = dist.new_group([0, 2, 3])
    if rank != 1:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=with_a_gap)
        assert tensor.item() == 3
        dist.destroy_process_group(with_a_gap)
    alone = dist.new_group([1])
    if rank == 1:
        tensor = torch.full((3,), 7.0)
        dist.all_reduce(tensor, group=alone)
        assert tensor.eq(7).all()
    dist.destroy_process_group(mine)
    dist.barrier()


@case
def what_is_not_supported_is_refused_in_a_sentence(dist: Any, rank: int, size: int) -> None:
    import torch

    def refuse(words: str, call: Callable[[], Any], by_torch: bool = False) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            if by_torch:  # its dispatcher has no operator for such tensors
                assert "Could not run 'c10d::" in str(error), str(error)
                return
            assert isinstance(error, ValueError), f"{type(error).__name__}: {error}"
            assert words in str(error), str(error)
            return
        raise AssertionError(f"nothing was refused; expected: {words}")

    ones = torch.ones(4)
    refuse("avg is not defined", lambda: dist.all_reduce(torch.ones(4, dtype=torch.bool), dist.ReduceOp.AVG))
    refuse("band is not defined for f32", lambda: dist.all_reduce(ones, dist.ReduceOp.BAND))
    refuse("on complex tensors", lambda: dist.all_reduce(torch.ones(4, dtype=torch.complex64), dist.ReduceOp.MAX))
    integers = torch.ones(4, dtype=torch.int32)
    refuse("premul_sum takes floating-point", lambda: dist.all_reduce(integers, dist._make_nccl_premul_sum(2.0)))
    refuse("1 output tensors on 4 ranks", lambda: dist.all_gather([torch.ones(4)], ones))
    refuse("2 input tensors on 4 ranks", lambda: dist.reduce_scatter(ones, [torch.ones(4)] * 2))
    refuse("takes SUM and AVG", lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX))
    refuse("dense tensors", lambda: dist.broadcast(torch.eye(3).to_sparse(), 0), by_torch=BY_DISPATCHER)
    if not BY_DISPATCHER:  # torch's dispatcher has operators of its own for meta tensors
        refuse("CPU tensors", lambda: dist.broadcast(torch.empty(4, device="meta"), 0))
    refuse("cannot reduce torch.float8_e4m3fn", lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn)))
    refuse("splits", lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1, 1, 2], [1, 1, 1, 1]))
    refuse("do not divide by 4 ranks", lambda: dist.all_to_all_single(torch.ones(5), torch.ones(5)))
    dist.all_reduce(ones)
    assert ones.eq(size).all(), "a refusal harms nothing"


@case
def a_tensor_whose_elements_share_memory_is_an_error_not_a_hang(dist: Any, rank: int, size: int) -> None:
    import torch

    for asynchronous in (False, True):
        for wait in ("wait", "get_future"):
            shared = torch.ones(1).expand(50_000)
            try:
                work = dist.all_reduce(shared, async_op=asynchronous)
                if work is not None:
                    work.wait() if wait == "wait" else work.get_future().wait()
            except (RuntimeError, ValueError) as error:
                assert "repeats elements (expand), so it cannot take results" in str(error), str(error)
            else:
                raise AssertionError("nothing was said")
    dist.barrier()


@case
def the_record_of_each_operation_can_be_read(dist: Any, rank: int, size: int) -> None:
    import torch

    import netfold.torch

    before = len(netfold.torch.events())
    dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10), 0)
    events = netfold.torch.events()[before:]
    assert events["bytes"].tolist() == [4000, 40]
    assert (events["finished_ns"] >= events["queued_ns"]).all()
    assert " (" in netfold.torch.why()
    why = netfold.torch.why(operation="broadcast", size_bytes=1 << 20)
    assert why.startswith("shared_memory (") and "for 1048576 bytes the model says" in why and "chain" in why


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_each_case_passes_on_every_rank(mode: str, name: str) -> None:
    check(__name__, MODES, mode, name)
