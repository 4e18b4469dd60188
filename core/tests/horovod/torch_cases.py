"""Checks of netfold.horovod.torch on every rank; test_torch_operations.py and test_torch_training.py run these."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from load import seconds
from ranks import run_ranks, values
from torch import nn

import netfold.horovod
import netfold.horovod.torch as hvd
from netfold import Communicator, FileStore
from netfold.horovod.torch import negotiation

Tensor = torch.Tensor
Case = Callable[[int, int], None]


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Distinct in every element and rank; sums of a few are exact."""
    return (torch.arange(int(np.prod(shape))) * 8 + rank + 1).to(dtype).reshape(shape)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def raises(kind: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def all_parts(size: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([part(rank, *shape, dtype=dtype) for rank in range(size)])


# --- operations ----------------------------------------------------------------------------------------------------


def allreduce_in_its_forms(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16):
        everyone = all_parts(size, 4, 3, dtype=dtype)
        for op, expected in (
            (hvd.Sum, everyone.sum(0).to(dtype)),
            (hvd.Min, everyone.amin(0)),
            (hvd.Max, everyone.amax(0)),
        ):
            mine = part(rank, 4, 3, dtype=dtype)
            same(hvd.allreduce(mine, op=op), expected)
            same(hvd.synchronize(hvd.allreduce_async(mine, op=op)), expected)
            same(hvd.grouped_allreduce([mine, mine.t()], op=op)[1], expected.t())
            same(hvd.synchronize(hvd.grouped_allreduce_async([mine], op=op))[0], expected)
            same(mine, part(rank, 4, 3, dtype=dtype))
            one, two, three, four = (mine.clone() for _ in range(4))
            assert hvd.allreduce_(one, op=op) is one
            assert hvd.synchronize(hvd.allreduce_async_(two, op=op)) is two
            assert hvd.grouped_allreduce_([three], op=op)[0] is three
            assert hvd.synchronize(hvd.grouped_allreduce_async_([four.t()], op=op))[0].shape == (3, 4)
            for each in (one, two, three, four):
                same(each, expected)
    close(hvd.allreduce(part(rank, 5)), all_parts(size, 5).mean(0))
    same(hvd.allreduce(part(rank, 5), average=False), all_parts(size, 5).sum(0))
    same(hvd.allreduce(part(rank, 2), op=hvd.Product), all_parts(size, 2).prod(0))
    same(hvd.allreduce(torch.tensor(3 * rank + 1)), torch.tensor(sum(3 * r + 1 for r in range(size)) // size))
    big = part(rank, 70_000)
    same(hvd.allreduce(big, op=hvd.Sum), all_parts(size, 70_000).sum(0))
    raises(ValueError, "op= or average=", lambda: hvd.allreduce(big, average=True, op=hvd.Sum))
    raises(NotImplementedError, "no Adasum", lambda: hvd.allreduce(big, op=hvd.Adasum))
    raises(ValueError, "complex64 cannot be sent", lambda: hvd.allreduce(torch.zeros(2, dtype=torch.complex64)))
    raises(ValueError, "no operator", lambda: hvd.allreduce(big, op="median"))


def factors_before_and_after(rank: int, size: int) -> None:
    total = all_parts(size, 6).sum(0)
    close(hvd.allreduce(part(rank, 6), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), total * 1.5)
    close(hvd.allreduce(part(rank, 6), op=hvd.Average, postscale_factor=2.0), total * 2 / size)
    mine = part(rank, 6, dtype=torch.int32)
    same(
        hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5),
        sum((part(r, 6, dtype=torch.int32).double() * 0.5).int() for r in range(size)),  # type: ignore[arg-type]
    )
    same(mine, part(rank, 6, dtype=torch.int32))


def names_in_another_order(rank: int, size: int) -> None:
    """Every rank submits the same names in its own order, twice: the second time the names are known."""
    for _ in range(2):
        order = [(7 * (rank + 1) * i + rank) % 29 for i in range(29)]
        handles = {i: hvd.allreduce_async(part(rank + 50 * i, i % 5 + 1), name=f"n{i}", op=hvd.Sum) for i in order}
        for i in range(29):
            same(hvd.synchronize(handles[i]), all_parts(size, i % 5 + 1).sum(0) + size * 50 * i)
            assert hvd.poll(handles[i])
    # A name whose shape has changed, while others ask for it out of order.
    names = ["n1", "n2"] if rank % 2 else ["n2", "n1"]
    changed = {name: hvd.allreduce_async(part(rank, 3, 2), name=name, op=hvd.Sum) for name in names}
    for name in ("n1", "n2"):
        same(hvd.synchronize(changed[name]), all_parts(size, 3, 2).sum(0))


def differing_calls_are_named_and_the_group_goes_on(rank: int, size: int) -> None:
    odd = rank == size - 1
    for call, text in (
        (lambda: hvd.allreduce(torch.ones(4 if odd else 3), name="s"), f"(3,), rank {size - 1} sends shapes (4,)"),
        (lambda: hvd.allreduce(torch.ones(3).to(torch.float64 if odd else torch.float32), name="d"), "torch.float64"),
        (lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if odd else hvd.Max, name="o"), "reduces by max"),
        (lambda: hvd.broadcast(torch.ones(3), int(odd), name="r"), "names root rank 0"),
        (lambda: hvd.allgather(torch.ones(2, 4 if odd else 3), name="g"), "sends shapes (3,)"),
    ):
        raises(hvd.HorovodInternalError, text, call)
    same(hvd.allreduce(torch.ones(3), name="s", op=hvd.Sum), torch.ones(3) * size)
    # One name twice, before the others come: this rank's own mistake.
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
        raises(ValueError, "'twice' waits for other ranks already", lambda: hvd.allreduce(torch.ones(2), name="twice"))
    hvd.barrier()
    if rank:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
    same(hvd.synchronize(handle), torch.ones(2))


def operations_that_do_not_meet_are_named_in_the_log(rank: int, size: int) -> None:
    warned = threading.Event()
    texts: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            warned.set()

    log, recorder, usual = logging.getLogger("netfold"), Recorder(logging.WARNING), negotiation.STALL_WARNING_S
    log.addHandler(recorder)
    negotiation.STALL_WARNING_S = 0.1
    try:
        first, second = ("left", "right") if rank == 0 else ("right", "left")
        handles = [hvd.allreduce_async(torch.ones(2), name=first)]
        assert warned.wait(seconds(20)), "no warning"
        assert f"rank {rank}: allreduce.{first} waits" in texts[0] and "have not submitted it" in texts[0], texts
        hvd.barrier()  # what the others wait for must not come before they have warned
        handles.append(hvd.allreduce_async(torch.ones(2), name=second))
        for handle in handles:
            same(hvd.synchronize(handle), torch.ones(2))
    finally:
        negotiation.STALL_WARNING_S = usual
        log.removeHandler(recorder)


def gather_scatter_and_exchange(rank: int, size: int) -> None:
    rows = torch.cat([part(r, r + 1, 2) for r in range(size)])
    same(hvd.allgather(part(rank, rank + 1, 2)), rows)
    same(hvd.synchronize(hvd.allgather_async(part(rank, rank, 2))), torch.cat([part(r, r, 2) for r in range(size)]))
    same(hvd.allgather(torch.tensor(rank)), torch.arange(size))
    same(hvd.allgather(torch.tensor([rank % 2 == 0])), torch.arange(size) % 2 == 0)
    first, second = hvd.grouped_allgather([part(rank, rank + 1, 2), torch.tensor([rank], dtype=torch.int32)])
    same(first, rows)
    same(second, torch.arange(size, dtype=torch.int32))
    same(hvd.synchronize(hvd.grouped_allgather_async([part(rank, rank + 1, 2)]))[0], rows)

    grid = [[part(a * size + b, a + 2 * b, 3) for b in range(size)] for a in range(size)]
    splits = [rank + 2 * b for b in range(size)]
    received = [a + 2 * rank for a in range(size)]
    for given in (splits, torch.tensor(splits)):
        got, counts = hvd.alltoall(torch.cat(grid[rank]), given)
        same(got, torch.cat([grid[a][rank] for a in range(size)]))
        assert counts.tolist() == received
    got, counts = hvd.synchronize(hvd.alltoall_async(torch.cat(grid[rank]), splits))
    assert counts.dtype == torch.int32 and counts.tolist() == received
    even = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    same(even, torch.cat([torch.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)]))
    raises(ValueError, "splits", lambda: hvd.alltoall(torch.ones(3), [2] * size))
    raises(ValueError, "whole numbers", lambda: hvd.alltoall(torch.ones(size), torch.ones(size)))
    raises(ValueError, "cannot be split equally", lambda: hvd.alltoall(torch.ones(2 * size + 1)))

    shares = torch.split(all_parts(size, 2 * size + 1, 2).sum(0), [3] + [2] * (size - 1))
    same(hvd.reducescatter(part(rank, 2 * size + 1, 2), op=hvd.Sum), shares[rank])
    close(hvd.synchronize(hvd.reducescatter_async(part(rank, 2 * size + 1, 2))), shares[rank] / size)
    several = hvd.grouped_reducescatter([part(rank, 2 * size + 1, 2), part(rank, size)], op=hvd.Sum)
    same(several[0], shares[rank])
    same(several[1], all_parts(size, size).sum(0)[rank : rank + 1])
    scaled = hvd.synchronize(hvd.grouped_reducescatter_async([part(rank, size)], op=hvd.Sum, prescale_factor=0.5))
    close(scaled[0], several[1] / 2)
    raises(ValueError, "no rows", lambda: hvd.reducescatter(torch.tensor(1.0)))

    for root in range(size):
        mine = part(rank, 5)
        same(hvd.broadcast(mine, root), part(root, 5))
        same(hvd.synchronize(hvd.broadcast_async(mine, root)), part(root, 5))
        same(mine, part(rank, 5))
        assert hvd.broadcast_(mine, root) is mine
        same(mine, part(root, 5))
        turned = part(rank, 3, 2).t()
        assert hvd.synchronize(hvd.broadcast_async_(turned, root)) is turned
        same(turned, part(root, 3, 2).t())
    raises(ValueError, f"root rank {size}", lambda: hvd.broadcast(mine, size))
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(size)]
    state = {"b": part(rank, 3), "a": part(rank + 1, 40_000), "step": rank, "c": part(rank, 2, dtype=torch.int64)}
    hvd.broadcast_parameters(state, root_rank=size - 1)
    same(state["b"], part(size - 1, 3))
    same(state["a"], part(size, 40_000))
    assert state["step"] == rank


def gradients_flow_back(rank: int, size: int) -> None:
    def gradient(function: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
        given = part(rank, *shape).requires_grad_()
        result = function(given)
        result.backward(torch.full_like(result, float(rank + 1)))
        assert given.grad is not None
        return given.grad

    weights = sum(range(1, size + 1))
    mean = weights / size
    close(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 3), torch.full((3,), float(weights)).double())
    close(gradient(hvd.allreduce, 3), torch.full((3,), mean).double())
    close(
        gradient(lambda x: torch.cat(hvd.grouped_allreduce([x, x], op=hvd.Sum)), 2),
        torch.full((2,), 2.0 * weights).double(),
    )
    close(gradient(hvd.allgather, rank + 1, 2), torch.full((rank + 1, 2), mean).double())
    close(gradient(lambda x: hvd.broadcast(x, 1), 3), torch.full((3,), mean if rank == 1 else 0.0).double())
    back = gradient(lambda x: hvd.alltoall(x, [2] * size)[0], 2 * size)
    same(back, torch.arange(1, size + 1).repeat_interleave(2).double())
    close(
        gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), size + 1),
        torch.tensor([1.0, *range(1, size + 1)]).double() * size,
    )


def ranks_that_ran_out_of_data_join(rank: int, size: int) -> None:
    """Rank r has r batches: the last rank goes on alone in the end."""
    for _ in range(2):
        for batch in range(rank):
            there = range(batch + 1, size)
            got = hvd.allreduce(part(rank, 4), name="uneven", op=hvd.Sum)
            same(got, torch.stack([part(r, 4) for r in there]).sum(0))
            close(hvd.allreduce(part(rank, 4), name=f"mean.{batch}"), got / size)
            if batch == size - 2:
                raises(hvd.HorovodInternalError, "has joined", lambda: hvd.broadcast(part(rank, 2), 0))
                raises(hvd.HorovodInternalError, "has joined", lambda: hvd.allreduce(part(rank, 2), op=hvd.Max))
        last = hvd.join()
        assert hvd.allgather_object(last) == [size - 1] * size
        same(hvd.allreduce(part(rank, 4), name="uneven", op=hvd.Sum), all_parts(size, 4).sum(0))


def values_count_whatever_the_memory_and_the_modes(rank: int, size: int) -> None:
    def strided(values: Tensor) -> Tensor:
        return torch.stack([values, values], 1)[:, 1]

    def negated(values: Tensor) -> Tensor:
        return torch._neg_view(-values)

    parts = all_parts(size, size)
    for layout, made, called, waited in itertools.product((torch.clone, strided, negated), *[(False, True)] * 3):
        for op, right in ((hvd.Sum, parts.sum(0)), (hvd.Average, parts.sum(0) / size)):
            with torch.inference_mode(made):
                tensor = layout(parts[rank])
            with torch.inference_mode(called):
                handle = hvd.allreduce_async_(tensor, op=op)
            with torch.inference_mode(waited):
                hvd.synchronize(handle)
            same(tensor.resolve_neg(), right)
        with torch.inference_mode(made):
            own, root = layout(parts[rank]), layout(parts[rank])
        with torch.inference_mode(called):
            same(hvd.allgather(own), parts.flatten())
            same(hvd.alltoall(own), parts[:, rank])
            same(hvd.reducescatter(own, op=hvd.Sum), parts.sum(0)[rank : rank + 1])
            hvd.broadcast_(root, 1)
        same(root.resolve_neg(), parts[1])


def process_sets_run_beside_each_other(rank: int, size: int) -> None:
    assert hvd.global_process_set.ranks == list(range(size)) and hvd.global_process_set.rank() == rank
    even = hvd.add_process_set(range(0, size, 2))
    odd = hvd.add_process_set(hvd.ProcessSet(list(range(1, size, 2))))
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert mine.included() and not other.included() and mine.size() == len(mine.ranks)
    for _ in range(3):  # unequal numbers of calls in the two sets
        for _ in range(1 + rank % 2):
            same(hvd.allreduce(part(rank, 3), op=hvd.Sum, process_set=mine), sum(part(r, 3) for r in mine.ranks))  # type: ignore[arg-type]
    root = mine.ranks[-1]
    same(hvd.broadcast(part(rank, 3), root, process_set=mine), part(root, 3))
    assert hvd.broadcast_object(rank, root, process_set=mine) == root
    hvd.barrier(process_set=mine)
    raises(ValueError, "is not in ProcessSet", lambda: hvd.allreduce(part(rank, 3), process_set=other))
    raises(ValueError, "already", lambda: hvd.add_process_set(even.ranks))
    raises(ValueError, "are not different ranks", lambda: hvd.add_process_set([size + 3]))
    assert hvd.remove_process_set(even) and hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(odd) and not hvd.remove_process_set(hvd.global_process_set)
    raises(ValueError, "is no process set of this job", lambda: hvd.allreduce(part(rank, 3), process_set=mine))


def one_host(rank: int, size: int) -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert not hvd.mpi_built() and not hvd.nccl_built() and hvd.is_initialized()
    raises(NotImplementedError, "netfold profile run", lambda: hvd.start_timeline("/tmp/x.json"))


# --- training ------------------------------------------------------------------------------------------------------


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 300), nn.Tanh(), nn.Linear(300, 1000),
        nn.Tanh(), nn.Linear(1000, 5),
    ).double()  # fmt: skip


def batches(size: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    for _ in range(count):
        yield (
            torch.randn(2 * size, 1, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(5, (2 * size,), generator=generator),
        )


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def as_one_process(
    rank: int, size: int, *, passes: int = 1, factor: float = 1.0, tolerance: float = 1e-9, **options: Any
) -> None:
    """Three steps beside the same three on one process with the whole batch."""
    model, alone = network(rank), network(0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer: Any = torch.optim.Adam(model.parameters(), 1e-3)
    reference = torch.optim.Adam(alone.parameters(), 1e-3)
    if "groups" in options and isinstance(options["groups"], str):
        options["groups"] = [list(model[0].parameters()), [model[3].weight]]
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    for inputs, targets in _grouped(size, passes):
        optimizer.zero_grad(), reference.zero_grad()
        for x, y in zip(inputs, targets, strict=True):
            mine = slice(2 * rank, 2 * rank + 2)
            loss_of(model, x[mine], y[mine]).backward()
            (loss_of(alone, x, y) * factor).backward()
        optimizer.step(), reference.step()
        for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
            close(got.detach(), expected.detach(), tolerance)


def _grouped(size: int, passes: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    stream = batches(size, 3 * passes)
    for _ in range(3):
        pairs = [next(stream) for _ in range(passes)]
        yield [x for x, _ in pairs], [y for _, y in pairs]


def steps_as_one_process(rank: int, size: int) -> None:
    as_one_process(rank, size)
    as_one_process(rank, size, passes=2)
    as_one_process(rank, size, gradient_predivide_factor=3.0)
    as_one_process(rank, size, op=hvd.Sum, factor=float(size))
    as_one_process(rank, size, groups=3)
    as_one_process(rank, size, groups="by layer")
    # Adam's step is 1e-3 whatever the gradient's size, so that rounding can turn it where a gradient is near 0.
    as_one_process(rank, size, compression=hvd.Compression.fp16, tolerance=6e-3)
    as_one_process(rank, size, compression=hvd.Compression.bf16, tolerance=6e-3)


class Halving:
    """A compressor of a user's own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.flatten() / 2, tensor.shape

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return (tensor * 2).view(ctx)


def compressors_do_what_they_say(rank: int, size: int) -> None:
    as_one_process(rank, size, compression=Halving)
    mine, exact = part(rank, 100, dtype=torch.float32).sqrt(), all_parts(size, 100).sqrt().sum(0)
    for compression, unit in ((hvd.Compression.fp16, 2.0**-11), (hvd.Compression.bf16, 2.0**-8)):
        got = hvd.allreduce(mine, op=hvd.Sum, compression=compression)
        assert got.dtype == torch.float32
        error = ((got.double() - exact).abs() / exact).max()
        # Each contribution and each partial sum is rounded once: at most 2 P - 1 roundings, of values of one sign.
        assert 2.0**-24 < error < (1 + unit) ** (2 * size) - 1, error
    whole = torch.arange(3) + rank
    same(
        hvd.allreduce(whole, op=hvd.Sum, compression=hvd.Compression.fp16),
        sum(torch.arange(3) + r for r in range(size)),
    )  # type: ignore[arg-type]


def synchronize_before_the_step(rank: int, size: int) -> None:
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().mul(rank + 1).backward()
    raises(AssertionError, "zero_grad() would change gradients", optimizer.zero_grad)
    optimizer.synchronize()
    mean = (size + 1) / 2
    close(model.weight.grad, torch.full((2, 3), mean), 1e-6)  # type: ignore[arg-type]
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    close(model.weight.detach(), before - 0.5, 1e-6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(1, 3)).sum().backward()
        optimizer.synchronize()
        optimizer.step()
    assert any("optimizer.skip_synchronize()" in str(each.message) for each in caught)
    optimizer.zero_grad()
    for _ in range(2):
        error = None
        try:
            model(torch.ones(1, 3)).sum().backward()
        except AssertionError as raised:
            error = raised
    assert "more than" in str(error) and "backward_passes_per_step" in str(error)
    optimizer.step()


def gradients_that_are_not_everywhere(rank: int, size: int) -> None:
    """A rank that used no layer, or not all layers, contributes zeros for the unused ones."""
    used, unused = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    model = nn.ModuleDict({"used": used, "unused": unused})
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        if rank > 0:
            used(torch.ones(1, 2)).sum().backward()
        if rank == size - 1:
            unused(torch.ones(1, 2)).sum().backward()
        optimizer.synchronize()
        close(used.weight.grad, torch.full((1, 2), (size - 1) / size), 1e-6)  # type: ignore[arg-type]
        close(unused.weight.grad, torch.full((1, 2), 1 / size), 1e-6)  # type: ignore[arg-type]
        with optimizer.skip_synchronize():
            optimizer.step()


def sparse_gradients(rank: int, size: int) -> None:
    for as_dense in (False, True):
        for op in (hvd.Average, hvd.Sum):
            torch.manual_seed(0)
            table, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
            model = nn.Sequential(table, head)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 0.5), model.named_parameters(), op=op, sparse_as_dense=as_dense
            )
            for _ in range(2):
                optimizer.zero_grad()
                before = table.weight.detach().clone()
                rows = torch.tensor([rank, 7, 7])
                model(rows).sum().backward()
                optimizer.synchronize()
                assert table.weight.grad is not None and table.weight.grad.is_sparse
                expected = torch.zeros(10, 4)
                for other in range(size):
                    for row in (other, 7, 7):
                        expected[row] += head.weight.detach()[0] / (size if op == hvd.Average else 1)
                with optimizer.skip_synchronize():
                    optimizer.step()
                close(table.weight.detach(), before - 0.5 * expected, 1e-5)
    given = torch.sparse_coo_tensor([[rank, 9]], [1.0, 2.0], (10,))
    got = hvd.sparse_allreduce_async(given, "sparse", hvd.Sum)().to_dense()
    assert got[9] == 2 * size and (got[:size] == 1).all()


def buckets_that_differ_are_named(rank: int, size: int) -> None:
    layers = {name: nn.Linear(2, 2, bias=False) for name in ("first", "second", "third")}
    order = ["first", "second", "third"] if rank == 0 else ["second", "first", "third"]
    params = [(f"{name}.weight", layers[name].weight) for name in order]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in params], 0.1), params)
    sum(layer(torch.ones(1, 2)).sum() for layer in layers.values()).backward()  # type: ignore[union-attr]
    raises(hvd.HorovodInternalError, "third.weight, second.weight, first.weight", optimizer.step)
    sgd = torch.optim.SGD([p for _, p in params], 0.1)
    raises(ValueError, "names that occur twice: a", lambda: hvd.DistributedOptimizer(sgd, [("a", params[0][1])] * 2))
    raises(ValueError, "lacks parameters of the optimizer", lambda: hvd.DistributedOptimizer(sgd, params[:2]))
    raises(
        ValueError,
        "needs op=hvd.Average",
        lambda: hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2),
    )
    raises(NotImplementedError, "no Adasum", lambda: hvd.DistributedOptimizer(sgd, op=hvd.Adasum))
    raises(ValueError, "already", lambda: hvd.DistributedOptimizer(optimizer))


def uneven_data_with_join(rank: int, size: int) -> None:
    """Two epochs; rank r has r + 1 batches of each."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    weight = torch.zeros(1, 2)
    for _ in range(2):
        for batch in range(rank + 1):
            optimizer.zero_grad()
            model(torch.full((1, 2), float(batch + 1))).sum().backward()
            optimizer.step()
        hvd.join()
        for batch in range(size):
            weight -= (batch + 1) * (size - batch) / size
        hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
        close(model.weight.detach(), weight, 1e-5)


def optimizers_of_process_sets(rank: int, size: int) -> None:
    sets = [hvd.add_process_set([0]), hvd.add_process_set(list(range(1, size)))]
    mine = sets[0] if rank == 0 else sets[1]
    models = [nn.Linear(2, 1, bias=False) for _ in sets]
    for process_set, model in zip(sets, models, strict=True):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), process_set=process_set
        )
        model(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.synchronize()
        share = sum(process_set.ranks) / len(process_set.ranks) if process_set is mine else float(rank)
        close(model.weight.grad, torch.full((1, 2), share), 1e-6)  # type: ignore[arg-type]
        optimizer.step()
    for process_set in sets:
        assert hvd.remove_process_set(process_set)


def optimizer_state_becomes_the_roots(rank: int, size: int) -> None:
    root = size - 1
    for kind, options in (
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.LBFGS, {}),
    ):
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1 * (rank + 1), **options)  # type: ignore[operator]
        if rank == root:  # the others have made no step
            for _ in range(2):

                def closure(model: Any = model, optimizer: Any = optimizer) -> Any:
                    optimizer.zero_grad()
                    loss = model(torch.ones(1, 3)).square().sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
        hvd.broadcast_parameters(model.state_dict(), root)
        before = model.weight.detach().clone()
        wrapped = hvd.DistributedOptimizer(optimizer) if kind is not torch.optim.LBFGS else optimizer
        hvd.broadcast_optimizer_state(wrapped, root)
        same(model.weight.detach(), before)
        assert abs(wrapped.param_groups[0]["lr"] - 0.1 * size) < 1e-9
        states = hvd.allgather_object(wrapped.state_dict()["state"])
        assert states[0], "the root's state came"
        assert all(str(state) == str(states[root]) for state in states)


def a_scheduler_made_before(rank: int, size: int) -> None:
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    model(torch.full((1, 1), float(rank))).sum().backward()
    optimizer.step()
    close(model.weight.grad, torch.full((1, 1), (size - 1) / 2), 1e-6)  # type: ignore[arg-type]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.state is not inner.state or optimizer.state_dict()["state"]


def batch_norm_over_all_ranks(rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    counts = [r + 1 for r in range(size)]
    whole = torch.randn(sum(counts), 3, 4, generator=generator, dtype=torch.float64) * 5 + 100
    upstream = torch.randn(sum(counts), 3, 4, generator=generator, dtype=torch.float64)
    for affine, momentum in ((True, 0.1), (False, None)):
        alone = nn.BatchNorm1d(3, momentum=momentum, affine=affine).double()
        layer = hvd.SyncBatchNorm(3, momentum=momentum, affine=affine).double()
        for _ in range(2):
            inputs = whole.clone().requires_grad_()
            (alone(inputs) * upstream).sum().backward()
            mine = torch.split(whole, counts)[rank].clone().requires_grad_()
            got = layer(mine)
            close(got.detach(), torch.split(alone(whole).detach(), counts)[rank], 1e-9)
            alone.num_batches_tracked -= 1  # the line above made one more forward pass
            (got * torch.split(upstream, counts)[rank]).sum().backward()
            close(mine.grad, torch.split(inputs.grad, counts)[rank], 1e-9)  # type: ignore[arg-type]
            if affine:
                hvd.allreduce_(layer.weight.grad, op=hvd.Sum)
                close(layer.weight.grad, alone.weight.grad, 1e-9)
                layer.zero_grad(), alone.zero_grad()
        layer.eval()
        close(
            layer(whole).detach(),
            nn.functional.batch_norm(whole, layer.running_mean, layer.running_var, layer.weight, layer.bias),
            1e-9,
        )
    raises(ValueError, "batch norm takes", lambda: hvd.SyncBatchNorm(3)(torch.ones(3)))


def what_is_left_of_an_epoch_is_dealt_out_anew(rank: int, size: int) -> None:
    sampler = hvd.elastic.ElasticSampler(range(8 * size))
    assert sorted(itertools.chain(*hvd.allgather_object(list(sampler)))) == list(range(8 * size))
    used = list(sampler)[:3]
    sampler.record_batch(0, 3)
    sampler.load_state_dict(sampler.state_dict())
    assert len(sampler) == 5
    assert sorted(itertools.chain(*hvd.allgather_object([*used, *sampler]))) == list(range(8 * size))
    before = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler)[3:] != before and len(sampler) == 8


OPERATIONS: dict[str, Case] = {
    case.__name__: case
    for case in (
        one_host,
        allreduce_in_its_forms,
        factors_before_and_after,
        names_in_another_order,
        differing_calls_are_named_and_the_group_goes_on,
        operations_that_do_not_meet_are_named_in_the_log,
        gather_scatter_and_exchange,
        values_count_whatever_the_memory_and_the_modes,
        gradients_flow_back,
        ranks_that_ran_out_of_data_join,
        process_sets_run_beside_each_other,
    )
}
TRAINING: dict[str, Case] = {
    case.__name__: case
    for case in (
        steps_as_one_process,
        compressors_do_what_they_say,
        synchronize_before_the_step,
        gradients_that_are_not_everywhere,
        sparse_gradients,
        buckets_that_differ_are_named,
        uneven_data_with_join,
        optimizers_of_process_sets,
        optimizer_state_becomes_the_roots,
        a_scheduler_made_before,
        batch_norm_over_all_ranks,
        what_is_left_of_an_epoch_is_dealt_out_anew,
    )
}


def _run(rank: int, size: int, folder: str, which: str) -> dict[str, str]:
    """Run all cases in one job, and stop after a failure."""
    torch.set_num_threads(1)
    cases = OPERATIONS if which == "operations" else TRAINING
    found = dict.fromkeys(cases, "not run, since a case before it failed")
    with Communicator(FileStore(folder), rank, size, timeout_s=40, join_timeout_s=40) as communicator:
        netfold.horovod.init(communicator)
        hvd.init()
        for name, case in cases.items():
            try:
                case(rank, size)
                hvd.barrier()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
                break
        hvd.shutdown()
    return found


@functools.cache
def world(which: str, size: int) -> list[dict[str, str]]:
    return values(run_ranks(_run, size, which, timeout_s=150))


def check(which: str, size: int, name: str) -> None:
    """Fail with the first rank's traceback."""
    for rank, found in enumerate(world(which, size)):
        assert not found[name], f"rank {rank}: {found[name]}"
