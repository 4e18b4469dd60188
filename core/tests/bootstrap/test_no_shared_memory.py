"""Hosts on which memory cannot be shared: the ranks communicate by TCP, and the log says why."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import resource
import struct
from collections.abc import Callable

import numpy as np
import pytest
from ranks import run_ranks, values

from netfold import Communicator, FileStore, Options

pytestmark = pytest.mark.native

_LIBC = ctypes.CDLL(None, use_errno=True)
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


def forbid_memfd() -> None:
    """As the seccomp profile of a container does: memfd_create fails with EPERM."""
    load, jump_if_equal, result = 0x20, 0x15, 0x06
    program = struct.pack("HBBI", load, 0, 0, 0)  # the system call's number
    program += struct.pack("HBBI", jump_if_equal, 0, 1, _MEMFD_CREATE[platform.machine()])
    program += struct.pack("HBBI", result, 0, 0, 0x00050000 | 1) + struct.pack("HBBI", result, 0, 0, 0x7FFF0000)
    memory = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(memory)))
    assert _LIBC.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert _LIBC.prctl(22, 2, filter_, 0, 0) == 0  # PR_SET_SECCOMP


def bound_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))


def hide_proc() -> None:
    assert _LIBC.unshare(0x00020000) == 0, ctypes.get_errno()  # CLONE_NEWNS
    for source, target, kind, flags in [(None, b"/", None, 0x44000), (b"none", b"/proc", b"tmpfs", 0)]:  # private
        assert _LIBC.mount(source, target, kind, flags, None) == 0, ctypes.get_errno()


CAUSES: dict[str, tuple[Callable[[], None], str, str]] = {
    "memfd_create": (forbid_memfd, "Operation not permitted", "seccomp"),
    "RLIMIT_FSIZE": (bound_files, "File too large", "ulimit -f"),
    "/proc": (hide_proc, "/proc", "mount"),
}


def _add(rank: int, size: int, folder: str, cause: str, everywhere: bool) -> tuple[tuple[int, ...], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("netfold").addHandler(handler)
    if rank == 0 or everywhere:
        CAUSES[cause][0]()
    with Communicator(FileStore(folder), rank, size, options=Options(probe="off"), join_timeout_s=30) as group:
        for count in (1, 100_000):
            buffer = np.full(count, rank + 1.0, np.float32)
            group.all_reduce(buffer)
            assert (buffer == size * (size + 1) / 2).all()
        return group.group.nodes, lines


@pytest.mark.parametrize("everywhere", [False, True], ids=["rank 0", "all ranks"])
@pytest.mark.parametrize(
    "cause",
    [
        "memfd_create",
        "RLIMIT_FSIZE",
        # Only root may mount something over /proc, in a namespace of its own.
        pytest.param("/proc", marks=pytest.mark.skipif(os.geteuid() != 0, reason="a mount over /proc takes root")),
    ],
)
def test_ranks_whose_host_lets_them_share_no_memory_communicate_by_tcp(cause: str, everywhere: bool) -> None:
    found = values(run_ranks(_add, 3, cause, everywhere))
    _, what, remedy = CAUSES[cause]
    # Without its own /proc rank 0 is alone; the memory that it cannot make is that of all.
    together = cause == "/proc" and not everywhere
    assert [nodes for nodes, _ in found] == [(0, 1, 1) if together else (0, 1, 2)] * 3
    told = [line for _, lines in found for line in lines if what in line]
    assert len(told) == (3 if cause == "/proc" and everywhere else 1), found
    assert all(line.startswith("rank ") and "by TCP" in line and remedy in line for line in told), told
