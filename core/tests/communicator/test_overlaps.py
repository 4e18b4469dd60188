"""Outputs that overlap inputs: the same memory, a part of it, or another rank's block. Right, or refused in a sentence.

The table of docs/reference/communicator.md, by every algorithm. Ranks are threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hosts import apart
from ranks import run_threads, values
from test_host_algorithms import SETS

from netfold import Communicator, FileStore, Options
from netfold.communicator.group import region

pytestmark = pytest.mark.native

SIZE = 3
KINDS = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
Array = np.ndarray[Any, Any]


def _storage(rank: int, block: int) -> Array:
    """Memory of four blocks: what a rank holds before a call."""
    return np.random.default_rng(rank).integers(0, 256, (SIZE + 1) * block, np.uint8)


def _cut(storage: Array, begin: int, block: int, count: int) -> list[Array]:
    return [storage[begin + at * block : begin + (at + 1) * block] for at in range(count)]


def _overlaps(kind: str, storage: Array, block: int, rank: int) -> Iterator[tuple[str, list[Array], list[Array]]]:
    """(name, inputs, outputs) in one rank's storage, for every way to overlap."""
    blocks = _cut(storage, 0, block, SIZE)
    others = {
        "same": blocks[rank],
        "part": storage[block // 2 : block // 2 + block],
        "another rank's": blocks[(rank + 1) % SIZE],
        "behind": storage[SIZE * block :],
    }
    for name, single in others.items():
        if kind in ("all_gather", "gather"):
            yield name, [single], blocks
        elif kind in ("scatter", "reduce_scatter"):
            yield name, blocks, [single]
    if kind == "all_to_all":
        yield "same", blocks, blocks
        yield "part", blocks, _cut(storage, block // 2, block, SIZE)
        yield "one block on", blocks, _cut(storage, block, block, SIZE)
        yield "the other order", blocks, blocks[::-1]


def _call(group: Communicator, kind: str, root: int, inputs: list[Array], outputs: list[Array]) -> None:
    if kind in ("all_gather", "gather"):
        getattr(group, kind)(inputs[0], outputs, *([root] if kind == "gather" else []))
    elif kind == "scatter":
        group.scatter(inputs, outputs[0], root)
    elif kind == "reduce_scatter":
        group.reduce_scatter(inputs, outputs[0], op="max")
    else:
        group.all_to_all(inputs, outputs)


def _expected(kind: str, root: int, rank: int, given: list[list[Array]]) -> list[Array] | None:
    """The outputs of `rank`; None where it gets nothing. given: every rank's inputs before the call."""
    if kind == "all_gather" or (kind == "gather" and rank == root):
        return [inputs[0] for inputs in given]
    if kind == "scatter":
        return [given[root][rank]]
    if kind == "reduce_scatter":
        return [np.maximum.reduce([inputs[rank] for inputs in given])]
    return [inputs[rank] for inputs in given] if kind == "all_to_all" else None


def _check(group: Communicator, kind: str, block: int, root: int) -> None:
    names = [name for name, *_ in _overlaps(kind, _storage(0, block), block, 0)]
    for at, name in enumerate(names):
        given = []
        for rank in range(SIZE):
            _, inputs, _ = list(_overlaps(kind, _storage(rank, block), block, rank))[at]
            given.append([each.copy() for each in inputs])
        _, inputs, outputs = list(_overlaps(kind, _storage(group.rank, block), block, group.rank))[at]
        _call(group, kind, root, inputs, outputs)
        expected = _expected(kind, root, group.rank, given)
        for got, each in zip(outputs, expected or outputs, strict=True):
            assert np.array_equal(got, each), f"{kind} of {block} bytes, root {root}, overlap: {name}"


def _every_overlap(rank: int, size: int, folder: str, algorithm: str, transport: str, blocks: list[int]) -> None:
    options = Options(algorithm=algorithm, transport=transport, probe="off")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60) as group:
        for kind in KINDS:
            for block in blocks:
                for root in (0, SIZE - 1) if kind in ("gather", "scatter") else (0,):
                    _check(group, kind, block, root)
        group.barrier()


@pytest.mark.parametrize(
    ("algorithm", "transport", "layout"),
    [
        *(pytest.param(each, "tcp", (0, 0, 0), id=each) for each in SETS),
        pytest.param("shared_memory", "auto", (0, 0, 0), id="shared memory"),
        pytest.param("hierarchical", "auto", (0, 0, 1), id="hierarchical"),
    ],
)
def test_results_are_right_however_outputs_overlap_inputs(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, transport: str, layout: tuple[int, ...]
) -> None:
    monkeypatch.setattr(*apart(layout))
    blocks = [1, (16 << 10) + 1, 1 << 20]
    values(run_threads(_every_overlap, SIZE, algorithm, transport, blocks, timeout_s=60))


@pytest.mark.parametrize("algorithm", ["auto", SETS[0]])
def test_a_large_exchange_in_place_is_right(algorithm: str) -> None:
    def exchange(rank: int, size: int, folder: str) -> None:
        options = Options(algorithm=algorithm, probe="off")
        with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60) as group:
            whole = np.repeat(np.arange(size, dtype=np.int64) + 10 * rank, (64 << 20) // 8 // size)
            group.all_to_all(whole, whole)
            np.testing.assert_array_equal(whole, np.repeat(10 * np.arange(size) + rank, len(whole) // size))

    values(run_threads(exchange, 2, timeout_s=60))


def _refused(rank: int, size: int, folder: str) -> None:
    with Communicator(FileStore(folder), rank, size, options=Options(probe="off"), timeout_s=20) as group:
        whole = np.zeros(3 * size, np.float32)
        for kind in ("all_gather", "gather", "all_to_all"):
            same = [whole[:2], *(whole[1:3] for _ in range(size - 1))]
            one = [np.ones(2, np.float32)] * (size if kind == "all_to_all" else 1)
            with pytest.raises(ValueError, match=f"{kind}: two of the outputs overlap"):
                _call(group, kind, rank, one, same)
        with pytest.raises(ValueError, match="the residual overlaps the tensor"):
            group.group.submit(
                "all_reduce",
                dtype="f32",
                inputs=[region(whole[1:3])],
                outputs=[region(whole[:2])],
                wait_here=True,
            )
        group.barrier()


def test_overlapping_outputs_are_refused_and_the_group_goes_on() -> None:
    values(run_threads(_refused, 2))
