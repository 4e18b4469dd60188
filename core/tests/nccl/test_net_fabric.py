"""The plugin's network over libfabric: NCCL's messages through a provider, and what ends them."""

from __future__ import annotations

import os
import signal
from ctypes import byref, c_void_p

import numpy as np
import pytest
from nccl.loader import HOST, INFO, INVALID_USAGE, REMOTE_ERROR, SUCCESS, VERSIONS, WARN, NcclError, Plugin
from nccl.test_net import (
    ENV,
    both_ends_here,
    exchange,
    groups,
    many_outstanding,
    messages_of_many_sizes,
    one_tag_ahead,
    pattern,
    ring_all_reduce,
)
from nccl.test_net_failures import one_way
from ranks import run_ranks, values

from netfold import FileStore

pytestmark = pytest.mark.native

TCP = {**ENV, "NETFOLD_TRANSPORT": "fabric:tcp"}
# Every liberty of a provider: completions in any order, refused calls, memory read late.
STRICT = {**ENV, "NETFOLD_TRANSPORT": "fabric:strict:seed=5+tcp"}


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_arrive_by_every_version(version: int) -> None:
    values(run_ranks(messages_of_many_sizes, 2, version, env=TCP))


@pytest.mark.parametrize("rma_min_bytes", ["0", "1000"])
@pytest.mark.parametrize("work", [groups, many_outstanding, one_tag_ahead])
def test_messages_arrive_by_a_provider_that_uses_every_liberty(work: object, rma_min_bytes: str) -> None:
    values(run_ranks(work, 2, env={**STRICT, "NETFOLD_RMA_MIN_BYTES": rma_min_bytes}, timeout_s=60))


def test_a_process_connects_to_itself() -> None:
    values(run_ranks(both_ends_here, 1, env=TCP))


def test_a_ring_sums_over_it() -> None:
    values(run_ranks(ring_all_reduce, 4, env=STRICT, timeout_s=60))


def registered(rank: int, size: int, folder: str) -> None:
    plugin = Plugin()
    to, back = exchange(plugin, rank, folder)
    assert any(level == INFO and text.startswith("uses tcp") for level, text in plugin.log), plugin.log
    ours, into = pattern(4 << 20, rank), np.zeros(4 << 20, np.uint8)
    registrations = []
    for comm, data in ((to, ours), (back, into)):
        registration = c_void_p()
        assert plugin.table.register_memory(comm, data.ctypes.data, data.nbytes, HOST, byref(registration)) == SUCCESS
        assert registration.value, "the memory stays registered until NCCL gives it back"
        registrations.append((comm, registration))
    for round_ in range(4):
        into[:] = 0
        plugin.wait(plugin.receive(back, [into]), plugin.send(to, ours))
        assert np.array_equal(into, pattern(4 << 20, 1 - rank)), round_
    for comm, registration in registrations:
        assert plugin.table.deregister_memory(comm, registration) == SUCCESS
    FileStore(folder).set(f"done/{rank}", b"")
    FileStore(folder).get(f"done/{1 - rank}", 30)
    plugin.close(to, back)


def test_registered_memory_is_sent_from_and_received_into() -> None:
    values(run_ranks(registered, 2, env=TCP))


def wrong_setting(rank: int, size: int, folder: str) -> tuple[int, str]:
    with pytest.raises(NcclError) as failed:
        Plugin()
    return failed.value.code, str(failed.value)


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({"NETFOLD_TRANSPORT": "fabric:absent"}, REMOTE_ERROR, "NETFOLD_TRANSPORT=fabric:absent on lo: "),
        ({"NETFOLD_TRANSPORT": "fabric:"}, INVALID_USAGE, "NETFOLD_TRANSPORT=fabric: is not one of auto, tcp, fabric"),
        ({"NETFOLD_TRANSPORT": "fabric:a,b"}, INVALID_USAGE, "NETFOLD_TRANSPORT=fabric:a,b is not one of auto, tcp"),
        ({"NETFOLD_TRANSPORT": "rdma"}, INVALID_USAGE, "NETFOLD_TRANSPORT=rdma is not one of auto, tcp, fabric"),
        (
            {"NETFOLD_TRANSPORT": "fabric:tcp", "NETFOLD_SECURITY": "encrypt"},
            INVALID_USAGE,
            "NETFOLD_SECURITY=encrypt and NETFOLD_TRANSPORT=fabric:tcp exclude each other",
        ),
        ({**TCP, "NETFOLD_RMA_MIN_BYTES": "-1"}, INVALID_USAGE, "NETFOLD_RMA_MIN_BYTES=-1 is not a whole number"),
    ],
)
def test_a_wrong_setting_is_one_line_and_nccl_uses_its_own_network(env: dict[str, str], code: int, said: str) -> None:
    ((found, text),) = values(run_ranks(wrong_setting, 1, env={**ENV, **env}))
    assert found == code
    assert said in text, text


def other_transport(rank: int, size: int, folder: str) -> str:
    if rank == 0:
        os.environ["NETFOLD_TRANSPORT"] = "tcp"
    plugin = Plugin()
    store = FileStore(folder)
    if rank == 1:
        handle, listener = plugin.listen()
        store.set("handle", handle)
        store.get("said", 30)
        plugin.close_listen(listener)
        return ""
    with pytest.raises(NcclError) as failed:
        plugin.connect(store.get("handle", 30))
    store.set("said", b"")
    return str(failed.value)


def test_ranks_on_different_networks_are_told_apart_before_a_byte() -> None:
    said, _ = values(run_ranks(other_transport, 2, env=TCP))
    assert "goes over fabric:tcp, this rank over TCP: all need the same NETFOLD_TRANSPORT" in said, said


def dies_in_a_message(rank: int, size: int, folder: str) -> tuple[int, str] | None:
    plugin, comm = one_way(rank, folder)
    if rank == 0:
        plugin.wait(plugin.send(comm, pattern(8, 0)))
        os.kill(os.getpid(), signal.SIGKILL)
    plugin.wait(plugin.receive(comm, [np.zeros(8, np.uint8)]))
    into = np.zeros(8 << 20, np.uint8)
    with pytest.raises(NcclError) as failed:
        plugin.wait(plugin.receive(comm, [into]), quiet_s=30)
    warned = [text for level, text in plugin.log if level == WARN]
    assert len(warned) == 1, warned
    plugin.close(receive=comm)
    return failed.value.code, str(failed.value)


@pytest.mark.parametrize("provider", [TCP, STRICT])
def test_a_rank_that_dies_fails_the_request_of_its_peer(provider: dict[str, str]) -> None:
    _, survivor = run_ranks(dies_in_a_message, 2, env={**provider, "NETFOLD_RECONNECT_S": "1"}, timeout_s=60)
    code, said = survivor.value
    assert code == REMOTE_ERROR
    assert "receiving from 127.0.0.1" in said, said
