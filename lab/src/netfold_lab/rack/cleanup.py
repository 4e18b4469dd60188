"""Remove everything that a rack has on the machine: its namespaces, the processes inside, and its state file.

The rack's own process locks the state file /run/netfold/<id> while it runs. The kernel releases the lock when the
process ends for any reason, SIGKILL included. A free lock means that the rack's reaper cleans up, or that both
processes were killed.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from netfold_lab.rack import names
from netfold_lab.rack.command import RackError, run
from netfold_lab.rack.processes import TERM_GRACE_S

STATE_FOLDER = Path("/run/netfold")
# Every host mounts its own folder over this one, which stays empty and is shared by all racks.
HOST_FOLDER = STATE_FOLDER / ".host"
# A killed process ends at once, unless the kernel holds it, as for a hung disk.
KILL_WAIT_S = 5.0
_POLL_S = 0.02


def claim(rack_id: str) -> int:
    """Write and lock the rack's state file; return the descriptor, whose closing releases the claim."""
    HOST_FOLDER.mkdir(parents=True, exist_ok=True)
    # Rename the file only when it is locked, or `rack down` could take it for an ended rack's.
    draft = STATE_FOLDER / f".{rack_id}"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    draft.rename(STATE_FOLDER / rack_id)
    return descriptor


def racks() -> list[str]:
    """Return the ids of all racks that have anything on this machine, running or ended."""
    ids = {names.rack_id_of(namespace) for namespace in _namespaces()}
    if STATE_FOLDER.is_dir():
        ids |= {file.name for file in STATE_FOLDER.iterdir() if not file.name.startswith(".")}
    return sorted(rack_id for rack_id in ids if rack_id)


def owner(rack_id: str) -> str | None:
    """Return the id of the running process that owns the rack; None where it has ended."""
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
    """Remove the processes inside a rack, its namespaces and its state file. Raises RackError."""
    spaces = [namespace for namespace in _namespaces() if names.rack_id_of(namespace) == rack_id]
    _end_processes(spaces)
    for namespace in spaces:
        # The kernel deletes a namespace's links with it.
        try:
            run(["ip", "netns", "delete", namespace])
        except RackError:
            # A reaper and `rack down` may run at once.
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
