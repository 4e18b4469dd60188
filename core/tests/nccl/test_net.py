"""The plugin's network, as NCCL calls it: messages between processes by every version of the interface."""

from __future__ import annotations

from ctypes import byref, c_void_p

import numpy as np
import pytest
from nccl.loader import CUDA, HOST, INFO, INVALID_USAGE, MAX_REQUESTS, SUCCESS, VERSIONS, WARN, NcclError, Plugin
from ranks import run_ranks, values

from netfold import FileStore

pytestmark = pytest.mark.native

SIZES = (0, 1, 8, 4096, 128 << 10, (128 << 10) + 1, 512 << 10, 3_000_017)
ENV = {"NETFOLD_INTERFACE": "lo"}
# Ranks of one host are as apart as those of two: connections that break are made again.
APART = {**ENV, "NETFOLD_TRANSPORT": "tcp"}


def pattern(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def exchange(plugin: Plugin, rank: int, folder: str) -> tuple[c_void_p, c_void_p]:
    """A comm in each direction between ranks 0 and 1: to send with, to receive with."""
    store = FileStore(folder)
    handle, listener = plugin.listen()
    store.set(f"handle/{rank}", handle)
    to = plugin.connect(store.get(f"handle/{1 - rank}", 30))
    back = plugin.accept(listener)
    plugin.close_listen(listener)
    return to, back


def wait_for_peer(rank: int, folder: str) -> None:
    """Return once both ranks have called."""
    FileStore(folder).set(f"done/{rank}", b"")
    FileStore(folder).get(f"done/{1 - rank}", 60)


def messages_of_many_sizes(rank: int, size: int, folder: str, version: int) -> None:
    plugin = Plugin(version)
    to, back = exchange(plugin, rank, folder)
    for round_, bytes_ in enumerate(SIZES):
        ours, into = pattern(bytes_, 2 * round_ + rank), np.zeros(bytes_ + 100, np.uint8)
        received = plugin.receive(back, [into], [5])
        sent = plugin.send(to, ours, 5)
        sizes, _ = plugin.wait(received, sent)
        assert sizes == [bytes_], "the size is that of the message"
        assert np.array_equal(into[:bytes_], pattern(bytes_, 2 * round_ + 1 - rank))
        assert not into[bytes_:].any()
    plugin.close(to, back)


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_arrive_by_every_version(version: int) -> None:
    values(run_ranks(messages_of_many_sizes, 2, version, env=ENV))


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
@pytest.mark.parametrize("streams", ["1", "3"])
def test_messages_arrive_over_several_streams_and_protected(security: str, streams: str) -> None:
    env = {**ENV, "NETFOLD_SECURITY": security, "NETFOLD_NCCL_STREAMS": streams}
    values(run_ranks(messages_of_many_sizes, 2, 12, env=env))


def both_ends_here(rank: int, size: int, folder: str) -> None:
    plugin = Plugin()
    handle, listener = plugin.listen()
    to = plugin.connect(handle)
    back = plugin.accept(listener)
    for bytes_ in (1, 4096, 3_000_001):
        ours, into = pattern(bytes_, bytes_), np.zeros(bytes_, np.uint8)
        received, sent = plugin.receive(back, [into]), plugin.send(to, ours)
        plugin.wait(received, sent)
        assert np.array_equal(into, ours)
    plugin.close(to, back)
    plugin.close_listen(listener)


@pytest.mark.parametrize("env", [{}, {"NETFOLD_RECONNECT_S": "0"}, {"NETFOLD_NCCL_STREAMS": "3"}])
def test_a_process_connects_to_itself(env: dict[str, str]) -> None:
    """As one that has several GPUs does, and NCCL where it tries a device."""
    values(run_ranks(both_ends_here, 1, env={**ENV, **env}))


def properties(rank: int, size: int, folder: str, version: int) -> None:
    plugin = Plugin(version)
    assert plugin.table.name == b"netfold"
    (device,) = plugin.devices()
    assert device.name == b"lo"
    assert device.pointers == HOST, "NCCL then gives memory of the host only"
    assert device.speed > 0
    assert 1 <= device.max_receives <= 8
    assert device.max_comms > 1000
    if version >= 9:
        assert (device.of_count, device.of[0]) == (1, 0)
        assert device.max_message == 1 << 30
    if version >= 11:
        assert device.max_multi_request == 1
    if version >= 12:
        assert (device.rail, device.plane) == (-1, -1)
    assert any(level == INFO and "lo 127.0.0.1" in text for level, text in plugin.log)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_device_is_described_in_every_version(version: int) -> None:
    values(run_ranks(properties, 1, version, env=ENV))


def groups(rank: int, size: int, folder: str) -> None:
    plugin = Plugin()
    to, back = exchange(plugin, rank, folder)
    tags = [3, 1, 2]
    for round_ in range(20):
        into = [np.zeros(200_000, np.uint8) for _ in tags]
        received = plugin.receive(back, into, tags)
        ours = {tag: pattern(1000 * tag * (round_ + 1), 100 * round_ + 10 * tag + rank) for tag in tags}
        sent = [plugin.send(to, ours[tag], tag) for tag in sorted(tags)]
        sizes, *_ = plugin.wait(received, *sent, counts=[len(tags), 1, 1, 1])
        assert sizes == [1000 * tag * (round_ + 1) for tag in tags]
        for tag, each in zip(tags, into, strict=True):
            wanted = pattern(1000 * tag * (round_ + 1), 100 * round_ + 10 * tag + 1 - rank)
            assert np.array_equal(each[: wanted.size], wanted)
    plugin.close(to, back)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_function_that_is_not_offered_has_no_pointer(version: int) -> None:
    """NCCL calls every function that has one: `consumed` after each receive, which the first run on a GPU showed."""
    table = Plugin(version).table
    left_out = {"device_registration", "consumed", "make_virtual_device"} & {field[0] for field in table._fields_}
    assert left_out and not any(getattr(table, name) for name in left_out)


def test_one_request_receives_messages_with_several_tags() -> None:
    values(run_ranks(groups, 2, env=ENV))


def one_tag_ahead(rank: int, size: int, folder: str) -> None:
    """Rank 0 sends 24 messages with tag 1 before the first with tag 2; rank 1 receives them in pairs, one at a time."""
    plugin = Plugin()
    to, back = exchange(plugin, rank, folder)
    count, bytes_ = 24, 300_000
    if rank == 0:
        ours = [pattern(bytes_, i) for i in range(2 * count)]
        sent = [plugin.send(to, ours[i], 1) for i in range(count)]
        for i in range(count):
            sent.append(plugin.send(to, ours[count + i], 2))
            while plugin.test(sent[-1]) is None:  # as a proxy does for one channel
                for j, each in enumerate(sent[:count]):
                    if each is not None and plugin.test(each) is not None:
                        sent[j] = None
        plugin.wait(*[each for each in sent[:count] if each is not None])
    else:
        for i in range(count):
            into = [np.zeros(bytes_, np.uint8) for _ in range(2)]
            plugin.wait(plugin.receive(back, into, [2, 1]), counts=[2])
            assert np.array_equal(into[1], pattern(bytes_, i))
            assert np.array_equal(into[0], pattern(bytes_, count + i))
    plugin.close(to, back)


def test_messages_of_one_tag_do_not_block_those_of_another() -> None:
    values(run_ranks(one_tag_ahead, 2, env=ENV))


def many_outstanding(rank: int, size: int, folder: str) -> None:
    plugin = Plugin()
    to, back = exchange(plugin, rank, folder)
    into = [np.zeros(1000, np.uint8) for _ in range(MAX_REQUESTS)]
    received = [plugin.receive(back, [each]) for each in into]
    assert None not in received
    assert plugin.receive(back, [np.zeros(1, np.uint8)]) is None, "NCCL tries again later"
    ours = [pattern(1000, 2 * i + rank) for i in range(MAX_REQUESTS)]
    sent = [plugin.send(to, each) for each in ours]
    plugin.wait(*received, *sent)
    for i, each in enumerate(into):
        assert np.array_equal(each, pattern(1000, 2 * i + 1 - rank)), "in the order of the sends"
    assert plugin.receive(back, [into[0]]) is not None
    plugin.close(to, back)


def test_as_many_requests_as_nccl_makes_are_under_way_at_once() -> None:
    values(run_ranks(many_outstanding, 2, env=ENV))


def registrations(rank: int, size: int, folder: str) -> None:
    plugin = Plugin()
    to, back = exchange(plugin, rank, folder)
    registration = c_void_p(1)
    data = np.zeros(8, np.uint8)
    assert plugin.table.register_memory(to, data.ctypes.data, 8, HOST, byref(registration)) == SUCCESS
    assert plugin.table.deregister_memory(to, registration) == SUCCESS
    assert plugin.table.register_memory(to, data.ctypes.data, 8, CUDA, byref(registration)) == INVALID_USAGE
    assert plugin.log[-1] == (WARN, "memory of a GPU was given, and only memory of the host was offered")
    assert plugin.table.register_dmabuf(to, data.ctypes.data, 8, CUDA, 0, 3, byref(registration)) == INVALID_USAGE
    request = c_void_p(1)
    assert plugin.table.flush(back, 1, None, None, None, byref(request)) == SUCCESS
    assert not request.value, "nothing to wait for"
    with pytest.raises(NcclError, match="9 receives in one request; at most 8 were offered"):
        plugin.receive(back, [data] * 9, list(range(9)))
    FileStore(folder).set(f"done/{rank}", b"")
    FileStore(folder).get(f"done/{1 - rank}", 30)
    plugin.close(to, back)


def test_memory_of_a_gpu_is_refused_with_a_sentence() -> None:
    values(run_ranks(registrations, 2, env=ENV))


def ring_all_reduce(rank: int, size: int, folder: str) -> None:
    """A ring, as NCCL runs it over the network: reduce-scatter, then all-gather, in chunks."""
    plugin = Plugin()
    store = FileStore(folder)
    handle, listener = plugin.listen()
    store.set(f"handle/{rank}", handle)
    to = plugin.connect(store.get(f"handle/{(rank + 1) % size}", 30))
    back = plugin.accept(listener)
    values_of = [np.random.default_rng(each).standard_normal(400_000).astype(np.float32) for each in range(size)]
    parts = np.array_split(values_of[rank].copy(), size)
    for step in range(2 * size - 2):
        mine = (rank - step) % size
        theirs = (mine - 1) % size
        into = np.zeros_like(parts[theirs])
        plugin.wait(plugin.receive(back, [into]), plugin.send(to, parts[mine]))
        parts[theirs] = into + parts[theirs] if step < size - 1 else into
    np.testing.assert_allclose(np.concatenate(parts), sum(values_of), rtol=1e-4, atol=1e-4)
    plugin.close(to, back)


def test_a_ring_sums_over_it() -> None:
    values(run_ranks(ring_all_reduce, 4, env={**ENV, "NETFOLD_SECURITY": "encrypt"}))
