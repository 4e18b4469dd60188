"""The ranks that are compared to find a straggler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from netfold_train.fault_tolerance import straggler
from netfold_train.parallel.mesh import Mesh
from netfold_train.recipe import FaultTolerance, Parallel

# Of ranks 0..7 = pipeline 2 x data 2 x tensor 2: the second stage has three times the work, and rank 6 is slow in it.
SECONDS = (0.10, 0.11, 0.12, 0.13, 0.30, 0.31, 0.90, 0.33)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    """A world of 8 ranks, in which the other ranks report SECONDS."""

    def all_gather(rows: list[Tensor], _own: Tensor) -> None:
        for row, own_s in zip(rows, SECONDS, strict=True):
            row.copy_(torch.tensor([own_s, own_s / 10]))

    def all_gather_object(found: list[str], _own: str, group: object) -> None:
        found[:] = [f"host{rank}" for rank in range(len(found))]

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    try:
        yield Mesh(Parallel(pipeline=2, tensor=2))
    finally:
        dist.destroy_process_group()


def test_only_ranks_with_the_same_work_are_compared(mesh: Mesh) -> None:
    assert mesh.runs(mesh.data.size) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    watch = straggler.Straggler([nn.Linear(1, 1)], FaultTolerance(straggler_ratio=2.0), mesh)
    said = []
    for _ in range(straggler.WINDOW_STEPS * (straggler.WINDOWS + 1)):
        watch.stepped(0.0, 0.0, 0.0)
        if watch.is_due:
            said.append(watch.compare())
    (sentence,) = filter(None, said)
    assert sentence.startswith(
        "rank 6 (host6) takes 0.900 s of its own per step, of which 0.090 s waiting for its batch; the median of 2 "
        "ranks with equal work takes 0.300 s; look for other work on that host"
    )
