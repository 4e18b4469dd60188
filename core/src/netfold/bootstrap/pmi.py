"""Query Hydra, the launcher of MPICH and Intel MPI, for the job's name and rank 0's host.

Hydra's environment has neither, so this module asks as an MPI would, over the connection that every rank has to its
host's proxy (PMI_FD): lines of PMI-1, `cmd=... key=value`, one reply a request (Balaji et al., "PMI: a scalable
parallel process-management interface", EuroMPI 2010). An MPI in the same process is not disturbed, before or after it
begins, since this module sends no `init`.

Intel's proxy reports a rank as crashed that has sent a request and ends without `finalize`. So this module sends
`finalize` when the process ends. It does not if an MPI is loaded, which sends it itself, and cannot begin after it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

# Hydra's own limit is 1024 for a value.
_MAX_ANSWER_BYTES = 4096
# For one reply. The barrier's comes when the last rank has asked.
_TIMEOUT_S = 60.0
_KEY = "netfold-host"

# Replies of this process, by process and query. The barrier is for all ranks together, so each rank makes it once.
_replies: dict[tuple[int, str], str] = {}
_finalizing: set[int] = set()  # processes that will send finalize
_lock = threading.Lock()


def job_name(environment: Mapping[str, str]) -> str:
    """A unique name of this job, the same on all its ranks. ValueError where no reply comes."""
    return _once("job", lambda: _Proxy(environment).job())


def first_host(environment: Mapping[str, str], rank: int, own_host: str) -> str:
    """Rank 0's `own_host`. Every rank of the job must ask, and waits until all do. ValueError where no reply comes."""
    return _once("host", lambda: _Proxy(environment).first_host(rank, own_host))


def _once(what: str, ask: Callable[[], str]) -> str:
    with _lock:
        key = os.getpid(), what
        if key not in _replies:
            _replies[key] = ask()
        return _replies[key]


class _Proxy:
    """The rank's end of its connection to Hydra. Socket options stay as they are, since an MPI may use it later."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        text = environment["PMI_FD"]
        try:
            self._fd = int(text)
            is_socket = stat.S_ISSOCK(os.fstat(self._fd).st_mode)
        except (OSError, ValueError):
            is_socket = False
        if not is_socket:
            raise ValueError(
                f"PMI_FD={text} is no connection to mpirun in this process: a process that a rank started is no rank "
                "itself; set MASTER_ADDR and MASTER_PORT, or take PMI_RANK and PMI_SIZE out of its environment"
            )
        _finalize_at_exit(self._fd)

    def job(self) -> str:
        return self._ask("get_my_kvsname", "kvsname")

    def first_host(self, rank: int, own_host: str) -> str:
        space = self.job()
        if rank == 0:
            self._ask(f"put kvsname={space} key={_KEY} value={own_host}", "rc")
        self._ask("barrier_in", "cmd")
        return self._ask(f"get kvsname={space} key={_KEY}", "value")

    def _ask(self, request: str, wanted: str) -> str:
        reply = _exchange(self._fd, request, _TIMEOUT_S)
        match = re.search(rf"(?:^| ){wanted}=(\S+)", reply)
        refused = re.search(r"(?:^| )rc=(?!0\b)", reply)
        if match is None or refused:
            raise ValueError(
                f"mpirun's proxy answered {reply!r} to {request.split()[0]!r}: set MASTER_ADDR and MASTER_PORT, the "
                "same on every rank"
            )
        return match[1]


def _exchange(fd: int, request: str, timeout_s: float) -> str:
    """Send one line and receive one. ValueError if none comes in time."""
    deadline = time.monotonic() + timeout_s
    line = b""
    try:
        os.write(fd, f"cmd={request}\n".encode())
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        while not line.endswith(b"\n"):
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0 or not waiting.poll(left_ms):
                raise ValueError(
                    f"mpirun's proxy did not answer {request.split()[0]!r} within {timeout_s:.0f} s; did every rank "
                    "make a group?"
                )
            part = os.read(fd, _MAX_ANSWER_BYTES)
            if not part or len(line) > _MAX_ANSWER_BYTES:
                raise ValueError("mpirun's proxy closed its connection; see its own output")
            line += part
    except OSError as error:
        raise ValueError(f"mpirun's proxy cannot be asked ({error}); see its own output") from None
    return line.decode(errors="replace").strip()


def _finalize_at_exit(fd: int) -> None:
    process = os.getpid()
    if process in _finalizing:
        return
    _finalizing.add(process)

    def finalize() -> None:
        if process != os.getpid() or _has_mpi():
            return
        with contextlib.suppress(ValueError):  # the proxy is gone already
            _exchange(fd, "finalize", 1.0)

    atexit.register(finalize)


def _has_mpi() -> bool:
    return re.search(r"/libmpi[^/]*\.so", Path("/proc/self/maps").read_text(errors="replace")) is not None
