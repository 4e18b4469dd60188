"""Running a job with recording on: a new folder, a variable in its environment, its exit code."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netfold.profile.recording import VARIABLE, describe_run


class LaunchError(Exception):
    """The folder cannot be used, or the command not be started; nothing was run."""


def new_folder(asked: Path | None) -> Path:
    """The folder, made, empty, absolute. None: the first of netfold-profile-1, -2, ... that is not there yet."""
    try:
        if asked is not None:
            folder = asked.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise LaunchError(f"{folder} is not empty; name a new folder, so that no profile is overwritten")
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
    try:
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
