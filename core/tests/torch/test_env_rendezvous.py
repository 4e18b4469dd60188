"""`init_process_group` by env:// without torchrun: rank 0 serves torch's store, again for each world of a process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from load import seconds
from page_script import free_port
from ranks import run_ranks, values

pytestmark = pytest.mark.torch

SIZE = 3


def begin(rank: int, size: int, port: int) -> Any:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("netfold")
    return dist


def again_and_again(rank: int, size: int, folder: str, port: int, late: str) -> None:
    import torch

    kept = []
    for turn in range(3):
        dist = begin(rank, size, port)
        if late != "rank 0, and nothing was called":
            tensor = torch.tensor([float(rank + turn)])
            dist.all_reduce(tensor)
            assert tensor.item() == sum(range(size)) + size * turn
        if late == "the store":
            kept.append(dist.distributed_c10d._get_default_store())
        if late == "rank 2" if rank == 2 else late.startswith("rank 0") and rank == 0:
            time.sleep(0.4)
        dist.destroy_process_group()


@pytest.mark.parametrize("late", ["rank 0", "rank 0, and nothing was called", "rank 2", "the store"])
def test_a_world_is_made_again_whoever_comes_late(late: str) -> None:
    """A former fault: a rank connected to the store of the former world, which rank 0 closed then."""
    values(run_ranks(again_and_again, SIZE, free_port(), late, timeout_s=30))


def barrier_without_rank_0(rank: int, size: int, folder: str, port: int, late: bool) -> tuple[str, str, Any]:
    import netfold.torch

    dist = begin(rank, size, port)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5 if late else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if not late:
        time.sleep(0.5)
    began = time.monotonic()
    try:
        netfold.torch.monitored_barrier(timeout=20)
    except RuntimeError as error:
        assert time.monotonic() - began < seconds(10)
        return type(error).__name__, str(error), getattr(error, "rank", None)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("late", [False, True], ids=["before", "during"])
def test_monitored_barrier_names_rank_0_if_the_store_died_with_it(late: bool) -> None:
    found = run_ranks(barrier_without_rank_0, SIZE, free_port(), late, dies=[0])
    for rank in (1, 2):
        kind, text, culprit = found[rank].value
        assert (kind, culprit) == ("PeerLost", 0), text
        assert f"rank {rank}: monitored_barrier: torch's store no longer answers" in text, text
        assert "rank 0 of the job, which serves it, has ended" in text, text
