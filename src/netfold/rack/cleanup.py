"""What a rack leaves on the machine, and how to take it away: namespaces, processes inside, a state file.

The state file /run/netfold/<id> is locked by the rack's own process for as long as that lives. The kernel
lets go of the lock at any death, SIGKILL included; a free lock says that its reaper cleans up, or, where that was
killed too, nobody.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from netfold.rack import names
from netfold.rack.command import RackError, run
from netfold.rack.processes import TERM_GRACE_S

STATE_FOLDER = Path("/run/netfold")
# Every host mounts a folder of its own over this one, which stays empty and is shared by all racks.
HOST_FOLDER = STATE_FOLDER / ".host"
# A killed process is gone at once unless the kernel holds it (a hung disk); then nobody can help.
KILL_WAIT_S = 5.0
_POLL_S = 0.02


def claim(rack_id: str) -> int:
    """Write and lock the rack's state file; the descriptor returned holds the claim until it is closed."""
    HOST_FOLDER.mkdir(parents=True, exist_ok=True)
    # It appears under its name only once it is locked, or `rack down` could take it for a dead rack's.
    unseen = STATE_FOLDER / f".{rack_id}"
    descriptor = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    unseen.rename(STATE_FOLDER / rack_id)
    return descriptor


def racks() -> list[str]:
    """The ids of all racks of which something is on this machine, alive or not."""
    ids = {names.rack_id_of(namespace) for namespace in _namespaces()}
    if STATE_FOLDER.is_dir():
        ids |= {file.name for file in STATE_FOLDER.iterdir() if not file.name.startswith(".")}
    return sorted(rack_id for rack_id in ids if rack_id)


def owner(rack_id: str) -> str | None:
    """The process id of the living process that holds the rack, or None where there is none."""
    file = STATE_FOLDER / rack_id
    try:
        with file.open() as state:
            try:
                fcntl.flock(state, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return state.read().strip()
    except FileNotFoundError:
        pass
    return None


def remove(rack_id: str) -> None:
    """Take away all that is left of a rack: the processes inside, the namespaces, the state file."""
    spaces = [namespace for namespace in _namespaces() if names.rack_id_of(namespace) == rack_id]
    _end_processes(spaces)
    for namespace in spaces:
        # The links go with the namespaces they are in.
        try:
            run(["ip", "netns", "delete", namespace])
        except RackError:
            # A reaper and `rack down` may be at it at once.
            if namespace in _namespaces():
                raise
    (STATE_FOLDER / rack_id).unlink(missing_ok=True)


def _namespaces() -> list[str]:
    # A line is `NAME` or `NAME (id: 3)`.
    return [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _end_processes(spaces: Sequence[str]) -> None:
    for number, wait_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_WAIT_S)):
        for pid in _processes(spaces):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while _processes(spaces):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        else:
            return
    raise RackError(f"processes {_processes(spaces)} in {', '.join(spaces)} do not end, not even by SIGKILL")


def _processes(spaces: Sequence[str]) -> list[int]:
    return [int(pid) for namespace in spaces for pid in run(["ip", "netns", "pids", namespace]).split()]
