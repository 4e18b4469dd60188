"""A group raises the soft limit of open files, which a shell or a service often leaves at 1024 or less."""

from __future__ import annotations

import contextlib
import os
import resource
import socket

import pytest
from ranks import run_ranks, values

from netfold.switch_protocol.open_files import allow_open_files, files_needed


def test_a_group_forms_above_the_soft_limit() -> None:
    for before, after, total in values(run_ranks(_form, 4, timeout_s=60)):
        assert before < after
        assert total == 4.0


@pytest.mark.parametrize("hard", [40, 600])
def test_the_hard_limit_stays_and_nothing_is_lowered(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    limits = [(30, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    allow_open_files(files_needed(4))
    assert limits[-1] == (min(hard, len(os.listdir("/proc/self/fd")) + files_needed(4)), hard)
    allow_open_files(files_needed(2))
    assert len(limits) == 2


def test_a_process_that_may_not_raise_its_limit_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(which: int, new: tuple[int, int]) -> None:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (30, 600))
    monkeypatch.setattr(resource, "setrlimit", refused)
    allow_open_files(400)


def _serves_many(rank: int, size: int, folder: str) -> int:
    from netfold.bootstrap.tcp_store import TcpStoreServer

    resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    server = TcpStoreServer("127.0.0.1", 43210, "job")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        clients = len(os.listdir("/proc/self/fd"))
    server.close()
    return clients


def test_a_store_serves_more_clients_than_the_soft_limit() -> None:
    assert values(run_ranks(_serves_many, 1, timeout_s=60))[0] > 100


def _form(rank: int, size: int, folder: str) -> tuple[int, int, float]:
    """The soft limit before and after a group has formed, and a sum."""
    import numpy as np

    from netfold.communicator import Communicator, FileStore

    # Room for a few more files, and not for the sockets of three other ranks.
    before = max(map(int, os.listdir("/proc/self/fd"))) + 6
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with Communicator(FileStore(f"{folder}/store"), rank, size) as communicator:
        total = float(communicator.all_reduce(np.ones(4, np.float32))[0])
    return before, resource.getrlimit(resource.RLIMIT_NOFILE)[0], total
