"""Horovod's operations: values, kinds of arrays, fusion, compression. Ranks are threads, each with its own session."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from ranks import run_threads, values

import netfold.horovod as hvd
from netfold import Communicator, FileStore
from netfold.horovod import fusion, tree
from netfold.horovod.session import Session

RANKS = pytest.mark.parametrize("size", [1, 2, 3])


def join(rank: int, size: int, folder: str) -> Session:
    return Session(Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20))


def part(rank: int, shape: tuple[int, ...] = (5, 3), dtype: str = "float64") -> Any:
    """Distinct in every element and rank; sums of a few are exact."""
    return (np.arange(np.prod(shape)) * 8 + rank + 1).astype(dtype).reshape(shape)


def same(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got, expected, strict=True)


class Immutable:
    """A read-only array of another framework, by the array API standard."""

    def __init__(self, held: Any) -> None:
        self._held = np.array(held)
        self._held.flags.writeable = False

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._held

    def __array_namespace__(self) -> Any:
        return Immutable

    @staticmethod
    def asarray(held: Any) -> Immutable:
        return Immutable(held)


def operations(rank: int, size: int, folder: str) -> None:
    job = join(rank, size, folder)
    with job.communicator:
        parts = [part(other) for other in range(size)]
        for op, expected in (
            (hvd.Average, np.mean(parts, axis=0)), (hvd.Sum, np.sum(parts, axis=0)), (hvd.Min, np.min(parts, axis=0)),
            (hvd.Max, np.max(parts, axis=0)), (hvd.Product, np.prod(parts, axis=0)),
        ):  # fmt: skip
            mine = parts[rank].copy()
            handle = job.allreduce_async(mine, op=op, compression=None)
            np.testing.assert_allclose(hvd.synchronize(handle), expected, rtol=1e-15)
            assert hvd.poll(handle)
            np.testing.assert_allclose(job.allreduce(mine, op=op, compression=None), expected, rtol=1e-15)
            same(mine, parts[rank])
        assert job.allreduce_async(rank + 0.5, op=hvd.Sum, compression=None).wait() == size * size / 2
        got = job.allreduce_async(Immutable(parts[rank]), op=hvd.Sum, compression=None).wait()
        assert isinstance(got, Immutable)
        same(np.asarray(got), np.sum(parts, axis=0))
        same(job.allreduce_async(part(rank, (6, 4)).T, op=hvd.Sum, compression=None).wait(), sum(
            part(other, (6, 4)).T for other in range(size)
        ))  # fmt: skip

        for root in range(size):
            mine = parts[rank].copy()
            same(job.broadcast(mine, root), parts[root])
            same(mine, parts[rank])
            assert job.broadcast_object({"rank": rank, "of": [size]}, root) == {"rank": root, "of": [size]}

        same(job.allgather(part(rank, (rank, 3))), np.concatenate([part(other, (other, 3)) for other in range(size)]))
        same(job.allgather(np.float32(rank)), np.arange(size, dtype=np.float32))

        grid = [[part(a * size + b, (a + 2 * b, 3)) for b in range(size)] for a in range(size)]
        got, rows = job.alltoall(np.concatenate(grid[rank]), [rank + 2 * b for b in range(size)])
        same(got, np.concatenate([grid[a][rank] for a in range(size)]))
        same(rows, np.array([a + 2 * rank for a in range(size)]))
        even = [[part(a * size + b, (4,)) for b in range(size)] for a in range(size)]
        same(job.alltoall(np.concatenate(even[rank]), None), np.concatenate([even[a][rank] for a in range(size)]))
        with pytest.raises(ValueError, match=rf"alltoall: splits .* must be {size} numbers"):
            job.alltoall(np.ones(3), [1] * (size + 3))
        assert job.local == (rank, size), "all threads are on one host"


@RANKS
def test_every_operation_gives_each_rank_the_right_values(size: int) -> None:
    values(run_threads(operations, size))


class Layer(NamedTuple):
    weight: Any
    bias: Any


def model(rank: int) -> Any:
    """A tree of several dtypes and shapes; sizes on both sides of the fusion bound below."""
    return {
        "second": [Layer(part(rank, (7, 5), "float32"), part(rank + 10, (5,), "float32")), None],
        "first": (part(rank + 20, (300,)), part(rank + 30, (), "float32"), part(rank + 40, (0, 4))),
        "large": part(rank + 50, (2000,), "float32"),
    }


def expected_sum(size: int) -> list[Any]:
    return [
        np.sum(of, axis=0, dtype=of[0].dtype) for of in zip(*(tree.leaves(model(r)) for r in range(size)), strict=True)
    ]


def grouped(rank: int, size: int, folder: str) -> int:
    job = join(rank, size, folder)
    with job.communicator:
        before = len(job.communicator.group.events())
        mine = model(rank)
        got = job.grouped_allreduce(mine, op=hvd.Sum, compression=None)
        messages = len(job.communicator.group.events()) - before
        assert list(got) == list(mine) and isinstance(got["second"][0], Layer) and got["second"][1] is None
        for leaf, whole in zip(tree.leaves(got), expected_sum(size), strict=True):
            same(leaf, whole)
        for leaf, untouched in zip(tree.leaves(mine), tree.leaves(model(rank)), strict=True):
            same(leaf, untouched)
        assert job.grouped_allreduce([], op=hvd.Sum, compression=None) == []
        return messages


@RANKS
def test_a_tree_is_reduced_in_few_messages(size: int) -> None:
    assert values(run_threads(grouped, size)) == [2] * size, "one a dtype"


def test_no_fused_message_exceeds_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "FUSION_BYTES", 1024)
    # f64: 300 elements alone, and the empty array; f32: one element, then 2000 alone, then 35 and 5.
    assert values(run_threads(grouped, 2)) == [5, 5]


def parameters(rank: int, size: int, folder: str) -> None:
    job = join(rank, size, folder)
    with job.communicator:
        for root in range(size):
            mine = model(rank)
            got = job.broadcast_parameters(mine, root)
            for leaf, here, roots in zip(tree.leaves(got), tree.leaves(mine), tree.leaves(model(root)), strict=True):
                assert leaf is here, "overwritten in place"
                same(leaf, roots)
            strange = job.broadcast_parameters([Immutable(part(rank)), 0.5 + rank, part(rank, (6, 4)).T], root)
            assert isinstance(strange[0], Immutable) and strange[1] == 0.5 + root
            same(np.asarray(strange[0]), part(root))
            same(strange[2], part(root, (6, 4)).T)


@RANKS
def test_broadcast_parameters_equal_the_roots(size: int) -> None:
    values(run_threads(parameters, size))


def compressed(rank: int, size: int, folder: str) -> None:
    # Each contribution and each partial sum of a ring is rounded to the wire's 2^-8 or 2^-11, P roundings in all
    # (core/tests/communicator/test_algorithms.py), and values here have one sign: |error| <= ((1 + u)^P - 1) sum.
    job = join(rank, size, folder)
    with job.communicator:
        parts = [np.sqrt(part(other, (4000,), "float32")) for other in range(size)]
        exact = np.sum([each.astype(np.float64) for each in parts], axis=0)
        for compression, unit in ((hvd.Compression.fp16, 2.0**-11), (hvd.Compression.bf16, 2.0**-8)):
            got = job.allreduce_async(parts[rank], op=hvd.Sum, compression=compression).wait()
            assert got.dtype == np.float32
            error = np.abs(got - exact) / exact
            assert error.max() <= (1 + unit) ** size * (1 + 2.0**-24) ** size - 1
            assert error.max() > 2.0**-24 * size, "nothing was rounded"
            tree_ = job.grouped_allreduce([parts[rank], np.arange(3) + rank], op=hvd.Sum, compression=compression)
            same(tree_[0], got)
            same(tree_[1], np.arange(3) * size + sum(range(size)))  # only f32 is compressed
        job.close()


def test_compression_loses_no_more_than_the_wires_roundings() -> None:
    values(run_threads(compressed, 3))


class Sgd:
    def __init__(self, parameters_: Any) -> None:
        self.parameters, self.rate = parameters_, 0.5

    def update(self, gradients: Any) -> None:
        self.parameters -= self.rate * gradients


class Transformation(NamedTuple):
    init: Any
    update: Any


def optimizers(rank: int, size: int, folder: str) -> None:
    job = join(rank, size, folder)
    with job.communicator:
        mean = np.mean([part(other) for other in range(size)], axis=0)
        plain = hvd.DistributedOptimizer(Sgd(np.zeros((5, 3))), session=job)
        plain.update(part(rank))
        same(plain.parameters, -0.5 * mean)
        assert plain.rate == 0.5

        functional = Transformation(lambda params: {"count": 0}, lambda g, state, params: ([-g[0]], state["count"] + 1))
        wrapped = hvd.DistributedOptimizer(functional, session=job, op=hvd.Sum)
        updates, count = wrapped.update([part(rank)], wrapped.init(None), params=None)
        same(updates[0], -mean * size)
        assert count == 1
        with pytest.raises(TypeError, match=r"an? object has no update\(gradients, \.\.\.\); call grouped_allreduce"):
            hvd.DistributedOptimizer(object(), session=job)


def test_an_optimizer_gets_the_average_over_ranks() -> None:
    values(run_threads(optimizers, 2))


def test_before_init_the_functions_raise() -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"call netfold\.horovod\.init\(\) first"):
        hvd.rank()


def test_without_a_launcher_a_process_is_a_job_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    try:
        hvd.init()
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
        same(hvd.allreduce(np.arange(3.0), name="loss"), np.arange(3.0))
        same(hvd.allreduce(np.ones(3, np.float32), compression=hvd.Compression.fp16), np.ones(3, np.float32))
        hvd.barrier()
    finally:
        hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
