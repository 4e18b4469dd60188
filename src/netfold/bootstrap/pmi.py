"""What Hydra, the launcher of MPICH and Intel MPI, tells a rank that asks it: the job's name, and where rank 0 is.

Its environment says neither, so we ask as an MPI would, over the connection that every rank has to its host's proxy
(PMI_FD): lines of PMI-1, `cmd=... key=value`, one answer a request (Balaji et al., "PMI: a scalable parallel
process-management interface", EuroMPI 2010). This disturbs no MPI in the same process, before or after it begins: we
leave out `init`, which is the MPI's to say.

Intel's proxy takes a rank that spoke to it and ended without `finalize` for one that crashed. So we say that when the
process ends; not if an MPI is loaded, which says it itself and cannot begin after it was said.
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
# For one answer. The barrier's comes when the last rank has asked.
_TIMEOUT_S = 60.0
_KEY = "netfold-host"

# Of this process, by what was asked. The barrier is one for all ranks, so each makes it once.
_told: dict[tuple[int, str], str] = {}
_parting: set[int] = set()  # processes that will say goodbye
_lock = threading.Lock()


def job_name(environment: Mapping[str, str]) -> str:
    """What tells this job from any other, the same on all its ranks. ValueError where nobody answers."""
    return _once("job", lambda: _Proxy(environment).job())


def first_host(environment: Mapping[str, str], rank: int, own_host: str) -> str:
    """Rank 0's `own_host`. Every rank of the job must ask, and waits until all do. ValueError where nobody answers."""
    return _once("host", lambda: _Proxy(environment).first_host(rank, own_host))


def _once(what: str, ask: Callable[[], str]) -> str:
    with _lock:
        key = os.getpid(), what
        if key not in _told:
            _told[key] = ask()
        return _told[key]


class _Proxy:
    """The rank's end of its connection to Hydra. What it is set to stays: an MPI may read from it later."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        text = environment["PMI_FD"]
        try:
            self._fd = int(text)
            is_ours = stat.S_ISSOCK(os.fstat(self._fd).st_mode)
        except (OSError, ValueError):
            is_ours = False
        if not is_ours:
            raise ValueError(
                f"PMI_FD={text} is no connection to mpirun in this process: one that a rank has started is no rank "
                "itself; set MASTER_ADDR and MASTER_PORT, or take PMI_RANK and PMI_SIZE out of its environment"
            )
        _say_goodbye_at_exit(self._fd)

    def job(self) -> str:
        return self._ask("get_my_kvsname", "kvsname")

    def first_host(self, rank: int, own_host: str) -> str:
        space = self.job()
        if rank == 0:
            self._ask(f"put kvsname={space} key={_KEY} value={own_host}", "rc")
        self._ask("barrier_in", "cmd")
        return self._ask(f"get kvsname={space} key={_KEY}", "value")

    def _ask(self, request: str, wanted: str) -> str:
        answer = _exchange(self._fd, request, _TIMEOUT_S)
        found = re.search(rf"(?:^| ){wanted}=(\S+)", answer)
        refused = re.search(r"(?:^| )rc=(?!0\b)", answer)
        if found is None or refused:
            raise ValueError(
                f"mpirun's proxy answered {answer!r} to {request.split()[0]!r}: set MASTER_ADDR and MASTER_PORT, the "
                "same on every rank"
            )
        return found[1]


def _exchange(fd: int, request: str, timeout_s: float) -> str:
    """One line there and one back. ValueError when none comes in time."""
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
            piece = os.read(fd, _MAX_ANSWER_BYTES)
            if not piece or len(line) > _MAX_ANSWER_BYTES:
                raise ValueError("mpirun's proxy closed its connection; see its own output")
            line += piece
    except OSError as error:
        raise ValueError(f"mpirun's proxy cannot be asked ({error}); see its own output") from None
    return line.decode(errors="replace").strip()


def _say_goodbye_at_exit(fd: int) -> None:
    process = os.getpid()
    if process in _parting:
        return
    _parting.add(process)

    def goodbye() -> None:
        if process != os.getpid() or _has_mpi():
            return
        with contextlib.suppress(ValueError):  # it is gone already
            _exchange(fd, "finalize", 1.0)

    atexit.register(goodbye)


def _has_mpi() -> bool:
    return re.search(r"/libmpi[^/]*\.so", Path("/proc/self/maps").read_text(errors="replace")) is not None
