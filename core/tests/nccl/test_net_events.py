"""Netfold's network events: the plugin's network tells NCCL's profiler of each message."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl.loader import Plugin, ProfilerCallback
from nccl.profiler_loader import KERNEL_STOP, NET, NET_UPDATE, NETFOLD_EVENTS, PROXY_STEP, NetData, Profiler
from nccl.test_net import exchange
from ranks import run_ranks, values

from netfold.profile.run import read_run

pytestmark = pytest.mark.native

START, STOP_WITH_UPDATE = 0, 3
ENV = {"NETFOLD_INTERFACE": "lo"}
SIZES = (1, 4096, 300_000)


def callback(called: Callable[[Any, int, int | None, int, int | None], None]) -> Any:
    """called(event, action, of, plugin, data)."""

    def as_nccl(event: Any, action: int, of: int | None, plugin: int, data: int | None) -> int:
        called(event, action, of, plugin, data)
        return 0

    return ProfilerCallback(as_nccl)


def every_message_is_an_event(rank: int, size: int, folder: str, version: int) -> None:
    seen: list[tuple[int, int | None, int, int, int]] = []

    def called(event: Any, action: int, of: int | None, plugin: int, data: int | None) -> None:
        assert plugin == NETFOLD_EVENTS and data is not None
        about = NetData.from_address(data)
        if action == START:
            event[0] = 1000 + len(seen) if of != 99 else None  # the profiler does not want the event of 99
        seen.append((action, of, event[0] or 0, about.bytes, about.is_send))

    plugin = Plugin(version, callback(called))
    to, back = exchange(plugin, rank, folder)
    ours, into = np.full(100, rank, np.uint8), [np.zeros(500, np.uint8) for _ in range(2)]
    received = plugin.receive(back, into, [1, 2], [71, 99])
    sent = [plugin.send(to, ours, tag, 70 + tag) for tag in (1, 2)]
    assert plugin.wait(received, *sent, counts=[2, 1, 1])[0] == [100, 100]
    again = plugin.receive(back, into[:1], [3])  # no handle: no event
    plugin.wait(again, plugin.send(to, ours, 3))
    plugin.close(to, back)
    starts = [each for each in seen if each[0] == START]
    assert [(of, handle, bytes_, is_send) for _, of, handle, bytes_, is_send in starts] == [
        (71, 1000, 500, 0),
        (99, 0, 500, 0),
        (71, 1002, 100, 1),
        (72, 1003, 100, 1),
    ]
    stops = [each for each in seen if each[0] == STOP_WITH_UPDATE]
    assert sorted(each[2:] for each in stops) == [(1000, 100, 0), (1002, 100, 1), (1003, 100, 1)], "what arrived"
    assert len(seen) == len(starts) + len(stops)


@pytest.mark.parametrize("version", (10, 11, 12))
def test_every_message_is_an_event(version: int) -> None:
    values(run_ranks(every_message_is_an_event, 2, version, env=ENV))


def without_a_profiler(rank: int, size: int, folder: str, version: int) -> None:
    """NCCL gives no callback, or the interface has none: handles are ignored."""
    plugin = Plugin(version)
    to, back = exchange(plugin, rank, folder)
    ours, into = np.full(100, rank, np.uint8), np.zeros(100, np.uint8)
    plugin.wait(plugin.receive(back, [into], [1], [71]), plugin.send(to, ours, 1, 70))
    assert into[0] == 1 - rank
    plugin.close(to, back)


@pytest.mark.parametrize("version", (8, 12))
def test_messages_need_no_profiler(version: int) -> None:
    values(run_ranks(without_a_profiler, 2, version, env=ENV))


def recorded_collective(rank: int, size: int, folder: str, run: str) -> None:
    """Call both plugins as NCCL does: steps of a proxy operation send and receive over netfold's network."""
    os.environ["NETFOLD_PROFILE"] = run
    profiler = Profiler()
    comm = profiler.comm(0x51, rank, 2, "both")

    def called(event: Any, action: int, of: int | None, plugin: int, data: int | None) -> None:
        if action == START:
            event[0] = comm.start(NET, of, of="netPlugin", id=plugin, data=data)
        elif action == STOP_WITH_UPDATE and data is not None:
            comm.state(event[0], NET_UPDATE, NetData.from_address(data))
            comm.stop(event[0])

    plugin = Plugin(12, callback(called))
    to, back = exchange(plugin, rank, folder)
    operation = comm.submit(None, channels=1)
    comm.stop(operation)
    kernel = comm.kernel(operation)
    sends, receives = (comm.proxy(operation, peer=1 - rank, send=send) for send in (True, False))
    for bytes_ in SIZES:
        ours, into = np.full(bytes_, rank, np.uint8), np.zeros(bytes_, np.uint8)
        steps = [comm.start(PROXY_STEP, each, of="proxyStep", step=0) for each in (sends, receives)]
        plugin.wait(plugin.receive(back, [into], [0], [steps[1]]), plugin.send(to, ours, 0, steps[0]))
        for step in steps:
            comm.stop(step)
    for each in (sends, receives):
        comm.stop(each)
    comm.state(kernel, KERNEL_STOP, 5)
    comm.stop(kernel)
    plugin.close(to, back)
    comm.finalize()


def test_network_events_are_recorded_under_their_collective(tmp_path: Path) -> None:
    values(run_ranks(recorded_collective, 2, str(tmp_path / "run"), env=ENV))
    for trace in read_run(tmp_path / "run").traces:
        assert trace.nccl is not None and len(trace.operations) == 1
        assert sorted(trace.nccl.transfers["is_send"].tolist()) == [0, 1]
        for transfer in trace.nccl.transfers:
            assert transfer["operation"] == trace.nccl.rows["id"][0]
            assert transfer["net_bytes"] == sum(SIZES)
            assert transfer["net_requests"] == len(SIZES)
            assert 0 < transfer["net_ns"] <= transfer["ended_ns"] - transfer["began_ns"]
