"""NETFOLD_SECURITY and a switch: which switch may be used, and which path replaces a lost one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breaking import reset
from interceptor import ThroughInterceptor
from load import seconds
from ranks import private, run_ranks, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold.communicator.membership import Membership
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_client import SwitchAccess

pytestmark = pytest.mark.native

TOKEN = secrets.token_hex(32)
COUNT = 400_000


def add(group: Communicator, turn: int) -> bool:
    """Return whether an all_reduce is right."""
    ranks = group.size
    array = np.arange(COUNT, dtype=np.int64) * (group.rank + 1) + turn
    group.all_reduce(array)
    return bool((array == np.arange(COUNT, dtype=np.int64) * (ranks * (ranks + 1) // 2) + ranks * turn).all())


def _joins(rank: int, size: int, folder: str, options: tuple[Options, ...]) -> tuple[bool, str]:
    """Return whether the group uses the switch, and its reasons."""
    given = options[rank % len(options)]
    with Communicator(FileStore(folder), rank, size, options=given, join_timeout_s=15, timeout_s=30) as group:
        assert add(group, 1)
        return group.group.membership is not None, group.group.why("all_reduce", 1 << 22)


def options_of(switch: str, tmp_path: Path, security: str, **others: Any) -> Options:
    token_file = private(tmp_path / "token", TOKEN + "\n") if "#" in switch else None
    return Options(switch=switch, token_file=token_file, transport="tcp", security=security, **others)


def test_a_switch_without_keys_is_not_used_where_packets_need_them(tmp_path: Path) -> None:
    with running_switch() as switch:
        assert values(run_ranks(_joins, 2, (options_of(switch.endpoint, tmp_path, "none"),)))[0][0]
        for security in ("authenticate", "encrypt"):
            for used, why in values(run_ranks(_joins, 2, (options_of(switch.endpoint, tmp_path, security),))):
                assert not used
                assert f"the switch at {switch.endpoint} is not used: NETFOLD_SECURITY={security}" in why, why


def test_a_switch_with_keys_is_used_whatever_the_security(tmp_path: Path) -> None:
    with running_switch("--token-file", private(tmp_path / "tokens", f"vision {TOKEN}\n")) as switch:
        for used, _ in values(run_ranks(_joins, 2, (options_of(switch.endpoint, tmp_path, "authenticate"),))):
            assert used
        switch.wait_for("event=started .*encrypted=no")
        for used, _ in values(run_ranks(_joins, 2, (options_of(switch.endpoint, tmp_path, "encrypt"),))):
            assert used
        switch.wait_for("event=started .*encrypted=yes")
        # One rank leaves out the fingerprint, so its packets could be redirected to any host.
        bare = switch.endpoint.partition("#")[0]
        both = tuple(options_of(each, tmp_path, "authenticate") for each in (switch.endpoint, bare))
        for outcome in run_ranks(_joins, 2, both):
            assert outcome.error == "RendezvousError", outcome
            assert f"the switch at {bare} is not used: NETFOLD_SECURITY=authenticate" in outcome.text


def test_a_switch_with_keys_below_one_without_is_refused(tmp_path: Path) -> None:
    tokens = private(tmp_path / "tokens", f"vision {TOKEN}\n")
    with running_switch() as root, running_switch("--token-file", tokens, "--parent", root.endpoint) as leaf:
        for outcome in run_ranks(_joins, 2, (options_of(leaf.endpoint, tmp_path, "authenticate"),)):
            assert outcome.error == "SwitchError", outcome
            assert f"the switch at {root.endpoint} has no keys, and NETFOLD_SECURITY=authenticate" in outcome.text


def _joins_alone(
    rank: int, size: int, folder: str, endpoint: str, token_file: str | None, securities: tuple[str, ...]
) -> str:
    joined = Membership.join(
        SwitchAccess(endpoint, token_file, rank, tuple(range(size)), securities[rank]),
        job="d" * 32,
        timeout_s=5.0,
    )
    joined.leave("it has joined")
    return joined.protection


def test_workers_of_a_job_with_different_security_are_refused(tmp_path: Path) -> None:
    token_file = private(tmp_path / "token", TOKEN + "\n")
    with running_switch("--token-file", private(tmp_path / "tokens", f"vision {TOKEN}\n")) as switch:
        both = values(run_threads(_joins_alone, 2, switch.endpoint, token_file, ("encrypt", "encrypt")))
        assert both == ["encrypted", "encrypted"]
        outcomes = run_threads(_joins_alone, 2, switch.endpoint, token_file, ("encrypt", "authenticate"))
        assert all(outcome.error == "SwitchError" for outcome in outcomes), outcomes
        assert any("all ranks of a job need the same (NETFOLD_SECURITY)" in outcome.text for outcome in outcomes)


def test_an_open_switch_refuses_a_job_that_requires_encryption() -> None:
    with running_switch() as switch, socket.create_connection(switch.address, 5) as stream:
        join = {"job": "d" * 32, "name": "", "rank": 0, "ranks": [0], "port": 9, "window_bytes": 1 << 20}
        control_messages.send(stream, {"type": "join", "version": control_messages.VERSION, **join, "encrypt": True})
        reply = control_messages.receive(stream)
    assert reply["type"] == "refused" and "this switch has no keys" in reply["reason"], reply


def _through_a_tree(rank: int, size: int, folder: str, options: tuple[Options, ...]) -> bool:
    given = options[rank % len(options)]
    with Communicator(FileStore(folder), rank, size, options=given, join_timeout_s=20, timeout_s=30) as group:
        assert group.group.membership is not None and group.group.membership.encrypts
        right = [add(group, turn) for turn in range(4)]
        small = np.full(3, rank + 0.5, np.float32)
        group.all_reduce(small)
        return all(right) and bool((small == size * (size - 1) / 2 + size / 2).all())


def test_packets_are_encrypted_through_a_tree_of_switches_and_over_two_side_by_side(tmp_path: Path) -> None:
    tokens = private(tmp_path / "tokens", f"vision {TOKEN}\n")
    ours = private(tmp_path / "leaf-token", TOKEN + "\n")
    with running_switch("--token-file", tokens) as root:
        link = ("--token-file", tokens, "--parent", root.endpoint, "--parent-token-file", ours)
        with running_switch(*link) as left, running_switch(*link) as right:
            homes = tuple(options_of(each.endpoint, tmp_path, "encrypt") for each in (left, right))
            assert all(values(run_ranks(_through_a_tree, 4, homes)))
            for switch in (root, left, right):
                switch.wait_for("event=started .*encrypted=yes")
            both = options_of(f"{left.endpoint},{root.endpoint}", tmp_path, "encrypt")
            assert all(values(run_ranks(_through_a_tree, 2, (both,))))


def reset_connection_to(port: int) -> None:
    """End this process's connections to that port, as an attacker with a TCP reset can."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as stream:
                if stream.family != socket.AF_INET or stream.getpeername()[1] != port:
                    continue
                if shutil.which("ss"):
                    reset(fd)
                # Where the kernel cannot do that, shut the connection down.
                stream.shutdown(socket.SHUT_RDWR)


def _downgraded(rank: int, size: int, folder: str, options: Options, port: int) -> str:
    """A job whose switch connection an attacker resets, to change the traffic between ranks afterwards."""
    store = ThroughInterceptor(folder)
    with Communicator(store, rank, size, options=options, timeout_s=30) as group:
        for turn in range(3):
            assert group.group.membership is not None
            assert add(group, turn)
        if rank == 0:
            reset_connection_to(port)
        deadline = time.monotonic() + seconds(20)
        turn = 3
        # Both ranks take the same number of turns, until no rank uses the switch.
        while True:
            assert add(group, turn), "a wrong sum without an attack"
            left = np.array([group.group.membership is not None], np.int32)
            group.all_reduce(left)
            turn += 1
            if left[0] == 0:
                break
            assert time.monotonic() < deadline
        if rank == 0:
            store.interceptor.attack = "flip"
        for late in range(turn, turn + 5):
            if not add(group, late):
                return "wrong"
        assert rank != 0 or store.interceptor.done.is_set()
        return "right"


@pytest.mark.parametrize("security", ["none", "authenticate", "encrypt"])
def test_a_reset_of_the_connection_to_the_switch_does_not_downgrade_security(tmp_path: Path, security: str) -> None:
    with running_switch("--token-file", private(tmp_path / "tokens", f"vision {TOKEN}\n")) as switch:
        options = options_of(switch.endpoint, tmp_path, security, rejoin_s=0)
        port = int(switch.endpoint.partition("#")[0].rpartition(":")[2])
        outcomes = run_ranks(_downgraded, 2, options, port, timeout_s=90)
        # A few bytes of 100,000 are headers, whose change is an error.
        if security == "none" and "wrong" not in [outcome.value for outcome in outcomes]:
            outcomes = run_ranks(_downgraded, 2, options, port, timeout_s=90)
    if security == "none":
        # Without the setting there is a downgrade: packets to the switch had MACs, the replacing path has none.
        assert "wrong" in [outcome.value for outcome in outcomes], outcomes
    else:
        assert [outcome.error for outcome in outcomes] == ["PeerLost", "PeerLost"], outcomes
        assert any("a record came with a wrong tag" in outcome.text for outcome in outcomes)
