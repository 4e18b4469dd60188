"""netfold.horovod.torch: the start of a job, its recovery from failed operations, and its end."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_cases  # noqa: E402
from ranks import Outcome, run_ranks, running_switch, values  # noqa: E402
from torch import nn  # noqa: E402

import netfold.horovod  # noqa: E402
import netfold.horovod.torch as hvd  # noqa: E402
from netfold import Communicator, FileStore  # noqa: E402
from netfold.horovod.torch import world as world_  # noqa: E402

pytestmark = pytest.mark.torch

EXAMPLES, BATCH, EPOCHS = 24, 2, 2


def as_torchrun(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(rank: int, size: int, faults: dict[int, str]) -> dict[str, Any]:
    """Fail once at each of the given numbers of batches, in the given way."""
    data = torch.arange(EXAMPLES, dtype=torch.float32)
    torch.manual_seed(rank)
    model = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.001, momentum=0.5), model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(data)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batches=0, epoch=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batches)])

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < EPOCHS:
            indices = list(state.sampler)
            for first in range(0, len(indices), BATCH):
                fault = faults.pop(state.batches, None)
                if fault == "differs":
                    hvd.allreduce(torch.ones(rank + 1), name="differs")
                if fault == "breaks" and rank == 0:
                    world_.world().engines[0].data.group.abort("a test")  # type: ignore[union-attr]
                optimizer.zero_grad()
                mine = indices[first : first + BATCH]
                model(data[mine].view(-1, 1)).sum().backward()
                optimizer.step()
                state.sampler.record_batch(first // BATCH, BATCH)
                state.batches += 1
                if state.batches % 2 == 0:
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    loop(state)
    parameters = torch.cat([each.detach().flatten() for each in model.parameters()])
    return {"parameters": parameters.tolist(), "batches": state.batches, "resets": resets}


def trained(rank: int, size: int, folder: str, ports: list[int]) -> list[dict[str, Any]]:
    found = []
    for port, faults in zip(ports, ({}, {3: "differs", 8: "breaks"}), strict=True):
        as_torchrun(rank, size, port)
        hvd.init()
        found.append(train(rank, size, dict(faults)))
        hvd.shutdown()
    return found


def test_training_with_two_failures_ends_with_the_parameters_of_training_without() -> None:
    ranks = values(run_ranks(trained, 2, [free_port(), free_port()], timeout_s=120))
    for whole, broken in ranks:
        assert whole["resets"] == [] and broken["resets"] == [2, 8], "back to the last commit each time"
        assert broken["parameters"] == whole["parameters"]
        assert broken["batches"] == whole["batches"] == EPOCHS * EXAMPLES // (2 * BATCH)


def over_a_switch(rank: int, size: int, folder: str, port: int) -> tuple[list[bool], list[float]]:
    as_torchrun(rank, size, port)
    hvd.init()
    engine = world_.world().engines[0]
    assert engine is not None
    groups = (world_.world().base.group, engine.control.group, engine.data.group)
    got = hvd.allreduce(torch.arange(1000.0) + rank, op=hvd.Sum)
    hvd.shutdown()
    return [group.membership is not None for group in groups], got.tolist()


def test_only_the_group_that_carries_tensors_takes_a_switchs_memory() -> None:
    with running_switch() as switch:
        env = {"NETFOLD_SWITCH": switch.endpoint}
        for joined, got in values(run_ranks(over_a_switch, 2, free_port(), env=env)):
            assert joined == [False, False, True]
            assert got == [2 * i + 1 for i in range(1000)]


def killed(rank: int, size: int, folder: str) -> str:
    torch.set_num_threads(1)
    communicator = Communicator(FileStore(folder), rank, size, timeout_s=40, join_timeout_s=40)
    netfold.horovod.init(communicator)
    hvd.init()
    hvd.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handle = hvd.allreduce_async(torch.ones(3), name="after")
    try:
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        text = str(error)
    try:
        hvd.allreduce(torch.ones(3))
    except hvd.HorovodInternalError:
        text += "; and again"
    hvd.shutdown()
    communicator.close()
    return text


def test_ranks_that_wait_for_a_killed_rank_name_it() -> None:
    outcomes = run_ranks(killed, 3, timeout_s=60, dies=[1])
    assert outcomes[1] == Outcome()
    for rank in (0, 2):
        text = values([outcomes[rank]])[0]
        assert "rank 1" in text and "under way here: allreduce.after" in text and text.endswith("; and again")


def test_before_init_every_function_raises() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.cross_rank, hvd.join, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd\.init\(\)|no process set of this job"):
            call()


def test_without_a_launcher_a_process_is_a_job_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):  # and again after shutdown
        hvd.init()
        try:
            hvd.init()
            torch_cases.one_host(0, 1)
            model = nn.Linear(2, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), op=hvd.Adasum)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1] and hvd.join() == 0
            assert hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="a")).tolist() == [1, 1]
        finally:
            hvd.shutdown()
    assert not hvd.is_initialized()
