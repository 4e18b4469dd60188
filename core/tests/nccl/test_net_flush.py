"""Flushes: a read of memory of a GPU by the adapter that wrote it (iflush), through a provider's own fi_read."""

from __future__ import annotations

import os
import signal
import time
from ctypes import byref, c_int, c_void_p
from pathlib import Path

import pytest
from load import seconds
from nccl.hostile import Hostile, HostileLibrary
from nccl.loader import CUDA, MAX_REQUESTS, REMOTE_ERROR, NcclError, Plugin
from nccl.test_net_cuda import Gpu
from nccl.test_net_direct import DIRECT, Memory
from nccl.test_net_failures import one_way
from ranks import run_ranks, values

from netfold import FileStore

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("libfabric")]

# StreamMux::kReadNs.
DEADLINE_S = 10


def begin(plugin: Plugin, comm: c_void_p, memory: Memory) -> c_void_p:
    request = c_void_p()
    data, sizes = (c_void_p * 1)(memory.data.ctypes.data), (c_int * 1)(1)
    code = plugin.table.flush(comm, 1, data, sizes, (c_void_p * 1)(memory.registration), byref(request))
    if code:
        raise NcclError(code, plugin.log[-1][1])
    assert request.value
    return request


def with_itself(plugin: Plugin) -> tuple[c_void_p, c_void_p]:
    handle, listener = plugin.listen()
    to = plugin.connect(handle)
    back = plugin.accept(listener)
    plugin.close_listen(listener)
    return to, back


def many(rank: int, size: int, folder: str, driver: str, hostile_library: str) -> int:
    hostile, gpu, plugin = HostileLibrary(hostile_library), Gpu(driver), Plugin()
    to, back = with_itself(plugin)
    memory = Memory(gpu, plugin, back, CUDA, 1 << 20)
    for _ in range(3):
        requests = [begin(plugin, back, memory) for _ in range(MAX_REQUESTS)]
        with pytest.raises(NcclError, match="all requests are in use, and none is left for a flush"):
            begin(plugin, back, memory)
        plugin.wait(*requests)
    for each in (begin(plugin, back, memory) for _ in range(100)):
        plugin.wait(each)
    memory.end()
    plugin.close(to, back)
    return hostile.reads


@pytest.mark.parametrize("provider", ["tcp", "sockets", "udp;ofi_rxd"])
def test_many_flushes_are_reads_by_the_provider(driver: str, hostile_library: str, provider: str) -> None:
    env = {**DIRECT, "NETFOLD_TRANSPORT": f"fabric:strict:seed=5:hmem=1+{provider}"}
    assert values(run_ranks(many, 1, driver, hostile_library, env=env)) == [3 * MAX_REQUESTS + 100]


def fails(rank: int, size: int, folder: str, driver: str, hostile_library: str, what: Hostile) -> tuple[float, str]:
    hostile, gpu, plugin = HostileLibrary(hostile_library), Gpu(driver), Plugin()
    to, back = with_itself(plugin)
    memory = Memory(gpu, plugin, back, CUDA, 4096)
    plugin.wait(begin(plugin, back, memory))
    hostile.becomes(what)
    began = time.monotonic()
    with pytest.raises(NcclError) as failed:
        plugin.wait(begin(plugin, back, memory), quiet_s=2 * DEADLINE_S)
    took_s = time.monotonic() - began
    assert failed.value.code == REMOTE_ERROR
    with pytest.raises(NcclError, match="reading memory of a GPU"):
        begin(plugin, back, memory)
    memory.end()
    plugin.close(to, back)
    if what is Hostile.READ_HANGS:  # the endpoint had to be closed
        hostile.becomes(Hostile.UNOPENED)
        with pytest.raises(NcclError, match="NETFOLD_TRANSPORT=fabric:strict"):
            plugin.devices()
    hostile.becomes(Hostile.HONEST)
    if what is Hostile.READ_FAILS:  # it ends the provider's connection to itself, and the next read with it
        return took_s, str(failed.value)
    to, back = with_itself(plugin)
    memory = Memory(gpu, plugin, back, CUDA, 4096)
    plugin.wait(begin(plugin, back, memory))
    memory.end()
    plugin.close(to, back)
    return took_s, str(failed.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (Hostile.READ_REFUSED, "reading memory of a GPU failed: Input/output error"),
        (Hostile.READ_FAILS, "reading memory of a GPU failed: "),
        (Hostile.READ_HANGS, f"reading memory of a GPU was not complete after {DEADLINE_S} s"),
    ],
)
def test_a_flush_that_fails_is_an_error_and_new_comms_flush(
    driver: str, hostile_library: str, what: Hostile, words: str
) -> None:
    ((took_s, said),) = values(run_ranks(fails, 1, driver, hostile_library, what, env=DIRECT))
    assert words in said and "receiving from 127.0.0.1" in said, said
    if what is Hostile.READ_HANGS:
        assert DEADLINE_S <= took_s < seconds(DEADLINE_S + 5)


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it ended, perhaps between the two calls
        return False


def of_a_dead_peer(rank: int, size: int, folder: str, driver: str) -> None:
    gpu = Gpu(driver)
    plugin, comm = one_way(rank, folder)
    memory, store = Memory(gpu, plugin, comm, CUDA, 4096), FileStore(folder)
    if rank == 0:
        store.set("pid", str(os.getpid()).encode())
        plugin.wait(plugin.send(comm, memory.data, registration=memory.registration))
        store.get("flushes", 60)
        os.kill(os.getpid(), signal.SIGKILL)
    plugin.wait(plugin.receive(comm, [memory.data], registrations=[memory.registration]))
    request = begin(plugin, comm, memory)
    store.set("flushes", b"")
    pid, deadline = int(store.get("pid", 60)), time.monotonic() + seconds(20)
    while is_alive(pid):
        assert time.monotonic() < deadline
    plugin.wait(request)
    memory.end()
    plugin.close(None, comm)


def test_a_flush_is_done_though_the_peer_is_dead(driver: str) -> None:
    found = run_ranks(of_a_dead_peer, 2, driver, env={**DIRECT, "NETFOLD_RECONNECT_S": "1"}, dies=[0])
    assert not found[1].error, found[1]
