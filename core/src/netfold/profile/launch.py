"""Run a job with recording on: create the run's folder, set a variable in the job's environment, return its exit code.

On several hosts, each host has a launcher, and all launchers use one folder. A running launcher has a file in the
folder, `launch-HOST-PID`. It touches this file every BEAT_S seconds and removes it at the end. So another launcher can
tell whether a profile in the folder belongs to its own run (some launcher is running) or to an earlier run, which it
does not change.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from netfold.profile.recording import LAUNCHER, VARIABLE, describe_run, unknown_files

# A launcher of another host with an older file has ended, or the hosts' clocks differ by this time.
BEAT_S, STALE_S = 10.0, 120.0
# If two launchers have one of these variables with equal values, they belong to one job.
_JOBS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID")


class LaunchError(Exception):
    """The folder cannot be used, or the command cannot be started. Nothing was run."""


def new_folder(asked: Path | None) -> Path:
    """Create the run's folder and return its absolute path.

    asked: empty, or in use by other launchers of the same run; LaunchError otherwise. None: the first of
    netfold-profile-1, -2, ... that does not exist.
    """
    try:
        if asked is not None:
            folder = asked.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_used(folder)
            return folder
        for number in itertools.count(1):
            folder = Path(f"netfold-profile-{number}").absolute()
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise LaunchError(f"the profile's folder cannot be created: {error}") from None
    raise AssertionError("there is always another number")


def launch(command: Sequence[str], folder: Path) -> int:
    """Run `command` to its end, recorded into `folder`. Return its exit code, 128 + n after signal n as in shells.

    SIGTERM is passed on to the command. SIGINT of a terminal reaches the command directly. The command handles both.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_launcher_file(folder))
            with contextlib.suppress(FileExistsError):  # another host's launcher wrote it
                describe_run(folder, command)
            process = subprocess.Popen(command, env={**os.environ, VARIABLE: str(folder)})
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be run: {error}") from None

        handlers: dict[signal.Signals, Any] = {
            signal.SIGTERM: lambda number, _: process.send_signal(number),
            signal.SIGINT: lambda *_: None,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code if code >= 0 else 128 - code


def namespace() -> str:
    """The boot and the PID namespace: within both, a number identifies one process."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


@contextlib.contextmanager
def _launcher_file(folder: Path) -> Iterator[None]:
    """Keep this launcher's file in `folder`. The job continues if the folder is removed meanwhile."""
    mark = folder / f"{LAUNCHER}{socket.gethostname()}-{os.getpid()}"
    identity = {"host": socket.gethostname(), "namespace": namespace(), "pid": os.getpid(), "job": _job()}
    mark.write_text(json.dumps(identity))
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(mark)

    thread = threading.Thread(target=beat, name="netfold profile run", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            mark.unlink()


def _refuse_used(folder: Path) -> None:
    # In this order: a launcher creates its file first and removes it last.
    names = sorted(os.listdir(folder))
    reasons = [_not_of_this_run(mark) for mark in folder.glob(f"{LAUNCHER}*")]
    if foreign := unknown_files(names):
        raise LaunchError(
            f"{folder} is not empty: it holds {foreign[0]}; name a new folder, so that no profile is overwritten"
        )
    if names and all(reasons):
        because = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
        raise LaunchError(
            f"{folder} is not empty: it holds an earlier profile, and no launcher of this job runs in it"
            f"{because}; name a new folder, so that no profile is overwritten"
        )


def _not_of_this_run(mark: Path) -> str:
    """Return why the launcher of the file does not belong to this job; empty if it belongs to this job."""
    try:
        age_s = time.time() - mark.stat().st_mtime
        identity = json.loads(mark.read_text())
    except FileNotFoundError:
        return "one has just ended"
    except ValueError:  # it is being written
        identity = {}
    where = f"one on {identity.get('host', 'an unknown host')}"
    if identity.get("namespace") == namespace() and not Path("/proc", str(identity["pid"])).exists():
        return f"{where} was killed"
    if identity.get("namespace") != namespace() and age_s > STALE_S:
        return f"{where} was last seen {age_s:.0f} s ago"
    for name, value in _job().items():
        if identity.get("job", {}).get(name, value) != value:
            return f"{where} has {name}={identity['job'][name]}, not {value}"
    return ""


def _job() -> Mapping[str, str]:
    return {name: os.environ[name] for name in _JOBS if name in os.environ}
