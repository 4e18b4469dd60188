"""Tensors of no elements and of no dimensions, and parts that are empty on some ranks alone, in every operation."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_uneven_shapes")]  # the world is made once

MODES = ("auto", "ring", "switch")
CASES: dict[str, Case] = {}
SHAPES = ((0, 3), (5,), (), (3, 0), (2, 2))
ROWS = (3, 0, 2, 1)  # of each rank


def case(function: Any) -> Any:
    CASES[function.__name__] = lambda dist, rank, size, folder: function(dist, rank, size)
    return function


def own(rank: int, *shape: int) -> Any:
    """Distinct in every element and rank."""
    import torch

    values = torch.zeros(shape)
    return torch.arange(float(values.numel())).view(shape) * 8 + rank + 1


def same(got: Any, right: Any) -> None:
    import torch

    assert got.shape == right.shape and torch.equal(got, right), (got, right)


def total(size: int, *shape: int) -> Any:
    return sum(own(rank, *shape) for rank in range(size))


@case
def parts_of_which_some_are_empty(dist: Any, rank: int, size: int) -> None:
    import torch

    for shape in ((), (2,), (0,)):
        for asynchronous in (False, True):
            rows = [own(other, ROWS[other], *shape) for other in range(size)]
            outputs = [torch.full_like(each, -1) for each in rows]
            work = dist.all_gather(outputs, rows[rank], async_op=asynchronous)
            if work is not None:
                work.wait()
            for got, right in zip(outputs, rows, strict=True):
                same(got, right)
        outputs = [torch.full_like(each, -1) for each in rows] if rank == 1 else None
        dist.gather(rows[rank], outputs, dst=1)
        for got, right in zip(outputs or [], rows, strict=False):
            same(got, right)
        output = torch.full_like(rows[rank], -1)
        dist.reduce_scatter(output, [own(rank, ROWS[other], *shape) for other in range(size)])
        same(output, total(size, ROWS[rank], *shape))
        sent = [own(rank + 8 * other, rank * other % 3, *shape) for other in range(size)]
        came = [own(other + 8 * rank, rank * other % 3, *shape) for other in range(size)]
        outputs = [torch.full_like(each, -1) for each in came]
        dist.all_to_all(outputs, sent)
        for got, right in zip(outputs, came, strict=True):
            same(got, right)
        whole = torch.full_like(torch.cat(came), -1)
        dist.all_to_all_single(whole, torch.cat(sent), [len(each) for each in came], [len(each) for each in sent])
        same(whole, torch.cat(came))


@case
def one_rank_alone_sends_or_receives(dist: Any, rank: int, size: int) -> None:
    import torch
    from torch.distributed import _functional_collectives as functional

    for sends, receives in (({1}, set(range(size))), (set(range(size)), {1}), ({2}, {1}), (set(), set())):
        given = [2 if rank in sends and other in receives else 0 for other in range(size)]
        taken = [2 if other in sends and rank in receives else 0 for other in range(size)]
        source = own(rank, sum(given), 3)
        at = [2 * len([each for each in range(rank) if each in receives])] * size
        right = torch.cat([own(other, 2 * len(receives), 3)[at[other] :][: taken[other]] for other in range(size)])
        output = torch.full((sum(taken), 3), -1.0)
        dist.all_to_all_single(output, source, taken, given)
        same(output, right)
        same(functional.all_to_all_single(source, taken, given, dist.group.WORLD) * 1, right)


@case
def several_tensors_of_which_some_are_empty(dist: Any, rank: int, size: int) -> None:
    import torch
    from torch.distributed import _coalescing_manager

    for shapes in (SHAPES, ((0, 3), (0,), (3, 0)), ()):
        for asynchronous in (False, True):
            tensors = [own(rank, *shape) for shape in shapes]
            work = dist.all_reduce_coalesced(tensors, async_op=asynchronous)
            if work is not None:
                work.wait()
            for got, shape in zip(tensors, shapes, strict=True):
                same(got, total(size, *shape))
        outputs = [[torch.full(shape, -1.0) for shape in shapes] for _ in range(size)]
        dist.all_gather_coalesced(outputs, [own(rank, *shape) for shape in shapes])
        for other in range(size):
            for got, shape in zip(outputs[other], shapes, strict=True):
                same(got, own(other, *shape))
        shapes = tuple(shape for shape in shapes if shape)
        wholes = [torch.full((size * shape[0], *shape[1:]), -1.0) for shape in shapes]
        with _coalescing_manager():
            for whole, shape in zip(wholes, shapes, strict=True):
                dist.all_gather_into_tensor(whole, own(rank, *shape))
        for whole, shape in zip(wholes, shapes, strict=True):
            same(whole, torch.cat([own(other, *shape) for other in range(size)]))
        parts = [torch.full(shape, -1.0) for shape in shapes]
        with _coalescing_manager():
            for part, shape in zip(parts, shapes, strict=True):
                dist.reduce_scatter_tensor(part, torch.cat([own(rank + 8 * other, *shape) for other in range(size)]))
        for part, shape in zip(parts, shapes, strict=True):
            same(part, sum(own(other + 8 * rank, *shape) for other in range(size)))


@case
def functional_collectives(dist: Any, rank: int, size: int) -> None:
    import torch
    from torch.distributed import _functional_collectives as functional

    world = dist.group.WORLD
    for shape in SHAPES:
        same(functional.all_reduce(own(rank, *shape), "sum", world) * 1, total(size, *shape))
        same(functional.broadcast(own(rank, *shape), 1, world) * 1, own(1, *shape))
    shapes = [shape for shape in SHAPES if shape]
    for shape in shapes:
        whole = torch.cat([own(other, *shape) for other in range(size)])
        same(functional.all_gather_tensor(own(rank, *shape), 0, world) * 1, whole)
        same(functional.reduce_scatter_tensor(whole, "sum", 0, world) * 1, size * own(rank, *shape))
    same(functional.all_gather_tensor(own(rank, 2, 0), 1, world) * 1, torch.zeros(2, 0))
    for got, shape in zip(
        functional.all_reduce_coalesced([own(rank, *each) for each in SHAPES], "sum", world), SHAPES, strict=True
    ):
        same(got * 1, total(size, *shape))
    gathered = functional.all_gather_into_tensor_coalesced([own(rank, *shape) for shape in shapes], world)
    for got, shape in zip(gathered, shapes, strict=True):
        same(got * 1, torch.cat([own(other, *shape) for other in range(size)]))
    scattered = functional.reduce_scatter_tensor_coalesced(
        [own(rank, *shape).repeat(size, *[1] * (len(shape) - 1)) for shape in shapes], "sum", [0] * len(shapes), world
    )
    for got, shape in zip(scattered, shapes, strict=True):
        same(got * 1, total(size, *shape))


@case
def one_tensor_of_no_dimensions_for_all_ranks(dist: Any, rank: int, size: int) -> None:
    import torch

    whole, part = torch.full((size,), -1.0), torch.tensor(-1.0)
    dist.all_gather_into_tensor(whole, own(rank))
    same(whole, torch.arange(1.0, size + 1))
    dist.reduce_scatter_tensor(part, whole)
    same(part, torch.tensor(size * (rank + 1.0)))
    with pytest.raises(ValueError, match="no dimensions"):
        dist.all_to_all_single(part, own(rank))
    dist.barrier()


@case
def sparse_tensors_without_values(dist: Any, rank: int, size: int) -> None:
    import torch

    for filled in ((), (1,), range(size)):
        indices, values = ([[2]], [5.0]) if rank in filled else ([[]], [])
        tensor = torch.sparse_coo_tensor(torch.tensor(indices, dtype=torch.int64), values, (4,))
        dist.all_reduce(tensor)
        same(tensor.to_dense(), torch.tensor([0, 0, 5.0 * len(filled), 0]))
    tensor = torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (0, 3))
    dist.all_reduce(tensor)
    same(tensor.to_dense(), torch.zeros(0, 3))


@case
def empty_objects_travel(dist: Any, rank: int, size: int) -> None:
    found: list[Any] = [0] * size
    dist.all_gather_object(found, [] if rank else None)
    assert found == [None, *[[]] * (size - 1)]
    box = ["", {}] if rank == 0 else [1, 1]
    dist.broadcast_object_list(box, src=0)
    assert box == ["", {}]
    given = [()] * size
    dist.scatter_object_list(box, given if rank == 0 else None, src=0)
    assert box[0] == ()


@case
def a_model_with_empty_parameters_and_a_rank_without_samples(dist: Any, rank: int, size: int) -> None:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.empty = torch.nn.Parameter(torch.ones(0, 4))
            self.scale = torch.nn.Parameter(torch.tensor(2.0))
            self.register_buffer("buffer", torch.zeros(0))

        def forward(self, batch: Any) -> Any:
            return (self.weight * batch * self.scale).sum() + self.empty.sum()

    model = torch.nn.parallel.DistributedDataParallel(Model())
    model(torch.full((0 if rank == 1 else 2, 3), rank + 1.0)).backward()
    mean = sum(2 * (other + 1.0) for other in range(size) if other != 1) / size
    same(model.module.weight.grad, torch.full((3,), 2 * mean))
    same(model.module.empty.grad, torch.ones(0, 4))
    same(model.module.scale.grad, torch.tensor(3 * mean))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_each_case_passes_on_every_rank(mode: str, name: str) -> None:
    check(__name__, MODES, mode, name)
