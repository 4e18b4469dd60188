"""A netfold group over fake devices: one rank a thread, one device a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fake_device_api import FakeHost, FakeLayer, Order
from ranks import Outcome, run_threads

from netfold.communicator import Group, Options
from netfold.torch.factory import make_process_group
from netfold.torch.operations import Operations
from netfold.torch.store import TorchStore

ORDERS: tuple[Order, ...] = ("late", "early", 1, 2)
# What a rank does with its group and its device.
Act = Callable[[Operations, FakeLayer], Any]


def on_devices(
    act: Act,
    size: int,
    order: Order = "late",
    *,
    before: Any = None,
    hosts: tuple[int, ...] = (),
    own_stores: bool = False,
    make_api: Callable[[int, FakeHost], Any] | None = None,
    timeout_s: float = 20.0,
    **options: Any,
) -> list[Outcome]:
    """`act` on every rank; `before` may change a rank's device API first. `hosts`: the host of each rank.

    make_api: for another device API than `FakeLayer`, by rank.
    own_stores: once the group has formed, each rank has a store that no other rank sees, as in `netfold.elastic`.
    """
    store, host, layers = dist.HashStore(), FakeHost(), []

    def enter(rank: int, _size: int, _folder: str) -> Any:
        torch.set_num_threads(1)
        device_api = make_api(rank, host) if make_api is not None else FakeLayer(order, rank, host)
        layers.append(device_api)
        if before is not None:
            before(device_api)
        part = dist.PrefixStore("netfold", store)
        some = Options(probe="off", **options)
        group = Group(TorchStore(part), rank, size, options=some, timeout_s=timeout_s, join_timeout_s=20.0)
        group.nodes = hosts or group.nodes
        part = dist.PrefixStore("alone", dist.HashStore()) if own_stores else part
        made = make_process_group(group, store, part, device_api)
        try:
            return act(made, device_api)
        finally:
            made.shutdown()

    outcomes = run_threads(enter, size, timeout_s=60.0)
    faults = [each for device_api in layers for each in (*device_api.faults, *device_api.unkept())]
    assert not faults, f"{len(faults)} calls break a rule of CUDA's, the first: {faults[0]}"
    if not any(outcome.error for outcome in outcomes):
        cut_off = [each for among in host.communicators for each in among.cut_off]
        assert not cut_off, f"NCCL was ended under what was still under way: {cut_off[0]}"
    return outcomes


def reduce_options(op: Any = dist.ReduceOp.SUM, *, asynchronous: bool = True, timeout_s: float = 0) -> Any:
    made = dist.AllreduceOptions()
    made.reduceOp = op
    made.asyncOp = asynchronous
    if timeout_s:
        made.timeout = timedelta(seconds=timeout_s)
    return made


def distinct(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Another value in every element of every rank, whose sums are exact in f32."""
    return (torch.arange(count, dtype=torch.int64) % 4093 + 5000 * rank).to(dtype)


def threads_named(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
