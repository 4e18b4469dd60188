"""Every operation of torch.distributed with tensors of every layout: their values count, not their bytes.

A tensor's memory may hold its values with gaps, in another order, or still to be negated or conjugated. A result may be
for a leaf that requires grad, or for an inference tensor. A case is an operation; it goes over all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worlds import BY_DISPATCHER, Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_layouts")]  # the world is made once

MODES = ("auto",)

Tensor = Any
# The values -> a tensor that reads as these values.
Layout = Callable[[Tensor], Tensor]
# Yields pairs of (result, the right values).
Operation = Callable[["World"], Iterator[tuple[Tensor, Tensor]]]

# --- layouts ---------------------------------------------------------------------------------------------------------


def strided(values: Tensor) -> Tensor:
    import torch

    wide = torch.full((*values.shape, 2), -7.0).to(values.dtype)
    wide[..., 1] = values
    return wide[..., 1]


def inference(layout: Layout) -> Layout:
    def make(values: Tensor) -> Tensor:
        import torch

        with torch.inference_mode():
            return layout(values)

    return make


def parameter(layout: Layout) -> Layout:
    def make(values: Tensor) -> Tensor:
        import torch

        return torch.nn.Parameter(layout(values))

    return make


def transposed(values: Tensor) -> Tensor:
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(values: Tensor) -> Tensor:
    import torch

    return values.contiguous(memory_format=torch.channels_last)


def negated(values: Tensor) -> Tensor:
    import torch

    return torch._neg_view(-values)


def imaginary_of_conjugate(values: Tensor) -> Tensor:
    import torch

    return torch.complex(values + 1, -values).conj().imag


def conjugated(values: Tensor) -> Tensor:
    return values.conj().resolve_conj().conj()


def view_of_a_leaf(values: Tensor) -> Tensor:
    import torch

    return torch.nn.Parameter(strided(values))[:]


def part_of_a_leaf(values: Tensor) -> Tensor:
    import torch

    return torch.nn.Parameter(torch.stack([values, values])).unbind(0)[1]


_PLAIN_SHAPES = ((6, 4), (60, 500))
_REAL: dict[str, tuple[Layout, tuple[tuple[int, ...], ...]]] = {
    "contiguous": (lambda values: values.clone(), _PLAIN_SHAPES),
    "strided": (strided, _PLAIN_SHAPES),
    "transposed": (transposed, _PLAIN_SHAPES),
    "channels_last": (channels_last, ((2, 3, 4, 5), (2, 30, 40, 5))),
    "with no dimension": (lambda values: values.clone(), ((),)),
    "with no dimension, strided": (strided, ((),)),
    "empty": (lambda values: values.clone(), ((0,), (3, 0))),
    "negated": (negated, (*_PLAIN_SHAPES, ())),
    "imaginary part of a conjugate": (imaginary_of_conjugate, _PLAIN_SHAPES),
    "leaf": (parameter(lambda values: values.clone()), _PLAIN_SHAPES),
    "strided leaf": (parameter(strided), _PLAIN_SHAPES),
    "view of a leaf": (view_of_a_leaf, _PLAIN_SHAPES),
    "one of several views of a leaf": (part_of_a_leaf, _PLAIN_SHAPES),
    "inference": (inference(lambda values: values.clone()), _PLAIN_SHAPES),
    "strided inference": (inference(strided), _PLAIN_SHAPES),
    "negated inference": (inference(negated), _PLAIN_SHAPES),
}
_COMPLEX: dict[str, tuple[Layout, tuple[tuple[int, ...], ...]]] = {
    "complex": (lambda values: values.clone(), _PLAIN_SHAPES),
}
# torch's own functions refuse these before they ask a backend.
_CONJUGATED: dict[str, tuple[Layout, tuple[tuple[int, ...], ...]]] = {
    "conjugated": (conjugated, (*_PLAIN_SHAPES, ())),
    "conjugated and strided": (lambda values: conjugated(strided(values)), _PLAIN_SHAPES),
    "conjugated inference": (inference(conjugated), _PLAIN_SHAPES),
}
if BY_DISPATCHER:  # torch's dispatcher hands any backend a copy of such a tensor, and the result is lost, over gloo too
    _REAL = {name: layout for name, layout in _REAL.items() if "negated" not in name and "conjugate" not in name}
    _CONJUGATED = {}
_EXPANDED: dict[str, tuple[Layout, tuple[tuple[int, ...], ...]]] = {"expanded": (lambda values: values, _PLAIN_SHAPES)}

# Whether asynchronous, and whether in inference mode.
_MODES_OF_CALLS = ((False, False), (True, False), (True, True))


class World:
    """The arguments of an operation, and the right results."""

    def __init__(self, dist: Any, rank: int, size: int) -> None:
        self.dist, self.rank, self.size = dist, rank, size
        self.asynchronous = False
        self.expanded = False  # whether inputs repeat one element, which no result can
        self._layout: Layout
        self._shape: tuple[int, ...]
        self._dtype: Any

    def values(self, rank: int, seed: int = 0) -> Tensor:
        """Distinct in every element, exact in every sum of four ranks. A rank's input reads as this."""
        import torch

        count = int(torch.tensor(self._shape).prod()) if self._shape else 1
        index = torch.arange(count, dtype=torch.float32).view(self._shape)
        found = index / 2 + 1 + 16 * rank + 64 * seed
        if self._dtype is not torch.float32:
            found = torch.complex(found, index + rank - 3)
        return found.reshape(-1)[:1].expand(self._shape) if self.expanded else found

    def own(self, seed: int = 0) -> Tensor:
        return self._layout(self.values(self.rank, seed))

    def blank(self) -> Tensor:
        """For a result."""
        return self._layout(self.values(9).contiguous())

    def sum(self, seed: int = 0) -> Tensor:
        return sum(self.values(rank, seed) for rank in range(self.size))

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        work = function(*args, async_op=self.asynchronous, **options)
        if work is not None:
            work.wait()

    def tried(self, operation: Operation, layouts: dict[str, Any], dtype: Any) -> Iterator[str]:
        """Yields what went wrong."""
        import torch

        self._dtype = dtype
        for name, (self._layout, shapes) in layouts.items():
            for self._shape in shapes:
                for self.asynchronous, mode in _MODES_OF_CALLS:
                    what = f"{name} {list(self._shape)}{', asynchronous' * self.asynchronous}, inference mode {mode}"
                    try:
                        with torch.inference_mode(mode):
                            for got, right in operation(self):
                                if not torch.equal(got.detach().resolve_conj().resolve_neg(), right):
                                    yield f"{what}: wrong values"
                    except Exception as error:
                        yield f"{what}: {type(error).__name__}: {error}"


# --- operations ------------------------------------------------------------------------------------------------------


def all_reduce(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    reduced = world.own()
    world.call(world.dist.all_reduce, reduced)
    yield reduced, world.sum()


def average(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    reduced = world.own()
    world.call(world.dist.all_reduce, reduced, world.dist.ReduceOp.AVG)
    yield reduced, world.sum() / world.size


def premultiplied(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    reduced = world.own()
    world.call(world.dist.all_reduce, reduced, world.dist._make_nccl_premul_sum(0.5))
    yield reduced, world.sum() / 2


def coalesced(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    several = [world.own(seed) for seed in range(3)]
    world.call(world.dist.all_reduce_coalesced, several)
    for seed, each in enumerate(several):
        yield each, world.sum(seed)


def coalescing_manager(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    from torch.distributed import _coalescing_manager

    several = [world.own(seed) for seed in range(3)]
    with _coalescing_manager(async_ops=world.asynchronous) as manager:
        for each in several:
            world.dist.all_reduce(each)
    manager.wait()
    for seed, each in enumerate(several):
        yield each, world.sum(seed)


def functional(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    from torch.distributed import _functional_collectives as functional

    yield functional.all_reduce(world.own(), "sum", world.dist.group.WORLD).detach() * 1, world.sum()


def methods_of_the_group(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    group, other = world.dist.group.WORLD, world.rank ^ 1
    reduced, received, into = world.own(), world.own(), world.blank()
    group.allreduce([reduced]).wait()
    yield reduced, world.sum()
    group.broadcast(received, 2).wait()
    yield received, world.values(2)
    works = group.send([world.own()], other, 0), group.recv([into], other, 0)
    for work in works:
        work.wait()
    yield into, world.values(other)


def reduce(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    reduced = world.own()
    world.call(world.dist.reduce, reduced, 1)
    yield reduced, world.sum() if world.rank == 1 else world.values(world.rank)


def broadcast(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    tensor = world.own()
    world.call(world.dist.broadcast, tensor, 2)
    yield tensor, world.values(2)


def all_gather(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    gathered = [world.blank() for _ in range(world.size)]
    world.call(world.dist.all_gather, gathered, world.own())
    for rank, each in enumerate(gathered):
        yield each, world.values(rank)


def all_gather_into_tensor(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    import torch

    own = world.own()
    whole = torch.empty(world.size * own.numel(), dtype=own.dtype)
    world.call(world.dist.all_gather_into_tensor, whole, own)
    for rank, each in enumerate(whole.chunk(world.size) if own.numel() else ()):
        yield each.view(own.shape), world.values(rank)


def gather(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    gathered = [world.blank() for _ in range(world.size)] if world.rank == 3 else None
    world.call(world.dist.gather, world.own(), gathered, dst=3)
    for rank, each in enumerate(gathered or ()):
        yield each, world.values(rank)


def scatter(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    parts = [world.own(rank) for rank in range(world.size)] if world.rank == 1 else None
    output = world.blank()
    world.call(world.dist.scatter, output, parts, src=1)
    yield output, world.values(1, world.rank)


def reduce_scatter(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    output = world.blank()
    world.call(world.dist.reduce_scatter, output, [world.own(rank) for rank in range(world.size)])
    yield output, world.sum(world.rank)


def reduce_scatter_tensor(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    import torch

    output = world.blank()
    whole = torch.cat([world.values(world.rank, rank).reshape(-1) for rank in range(world.size)])
    world.call(world.dist.reduce_scatter_tensor, output, whole)
    yield output, world.sum(world.rank)


def all_to_all(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    outputs = [world.blank() for _ in range(world.size)]
    world.call(world.dist.all_to_all, outputs, [world.own(rank) for rank in range(world.size)])
    for rank, each in enumerate(outputs):
        yield each, world.values(rank, world.rank)


def send_and_recv(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    dist, other, into = world.dist, world.rank ^ 1, world.blank()
    if world.asynchronous:
        works = [dist.isend(world.own(), other), dist.irecv(into, other)]
        works[1].get_future().wait()
        works[0].wait()
    elif world.rank % 2:
        dist.recv(into, other)
        dist.send(world.own(), other)
    else:
        dist.send(world.own(), other)
        dist.recv(into)
    yield into, world.values(other)


def batched(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    dist, other, into = world.dist, world.rank ^ 1, world.blank()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, into, other), dist.P2POp(dist.isend, world.own(), other)]
    ):
        work.wait()
    yield into, world.values(other)


_WITH_RESULTS = (
    all_reduce, average, premultiplied, coalesced, coalescing_manager, functional, methods_of_the_group, reduce,
    broadcast, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter, reduce_scatter_tensor, all_to_all,
    send_and_recv, batched,
)  # fmt: skip

_WITH_INPUTS = (
    all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter, all_to_all, send_and_recv, batched,
)  # fmt: skip


def sparse(dist: Any, rank: int, size: int, folder: str) -> None:
    """A sparse sum is put together on a completion thread; the factory functions of the caller's thread may be set."""
    import torch

    for made, called in ((False, False), (True, True), (True, False), (False, True)):
        for asynchronous in (False, True):
            with torch.inference_mode(made):
                tensor = torch.sparse_coo_tensor([[0, rank]], [1.0, 2.0], (size,))
            with torch.inference_mode(called), torch.device("meta"):
                work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert tensor.to_dense().tolist() == [size + 2.0] + [2.0] * (size - 1), (made, called, asynchronous)


def _case(operation: Operation) -> Case:
    def run(dist: Any, rank: int, size: int, folder: str) -> None:
        import torch

        world = World(dist, rank, size)
        wrong = list(world.tried(operation, _REAL, torch.float32))
        wrong += world.tried(operation, _COMPLEX, torch.complex64)
        if operation in (functional, methods_of_the_group):
            wrong += world.tried(operation, _CONJUGATED, torch.complex64)
        if operation in _WITH_INPUTS:
            world.expanded = True
            wrong += world.tried(operation, _EXPANDED, torch.float32)
        assert not wrong, "\n".join(wrong)

    return run


CASES: dict[str, Case] = {operation.__name__: _case(operation) for operation in _WITH_RESULTS} | {"sparse": sparse}


@pytest.mark.parametrize("name", CASES)
def test_each_case_passes_on_every_rank(name: str) -> None:
    check(__name__, MODES, "auto", name)
