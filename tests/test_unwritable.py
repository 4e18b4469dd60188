"""With an unwritable home or working directory netfold works, or prints one sentence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A folder of the kernel, in which not even root can make a folder.
UNWRITABLE = "/proc/self"
TIMEOUT_S = 120


def netfold(*arguments: str, home: str = UNWRITABLE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "netfold.cli", *arguments],
        cwd=UNWRITABLE,
        env={**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "XDG_CONFIG_HOME": home},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_no_file_is_written_to_the_home() -> None:
    script = (
        "import numpy, tempfile; from netfold import Communicator, FileStore; "
        "folder = tempfile.TemporaryDirectory(); group = Communicator(FileStore(folder.name), 0, 1); "
        "values = numpy.ones(3); group.all_reduce(values); print(values); group.close()"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "HOME": UNWRITABLE},
        cwd=UNWRITABLE,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (run.returncode, run.stdout) == (0, "[1. 1. 1.]\n"), run.stderr


@pytest.mark.parametrize(
    "arguments",
    ["profile run -- true", "demo --quick", "bench figures --redraw"],
    ids=lambda value: value.replace(" ", "-"),
)
def test_an_unwritable_folder_is_an_error_of_one_sentence(arguments: str) -> None:
    run = netfold(*arguments.split())
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("netfold")
