"""The plugin's collective network, as NCCL calls it: sums through a real switch by every version of the interface."""

from __future__ import annotations

import os
import secrets
from ctypes import byref, c_void_p
from pathlib import Path

import numpy as np
import pytest
from nccl.collnet_loader import (
    AVERAGE,
    BF16,
    FLOAT8,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    TYPES,
    CollNet,
    contribution,
    expected,
    joined,
)
from nccl.loader import CUDA, HOST, INFO, INVALID_USAGE, SUCCESS, VERSIONS, NcclError
from ranks import private, run_ranks, running_switch, two_leaves, values

pytestmark = pytest.mark.native

ENV = {"NETFOLD_INTERFACE": "lo"}
TOKEN = secrets.token_hex(32)
BY_SWITCH = {**ENV, "NETFOLD_ALGORITHM": "in_network"}


def comm_of_all(plugin: CollNet, rank: int, size: int, folder: str, name: str = "") -> c_void_p:
    comm = joined(plugin, rank, size, folder, name)
    assert comm is not None, plugin.log
    return comm


def sums_of_many_sizes(rank: int, size: int, folder: str, version: int) -> list[str]:
    plugin = CollNet(version)
    comm = comm_of_all(plugin, rank, size, folder)
    for seed, count in enumerate((1, 7, 352, 353, 100_000, 1_000_003)):
        ours, into = contribution(rank, count, "float32", seed), np.zeros(count, np.float32)
        before = ours.copy()
        assert plugin.wait(plugin.all_reduce(comm, ours, into)) == [ours.nbytes]
        assert np.array_equal(into, expected(size, count, "float32", seed)), count
        assert np.array_equal(ours, before), "NCCL's own memory is only read"
        assert plugin.wait(plugin.all_reduce(comm, ours, ours)) == [ours.nbytes]
        assert np.array_equal(ours, into), "in place"
    plugin.close(comm)
    return [text for _, text in plugin.log]


@pytest.mark.parametrize("version", VERSIONS)
def test_sums_go_through_the_switch_by_every_version(version: int) -> None:
    with running_switch() as switch:
        env = {**BY_SWITCH, "NETFOLD_SWITCH": switch.endpoint, "NETFOLD_JOB_NAME": "nccl-test"}
        logs = values(run_ranks(sums_of_many_sizes, 4, version, env=env))
        assert "nccl-test" in switch.log()
        assert any(f"CollNet uses the switch at {switch.endpoint} with 4 ranks" in text for text in logs[0])


def every_type(rank: int, size: int, folder: str) -> None:
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    for dtype in TYPES:
        for reduction in (SUM, PRODUCT, MAX, MIN):
            assert plugin.supports(TYPES[dtype], reduction)
            ours = contribution(rank, 5_001, dtype) % 3 if reduction == PRODUCT else contribution(rank, 5_001, dtype)
            all_ = [contribution(each, 5_001, dtype) for each in range(size)]
            wanted = expected(size, 5_001, dtype, reduction=reduction)
            if reduction == PRODUCT:
                wanted = np.multiply.reduce([each % 3 for each in all_], dtype=dtype)
            into = np.zeros_like(ours)
            plugin.wait(plugin.all_reduce(comm, ours, into, reduction))
            assert np.array_equal(into, wanted), (dtype, reduction)
    # bf16 is the upper half of an f32.
    halves = (contribution(rank, 5_001, "float32").view(np.uint32) >> 16).astype(np.uint16)
    into16 = np.zeros_like(halves)
    plugin.wait(plugin.all_reduce(comm, halves, into16, SUM, BF16))
    found = (into16.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found, expected(size, 5_001, "float32"))
    assert not plugin.supports(FLOAT8, SUM)
    assert not plugin.supports(TYPES["float32"], AVERAGE)
    with pytest.raises(NcclError, match="type 10 and reduction 0 of NCCL were not offered") as refused:
        plugin.all_reduce(comm, halves, into16, SUM, FLOAT8)
    assert refused.value.code == INVALID_USAGE
    plugin.close(comm)


def test_every_type_and_reduction_of_nccl_that_is_offered_is_right() -> None:
    with running_switch() as switch:
        values(run_ranks(every_type, 3, env={**BY_SWITCH, "NETFOLD_SWITCH": switch.endpoint}))


def windows(rank: int, size: int, folder: str, version: int) -> None:
    """Blocks of 1,000 elements a rank, in windows that begin and end anywhere."""
    plugin = CollNet(version)
    comm = comm_of_all(plugin, rank, size, folder)
    count, unit = 1_000, 4
    block = count * unit
    ours = contribution(rank, count, "float32")
    whole = np.concatenate([contribution(each, count, "float32") for each in range(size)])
    for begin, end in ((0, size * count), (0, 300), (300, 1_700), (999, 1_001), (2_000, 3_000), (2_500, size * count)):
        first, last = max(begin, rank * count), min(end, (rank + 1) * count)
        own = slice(first - rank * count, max(first, last) - rank * count) if first < last else slice(0, 0)
        into = np.full(end - begin, -1, np.float32)
        request = plugin.all_gather(comm, ours[own], into, block, (begin * unit, (end - begin) * unit))
        plugin.wait(request)
        assert np.array_equal(into, whole[begin:end]), (begin, end)

        given = contribution(rank, size * count, "float32", 5)[begin:end].copy()
        kept = given.copy()
        sums = expected(size, size * count, "float32", 5)
        reduced = np.full(count, -1, np.float32)
        request = plugin.reduce_scatter(comm, given, reduced, block, (begin * unit, (end - begin) * unit))
        assert plugin.wait(request) == [max(0, last - first) * unit]
        assert np.array_equal(reduced[: max(0, last - first)], sums[first : max(first, last)]), (begin, end)
        assert (reduced[max(0, last - first) :] == -1).all(), "nothing is written behind the block"
        assert np.array_equal(given, kept)
    with pytest.raises(NcclError, match="a window ends at byte 16004 of 4 blocks of 4000"):
        plugin.all_gather(comm, ours, np.zeros(4_001, np.float32), block, (0, 16_004))
    with pytest.raises(NcclError, match="a window cuts an element of f32"):
        plugin.reduce_scatter(comm, ours, ours, block, (2, 400))
    plugin.close(comm)


@pytest.mark.parametrize("algorithm", ["in_network", "ring", "auto"])
@pytest.mark.parametrize("version", [8, 12])
def test_windows_of_all_gather_and_reduce_scatter_are_right(version: int, algorithm: str) -> None:
    with running_switch() as switch:
        env = {**ENV, "NETFOLD_ALGORITHM": algorithm, "NETFOLD_SWITCH": switch.endpoint}
        values(run_ranks(windows, 4, version, env=env))


def many_outstanding(rank: int, size: int, folder: str) -> None:
    """Several comms at once, as of several channels and communicators, each with many operations under way."""
    plugin = CollNet()
    comms = [comm_of_all(plugin, rank, size, folder, str(number)) for number in range(3)]
    counts = [1 + (i * 7919) % 60_000 for i in range(80)]
    ours, into, requests = {}, {}, {}
    for i, count in enumerate(counts):
        for number, comm in enumerate(comms):
            key = number, i
            ours[key] = contribution(rank, count, "int32", i + number)
            into[key] = np.zeros(count, np.int32)
            requests[key] = plugin.all_reduce(comm, ours[key], into[key])
            assert requests[key] is not None
    for number in reversed(range(len(comms))):
        for i, count in enumerate(counts):
            plugin.wait(requests[number, i])
            assert np.array_equal(into[number, i], expected(size, count, "int32", i + number)), (number, i)
    for comm in comms:
        plugin.close(comm)


@pytest.mark.parametrize("algorithm", ["in_network", "auto"])
def test_many_operations_of_several_comms_are_under_way_at_once(algorithm: str) -> None:
    with running_switch() as switch:
        env = {**ENV, "NETFOLD_ALGORITHM": algorithm, "NETFOLD_SWITCH": switch.endpoint}
        values(run_ranks(many_outstanding, 4, env=env))


def as_many_as_there_are_requests(rank: int, size: int, folder: str) -> None:
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    ours = contribution(rank, 10, "int32")
    into = [np.zeros(10, np.int32) for _ in range(300)]
    requests = []
    for each in into:
        request = plugin.all_reduce(comm, ours, each)
        if request is None:
            break
        requests.append(request)
    assert len(requests) == 256, "then NCCL tries again later"
    plugin.wait(*requests)
    plugin.wait(plugin.all_reduce(comm, ours, into[-1]))
    assert np.array_equal(into[-1], expected(size, 10, "int32"))
    plugin.close(comm)


def test_beyond_its_requests_it_asks_nccl_to_try_again() -> None:
    with running_switch() as switch:
        values(run_ranks(as_many_as_there_are_requests, 2, env={**BY_SWITCH, "NETFOLD_SWITCH": switch.endpoint}))


def large_sums(rank: int, size: int, folder: str) -> None:
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    for seed in range(12):  # of a size from which a part goes round a ring
        ours = contribution(rank, 700_001, "float32", seed)
        into = np.zeros_like(ours)
        plugin.wait(plugin.all_reduce(comm, ours, into))
        assert np.array_equal(into, expected(size, ours.size, "float32", seed))
    plugin.close(comm)


@pytest.mark.parametrize("algorithm", ["split", "auto"])
def test_large_sums_take_the_switch_and_a_ring(algorithm: str) -> None:
    with running_switch() as switch:
        env = {**ENV, "NETFOLD_ALGORITHM": f"all_reduce={algorithm}", "NETFOLD_SWITCH": switch.endpoint}
        values(run_ranks(large_sums, 4, env=env))


def sums_below_leaves(rank: int, size: int, folder: str, leaves: list[str]) -> list[str]:
    """Each rank's NETFOLD_SWITCH is the one of its rack."""
    os.environ["NETFOLD_SWITCH"] = leaves[rank % len(leaves)]
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    for seed, count in enumerate((1, 353, 100_000, 1_000_003)):
        ours, into = contribution(rank, count, "float32", seed), np.zeros(count, np.float32)
        plugin.wait(plugin.all_reduce(comm, ours, into))
        assert np.array_equal(into, expected(size, count, "float32", seed)), count
    plugin.close(comm)
    return [text for _, text in plugin.log]


@pytest.mark.parametrize("security", ["none", "encrypt"])
def test_ranks_of_several_racks_add_through_a_tree_of_switches(tmp_path: Path, security: str) -> None:
    tokens = private(tmp_path / "tokens", f"vision {TOKEN}\nrack {TOKEN[::-1]}\n")
    mine, above = private(tmp_path / "token", TOKEN), private(tmp_path / "above", TOKEN[::-1])
    guard = [] if security == "none" else ["--token-file", tokens]
    with two_leaves(*guard, parent=["--parent-token-file", above] if guard else []) as switches:
        env = {**BY_SWITCH, "NETFOLD_SECURITY": security, **({"NETFOLD_TOKEN_FILE": mine} if guard else {})}
        leaves = [leaf.endpoint for leaf in switches[1:]]
        logs = values(run_ranks(sums_below_leaves, 5, leaves, env=env))
        for rank, log in enumerate(logs):
            address = leaves[rank % 2].partition("#")[0]
            assert any(f"CollNet uses the switch at {address} with 5 ranks" in text for text in log), log
        assert all("event=started" in switch.log() for switch in switches)


def devices(rank: int, size: int, folder: str, version: int) -> list[int]:
    plugin = CollNet(version)
    assert plugin.table.name == b"netfold"
    found = plugin.devices()
    for device in found:
        assert (device.name, device.pointers) == (b"lo", HOST)
        if version >= 9:
            assert 0 < device.max_collective <= 1 << 40, "NCCL refuses another value"
    return [len(found)]


@pytest.mark.parametrize("version", VERSIONS)
def test_there_are_devices_only_with_a_switch(version: int) -> None:
    assert values(run_ranks(devices, 1, version, env=ENV)) == [[0]]
    assert values(run_ranks(devices, 1, version, env={**ENV, "NETFOLD_SWITCH": "127.0.0.1:1"})) == [[1]]


def memory(rank: int, size: int, folder: str) -> None:
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    data, registration, request = np.zeros(8, np.uint8), c_void_p(1), c_void_p(1)
    table = plugin.table
    assert table.register_memory(comm, data.ctypes.data, 8, HOST, byref(registration)) == SUCCESS
    assert table.deregister_memory(comm, registration) == SUCCESS
    assert table.register_memory(comm, data.ctypes.data, 8, CUDA, byref(registration)) == INVALID_USAGE
    assert "memory of a GPU was given" in plugin.log[-1][1]
    assert table.register_dmabuf(comm, data.ctypes.data, 8, CUDA, 0, 3, byref(registration)) == INVALID_USAGE
    assert table.flush(comm, data.ctypes.data, 8, None, byref(request)) == SUCCESS
    assert not request.value, "nothing to wait for"
    assert [level for level, text in plugin.log if "CollNet uses" in text] == [INFO]
    plugin.close(comm)


def test_memory_of_a_gpu_is_refused_with_a_sentence() -> None:
    with running_switch() as switch:
        values(run_ranks(memory, 2, env={**BY_SWITCH, "NETFOLD_SWITCH": switch.endpoint}))
