"""The number of files that a rank or a switch may have open: a rank has up to some connections for each other rank."""

from __future__ import annotations

import contextlib
import os
import resource

from netfold.switch_protocol.acceptor import MAX_UNAUTHENTICATED

# Of one group, beside what the process has open already; a rank with switches or rails needs more of the reserve.
_RESERVE, _A_RANK = 256 + MAX_UNAUTHENTICATED, 6


def files_needed(ranks: int) -> int:
    """Open files that a group of `ranks` ranks takes in each of its processes, about."""
    return _RESERVE + _A_RANK * ranks


def allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files by what `count` further ones need, or to the hard limit.

    The default soft limit, 1024, is that of programs which use select(), whose sets end there. Nothing is lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        needed = len(os.listdir("/proc/self/fd")) + count
    except OSError:  # no /proc: as if all that may be open were
        needed = soft + count
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # A sandbox may forbid it: connections then name the error.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
