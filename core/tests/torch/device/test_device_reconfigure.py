"""`reconfigure` of a group with devices: the next group chooses its paths anew, and the former group's work ends."""

from __future__ import annotations

import functools
import gc
import threading
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_worlds import distinct, reduce_options, threads_named  # noqa: E402
from fake_device_api import FakeHost, FakeLayer  # noqa: E402
from load import seconds  # noqa: E402
from ranks import run_threads, values  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from netfold.communicator import Group, Options  # noqa: E402
from netfold.communicator.reconfigure import Generations  # noqa: E402
from netfold.torch.store import TorchStore  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not hasattr(distributed_c10d, "ReconfigureOptions"), reason="this torch has no reconfigure: 2.15 has"
    ),
]

SIZE, COUNT, JOIN_S = 3, 60_001, 20.0
PATHS = {
    "auto": "by IPC among the 3 ranks of a host",
    "nccl": "by NCCL among the 3 ranks of a host",
    "off": "IPC disabled because NETFOLD_INTRA_HOST=off",
}


def check_sum(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(torch.full((COUNT,), -1.0))
    mine, size = distinct(group.rank(), COUNT), group.size()
    device_api.compute(lambda: tensor.copy_(mine))
    group.allreduce([tensor], reduce_options()).wait()
    assert torch.equal(device_api.value(tensor), sum(distinct(each, COUNT) for each in range(size)))


def asked(uuid: int, handles: list[str]) -> Any:
    options = distributed_c10d.ReconfigureOptions()
    options.uuid, options.handles, options.timeout = uuid, handles, timedelta(seconds=JOIN_S)
    return options


def changes(
    store: Any, host: FakeHost, together: threading.Barrier, options: Options, rank: int, size: int, folder: str
) -> None:
    """Rank 1 leaves and comes back first, twice."""
    from netfold.torch.backend import NetfoldBackend

    torch.set_num_threads(1)
    device_api, part = FakeLayer("late", rank, host), dist.PrefixStore("netfold", store)
    first = Group(TorchStore(part), rank, size, options=options, timeout_s=JOIN_S, join_timeout_s=JOIN_S)
    generations = Generations.of(first, JOIN_S)
    backend = NetfoldBackend(first, part, device_api, None, generations)
    handles = list(generations.handles)
    try:
        check_sum(backend, device_api)
        for uuid in (1, 3):
            together.wait(JOIN_S)
            if rank != 1:
                left = [each for each in handles if each != handles[1]]
                backend.reconfigure(asked(uuid, left))
                assert (backend.rank(), backend.size()) == (left.index(backend.get_reconfigure_handle()), 2)
                check_sum(backend, device_api)
            together.wait(JOIN_S)
            backend.reconfigure(asked(uuid + 1, [handles[1], handles[0], handles[2]]))
            assert (backend.rank(), backend.size()) == ((1, 0, 2)[rank], 3)
            check_sum(backend, device_api)
            assert PATHS[str(options.intra_host)] in backend.devices.why(), backend.devices.why()
        together.wait(JOIN_S)
    finally:
        backend.shutdown()


@pytest.mark.parametrize("intra_host", sorted(PATHS))
def test_devices_follow_their_group(intra_host: str) -> None:
    gc.collect()
    before = len(threads_named("netfold-device"))
    options = Options(probe="off", intra_host=intra_host)
    shared = (dist.HashStore(), FakeHost(), threading.Barrier(SIZE))
    values(run_threads(functools.partial(changes, *shared, options), SIZE, timeout_s=seconds(60)))
    assert len(threads_named("netfold-device")) == before
