"""Messages straight from and into memory of a GPU over a fabric, in which the CPU may touch no byte of it.

A stand-in for the provider (strict_endpoint.hpp, hmem=1) moves bytes of memory that the process itself cannot access.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl.gpu_memory import GpuMemory
from nccl.loader import CUDA, DMABUF, HOST, INFO, REMOTE_ERROR, VERSIONS, WARN, NcclError, Plugin
from nccl.test_net import ENV, exchange, groups, many_outstanding, one_tag_ahead, pattern, wait_for_peer
from nccl.test_net_cuda import Gpu
from nccl.test_net_failures import one_way
from ranks import run_ranks, values

from netfold import FileStore

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("libfabric")]

SIZES = (0, 1, 4096, 64 << 10, (512 << 10) + 1, 16 << 20)
DIRECT = {**ENV, "NETFOLD_TRANSPORT": "fabric:strict:seed=5:hmem=1+tcp", "NETFOLD_NCCL_CUDA": "direct"}
Kinds = tuple[int, int]
KINDS = pytest.mark.parametrize("kinds", [(CUDA, CUDA), (CUDA, HOST), (HOST, CUDA)], ids=["both", "sender", "receiver"])


# Registered memory may not be freed, and the endpoint's threads go on behind a test.
_kept: list[Memory] = []


class Memory:
    """Memory of a kind that is registered with a comm. `values`: its bytes, as the test sees them."""

    def __init__(self, gpu: Gpu, plugin: Plugin, comm: c_void_p, kind: int, bytes_: int) -> None:
        self._plugin, self._comm = plugin, comm
        if kind == CUDA:
            whole = GpuMemory(max(bytes_, 1))
            self.data: Any = whole.part(0, bytes_)
            self.values = whole.values[:bytes_]
            address, count = c_void_p(whole.address), ctypes.c_size_t(whole.nbytes)
            assert not gpu.calls.fake_own(address, count, gpu.device)
        else:
            whole = self.data = self.values = np.zeros(bytes_, np.uint8)
        self._whole: Any = whole
        self.registration = plugin.register(comm, whole, kind)
        _kept.append(self)

    def part(self, begin: int, bytes_: int) -> Any:
        """Some of its bytes, as a message names them."""
        whole = self._whole
        return whole.part(begin, bytes_) if isinstance(whole, GpuMemory) else whole[begin : begin + bytes_]

    def end(self) -> None:
        assert self._plugin.table.deregister_memory(self._comm, self.registration) == 0
        _kept.remove(self)


def flush(plugin: Plugin, comm: c_void_p, memory: Memory, bytes_: int) -> bool:
    """As NCCL calls it after a receive. False: there was nothing to wait for."""
    request = c_void_p(1)
    data, sizes = (c_void_p * 1)(memory.data.ctypes.data), (ctypes.c_int * 1)(bytes_)
    held = (c_void_p * 1)(memory.registration)
    assert plugin.table.flush(comm, 1, data, sizes, held, byref(request)) == 0
    if request.value:
        plugin.wait(request)
    return bool(request.value)


def touches(rank: int, size: int, folder: str) -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # providers of libfabric set handlers that write files
    ctypes.memset(GpuMemory(8).address, 1, 1)


def test_the_stand_in_for_a_gpus_memory_cannot_be_touched() -> None:
    (found,) = run_ranks(touches, 1, dies=[0])
    assert found.value is None and not found.error


def messages(rank: int, size: int, folder: str, driver: str, version: int, kinds: Kinds) -> None:
    gpu, plugin = Gpu(driver), Plugin(version)
    assert all(each.pointers == HOST | CUDA | DMABUF for each in plugin.devices())
    to, back = exchange(plugin, rank, folder)
    for round_, bytes_ in enumerate(SIZES):
        ours = Memory(gpu, plugin, to, kinds[0], bytes_)
        into = Memory(gpu, plugin, back, kinds[1], bytes_ + 100)
        ours.values[:] = pattern(bytes_, 2 * round_ + rank)
        received = plugin.receive(back, [into.data], [5], registrations=[into.registration])
        sent = plugin.send(to, ours.data, 5, registration=ours.registration)
        sizes, _ = plugin.wait(received, sent, quiet_s=60)
        assert sizes == [bytes_], "the message is shorter than the receive"
        assert flush(plugin, back, into, bytes_) == (kinds[1] == CUDA and bytes_ > 0)
        assert np.array_equal(into.values[:bytes_], pattern(bytes_, 2 * round_ + 1 - rank))
        assert not into.values[bytes_:].any()
        ours.end(), into.end()
    assert gpu.copies() == (0, 0)
    gpu.no_fault()
    wait_for_peer(rank, folder)
    plugin.close(to, back)


@KINDS
def test_messages_go_from_and_to_memory_of_a_gpu(driver: str, kinds: Kinds) -> None:
    values(run_ranks(messages, 2, driver, VERSIONS[-1], kinds, env=DIRECT, timeout_s=120))


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_every_version_takes_memory_of_a_gpu(driver: str, version: int) -> None:
    values(run_ranks(messages, 2, driver, version, (CUDA, CUDA), env=DIRECT, timeout_s=120))


def unexpected(rank: int, size: int, folder: str, driver: str, kinds: Kinds) -> None:
    """All sends of both ranks are made before any receive. They are received by other tags than they were sent."""
    gpu, plugin, store = Gpu(driver), Plugin(), FileStore(folder)
    to, back = exchange(plugin, rank, folder)
    lengths = (1, 4096, 70_000, 3_000_001)
    ours = [Memory(gpu, plugin, to, kinds[0], bytes_) for bytes_ in lengths]
    sent = []
    for tag, each in enumerate(ours):
        each.values[:] = pattern(each.values.size, 10 * tag + rank)
        sent.append(plugin.send(to, each.data, tag, registration=each.registration))
    store.set(f"sent/{rank}", b"")
    store.get(f"sent/{1 - rank}", 60)
    for tag in (2, 0, 3, 1):
        into = Memory(gpu, plugin, back, kinds[1], lengths[tag] + 10)
        received = plugin.receive(back, [into.data], [tag], registrations=[into.registration])
        while plugin.test(received) is None:  # the peer's receives move by this rank's sends
            sent = [each for each in sent if each is None or plugin.test(each) is None]
        assert np.array_equal(into.values[: lengths[tag]], pattern(lengths[tag], 10 * tag + 1 - rank)), tag
        assert not into.values[lengths[tag] :].any()
        into.end()
    plugin.wait(*sent)
    wait_for_peer(rank, folder)
    plugin.close(to, back)


@KINDS
def test_a_message_waits_at_its_sender_until_it_is_received(driver: str, kinds: Kinds) -> None:
    values(run_ranks(unexpected, 2, driver, kinds, env=DIRECT, timeout_s=120))


def grouped(rank: int, size: int, folder: str, driver: str, kinds: Kinds) -> None:
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    tags, other = [3, 1, 2], kinds[0]
    into = [Memory(gpu, plugin, back, kind, 200_000) for kind in (kinds[1], other, kinds[1])]
    ours = Memory(gpu, plugin, to, kinds[0], 4 * 60_000)
    for round_ in range(10):
        received = plugin.receive(
            back, [each.data for each in into], tags, registrations=[each.registration for each in into]
        )
        lengths = {tag: 1 + 2000 * tag * round_ for tag in tags}
        sent = []
        for tag in sorted(tags):
            ours.values[60_000 * tag :][: lengths[tag]] = pattern(lengths[tag], 100 * round_ + 10 * tag + rank)
            part = ours.part(60_000 * tag, lengths[tag])
            sent.append(plugin.send(to, part, tag, registration=ours.registration))
        sizes, *_ = plugin.wait(received, *sent, counts=[len(tags), 1, 1, 1])
        assert sizes == [lengths[tag] for tag in tags]
        for tag, each in zip(tags, into, strict=True):
            wanted = pattern(lengths[tag], 100 * round_ + 10 * tag + 1 - rank)
            assert np.array_equal(each.values[: wanted.size], wanted), (round_, tag)
    wait_for_peer(rank, folder)
    plugin.close(to, back)


@KINDS
def test_one_request_receives_messages_with_several_tags(driver: str, kinds: Kinds) -> None:
    values(run_ranks(grouped, 2, driver, kinds, env=DIRECT, timeout_s=120))


@pytest.mark.parametrize("work", [groups, many_outstanding, one_tag_ahead])
def test_the_hosts_memory_goes_by_the_same_comms(driver: str, work: Callable[..., None]) -> None:
    values(run_ranks(beside, 2, driver, work, env=DIRECT, timeout_s=120))


def beside(rank: int, size: int, folder: str, driver: str, work: Callable[..., None]) -> None:
    Gpu(driver)
    work(rank, size, folder)


def dmabufs(rank: int, size: int, folder: str, driver: str) -> None:
    """Memory that begins in the middle of a dmabuf, whose descriptor is closed once it is registered."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    held, memory, begin = [], [], 8192
    for comm in (to, back):
        whole, registration = GpuMemory(begin + 5000), c_void_p()
        address = whole.address + begin
        assert not gpu.calls.fake_own(c_void_p(address), ctypes.c_size_t(5000), 0)
        descriptor = os.dup(whole.descriptor)
        code = plugin.table.register_dmabuf(comm, address, 5000, CUDA, begin, descriptor, byref(registration))
        os.close(descriptor)
        assert code == 0 and registration.value
        held.append(registration)
        memory.append(whole)
    memory[0].values[begin:] = pattern(5000, rank)
    received = plugin.receive(back, [memory[1].part(begin, 5000)], registrations=[held[1]])
    plugin.wait(received, plugin.send(to, memory[0].part(begin, 5000), registration=held[0]))
    assert np.array_equal(memory[1].values[begin:], pattern(5000, 1 - rank))
    assert not memory[1].values[:begin].any()
    wait_for_peer(rank, folder)
    plugin.close(to, back)


def test_a_dmabuf_is_registered(driver: str) -> None:
    values(run_ranks(dmabufs, 2, driver, env=DIRECT))


def dies_in_a_message(rank: int, size: int, folder: str, driver: str, dying: int) -> str:
    gpu = Gpu(driver)
    plugin, comm = one_way(rank, folder)
    memory = Memory(gpu, plugin, comm, CUDA, 16 << 20)
    small = Memory(gpu, plugin, comm, CUDA, 8)

    def move(each: Memory) -> c_void_p | None:
        if rank == 0:
            return plugin.send(comm, each.data, registration=each.registration)
        return plugin.receive(comm, [each.data], registrations=[each.registration])

    plugin.wait(move(small))
    if rank == 0:
        memory.values[:] = 7
    request, store = move(memory), FileStore(folder)
    assert request is not None
    # The receiver has at most 16 of the 32 parts posted when the first byte is there.
    begun = Path(folder) / "begun"
    while not (begun.exists() if rank == 0 else memory.values[0]):
        assert plugin.test(request) is None
    begun.touch()
    if rank == dying:
        store.set("dies", b"")
        os.kill(os.getpid(), signal.SIGKILL)
    store.get("dies", 60)
    with pytest.raises(NcclError) as failed:
        plugin.wait(request, quiet_s=60)
    assert failed.value.code == REMOTE_ERROR
    assert len([text for level, text in plugin.log if level == WARN]) == 1
    memory.end(), small.end()
    plugin.close(*((comm, None) if rank == 0 else (None, comm)))
    return str(failed.value)


@pytest.mark.parametrize("dying", [0, 1], ids=["sender", "receiver"])
def test_a_rank_that_dies_fails_the_request_of_its_peer(driver: str, dying: int) -> None:
    env = {**DIRECT, "NETFOLD_RECONNECT_S": "1"}
    found = run_ranks(dies_in_a_message, 2, driver, dying, env=env, timeout_s=120, dies=[dying])
    survivor = found[1 - dying]
    assert not survivor.error, survivor
    assert ("sending to 127.0.0.1", "receiving from 127.0.0.1")[1 - dying] in survivor.value


def refused(rank: int, size: int, folder: str, driver: str) -> str:
    gpu, plugin = Gpu(driver, 3), Plugin()
    to, back = exchange(plugin, rank, folder)
    with pytest.raises(NcclError) as failed:
        Memory(gpu, plugin, to, CUDA, 4096)
    ours, into = pattern(1000, rank), np.zeros(1000, np.uint8)
    plugin.wait(plugin.receive(back, [into]), plugin.send(to, ours))
    assert np.array_equal(into, pattern(1000, 1 - rank)), "the comm goes on with the host's memory"
    wait_for_peer(rank, folder)
    plugin.close(to, back)
    return str(failed.value)


def test_a_refused_registration_is_one_sentence(driver: str) -> None:
    env = {**DIRECT, "NETFOLD_TRANSPORT": "fabric:strict:hmem=2+tcp"}
    for said in values(run_ranks(refused, 2, driver, env=env)):
        assert "provider strict+tcp" in said and "cannot register 4096 bytes of memory of GPU 3: " in said, said
        assert "nvidia_peermem" in said and "NETFOLD_NCCL_CUDA=off" in said


def beyond(rank: int, size: int, folder: str, driver: str) -> str:
    gpu = Gpu(driver)
    plugin, comm = one_way(rank, folder)
    memory = Memory(gpu, plugin, comm, CUDA, 4096)
    part = memory.part(4000, 97)
    with pytest.raises(NcclError) as failed:
        if rank == 0:
            plugin.wait(plugin.send(comm, part, registration=memory.registration))
        else:
            plugin.wait(plugin.receive(comm, [memory.data], registrations=[memory.registration]))
    plugin.close(*((comm, None) if rank == 0 else (None, comm)))
    return str(failed.value)


def test_bytes_beyond_the_registered_memory_are_refused(driver: str) -> None:
    said, _ = values(run_ranks(beyond, 2, driver, env={**DIRECT, "NETFOLD_RECONNECT_S": "1"}, timeout_s=60))
    assert "97 bytes are not in the 4096 bytes of a GPU's memory that were registered" in said, said


def offered(rank: int, size: int, folder: str, driver: str) -> tuple[int, list[Any]]:
    if driver:
        Gpu(driver)
    plugin = Plugin()
    return plugin.devices()[0].pointers, plugin.log


@pytest.mark.parametrize(
    ("transport", "cuda", "pointers"),
    [
        ("fabric:strict:hmem=1+tcp", "auto", HOST | CUDA | DMABUF),
        ("fabric:strict:hmem=1+tcp", "", HOST),
        ("fabric:strict:hmem=1+tcp", "off", HOST),
        ("fabric:strict+tcp", "auto", HOST),
        ("fabric:tcp", "auto", HOST),
        ("tcp", "auto", HOST),
    ],
)
def test_memory_of_a_gpu_is_offered_where_the_provider_reaches_it(
    driver: str, transport: str, cuda: str, pointers: int
) -> None:
    env = {**ENV, "NETFOLD_TRANSPORT": transport, "NETFOLD_NCCL_CUDA": cuda}
    ((found, log),) = values(run_ranks(offered, 1, driver, env=env))
    assert found == pointers and not [text for level, text in log if level == WARN]
    told = [text for level, text in log if level == INFO and text.startswith("messages in memory of GPUs go through")]
    assert len(told) == (cuda == "auto" and pointers == HOST and transport != "tcp"), log


def not_granted(rank: int, size: int, folder: str, driver: str) -> str:
    Gpu(driver)
    with pytest.raises(NcclError) as raised:
        Plugin()
    return str(raised.value)


@pytest.mark.parametrize(
    ("transport", "why"),
    [
        ("fabric:strict+tcp", "provider strict+tcp;ofi_rxm on lo: it was told to have none"),
        ("fabric:tcp", "provider tcp;ofi_rxm on lo: it does not offer memory of GPUs (FI_HMEM)"),
        ("fabric:shm", "provider shm on lo: provider shm cannot take back memory that a peer may write to"),
        ("tcp", "TCP goes through the host's memory; set NETFOLD_TRANSPORT=fabric:PROVIDER"),
    ],
)
def test_direct_says_why_it_is_refused(driver: str, transport: str, why: str) -> None:
    env = {**ENV, "NETFOLD_TRANSPORT": transport, "NETFOLD_NCCL_CUDA": "direct"}
    (said,) = values(run_ranks(not_granted, 1, driver, env=env))
    assert f"NETFOLD_NCCL_CUDA=direct cannot be used: {why}" in said, said


def mixed(rank: int, size: int, folder: str, driver: str) -> None:
    if rank == 0:
        os.environ["NETFOLD_NCCL_CUDA"] = "off"
    messages_with(rank, folder, driver)


def messages_with(rank: int, folder: str, driver: str) -> None:
    """Rank 0 has memory of the host only, rank 1 a GPU's."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    kind = (HOST, CUDA)[rank]
    for round_, bytes_ in enumerate((1, 5000, 3_000_001)):
        ours = Memory(gpu, plugin, to, kind, bytes_)
        into = Memory(gpu, plugin, back, kind, bytes_)
        ours.values[:] = pattern(bytes_, 2 * round_ + rank)
        received = plugin.receive(back, [into.data], registrations=[into.registration])
        plugin.wait(received, plugin.send(to, ours.data, registration=ours.registration), quiet_s=60)
        assert np.array_equal(into.values, pattern(bytes_, 2 * round_ + 1 - rank))
        ours.end(), into.end()
    wait_for_peer(rank, folder)
    plugin.close(to, back)


@pytest.mark.parametrize("rma_min_bytes", ["0", "100000"])
def test_a_rank_without_a_gpu_exchanges_messages_with_one_that_has_one(driver: str, rma_min_bytes: str) -> None:
    env = {**DIRECT, "NETFOLD_RMA_MIN_BYTES": rma_min_bytes}
    values(run_ranks(mixed, 2, driver, env=env, timeout_s=60))
