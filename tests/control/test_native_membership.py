"""A rank that joins a switch by the native client, without Python's: the same job, the same sums, the same refusals."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import Outcome, run_ranks, run_threads, running_switch, values

from netfold._native_dev import control

pytestmark = pytest.mark.native

TOKEN = secrets.token_hex(32)
# kernels::DType and kernels::ReduceOp.
F32, I32, SUM = 0, 6, 0
TABLE = 0x5A17


def private(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def joined(
    rank: int,
    size: int,
    endpoint: str,
    *,
    job: str,
    token_file: str = "",
    security: str = "none",
    timeout_s: float = 20.0,
    window_bytes: int = 1 << 20,
) -> Any:
    return control.join(
        endpoint=endpoint,
        token_file=token_file,
        job=job,
        rank=rank,
        ranks=list(range(size)),
        window_bytes=window_bytes,
        security=security,
        timeout_s=timeout_s,
    )


def part(rank: int, count: int, turn: int) -> Any:
    return np.random.default_rng([rank, count, turn]).integers(-1000, 1000, count).astype(np.float32)


def add(member: Any, array: Any, sequence: int) -> None:
    member.all_reduce(array.ctypes.data, array.nbytes, F32, SUM, sequence, TABLE, int(seconds(30) * 1e9))


def sums(member: Any, rank: int, size: int, counts: tuple[int, ...] = (1, 7, 352, 5000, 300_001)) -> None:
    """Add arrays of these lengths, and check every element."""
    for turn, count in enumerate(counts):
        array = part(rank, count, turn)
        add(member, array, turn + 1)
        np.testing.assert_array_equal(array, sum(part(each, count, turn) for each in range(size)))


def _adds(rank: int, size: int, folder: str, endpoint: str, job: str, token_file: str, security: str) -> tuple[bool, bool]:
    member = joined(rank, size, endpoint, job=job, token_file=token_file, security=security)
    sums(member, rank, size)
    member.leave("it is done")
    return member.authenticated, member.encrypts


def test_native_ranks_add_through_an_open_switch() -> None:
    with running_switch() as switch:
        assert values(run_threads(_adds, 3, switch.endpoint, "ab" * 8, "", "none")) == [(False, False)] * 3
        switch.wait_for("rank 1 left: it is done")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """A switch that wants a token, and the file with one that it knows."""
    with running_switch("--token-file", private(tmp_path / "tokens", f"vision {TOKEN}\n")) as switch:
        yield switch, private(tmp_path / "token", TOKEN + "\n")


@pytest.mark.parametrize(("security", "encrypts"), [("none", False), ("authenticate", False), ("encrypt", True)])
def test_native_ranks_add_through_a_switch_with_tokens(
    guarded: tuple[Any, str], security: str, encrypts: bool
) -> None:
    switch, token_file = guarded
    both = values(run_threads(_adds, 2, switch.endpoint, "cd" * 16, token_file, security))
    assert both == [(True, encrypts)] * 2
    switch.wait_for("event=started .*packets " + ("encrypted" if encrypts else "authenticated"))
    assert TOKEN not in switch.log()
