"""Connections among CollNet's ranks that break: they are made again, and no operation is lost."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from breaking import WAYS, breaking, connections, hang_up
from load import seconds
from nccl.collnet_loader import CollNet, contribution, expected
from nccl.loader import REMOTE_ERROR, WARN, NcclError
from nccl.test_collnet import comm_of_all
from nccl.test_net import APART, ENV
from ranks import private, run_ranks, running_switch, values

from netfold import FileStore

pytestmark = pytest.mark.native


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def warnings_of(plugin: CollNet) -> list[str]:
    return [text for level, text in plugin.log if level == WARN]


def made_again(plugin: CollNet) -> int:
    return sum("was made again" in text for _, text in plugin.log)


def meet(folder: str, rank: int, size: int, name: str) -> None:
    store = FileStore(folder)
    store.set(f"{name}/{rank}", b"")
    for each in range(size):
        store.get(f"{name}/{each}", 60)


def stream(plugin: CollNet, comm: object, rank: int, size: int, count: int, turns: range, at_once: int = 4) -> None:
    """Sums, of which each is right."""
    under_way: list[tuple[object, np.ndarray, int]] = []
    for turn in [*turns, *[-1] * at_once]:
        if turn >= 0:
            ours = contribution(rank, count, "float32", turn)
            into = np.zeros_like(ours)
            under_way.append((plugin.all_reduce(comm, ours, into), into, turn))  # type: ignore[arg-type]
        if under_way and (turn < 0 or len(under_way) == at_once):
            request, into, turn = under_way.pop(0)
            plugin.wait(request, quiet_s=30)  # type: ignore[arg-type]
            assert np.array_equal(into, expected(size, count, "float32", turn)), turn


def sums_while_breaking(
    rank: int, size: int, folder: str, how: Callable[[int], None], switch_port: int
) -> tuple[int, int, list[str]]:
    """Each rank breaks one of its connections to the others now and then."""
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    meet(folder, rank, size, "connected")
    with breaking(how, rank, 0.05, switch_port) as broken:
        stream(plugin, comm, rank, size, 100_000, range(400))
    meet(folder, rank, size, "done")
    plugin.close(comm)
    return len(broken), made_again(plugin), warnings_of(plugin)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("algorithm", ["in_network", "ring", "direct", "split"])
def test_connections_that_break_cost_no_sum(how: Callable[[int], None], algorithm: str) -> None:
    with running_switch() as switch:
        env = {**APART, "NETFOLD_SWITCH": switch.endpoint, "NETFOLD_ALGORITHM": f"all_reduce={algorithm}"}
        found = values(run_ranks(sums_while_breaking, 3, how, port_of(switch.endpoint), env=env, timeout_s=120))
    assert all(broken > 3 for broken, _, _ in found), found
    assert sum(again for _, again, _ in found) > 3, found
    assert all(not said for _, _, said in found), found


def test_connections_that_break_are_made_again_with_the_security_of_the_first(tmp_path: Path) -> None:
    token = secrets.token_hex(32)
    with running_switch("--token-file", private(tmp_path / "tokens", f"vision {token}\n")) as switch:
        address = switch.endpoint.partition("#")[0]
        env = {
            **APART,
            "NETFOLD_SWITCH": switch.endpoint,
            "NETFOLD_TOKEN_FILE": private(tmp_path / "token", token),
            "NETFOLD_ALGORITHM": "all_reduce=ring",
            "NETFOLD_SECURITY": "encrypt",
        }
        found = values(run_ranks(sums_while_breaking, 3, hang_up, port_of(address), env=env, timeout_s=120))
    assert sum(again for _, again, _ in found) > 3, found
    assert all(not said for _, _, said in found), found


def breaks_idle(rank: int, size: int, folder: str, breaker: int, switch_port: int) -> tuple[int, list[str]]:
    """One rank breaks all of its connections while nothing is under way."""
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    stream(plugin, comm, rank, size, 10_000, range(3))
    meet(folder, rank, size, "first")
    if rank == breaker:
        for fd in connections(switch_port):
            hang_up(fd)
    meet(folder, rank, size, "broken")
    stream(plugin, comm, rank, size, 10_000, range(3, 20))
    meet(folder, rank, size, "done")
    plugin.close(comm)
    return made_again(plugin), warnings_of(plugin)


@pytest.mark.parametrize("breaker", [0, 2])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_idle_connections_that_broke_are_made_again(breaker: int, algorithm: str) -> None:
    with running_switch() as switch:
        env = {**APART, "NETFOLD_SWITCH": switch.endpoint, "NETFOLD_ALGORITHM": f"all_reduce={algorithm}"}
        found = values(run_ranks(breaks_idle, 3, breaker, port_of(switch.endpoint), env=env, timeout_s=60))
    assert sum(again for again, _ in found) >= 4, found
    assert all(not said for _, said in found), found


def loses_both(rank: int, size: int, folder: str, pid: int, switch_port: int) -> tuple[int, list[str]]:
    """The switch ends, and meanwhile connections break: the ranks agree over them, and go on by host algorithms."""
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    meet(folder, rank, size, "connected")
    with breaking(hang_up, rank, 0.03, switch_port):
        stream(plugin, comm, rank, size, 100_000, range(30))
        if rank == 0:
            os.kill(pid, signal.SIGKILL)
        stream(plugin, comm, rank, size, 100_000, range(30, 200))
    meet(folder, rank, size, "done")
    plugin.close(comm)
    return made_again(plugin), warnings_of(plugin)


def test_a_lost_switch_and_connections_that_break_cost_no_sum() -> None:
    with running_switch() as switch:
        env = {**APART, "NETFOLD_SWITCH": switch.endpoint, "NETFOLD_ALGORITHM": "in_network"}
        words = switch.process.pid, port_of(switch.endpoint)
        found = values(run_ranks(loses_both, 3, *words, env=env, timeout_s=120))
    assert sum(again for again, _ in found) > 3, found
    assert all(len(said) == 1 and "no operation is lost" in said[0] for _, said in found), found


def breaks_for_good(rank: int, size: int, folder: str, switch_port: int) -> tuple[str, float]:
    """Rank 1 breaks its connections, and none may be made again."""
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    stream(plugin, comm, rank, size, 10_000, range(3))
    meet(folder, rank, size, "first")
    if rank == 1:
        for fd in connections(switch_port):
            hang_up(fd)
    began = time.monotonic()
    with pytest.raises(NcclError) as failed:
        stream(plugin, comm, rank, size, 10_000, range(3, 1000))
    assert failed.value.code == REMOTE_ERROR and len(warnings_of(plugin)) == 1
    took = time.monotonic() - began
    plugin.close(comm)
    return str(failed.value), took


@pytest.mark.parametrize("env", [{**APART, "NETFOLD_RECONNECT_S": "0"}, ENV], ids=["asked for", "within a host"])
def test_without_reconnecting_a_break_fails_all_operations_at_once(env: dict[str, str]) -> None:
    with running_switch() as switch:
        env = {**env, "NETFOLD_SWITCH": switch.endpoint, "NETFOLD_ALGORITHM": "ring"}
        found = values(run_ranks(breaks_for_good, 3, port_of(switch.endpoint), env=env, timeout_s=60))
    for text, took in found:
        assert "rank" in text and took < seconds(5), found
