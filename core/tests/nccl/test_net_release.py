"""NCCL takes memory back while requests are open, as where a job is aborted.

It ends the registration, frees the memory, and closes the comm. Nothing in this process uses the memory from then on:
the stand-in for the provider (strict_endpoint.hpp) notices at each of its polls that registered memory was freed.
"""

from __future__ import annotations

import mmap
from ctypes import c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl.gpu_memory import GpuMemory
from nccl.hostile import Hostile, HostileLibrary
from nccl.loader import CUDA, HOST, NcclError, Plugin
from nccl.test_net import exchange, wait_for_peer
from nccl.test_net_cuda import Gpu
from nccl.test_net_direct import DIRECT
from nccl.test_net_flush import begin, with_itself
from nccl.test_net_hostile import moves
from ranks import run_ranks, values

from netfold import FileStore

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("libfabric")]

BYTES = 16 << 20  # more parts than a stream has grants


class Freed:
    """Memory that is registered with a comm and can be freed at once."""

    def __init__(self, gpu: Gpu, plugin: Plugin, comm: c_void_p, kind: int, bytes_: int) -> None:
        self._plugin = plugin
        self._pages = None if kind == CUDA else mmap.mmap(-1, bytes_)
        self.data: Any = GpuMemory(bytes_) if kind == CUDA else np.frombuffer(self._pages, np.uint8)
        self.values = self.data.values if kind == CUDA else self.data
        if kind == CUDA:
            assert not gpu.calls.fake_own(c_void_p(self.data.address), c_size_t(bytes_), gpu.device)
        self.comm, self.registration = comm, plugin.register(comm, self.data, kind)

    def deregister(self) -> None:
        assert self._plugin.table.deregister_memory(self.comm, self.registration) == 0

    def free(self) -> None:
        if self._pages is None:
            self.data.free()
            return
        self.data = self.values = None
        self._pages.close()


def aborts(rank: int, size: int, folder: str, driver: str, aborting: int, kind: int, order: str) -> None:
    """A message from rank 0 to rank 1 is in its middle when a rank takes its memory back."""
    gpu, plugin, store = Gpu(driver), Plugin(), FileStore(folder)
    to, back = exchange(plugin, rank, folder)
    others = exchange(plugin, rank, f"{folder}/others")
    comm, other_comm = (to, back) if rank == 0 else (back, to)
    memory = Freed(gpu, plugin, comm, kind, BYTES)
    if rank == 0:
        memory.values[:] = 7 if kind == CUDA else 0
        if kind == HOST:
            memory.data[:] = 7
        request = plugin.send(comm, memory.data, registration=memory.registration)
    else:
        request = plugin.receive(comm, [memory.data], registrations=[memory.registration])
    assert request is not None
    begun = Path(folder) / "begun"
    while not (begun.exists() if rank == 0 else memory.values[0]):
        assert plugin.test(request) is None
    begun.touch()
    store.set(f"begun/{rank}", b"")
    store.get(f"begun/{1 - rank}", 60)

    def close() -> None:
        plugin.close(*((comm, None) if rank == 0 else (None, comm)))

    if rank == aborting:
        if order == "close":
            close()
        memory.deregister()
        memory.free()
    moves(gpu, plugin, *others, rank)
    moves(gpu, plugin, *others, rank)
    if rank == aborting:
        if order == "deregister":
            with pytest.raises(NcclError, match="NCCL took back the registration of memory that a request used"):
                plugin.test(request)
            close()
        store.set("closed", b"")
    else:
        store.get("closed", 60)
        with pytest.raises(NcclError):
            plugin.wait(request)
        memory.deregister()
        memory.free()
        close()
    moves(gpu, plugin, *others, rank)
    wait_for_peer(rank, folder)
    plugin.close(*((None, other_comm) if rank == 0 else (other_comm, None)))
    plugin.close(*others)


@pytest.mark.parametrize("order", ["deregister", "close"])
@pytest.mark.parametrize("kind", [CUDA, HOST], ids=["gpu", "host"])
@pytest.mark.parametrize("aborting", [0, 1], ids=["sender", "receiver"])
def test_memory_of_an_open_request_is_not_used_once_it_was_taken_back(
    driver: str, aborting: int, kind: int, order: str
) -> None:
    env = {**DIRECT, "NETFOLD_RMA_MIN_BYTES": "100000"}
    values(run_ranks(aborts, 2, driver, aborting, kind, order, env=env, timeout_s=60))


def flushes(rank: int, size: int, folder: str, driver: str, hostile_library: str, how: str, order: str) -> None:
    hostile, gpu, plugin = HostileLibrary(hostile_library), Gpu(driver), Plugin()
    to, back = with_itself(plugin)
    memory = Freed(gpu, plugin, back, CUDA, 4096)
    if how == "hangs":
        hostile.becomes(Hostile.READ_HANGS)
    request = begin(plugin, back, memory)
    if how != "not begun":
        assert plugin.test(request) is None
    if order == "close":
        plugin.close(to, back)
    memory.deregister()
    memory.free()
    if order == "deregister":
        plugin.close(to, back)
    hostile.becomes(Hostile.HONEST)
    to, back = with_itself(plugin)
    memory = Freed(gpu, plugin, back, CUDA, 4096)
    plugin.wait(begin(plugin, back, memory))
    memory.deregister()
    memory.free()
    plugin.close(to, back)


@pytest.mark.parametrize("order", ["deregister", "close"])
@pytest.mark.parametrize("how", ["not begun", "begun", "hangs"])
def test_memory_of_an_open_flush_is_not_read_once_it_was_taken_back(
    driver: str, hostile_library: str, how: str, order: str
) -> None:
    values(run_ranks(flushes, 1, driver, hostile_library, how, order, env=DIRECT))
