"""A child of fork can use the objects that all groups of a process share, whatever other threads did at the fork."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from changed import build, change_file

pytestmark = pytest.mark.native

NATIVE = Path(__file__).parents[3] / "core" / "native"
LOCKED = {
    "regions": NATIVE / "transport" / "shm" / "shm_registry.cpp",
    "descriptors": NATIVE / "transport" / "socket.cpp",
    "status": NATIVE / "engine" / "status.cpp",
}
PROCESS_WIDE = NATIVE / "transport" / "include" / "netfold" / "transport" / "process_wide.hpp"
INCLUDES = [
    NATIVE / folder / "include" for folder in ("transport", "engine", "collective", "protocol", "kernels", "auth")
]
MAIN = Path(__file__).with_name("fork_locks.cpp")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("objects")
    return {name: compiled(source, folder / f"{name}.o") for name, source in {**LOCKED, "main": MAIN}.items()}


def compiled(source: Path, out: Path) -> Path:
    return build(out, [source], INCLUDES, "-O1", "-c")


def ended(objects: dict[str, Path], what: str, seconds: int, folder: Path) -> int:
    """Return the first status that is not 0: some of the forks come during the first use."""
    program = build(folder / "fork_locks", objects.values(), [], "-pthread")
    return next(filter(None, (subprocess.run([program, what, str(seconds)]).returncode for _ in range(20))), 0)


@pytest.mark.parametrize("what", LOCKED)
def test_a_child_of_fork_can_use_objects_that_threads_of_its_parent_had_locked(
    what: str, objects: dict[str, Path], tmp_path: Path
) -> None:
    assert ended(objects, what, 60, tmp_path) == 0


@pytest.mark.parametrize("what", LOCKED)
def test_without_a_lock_over_the_fork_a_child_hangs(what: str, objects: dict[str, Path], tmp_path: Path) -> None:
    (handlers,) = re.findall(r"pthread_atfork\(.*?\}\);", PROCESS_WIDE.read_text(), re.DOTALL)
    folder = tmp_path / "netfold" / "transport"
    folder.mkdir(parents=True)
    change_file(PROCESS_WIDE, handlers, "", folder)
    mutant = build(tmp_path / "mutant.o", [LOCKED[what]], [tmp_path, *INCLUDES], "-O1", "-c")
    assert ended({**objects, what: mutant}, what, 3, tmp_path) == 1
