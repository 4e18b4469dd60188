"""Messages in memory of a GPU, over a stand-in for CUDA's driver whose copies are late (NETFOLD_NCCL_CUDA=staged)."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breaking import breaking, hang_up
from c_library import compile_library
from fabrics import need_libfabric
from load import seconds
from nccl.collnet_loader import CollNet
from nccl.loader import CUDA, HOST, MAX_REQUESTS, VERSIONS, WARN, NcclError, Plugin
from nccl.test_net import APART, ENV, exchange, pattern, wait_for_peer
from ranks import run_ranks, values

pytestmark = pytest.mark.native

SOURCE = Path(__file__).parent.parent / "torch" / "device" / "fake_cuda.c"
STAGED = {**APART, "NETFOLD_NCCL_CUDA": "staged"}
UNUSED = "NETFOLD_NCCL_CUDA=staged is not used, and NCCL copies itself: CUDA's driver library"
SIZES = (0, 1, 4096, (64 << 10) + 1, 512 << 10, 3_000_017)


def built(folder: Path, *flags: str) -> str:
    """A library of the driver's name: the plugin opens the one that the process has loaded."""
    return compile_library(SOURCE, folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", *flags)


class Gpu:
    """Memory of a GPU, whose addresses are the process's. What is late there shows in the values."""

    def __init__(self, driver: str, device: int = 0) -> None:
        self.calls = ctypes.CDLL(driver)
        self.calls.fake_fault.restype = ctypes.c_char_p
        self.device = device

    def holds(self, values: np.ndarray) -> np.ndarray:
        address = c_void_p(values.ctypes.data)
        assert not self.calls.fake_own(address, ctypes.c_size_t(max(values.nbytes, 1)), self.device)
        return values

    def hangs(self, on: bool) -> None:
        self.calls.fake_set_hangs(self.device, int(on))

    def computes(self, on: bool) -> None:
        """A kernel runs, as NCCL's do until their messages have come."""
        self.calls.fake_set_computing(int(on))

    def copies(self) -> tuple[int, int]:
        return self.calls.fake_copies(0), self.calls.fake_copies(1)

    def no_fault(self) -> None:
        assert self.calls.fake_fault() == b""


def messages(rank: int, size: int, folder: str, driver: str, version: int, kinds: tuple[int, int]) -> None:
    """kinds: of the sender's memory and of the receiver's."""
    gpu, plugin = Gpu(driver), Plugin(version)
    assert all(each.pointers == HOST | CUDA for each in plugin.devices())
    to, back = exchange(plugin, rank, folder)
    for round_, bytes_ in enumerate(SIZES):
        ours, into = pattern(bytes_, 2 * round_ + rank), np.zeros(bytes_ + 100, np.uint8)
        held = [None, None]
        for i, (comm, memory, kind) in enumerate(((to, ours, kinds[0]), (back, into, kinds[1]))):
            if kind == CUDA:
                held[i] = plugin.register(comm, gpu.holds(memory), CUDA)
        gpu.computes(True)
        received = plugin.receive(back, [into], [5], registrations=[held[1]])
        sent = plugin.send(to, ours, 5, registration=held[0])
        sizes, _ = plugin.wait(received, sent)
        gpu.computes(False)
        assert sizes == [bytes_]
        assert np.array_equal(into[:bytes_], pattern(bytes_, 2 * round_ + 1 - rank))
        assert not into[bytes_:].any()
        for comm, each in ((to, held[0]), (back, held[1])):
            if each is not None:
                assert plugin.table.deregister_memory(comm, each) == 0
    done = len(SIZES) - 1
    assert gpu.copies() == (done * (kinds[0] == CUDA), done * (kinds[1] == CUDA))
    gpu.no_fault()
    wait_for_peer(rank, folder)
    plugin.close(to, back)


@pytest.mark.parametrize("kinds", [(CUDA, CUDA), (CUDA, HOST), (HOST, CUDA)], ids=["both", "sender", "receiver"])
def test_messages_go_from_and_to_memory_of_a_gpu(driver: str, kinds: tuple[int, int]) -> None:
    values(run_ranks(messages, 2, driver, VERSIONS[-1], kinds, env=STAGED))


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_every_version_takes_memory_of_a_gpu(driver: str, version: int) -> None:
    values(run_ranks(messages, 2, driver, version, (CUDA, CUDA), env=STAGED))


@pytest.mark.parametrize(
    "more",
    [{"NETFOLD_SECURITY": "encrypt", "NETFOLD_NCCL_STREAMS": "3"}, {"NETFOLD_TRANSPORT": "fabric:strict:seed=5+tcp"}],
    ids=["encrypted streams", "fabric"],
)
def test_every_carrier_takes_memory_of_a_gpu(driver: str, more: dict[str, str]) -> None:
    if "NETFOLD_TRANSPORT" in more:
        need_libfabric()
    values(run_ranks(messages, 2, driver, VERSIONS[-1], (CUDA, CUDA), env={**STAGED, **more}))


def order(rank: int, size: int, folder: str, driver: str) -> None:
    """Messages with one tag, from the GPU and the host, while the GPU copies nothing. Nothing overtakes."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    first, second, third = (pattern(1000, each) for each in range(3))
    into = [np.zeros(1000, np.uint8) for _ in range(3)]
    held = plugin.register(to, gpu.holds(first), CUDA)
    if rank == 0:
        gpu.hangs(True)
        sends = [plugin.send(to, first, registration=held), plugin.send(to, second), plugin.send(to, third)]
        assert all(plugin.test(each) is None for each in sends if each)
        assert gpu.copies() == (0, 0)
        gpu.hangs(False)
        plugin.wait(*sends)
    else:
        plugin.wait(*(plugin.receive(back, [each]) for each in into))
        assert all(np.array_equal(found, due) for found, due in zip(into, (first, second, third), strict=True))
    wait_for_peer(rank, folder)
    gpu.no_fault()
    plugin.close(to, back)


def test_no_message_overtakes_one_that_is_still_copied(driver: str) -> None:
    values(run_ranks(order, 2, driver, env=STAGED))


def grouped(rank: int, size: int, folder: str, driver: str) -> None:
    """A request of three receives: two GPUs' memory and the host's. It is done after the last copy."""
    gpu, other, plugin = Gpu(driver), Gpu(driver, 1), Plugin()
    to, back = exchange(plugin, rank, folder)
    into = [np.zeros(10_000, np.uint8) for _ in range(3)]
    held = [plugin.register(back, gpu.holds(into[0]), CUDA), None, plugin.register(back, other.holds(into[2]), CUDA)]
    received = plugin.receive(back, into, [7, 8, 9], registrations=held)
    ours = [pattern(5000 + each, 10 * rank + each) for each in range(3)]
    sends = [plugin.send(to, each, 9 - i) for i, each in enumerate(ours)]
    found = plugin.wait(received, *sends, counts=[3, 1, 1, 1])
    assert found[0] == [5002, 5001, 5000]
    for i in range(3):
        assert np.array_equal(into[i][: 5002 - i], pattern(5002 - i, 10 * (1 - rank) + 2 - i))
        assert not into[i][5002 - i :].any()
    wait_for_peer(rank, folder)
    gpu.no_fault()
    plugin.close(to, back)


def test_one_request_receives_into_two_gpus_and_the_host(driver: str) -> None:
    values(run_ranks(grouped, 2, driver, env=STAGED))


def parts(rank: int, size: int, folder: str, driver: str) -> str:
    """Eight messages under way in parts of one region, as NCCL's steps, again and again; then one beyond its end."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    ours, into = gpu.holds(np.zeros(8 << 18, np.uint8)), gpu.holds(np.zeros(8 << 18, np.uint8))
    held = plugin.register(to, ours, CUDA), plugin.register(back, into, CUDA)
    gpu.computes(True)
    for round_ in range(5):
        ours[:] = pattern(8 << 18, 2 * round_ + rank)
        receives = [plugin.receive(back, [part], registrations=[held[1]]) for part in np.split(into, 8)]
        sends = [plugin.send(to, part, registration=held[0]) for part in np.split(ours, 8)]
        plugin.wait(*receives, *sends)
        assert np.array_equal(into, pattern(8 << 18, 2 * round_ + 1 - rank)), round_
    gpu.computes(False)
    with pytest.raises(NcclError) as raised:
        plugin.send(to, np.zeros(9 << 18, np.uint8), registration=held[0])
    wait_for_peer(rank, folder)
    gpu.no_fault()
    for comm, each in ((to, held[0]), (back, held[1])):
        assert plugin.table.deregister_memory(comm, each) == 0
    plugin.close(to, back)
    return str(raised.value)


def test_many_messages_are_under_way_in_one_region(driver: str) -> None:
    for said in values(run_ranks(parts, 2, driver, env=STAGED)):
        assert "is not in the 2097152 bytes of a GPU's memory that were registered" in said


def breaks(rank: int, size: int, folder: str, driver: str) -> int:
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    with breaking(hang_up, rank, 0.07) as broken:
        for round_ in range(30):
            ours, into = gpu.holds(pattern(700_000, round_ + rank)), gpu.holds(np.zeros(700_000, np.uint8))
            held = plugin.register(to, ours, CUDA), plugin.register(back, into, CUDA)
            received = plugin.receive(back, [into], registrations=[held[1]])
            plugin.wait(received, plugin.send(to, ours, registration=held[0]), quiet_s=40)
            assert np.array_equal(into, pattern(700_000, round_ + 1 - rank)), round_
            time.sleep(0.02)
    wait_for_peer(rank, folder)
    gpu.no_fault()
    plugin.close(to, back)
    return len(broken)


def test_a_connection_that_breaks_loses_no_byte_of_a_gpu(driver: str) -> None:
    assert sum(values(run_ranks(breaks, 2, driver, env=STAGED, timeout_s=120))) > 3


def fails(rank: int, size: int, folder: str, driver: str, function: str) -> str:
    """Rank 0's driver fails, in a message to rank 1, or in one from there."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    memory, said = np.zeros(1000, np.uint8), ""
    if rank == 1:
        plugin.wait(plugin.send(to, memory))
    else:
        held = plugin.register(to, gpu.holds(memory), CUDA)
        gpu.calls.fake_fail(function.encode(), ctypes.c_long(0), 700)
        with pytest.raises(NcclError) as raised:
            if function == "cuMemcpyHtoDAsync":
                plugin.wait(plugin.receive(back, [memory], registrations=[held]))
            else:
                plugin.wait(plugin.send(to, memory, registration=held))
        said = str(raised.value)
    wait_for_peer(rank, folder)
    plugin.close(to, back)
    return said


@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventQuery"])
def test_an_error_of_the_gpu_is_one_of_nccls(driver: str, function: str) -> None:
    said, _ = values(run_ranks(fails, 2, driver, function, env=STAGED))
    assert f"{function}: an illegal memory access was encountered (CUDA driver error 700)" in said


def closes(rank: int, size: int, folder: str, driver: str) -> None:
    """closeSend returns after the last copy: NCCL frees the memory then."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    ours = gpu.holds(pattern(100_000, 0))
    held = plugin.register(to, ours, CUDA)
    gpu.hangs(True)
    plugin.send(to, ours, registration=held)
    assert plugin.table.deregister_memory(to, held) == 0  # before closeSend, as NCCL does where a job fails
    closed = threading.Event()
    closing = threading.Thread(target=lambda: (plugin.close(to), closed.set()))
    closing.start()
    assert not closed.wait(0.3)
    gpu.hangs(False)
    assert closed.wait(seconds(10)) and gpu.copies() == (1, 0)
    closing.join()
    wait_for_peer(rank, folder)
    plugin.close(receive=back)


def test_a_comm_closes_after_its_copies(driver: str) -> None:
    values(run_ranks(closes, 2, driver, env=STAGED))


def closes_receiver(rank: int, size: int, folder: str, driver: str) -> None:
    """closeRecv returns after the last copy: what came later would be written to memory that NCCL freed."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    if rank == 1:
        plugin.wait(plugin.send(to, pattern(100_000, 1)))
    else:
        into = gpu.holds(np.zeros(100_000, np.uint8))
        held = plugin.register(back, into, CUDA)
        gpu.hangs(True)
        received = plugin.receive(back, [into], registrations=[held])
        until = time.monotonic() + seconds(20)
        while not gpu.calls.fake_queries(0):  # then its copy has begun
            assert received is not None and plugin.test(received) is None and time.monotonic() < until
        assert plugin.table.deregister_memory(back, held) == 0
        closed = threading.Event()
        closing = threading.Thread(target=lambda: (plugin.close(receive=back), closed.set()))
        closing.start()
        assert not closed.wait(0.3) and not into.any()
        gpu.hangs(False)
        assert closed.wait(seconds(10)) and gpu.copies() == (0, 1)
        closing.join()
        assert np.array_equal(into, pattern(100_000, 1))
        gpu.no_fault()
    wait_for_peer(rank, folder)
    plugin.close(to, back if rank == 1 else None)


def test_a_receiving_comm_closes_after_its_copies(driver: str) -> None:
    values(run_ranks(closes_receiver, 2, driver, env=STAGED))


def hangs(rank: int, size: int, folder: str, driver: str, ends: bool) -> list[str]:
    """A comm closes while the GPU copies. No later region gets the pinned memory of a copy that did not end."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    if rank == 0:
        ours, later = gpu.holds(pattern(100_000, 0)), gpu.holds(np.zeros(100_000, np.uint8))
        held = plugin.register(to, ours, CUDA)
        gpu.hangs(not ends)
        plugin.send(to, ours, registration=held)
        plugin.close(to)
        assert plugin.table.deregister_memory(to, held) == 0
        gpu.computes(True)  # a new allocation fails
        if ends:
            plugin.register(back, later, CUDA)
        else:
            with pytest.raises(NcclError, match="cuMemHostAlloc"):
                plugin.register(back, later, CUDA)
        gpu.computes(False)
        gpu.hangs(False)
    wait_for_peer(rank, folder)
    plugin.close(to if rank == 1 else None, back)
    return [text for level, text in plugin.log if level == WARN and "not copied a message" in text]


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_pinned_memory_of_a_copy_that_hangs_is_not_used_again(driver: str, ends: bool) -> None:
    said, _ = values(run_ranks(hangs, 2, driver, ends, env=STAGED))
    assert len(said) == (0 if ends else 1)
    assert all(re.search(r"a message with .*: the GPU has not copied a message after 10 s", each) for each in said)


def copies_nothing(rank: int, size: int, folder: str, driver: str) -> str:
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    if rank == 0:
        ours = gpu.holds(pattern(100_000, 0))
        held = plugin.register(to, ours, CUDA)
        gpu.hangs(True)
        sent = plugin.send(to, ours, registration=held)
        with pytest.raises(NcclError) as raised:
            plugin.wait(sent)
        gpu.hangs(False)
        plugin.close(to, back)
        return str(raised.value)
    into = gpu.holds(np.zeros(100_000, np.uint8))
    held = plugin.register(back, into, CUDA)
    with pytest.raises(NcclError) as raised:
        plugin.wait(plugin.receive(back, [into], registrations=[held]))
    plugin.close(to, back)
    return str(raised.value)


def test_a_gpu_that_copies_nothing_ends_the_wait(driver: str) -> None:
    ours, theirs = values(run_ranks(copies_nothing, 2, driver, env=STAGED))
    assert "sending to" in ours and "the GPU has not copied a message after 10 s" in ours
    assert "receiving from" in theirs and "closed the connection" in theirs


def full(rank: int, size: int, folder: str, driver: str) -> None:
    """All requests wait for a GPU that copies nothing: NCCL is to call again, and then loses no message."""
    gpu, plugin = Gpu(driver), Plugin()
    to, back = exchange(plugin, rank, folder)
    parts = gpu.holds(pattern(100 * (MAX_REQUESTS + 1), 3)).reshape(-1, 100)
    if rank == 0:
        held = plugin.register(to, parts, CUDA)
        gpu.hangs(True)
        sends = [plugin.send(to, each, registration=held) for each in parts]
        assert None not in sends[:-1] and sends[-1] is None
        assert all(plugin.test(each) is None for each in sends[:-1] if each)
        gpu.hangs(False)
        plugin.wait(*sends[:-1])
        plugin.wait(plugin.send(to, parts[-1], registration=held))
        assert gpu.copies() == (len(parts), 0)
    else:
        into = np.zeros(100, np.uint8)
        for each in parts:
            plugin.wait(plugin.receive(back, [into]))
            assert np.array_equal(into, each)
    wait_for_peer(rank, folder)
    gpu.no_fault()
    plugin.close(to, back)


def test_a_send_beyond_all_requests_is_asked_for_again(driver: str) -> None:
    values(run_ranks(full, 2, driver, env=STAGED))


def offered(rank: int, size: int, folder: str, driver: str, environment: dict[str, str]) -> tuple[int, list[Any]]:
    os.environ.update(environment)
    if driver:
        Gpu(driver)
    plugin = Plugin()
    return plugin.devices()[0].pointers, plugin.log


def has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("staged", [{}, {"NETFOLD_NCCL_CUDA": "off"}])
def test_memory_of_a_gpu_is_offered_only_where_asked_for(driver: str, staged: dict[str, str]) -> None:
    ((pointers, log),) = values(run_ranks(offered, 1, driver, staged, env=ENV))
    assert pointers == HOST and all(level != WARN for level, _ in log)


def added_in_a_switch(rank: int, size: int, folder: str, driver: str) -> list[int]:
    Gpu(driver)
    assert Plugin().devices()[0].pointers == HOST | CUDA
    return [each.pointers for each in CollNet().devices()]


def test_collnet_offers_memory_of_the_host_only(driver: str) -> None:
    env = {**STAGED, "NETFOLD_SWITCH": "127.0.0.1:1"}
    assert values(run_ranks(added_in_a_switch, 1, driver, env=env)) == [[HOST]]


def test_without_a_gpu_one_line_says_why(driver: str) -> None:
    ((pointers, log),) = values(run_ranks(offered, 1, driver, {"FAKE_CUDA_DEVICES": "0"}, env=STAGED))
    assert pointers == HOST and (WARN, f"{UNUSED} libcuda.so.1 finds no device") in log


@pytest.mark.parametrize("function", ["cuStreamCreate", "cuMemcpyHtoDAsync_v2"])
def test_without_a_function_one_line_says_why(tmp_path: Path, function: str) -> None:
    driver = built(tmp_path, f"-D{function}=renamed")
    ((pointers, log),) = values(run_ranks(offered, 1, driver, {}, env=STAGED))
    (why,) = [text for level, text in log if level == WARN]
    assert pointers == HOST and why.startswith(f"{UNUSED} libcuda.so.1") and f"has no {function}" in why


def test_without_the_library_one_line_says_why() -> None:
    """A machine that has CUDA's driver offers its memory, or gives the driver's own reason."""
    ((pointers, log),) = values(run_ranks(offered, 1, "", {}, env=STAGED))
    said = [text for level, text in log if level == WARN]
    assert (pointers == HOST | CUDA) == (not said)
    assert all(text.startswith("NETFOLD_NCCL_CUDA=staged is not used, and NCCL copies itself: ") for text in said)
    assert has_cuda() or (len(said) == 1 and said[0].endswith("install NVIDIA's driver"))


def wrong(rank: int, size: int, folder: str) -> str:
    with pytest.raises(NcclError) as raised:
        Plugin()
    return str(raised.value)


def test_a_wrong_value_is_named() -> None:
    (said,) = values(run_ranks(wrong, 1, env={**ENV, "NETFOLD_NCCL_CUDA": "yes"}))
    assert "NETFOLD_NCCL_CUDA=yes is not one of auto, direct, staged, off" in said
