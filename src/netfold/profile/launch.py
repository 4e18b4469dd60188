"""Running a job with recording on: a folder of its run, a variable in its environment, its exit code.

On several hosts a launcher runs on each, all with one folder. While a launcher is at work it has a file there,
`launch-HOST-PID`, that it touches every BEAT_S seconds and removes at the end. So a launcher that finds a profile tells
whether that is of its own run (some launcher is at work) or of an earlier one, which it leaves alone.
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

# A launcher of another host that has not touched its file for so long has ended, or the hosts' clocks differ as much.
BEAT_S, STALE_S = 10.0, 120.0
# Where both of two launchers have one of these, they are of one job if it is the same.
_JOBS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID")


class LaunchError(Exception):
    """The folder cannot be used, or the command not be started; nothing was run."""


def new_folder(asked: Path | None) -> Path:
    """The run's folder, made, absolute. None: the first of netfold-profile-1, -2, ... that is not there yet.

    asked: empty, or in use by other launchers of the same run; LaunchError otherwise.
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
        raise LaunchError(f"the profile's folder cannot be made: {error}") from None
    raise AssertionError("there is always another number")


def launch(command: Sequence[str], folder: Path) -> int:
    """Run `command` to its end, recorded into `folder`; its exit code, 128 + n after signal n as shells have it.

    SIGTERM goes on to the command; a terminal's SIGINT reaches it anyway. It decides what becomes of them.
    """
    with contextlib.ExitStack() as at_work:
        try:
            at_work.enter_context(_at_work(folder))
            with contextlib.suppress(FileExistsError):  # another host's launcher was first
                describe_run(folder, command)
            process = subprocess.Popen(command, env={**os.environ, VARIABLE: str(folder)})
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be run: {error}") from None

        def hand_on(number: int, _: Any) -> None:
            process.send_signal(number)

        wanted: dict[signal.Signals, Any] = {signal.SIGTERM: hand_on, signal.SIGINT: lambda *_: None}
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code if code >= 0 else 128 - code


def namespace() -> str:
    """Where a number names the same process: the machine's boot and the PID namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


@contextlib.contextmanager
def _at_work(folder: Path) -> Iterator[None]:
    """This launcher has its file in `folder`. A folder that vanishes meanwhile ends no job."""
    mark = folder / f"{LAUNCHER}{socket.gethostname()}-{os.getpid()}"
    said = {"host": socket.gethostname(), "namespace": namespace(), "pid": os.getpid(), "job": _job()}
    mark.write_text(json.dumps(said))
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
    # In this order: a launcher makes its file before anything else, and removes it after everything else.
    names = sorted(os.listdir(folder))
    reasons = [_not_of_this_run(mark) for mark in folder.glob(f"{LAUNCHER}*")]
    if foreign := unknown_files(names):
        raise LaunchError(
            f"{folder} is not empty: it holds {foreign[0]}; name a new folder, so that no profile is overwritten"
        )
    if names and all(reasons):
        because = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
        raise LaunchError(
            f"{folder} is not empty: it holds an earlier profile, and no launcher of this job is at work in it"
            f"{because}; name a new folder, so that no profile is overwritten"
        )


def _not_of_this_run(mark: Path) -> str:
    """Why the launcher that made the file is not one of this job, in words; empty where it is."""
    try:
        age_s = time.time() - mark.stat().st_mtime
        said = json.loads(mark.read_text())
    except FileNotFoundError:
        return "one has just ended"
    except ValueError:  # it is being written
        said = {}
    where = f"one on {said.get('host', 'a host that it does not name')}"
    if said.get("namespace") == namespace() and not Path("/proc", str(said["pid"])).exists():
        return f"{where} was killed"
    if said.get("namespace") != namespace() and age_s > STALE_S:
        return f"{where} was last seen {age_s:.0f} s ago"
    for name, value in _job().items():
        if said.get("job", {}).get(name, value) != value:
            return f"{where} has {name}={said['job'][name]}, not {value}"
    return ""


def _job() -> Mapping[str, str]:
    return {name: os.environ[name] for name in _JOBS if name in os.environ}
