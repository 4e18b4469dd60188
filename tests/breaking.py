"""Breaks this process's own TCP connections, as a network does."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest


def connections(spared: int = 0) -> list[int]:
    """Descriptors of this process's established TCP connections, without those to the port `spared`."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as stream:
                    is_tcp = stream.type == socket.SOCK_STREAM and stream.family == socket.AF_INET
                    if is_tcp and stream.getpeername()[1] != spared:
                        found.append(fd)
    return found


def hang_up(fd: int) -> None:
    """Both directions end, in order: the peer reads all sent bytes, then an unexpected end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as stream:
        stream.shutdown(socket.SHUT_RDWR)


def reset(fd: int) -> None:
    """As a firewall or a lost address does: bytes in flight are lost, and both ends get a reset."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as stream:
        # Another process may use the same port towards another address.
        ours, theirs = ("{}:{}".format(*name[:2]) for name in (stream.getsockname(), stream.getpeername()))
        subprocess.run(["ss", "-K", "src", ours, "dst", theirs], capture_output=True, check=False)


def can_reset() -> bool:
    """ss -K needs rights and a kernel that has it."""
    if os.geteuid() != 0 or shutil.which("ss") is None:
        return False
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as stream:
        reset(stream.fileno())
        try:
            stream.send(b"x")
        except OSError:
            return True
    return False


WAYS = [
    pytest.param(hang_up, id="hang_up"),
    pytest.param(
        reset,
        id="reset",
        marks=pytest.mark.skipif(not can_reset(), reason="ss -K needs root and a kernel with INET_DIAG_DESTROY"),
    ),
]


@contextlib.contextmanager
def breaking(how: Callable[[int], None], seed: int, every_s: float, spared: int = 0) -> Iterator[list[int]]:
    """Breaks one of this process's connections repeatedly, but none to the port `spared`."""
    stop = threading.Event()
    broken: list[int] = []

    def work() -> None:
        choose = random.Random(seed)
        while not stop.wait(every_s):
            if there := connections(spared):
                fd = choose.choice(there)
                how(fd)
                broken.append(fd)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield broken
    finally:
        stop.set()
        thread.join()
